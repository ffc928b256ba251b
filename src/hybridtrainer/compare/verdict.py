"""What a comparison may claim: from the curves of two arms, seed by seed, to one sentence.

The order of questions is fixed: did the baseline reach the target, was quality lost, was it faster. A saving that
costs quality is a loss, whatever the clock says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from hybridtrainer.compare.average import AverageRun, Seeds, speed_ratio
from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.interval import Interval, paired_interval

Verdict = Literal["faster", "slower", "not distinguishable", "quality lost", "no verdict"]
TARGET_AT = 0.9  # of a baseline's run
LEAST_SEEDS = 3  # two are told apart by chance in one case of eight


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
        speedup: Time of the baseline over time of the arm, to the target, for the mean over seeds of each; and seed by
            seed where both reached it.
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
    seconds = [AverageRun(runs, lambda point: point.seconds) for runs in (curves, baseline_curves)]
    everyone = tuple(range(len(pairs)))
    facts = _Facts(
        arm,
        baseline,
        metric,
        goal,
        seeds=len(pairs),
        arm_reached=goal is not None and seconds[0].reached(everyone, goal) is not None,
        baseline_reached=goal is not None and seconds[1].reached(everyone, goal) is not None,
        final=final,
        speedup=_ratio(pairs, target, seconds[0], seconds[1], lambda point: point.seconds),
        broken=sum(ours.broken for ours, _ in pairs),
        baseline_broken=sum(theirs.broken for _, theirs in pairs),
        scale=fmean(abs(end.value) for _, theirs in pairs if (end := theirs.final())) if final else 0.0,
        median_of=median_of,
    )
    verdict, sentence = facts.verdict(tolerance)
    sentence += _missed_words({arm: _missed(curves, goal), baseline: _missed(baseline_curves, goal)}, len(pairs))
    compute = [AverageRun(runs, lambda point: point.compute) for runs in (curves, baseline_curves)]
    return Comparison(
        verdict,
        sentence,
        facts.speedup,
        _ratio(pairs, target, compute[0], compute[1], lambda point: point.compute),
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
    arm_reached: bool
    baseline_reached: bool
    final: Paired | None
    speedup: Paired | None
    broken: int
    baseline_broken: int
    scale: float
    median_of: str = ""

    def verdict(self, tolerance: float) -> tuple[Verdict, str]:
        goal = "the target" if self.target is None else f"{self.metric} {self.target:.4g}"
        if not self.baseline_reached:
            return "no verdict", (
                f"No verdict: {self.baseline} itself does not reach {goal} and stay there.{self._median_words()}"
            )
        if self.baseline_broken and self.broken <= self.baseline_broken:
            return (
                "no verdict",
                f"No verdict: {self.baseline} itself diverged in {self.baseline_broken} of {_count(self.seeds)}.",
            )
        if self.broken:
            return "quality lost", (
                f"{self.arm} loses quality against {self.baseline}: it diverged, or its {self.metric} was not a number "
                f"in the end, in {self.broken} of {_count(self.seeds)}."
            )
        if self.seeds < LEAST_SEEDS:
            ratio = "" if self.speedup is None else f" ({self.speedup.interval.mean:.2f} times as fast in these)"
            return "no verdict", (
                f"No verdict: {_count(self.seeds)} cannot tell {self.arm} from {self.baseline}{ratio}; "
                f"{LEAST_SEEDS} are the least, 5 are better."
            )
        lost = self._quality_lost(tolerance)
        if lost:
            missed = "" if self.arm_reached else f" and does not reach {goal}"
            return "quality lost", f"{self.arm} loses quality against {self.baseline}{missed}{self._final_words()}."
        if self.speedup is None:
            return "not distinguishable", (
                f"{self.arm} cannot be called faster than {self.baseline}: it does not reach {goal} and stay there"
                f"{self._final_words()}."
            )
        verdict, sentence = self._speed(goal)
        if verdict == "faster" and self.final is not None and self.final.interval.mean < -tolerance * self.scale:
            return "not distinguishable", (
                f"{self.arm} is not called faster than {self.baseline}: it gets to {goal} "
                f"{self.speedup.interval.mean:.2f} times as fast{self._final_words()}, which may be chance."
            )
        return verdict, sentence

    def _median_words(self) -> str:
        """Why a baseline may miss a target that comes from its own runs."""
        if self.median_of != self.baseline or self.target is None:
            return ""
        return (
            f" The target is what the median run of {self.median_of} had reached at {TARGET_AT:.0%} of its length, and "
            "it is the mean over the seeds that has to reach it: in short or noisy runs it may not. Train longer, or "
            "give a target with --target."
        )

    def _quality_lost(self, tolerance: float) -> bool:
        """Whether the interval of the final difference lies below zero, and the difference beyond the tolerance."""
        if self.final is None:
            return not self.arm_reached
        found = self.final.interval
        return found.high is not None and found.high < 0 and found.mean < -tolerance * self.scale

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
        limits = f"({_limits(found, '.2f', 'never')}, {_count(self.seeds)})"
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


def _ratio(
    pairs: Sequence[tuple[Curve, Curve]],
    target: Callable[[Seeds], float | None],
    ours: AverageRun,
    theirs: AverageRun,
    cost: Callable[[Point], float],
) -> Paired | None:
    """The baseline's cost of the target over the arm's: of the average runs, and of each pair that reached it."""
    found = speed_ratio(ours, theirs, len(pairs), target)
    goal = target(tuple(range(len(pairs))))
    if found is None or goal is None:
        return None
    moments = [(one.reached(goal), other.reached(goal)) for one, other in pairs]
    return Paired(found, tuple(cost(them) / cost(us) if us and them and cost(us) else None for us, them in moments))


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


def _missed_words(missed: Mapping[str, int], seeds: int) -> str:
    """In how many seeds single runs missed the target, for the arms of which some did."""
    told = [f"{arm} in {count} of {_count(seeds)}" for arm, count in missed.items() if count]
    return f" The target was missed by {' and by '.join(told)}." if told else ""


def _missed(curves: Sequence[Curve], goal: float | None) -> int:
    return 0 if goal is None else sum(curve.reached(goal) is None for curve in curves)


def _limits(interval: Interval, form: str, zero: str = "") -> str:
    """The interval in words; `zero` is what a limit of 0 means: a ratio of 0 is a target that is never reached."""
    low, high = (zero if zero and limit == 0 else f"{limit:{form}}" for limit in (interval.low, interval.high))
    return f"95% interval {low} to {high}"


def _count(seeds: int) -> str:
    return f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"
