"""What may be claimed of one arm against one baseline, and the sentence that says it. Knows no curve.

The order of questions is fixed: did the baseline reach the target, was quality lost, was it faster. A saving that
costs quality is a loss, whatever the clock says.

A baseline that never reached the target gives no verdict, with one exception: where it trained to its end and the arm
was there sooner, the arm is at least so many times as fast. Then the other questions are asked as ever, and the last
one has two answers only, faster or no verdict: a lower bound cannot show that an arm is slower, or the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridtrainer.compare.interval import Interval
from hybridtrainer.sizes import rounded_down

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
class Facts:
    """All that a verdict is made of; there is a speedup, or a lower bound of it (`at_least`), or neither."""

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
    at_least: Paired | None = None

    def verdict(self, tolerance: float) -> tuple[Verdict, str]:
        """What may be claimed, and the same in words; the tolerance is the share of the metric that is no loss."""
        goal = "the target" if self.target is None else f"{self.metric} {self.target:.4g}"
        if not self.baseline_reached and self.at_least is None:
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
            ratio = f" ({self._times()} in these)" if self.speedup or self.at_least else ""
            return "no verdict", (
                f"No verdict: {_count(self.seeds)} cannot tell {self.arm} from {self.baseline}{ratio}; "
                f"{LEAST_SEEDS} are the least, 5 are better."
            )
        if self._quality_lost(tolerance):
            missed = "" if self.arm_reached else f" and does not reach {goal}"
            return "quality lost", f"{self.arm} loses quality against {self.baseline}{missed}{self._final_words()}."
        if self.speedup is None and self.at_least is None:
            return "not distinguishable", (
                f"{self.arm} cannot be called faster than {self.baseline}: it does not reach {goal} and stay there"
                f"{self._final_words()}."
            )
        verdict, sentence = self._speed(goal) if self.speedup else self._bound(goal)
        if verdict == "faster" and self.final is not None and self.final.interval.mean < -tolerance * self.scale:
            return "not distinguishable", (
                f"{self.arm} is not called faster than {self.baseline}: it gets to {goal} "
                f"{self._times()}{self._final_words()}, which may be chance."
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

    def _bound(self, goal: str) -> tuple[Verdict, str]:
        """What a lower bound of the speedup lets us say."""
        assert self.at_least is not None
        found = self.at_least.interval
        low = None if found.low is None else rounded_down(found.low, 2)
        limits = _limits(replace(found, low=low), ".2f", "never", "95% interval of that bound")
        limits = f"({limits}, {_count(self.seeds)})"
        if found.low is not None and found.low > 1:
            return "faster", (
                f"{self.arm} is {self._times()} as {self.baseline} to {goal} {limits}: {self.baseline} does not get "
                "there and stay there in its whole run."
            )
        return "no verdict", (
            f"No verdict: {self.baseline} itself does not reach {goal} and stay there; {self.arm} does, and is "
            f"{self._times()} {limits}, which does not show that it is faster."
        )

    def _times(self) -> str:
        """How many times as fast, in words; of a bound that it is one."""
        if self.speedup is not None:
            return f"{self.speedup.interval.mean:.2f} times as fast"
        assert self.at_least is not None
        return f"at least {rounded_down(self.at_least.interval.mean, 2):.2f} times as fast"


def missed_words(missed: Mapping[str, int], seeds: int) -> str:
    """In how many seeds single runs missed the target, for the arms of which some did."""
    told = [f"{arm} in {count} of {_count(seeds)}" for arm, count in missed.items() if count]
    return f" The target was missed by {' and by '.join(told)}." if told else ""


def _limits(interval: Interval, form: str, zero: str = "", name: str = "95% interval") -> str:
    """The interval in words; `zero` is what a limit of 0 means: a ratio of 0 is a target that is never reached."""
    low, high = (zero if zero and limit == 0 else f"{limit:{form}}" for limit in (interval.low, interval.high))
    return f"{name} {low} to {high}"


def _count(seeds: int) -> str:
    return f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"
