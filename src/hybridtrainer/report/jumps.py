"""The jumps of a run as attempts, each from forecast to final verdict. Reads records, draws nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridtrainer.report.values import number, whole

VERDICTS = ("kept", "refused", "rolled back", "accepted")
"""Final verdicts in the order in which they are shown; "accepted" is a jump still under correction."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to foresee steps.

    Attributes:
        step: The clock before it.
        verdict: One of `VERDICTS`, or whatever the log says.
        reason: Why the verdict is what it is.
        horizon_steps: How far the forecast looked.
        worth_steps: What the clock moved by; for one that was undone, what it had moved by.
        forecaster: Who proposed it.
        confidence: The forecaster's confidence.
        probe_before: Probe loss before the jump.
        probe_after: Probe loss right after it.
    """

    step: float
    verdict: str
    reason: str
    horizon_steps: int | None
    worth_steps: int | None
    forecaster: str
    confidence: float | None
    probe_before: float | None
    probe_after: float | None

    @property
    def probe_change(self) -> float | None:
        """By how much the jump changed the probe loss; below 0 is better."""
        if self.probe_before is None or self.probe_after is None:
            return None
        return self.probe_after - self.probe_before


def attempts(records: Iterable[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts in the records of a log.

    A jump that passed its probe has two records, the second with its fate; they become one attempt, with the probe
    losses of the first: those of the second were taken after real steps and would flatter the jump.
    """
    found: list[Attempt] = []
    for record in records:
        if record.get("kind") != "jump":
            continue
        attempt = _attempt(record)
        open_one = found[-1] if found else None
        settles = attempt.verdict in ("kept", "rolled back")
        if settles and open_one and open_one.verdict == "accepted" and open_one.step == attempt.step:
            found[-1] = replace(open_one, verdict=attempt.verdict, reason=f"{open_one.reason}; {attempt.reason}")
        else:
            found.append(attempt)
    return found


def counted_reasons(found: Iterable[Attempt]) -> list[tuple[str, str, int]]:
    """(verdict, reason without its figures, how often), most frequent first."""
    counts = Counter((attempt.verdict, without_figures(attempt.reason)) for attempt in found)
    return [(verdict, reason, times) for (verdict, reason), times in counts.most_common()]


def without_figures(reason: str) -> str:
    """A reason with its figures replaced, so that alike ones are counted together.

    >>> without_figures("probe loss 2.7 to 2.6, worth 3 of 15 steps")
    'probe loss # to # worth # of # steps'
    """
    return " ".join("#" if any(char.isdigit() for char in word) else word for word in reason.split())


def _attempt(record: Mapping[str, Any]) -> Attempt:
    return Attempt(
        step=number(record.get("step")) or 0.0,
        verdict=str(record.get("verdict", "")),
        reason=str(record.get("reason", "")),
        horizon_steps=whole(record.get("horizon_steps")),
        worth_steps=whole(record.get("worth_steps")),
        forecaster=str(record.get("forecaster", "")),
        confidence=number(record.get("confidence")),
        probe_before=number(record.get("probe_before")),
        probe_after=number(record.get("probe_after")),
    )
