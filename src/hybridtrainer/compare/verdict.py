"""What a comparison may claim: from the curves of two arms, seed by seed, to one sentence.

The order of questions is fixed: did the baseline reach the target, was quality lost, was it faster. A saving that
costs quality is a loss, whatever the clock says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.interval import Interval, paired_interval

Verdict = Literal["faster", "slower", "not distinguishable", "quality lost", "no verdict"]
TARGET_AT = 0.9  # of a baseline's run


@dataclass(frozen=True)
class Paired:
    """One quantity, compared seed by seed; None for a seed that has no value."""

    interval: Interval
    per_seed: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self.interval), "per_seed": list(self.per_seed)}


@dataclass(frozen=True)
class Comparison:
    """One arm against one baseline.

    Attributes:
        verdict: What may be claimed.
        sentence: The same in words, with figures.
        speedup: Time of the baseline over time of the arm, to the target; geometric mean.
        compute: The same for compute, counted in samples.
        final_quality: How much better the arm is at the end of its run; negative is worse, for any metric.
        equal_time: The same when both have trained for as long as the shorter of the two runs.
        equal_steps: The same when both clocks show the end of the shorter run.
    """

    verdict: Verdict
    sentence: str
    speedup: Paired | None
    compute: Paired | None
    final_quality: Paired | None
    equal_time: Paired | None
    equal_steps: Paired | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        quantities = ("speedup", "compute", "final_quality", "equal_time", "equal_steps")
        values = {name: getattr(self, name) for name in quantities}
        return {"verdict": self.verdict, "sentence": self.sentence} | {
            name: value and value.to_dict() for name, value in values.items()
        }


def median_target(curves: Sequence[Curve]) -> float | None:
    """What the median run of a baseline has reached at 90% of its length.

    Not at the very end: half of the baseline's own runs would miss that by chance.
    """
    values = [
        value
        for curve in curves
        if curve.points and (value := curve.at(TARGET_AT * curve.points[-1].step, _step)) is not None
    ]
    return median(values) if values and all(map(math.isfinite, values)) else None


def judge(
    arm: str,
    baseline: str,
    curves: Sequence[Curve],
    baseline_curves: Sequence[Curve],
    target: float | None,
    tolerance: float,
    metric: str,
) -> Comparison:
    """Compares an arm with a baseline; curves with the same index have the same seed.

    Args:
        arm: Name of the arm that is judged.
        baseline: Name of the one it is judged against.
        curves: Of the arm.
        baseline_curves: Of the baseline.
        target: The metric to be reached; None where the baseline gave none.
        tolerance: Share of the metric that counts as no loss of quality.
        metric: What is measured.
    """
    pairs = list(zip(curves, baseline_curves, strict=True))
    final = _differences(pairs, lambda curve: end.value if (end := curve.final()) else None)
    reached = [(_reached(ours, target), _reached(theirs, target)) for ours, theirs in pairs]
    speedup = _ratios(reached, lambda point: point.seconds)
    facts = _Facts(
        arm,
        baseline,
        metric,
        target,
        seeds=len(pairs),
        missed=sum(ours is None for ours, _ in reached),
        baseline_missed=sum(theirs is None for _, theirs in reached),
        final=final,
        speedup=speedup,
        scale=fmean(abs(end.value) for _, theirs in pairs if (end := theirs.final())) if final else 0.0,
    )
    verdict, sentence = facts.verdict(tolerance)
    return Comparison(
        verdict,
        sentence,
        speedup,
        _ratios(reached, lambda point: point.compute),
        final,
        _at_shorter_end(pairs, lambda point: point.seconds),
        _at_shorter_end(pairs, _step),
    )


@dataclass(frozen=True)
class _Facts:
    """All that a verdict is made of."""

    arm: str
    baseline: str
    metric: str
    target: float | None
    seeds: int
    missed: int
    baseline_missed: int
    final: Paired | None
    speedup: Paired | None
    scale: float

    def verdict(self, tolerance: float) -> tuple[Verdict, str]:
        goal = "the target" if self.target is None else f"{self.metric} {self.target:.4g}"
        if self.target is None or 2 * self.baseline_missed > self.seeds:
            return "no verdict", (
                f"No verdict: {self.baseline} itself reached {goal} and stayed there in "
                f"{self.seeds - self.baseline_missed} of {_count(self.seeds)}."
            )
        if self.seeds < 2:
            ratio = "" if self.speedup is None else f" ({self.speedup.interval.mean:.2f} times as fast in this one)"
            return "no verdict", f"No verdict: one seed has no interval, so {self.arm} cannot be judged{ratio}."
        lost = self._quality_lost(tolerance)
        if lost:
            return "quality lost", lost
        if self.speedup is None or self.speedup.interval.low is None or self.missed > self.baseline_missed:
            return "not distinguishable", (
                f"{self.arm} and {self.baseline} cannot be told apart: {self.arm} missed {goal} in {self.missed} of "
                f"{_count(self.seeds)}, {self.baseline} in {self.baseline_missed}."
            )
        return self._speed(goal)

    def _quality_lost(self, tolerance: float) -> str:
        final = self.final
        if 2 * self.missed > self.seeds:
            return (
                f"{self.arm} loses quality: it missed {self.metric} {self.target:.4g} in {self.missed} of "
                f"{_count(self.seeds)}{self._final_words()}."
            )
        if final is None or final.interval.high is None:
            return ""
        if final.interval.high < 0 and final.interval.mean < -tolerance * self.scale:
            return f"{self.arm} loses quality against {self.baseline}{self._final_words()}."
        return ""

    def _final_words(self) -> str:
        if self.final is None:
            return ""
        found = self.final.interval
        better = "better" if found.mean >= 0 else "worse"
        limits = "" if found.low is None or found.high is None else f"{_limits(found, '+.4f')}, "
        return f"; its final {self.metric} is {better} by {abs(found.mean):.4f} ({limits}{_count(self.seeds)})"

    def _speed(self, goal: str) -> tuple[Verdict, str]:
        assert self.speedup is not None
        found = self.speedup.interval
        limits = f"({_limits(found, '.2f')}, {_count(self.seeds)})"
        if found.low is not None and found.low > 1:
            return "faster", f"{self.arm} is {found.mean:.2f} times as fast as {self.baseline} to {goal} {limits}."
        if found.high is not None and found.high < 1:
            return (
                "slower",
                f"{self.arm} is slower than {self.baseline}: {found.mean:.2f} times as fast to {goal} {limits}.",
            )
        return "not distinguishable", (
            f"{self.arm} and {self.baseline} cannot be told apart: {found.mean:.2f} times as fast to {goal} {limits}."
        )


def _step(point: Point) -> float:
    return point.step


def _reached(curve: Curve, target: float | None) -> Point | None:
    return None if target is None else curve.reached(target)


def _ratios(reached: Sequence[tuple[Point | None, Point | None]], cost: Callable[[Point], float]) -> Paired | None:
    """The baseline's cost over the arm's, for the seeds in which both reached the target."""
    logs = [
        math.log(cost(theirs) / cost(ours)) if ours and theirs and cost(ours) > 0 and cost(theirs) > 0 else None
        for ours, theirs in reached
    ]
    known = [value for value in logs if value is not None]
    if not known:
        return None
    per_seed = tuple(None if value is None else math.exp(value) for value in logs)
    return Paired(paired_interval(known).map(math.exp), per_seed)


def _differences(pairs: Sequence[tuple[Curve, Curve]], value: Callable[[Curve], float | None]) -> Paired | None:
    """How much better the arm is, for the seeds in which both have a finite value."""
    found: list[float | None] = []
    for ours, theirs in pairs:
        values = value(ours), value(theirs)
        sign = 1 if ours.higher_is_better else -1
        both = values[0] is not None and values[1] is not None and math.isfinite(values[0] - values[1])
        found.append(sign * (values[0] - values[1]) if both else None)  # type: ignore[operator]
    known = [difference for difference in found if difference is not None]
    return Paired(paired_interval(known), tuple(found)) if known else None


def _at_shorter_end(pairs: Sequence[tuple[Curve, Curve]], clock: Callable[[Point], float]) -> Paired | None:
    """The difference at the moment at which the shorter of the two runs ended."""
    ends = {
        id(curve): min(clock(ours.points[-1]), clock(theirs.points[-1])) if ours.points and theirs.points else 0.0
        for ours, theirs in pairs
        for curve in (ours, theirs)
    }
    return _differences(pairs, lambda curve: curve.at(ends[id(curve)], clock))


def _limits(interval: Interval, form: str) -> str:
    return f"95% interval {interval.low:{form}} to {interval.high:{form}}"


def _count(seeds: int) -> str:
    return f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"
