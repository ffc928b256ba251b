"""What a comparison may claim: from the curves of two arms, seed by seed, to one verdict and its sentence.

A baseline that trained to its end without reaching the target has still been measured: its whole run is less than it
would have needed. What that bounds is kept apart from what was seen: `at_least` is never a speedup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from hybridtrainer.compare.average import AverageRun, Seeds, least_ratio, speed_ratio
from hybridtrainer.compare.claim import TARGET_AT, Facts, Paired, Verdict, missed_words
from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.interval import paired_interval

QUANTITIES = ("speedup", "compute", "at_least", "compute_at_least", "final_quality", "equal_time", "equal_steps")


@dataclass(frozen=True)
class Comparison:
    """One arm against one baseline.

    Attributes:
        verdict: What may be claimed.
        sentence: The same in words, with figures.
        speedup: Time of the baseline over time of the arm, to the target, for the mean over seeds of each; and seed by
            seed where both reached it.
        compute: The same for compute, counted in samples.
        at_least: A lower bound of the speedup where the baseline never reaches the target and the arm does: time of the
            baseline's whole run over time of the arm to the target, and seed by seed where the arm reached it. None
            where a run of the baseline broke, or where the target comes from the baseline's own median run.
        compute_at_least: The same for compute.
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
    at_least: Paired | None = None
    compute_at_least: Paired | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {name: getattr(self, name) for name in QUANTITIES}
        return {"verdict": self.verdict, "sentence": self.sentence} | {
            name: value and value.to_dict() for name, value in values.items()
        }


def level(curve: Curve) -> float | None:
    """What a run has reached at 90% of its length; not at the very end, where chance decides who gets there."""
    return curve.at(TARGET_AT * curve.points[-1].step, _step) if curve.points else None


def median_target(levels: Sequence[float | None], tolerance: float, higher_is_better: bool) -> float | None:
    """The target that a baseline's runs give: the median of their levels, less what counts as no loss of quality.

    Without that a run on a plateau would miss it by noise. None where a run has no level that is finite.
    """
    known = [value for value in levels if value is not None and math.isfinite(value)]
    if not known or len(known) < len(levels):
        return None
    middle = median(known)
    return middle - abs(middle) * tolerance * (1 if higher_is_better else -1)


def judge(
    arm: str,
    baseline: str,
    curves: Sequence[Curve],
    baseline_curves: Sequence[Curve],
    target: Callable[[Seeds], float | None],
    tolerance: float,
    metric: str,
    median_of: str = "",
) -> Comparison:
    """Compares an arm with a baseline; curves with the same index have the same seed.

    Args:
        arm: Name of the arm that is judged.
        baseline: Name of the one it is judged against.
        curves: Of the arm.
        baseline_curves: Of the baseline.
        target: The metric to be reached, for any sample of the seeds, given by their indices.
        tolerance: Share of the metric that counts as no loss of quality.
        metric: What is measured.
        median_of: The arm whose median run gave the target; empty where somebody gave it.
    """
    goal = target(tuple(range(len(curves))))
    pairs = list(zip(curves, baseline_curves, strict=True))
    final = _differences(pairs, lambda curve: end.value if (end := curve.final()) else None)
    seconds = _Cost(pairs, target, lambda point: point.seconds)
    compute = _Cost(pairs, target, lambda point: point.compute)
    baseline_broken = sum(theirs.broken for _, theirs in pairs)
    bounded = not baseline_broken and median_of != baseline
    everyone = tuple(range(len(pairs)))
    facts = Facts(
        arm,
        baseline,
        metric,
        goal,
        seeds=len(pairs),
        arm_reached=goal is not None and seconds.ours.reached(everyone, goal) is not None,
        baseline_reached=goal is not None and seconds.theirs.reached(everyone, goal) is not None,
        final=final,
        speedup=seconds.ratio(),
        at_least=seconds.at_least() if bounded else None,
        broken=sum(ours.broken for ours, _ in pairs),
        baseline_broken=baseline_broken,
        scale=fmean(abs(end.value) for _, theirs in pairs if (end := theirs.final())) if final else 0.0,
        median_of=median_of,
    )
    verdict, sentence = facts.verdict(tolerance)
    sentence += missed_words({arm: _missed(curves, goal), baseline: _missed(baseline_curves, goal)}, len(pairs))
    return Comparison(
        verdict,
        sentence,
        facts.speedup,
        compute.ratio(),
        final,
        _at_shorter_end(pairs, lambda point: point.seconds),
        _at_shorter_end(pairs, _step),
        facts.at_least,
        compute.at_least() if bounded else None,
    )


def _step(point: Point) -> float:
    return point.step


class _Cost:
    """What the target cost both arms, in seconds or in compute: of the average runs, and of each pair."""

    def __init__(
        self,
        pairs: Sequence[tuple[Curve, Curve]],
        target: Callable[[Seeds], float | None],
        cost: Callable[[Point], float],
    ) -> None:
        self._pairs, self._target, self._cost = pairs, target, cost
        self.ours = AverageRun([ours for ours, _ in pairs], cost)
        self.theirs = AverageRun([theirs for _, theirs in pairs], cost)

    def ratio(self) -> Paired | None:
        """The baseline's cost of the target over the arm's, where both reached it."""
        found = speed_ratio(self.ours, self.theirs, len(self._pairs), self._target)
        return None if found is None else Paired(found, self._per_seed(Curve.reached))

    def at_least(self) -> Paired | None:
        """The cost of the baseline's whole run over the arm's of the target, where only the arm reached it.

        A seed in which the baseline reached it after all has the ratio itself.
        """
        found = least_ratio(self.ours, self.theirs, len(self._pairs), self._target)
        if found is None:
            return None
        return Paired(found, self._per_seed(lambda theirs, goal: theirs.reached(goal) or theirs.final()))

    def _per_seed(self, moment: Callable[[Curve, float], Point | None]) -> tuple[float | None, ...]:
        goal = self._target(tuple(range(len(self._pairs))))
        if goal is None:
            return (None,) * len(self._pairs)
        moments = [(ours.reached(goal), moment(theirs, goal)) for ours, theirs in self._pairs]
        cost = self._cost
        return tuple(cost(them) / cost(us) if us and them and cost(us) else None for us, them in moments)


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


def _missed(curves: Sequence[Curve], goal: float | None) -> int:
    return 0 if goal is None else sum(curve.reached(goal) is None for curve in curves)
