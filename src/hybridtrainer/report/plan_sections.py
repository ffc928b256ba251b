"""What a page says of plans: what runs were planned to take, and what they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtrainer.observe.against_plan import SECONDS, Actual, against_plan, shown
from hybridtrainer.observe.plan_file import PLAN, read_planned
from hybridtrainer.records import PlanFigure
from hybridtrainer.report.figures import Section, capped
from hybridtrainer.report.values import number, plain, whole


@dataclass(frozen=True)
class PlanTold:
    """What a log says of a plan; a file may hold anything.

    Attributes:
        figures: Plan and measurement.
        timed_steps: Whose seconds count.
        remarks: What explains them.
    """

    figures: Sequence[PlanFigure]
    timed_steps: int
    remarks: Sequence[str]


def plan_told(record: Mapping[str, Any] | None, folder: Path) -> tuple[PlanTold | None, str]:
    """A run's plan beside what it took, and what was wrong with the files; None where it was not planned.

    Args:
        record: The newest of a log that has them; None where it has none, as that of a run that still goes on.
        folder: Of the run, which keeps the plan.
    """
    if record is not None:
        figures, remarks = record.get("figures"), record.get("remarks")
        return PlanTold(
            [_figure(each) for each in figures if isinstance(each, dict)] if isinstance(figures, list) else [],
            whole(record.get("timed_steps")) or 0,
            [str(each) for each in remarks] if isinstance(remarks, list) else [],
        ), ""
    if not (folder / PLAN).exists():
        return None, ""
    planned = read_planned(folder)
    if planned is None:
        return None, f"{PLAN} is damaged and was left out."
    found = against_plan(planned, Actual(is_over=False))
    return PlanTold(found.figures, found.timed_steps, found.remarks), ""


def plan_section(runs: Mapping[str, PlanTold]) -> Section | None:
    """Plan against actual, for the runs that were planned; None where none was.

    Args:
        runs: By the name of the run.
    """
    if not runs:
        return None
    rows = [[name, *_row(figure, told.timed_steps)] for name, told in runs.items() for figure in told.figures]
    texts = [
        f"{plain(name, 60)}: {plain(remark)}" if len(runs) > 1 else plain(remark)
        for name, told in runs.items()
        for remark in told.remarks
    ]
    columns = ["run", "what", "planned", "actual", "plan off by", "note"]
    if len(runs) == 1:
        columns, rows = columns[1:], [row[1:] for row in rows]
    words = frozenset({0, 1, 5} if len(runs) > 1 else {0, 4})
    return Section("Plan against actual", texts, tables=[capped(columns, rows, texts=words)])


def _figure(given: Mapping[str, Any]) -> PlanFigure:
    planned, actual, difference, limit = (
        number(given.get(key)) for key in ("planned", "actual", "difference", "limit")
    )
    name, missing = str(given.get("name", "")), str(given.get("missing", ""))
    return PlanFigure(name, planned, actual, difference, limit or 0.0, missing)


def _row(figure: PlanFigure, timed_steps: int) -> list[str]:
    if figure.difference is None:
        off, why = "unavailable", figure.missing
    else:
        off, why = f"{figure.difference:+.1%}", f"median of {timed_steps:,} steps" if figure.name == SECONDS else ""
    return [figure.name, shown(figure.name, figure.planned), shown(figure.name, figure.actual), off, why]
