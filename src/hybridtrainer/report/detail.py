"""How much a page shows of each thing, so that it stays small however long and however many the runs are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrainer.report.charts import Band
from hybridtrainer.report.story import Stretch


@dataclass(frozen=True)
class Detail:
    """The share of each of `things` runs, times a `factor` that is lowered where a page became too large."""

    things: int
    factor: float = 1.0

    @property
    def points(self) -> int:
        """Points of a line in a chart of all runs."""
        return self._share(3000, 40, 400)

    @property
    def own_points(self) -> int:
        """Points of a line in a chart of a single run, of which there are more the more runs there are."""
        return self._share(1500, 30, 400)

    @property
    def marks(self) -> int:
        """Markers of a series."""
        return self._share(300, 6, 80)

    @property
    def jumps(self) -> int:
        """Jumps in a picture."""
        return self._share(400, 10, 120)

    @property
    def rows(self) -> int:
        """Rows of a list."""
        return self._share(400, 6, 50)

    @property
    def values(self) -> int:
        """Rows of the values behind a chart of a single run."""
        return self._share(600, 10, 100)

    @property
    def bands(self) -> int:
        """Stretches of phases in a chart."""
        return self._share(600, 30, 300)

    @property
    def brief(self) -> bool:
        """Whether there is no room for charts of single runs."""
        return self.factor <= 0

    def _share(self, total: int, least: int, most: int) -> int:
        return max(least, int(min(most, total // max(1, self.things)) * self.factor))


def phase_style(phase: str) -> str:
    """The class for the colour of a phase."""
    return f"phase-{phase}"


def phase_bands(stretches: Sequence[Stretch], limit: int, unit: float = 1.0) -> tuple[list[Band], bool]:
    """Phases as bands, and whether they had to be gathered.

    More than `limit` of them are gathered in columns whose height shows the share of each phase: leaving some out
    would make the short ones vanish.
    """
    if len(stretches) <= limit:
        return [Band(known.begin / unit, known.end / unit, phase_style(known.phase)) for known in stretches], False
    begin, end = stretches[0].begin, stretches[-1].end
    columns = max(1, limit // 3)
    width = (end - begin) / columns or 1.0
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for known in stretches:
        first = min(columns - 1, int((known.begin - begin) / width))
        last = min(columns - 1, int((known.end - begin) / width))
        for column in range(first, last + 1):
            left = begin + column * width
            inside = min(known.end, left + width) - max(known.begin, left)
            shares[column][known.phase] = shares[column].get(known.phase, 0.0) + max(0.0, inside)
    bands: list[Band] = []
    for column, share in enumerate(shares):
        total, low = sum(share.values()) or 1.0, 0.0
        for phase, size in sorted(share.items()):
            left, high = begin + column * width, low + size / total
            bands.append(Band(left / unit, (left + width) / unit, phase_style(phase), low, high))
            low = high
    return bands, True
