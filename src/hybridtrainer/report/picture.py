"""The chart of a report on its own: one SVG with its style and its legend, for notebooks and other pages."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from hybridtrainer.errors import RunFolderError
from hybridtrainer.report.detail import Detail
from hybridtrainer.report.figures import Key
from hybridtrainer.report.run_sections import losses
from hybridtrainer.report.runs import read_run
from hybridtrainer.report.svg import join, tag

LEGEND_HEIGHT = 26.0
SWATCH, GAP, LETTER = 26.0, 18.0, 7.0  # the width of a letter is a guess: nothing here knows fonts


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows where it is the last value of a cell, and that can be written to a file.

    Attributes:
        svg: The whole file.
    """

    svg: str = field(repr=False)

    def _repr_html_(self) -> str:
        """As an image, so that its style stays inside of it."""
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="chart" src="data:image/svg+xml;base64,{data}" width="720">'


def draw_losses(folders: Sequence[str | Path], *, by_time: bool = True) -> Picture:
    """Training and validation loss of runs with their phases, as in the report.

    Args:
        folders: Folders of runs; several are drawn into one chart.
        by_time: Over training time; over steps otherwise.

    Raises:
        RunFolderError: if no folder is given, or one has no log that can be read.
    """
    if not folders:
        raise RunFolderError("There is nothing to draw.", "Name at least one folder of a run.")
    runs = [read_run(Path(folder)) for folder in folders]
    over_time, over_steps, *_ = losses(runs, Detail(len(runs))).figures
    figure = over_time if by_time else over_steps
    width, height = (float(value) for value in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', figure.svg)[0])
    style = (resources.files("hybridtrainer.report") / "style.css").read_text(encoding="utf-8")
    # Its class would give it the width and height of a chart in a page; the outer one has it for both.
    placed = f'<svg y="{LEGEND_HEIGHT}" width="{width}" height="{height}" '
    inner = Markup(str(figure.svg).replace("<svg ", placed, 1).replace('class="chart"', "", 1))
    svg = tag(
        "svg",
        Markup(f"<style>{style} .whole {{ background: var(--paper); font-family: sans-serif; }}</style>"),
        _legend(figure.legend),
        inner,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height + LEGEND_HEIGHT:.0f}",
        class_="chart whole",
    )
    return Picture(str(svg))


def _legend(keys: Sequence[Key]) -> Markup:
    parts: list[Markup] = []
    x = 8.0
    for key in keys:
        if key.shape == "area":
            parts.append(tag("rect", x=x + 3, y=8, width=SWATCH - 6, height=10, rx=2, class_=key.style))
        else:
            parts.append(tag("line", x1=x, x2=x + SWATCH - 2, y1=13, y2=13, class_=key.style))
        parts.append(tag("text", key.name, x=x + SWATCH + 4, y=17))
        x += SWATCH + GAP + LETTER * len(key.name)
    return join(parts)
