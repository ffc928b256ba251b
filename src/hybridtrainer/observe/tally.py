"""Counts what a run did: steps, jumps, seconds by phase. Fed with records; decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridtrainer.records import JumpRecord, Phase, Record, StepResult


@dataclass(frozen=True)
class Statistics:
    """What a run has done so far.

    Attributes:
        steps: The clock.
        real_steps: Steps whose backward pass was computed, those later rolled back included.
        foreseen_steps: Steps credited to jumps that were not undone.
        backward_reduction: Share of the clock's steps for which no backward pass was computed; negative where
            roll-backs cost more than jumps saved.
        jumps_accepted: Jumps that passed their probe.
        jumps_kept: Those of them that were verified after correction.
        jumps_refused: Jumps undone at the probe.
        jumps_rolled_back: Jumps undone during correction.
        refusals: Why jumps were refused or rolled back, with counts.
        declined: Why no jump was tried at the end of a Full phase, with counts.
        skipped_updates: Updates withheld because something was not finite.
        forward_samples: Samples that went through the model, those of probes included, those of evaluations not.
        backward_samples: Samples whose gradient was computed, those of steps later rolled back included.
        seconds: Wall-clock time inside `step`.
        seconds_by_phase: The same, by phase; refused jumps count as Predict.
        estimated_speedup: Time the clock's steps would have taken as real ones, over the time they took. An
            estimate: it says nothing about quality.
        worth_seconds: Of each kind of foresight that was used: "jumps", the steps they stood for less what they took;
            "samples", the steps that would have computed those that were left out; "depth", what the steps of the
            short model would have taken with the whole one. Estimates too: only a comparison knows what they cost.
    """

    steps: int
    real_steps: int
    foreseen_steps: int
    backward_reduction: float
    jumps_accepted: int
    jumps_kept: int
    jumps_refused: int
    jumps_rolled_back: int
    refusals: dict[str, int]
    declined: dict[str, int]
    skipped_updates: int
    forward_samples: int
    backward_samples: int
    seconds: float
    seconds_by_phase: dict[str, float]
    estimated_speedup: float | None
    worth_seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass
class Tally:
    """Running counts. Not part of what decides a run's future, but kept in checkpoints for continuity."""

    clock: int = 0
    real_steps: int = 0
    foreseen: int = 0
    skipped: int = 0
    forward_samples: int = 0
    backward_samples: int = 0
    jump_seconds: float = 0.0
    real_seconds: float = 0.0
    short_steps: int = 0
    short_seconds: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))

    def observe(self, record: Record) -> None:
        """Takes in one record."""
        if isinstance(record, JumpRecord):
            self.verdicts[record.verdict] += 1
            self.jump_seconds += record.seconds
            self.foreseen += {"accepted": 1, "rolled back": -1}.get(record.verdict, 0) * record.worth_steps
            if record.verdict in ("refused", "rolled back"):
                self.refusals[_kind(record.reason)] += 1
        elif isinstance(record, StepResult):
            self.clock = record.step
            self.forward_samples += record.forward_samples
            self.backward_samples += record.backward_samples
            self.seconds[Phase.PREDICT] += self.jump_seconds
            own = max(0.0, record.seconds - self.jump_seconds)
            self.seconds[record.phase] += own
            self.jump_seconds = 0.0
            if not record.predicted:
                self.real_steps += 1
                self.real_seconds += own
                self.skipped += record.skipped

    def count_growth(self) -> None:
        """Takes note that all real steps so far were those of a short model."""
        self.short_steps, self.short_seconds = self.real_steps, self.real_seconds

    def count_declined(self, reason: str) -> None:
        """Takes note that no jump was tried."""
        self.declined[_kind(reason)] += 1

    def mean_real_seconds(self) -> float:
        """Of a real step; 0 before the first."""
        return self.real_seconds / self.real_steps if self.real_steps else 0.0

    def statistics(self, left_out: int | None = None) -> Statistics:
        """The counts and what follows from them.

        Args:
            left_out: Samples that passed by and were not computed; None where all are.
        """
        total = sum(self.seconds.values())
        return Statistics(
            steps=self.clock,
            real_steps=self.real_steps,
            foreseen_steps=self.foreseen,
            backward_reduction=1 - self.real_steps / self.clock if self.clock else 0.0,
            jumps_accepted=self.verdicts["accepted"],
            jumps_kept=self.verdicts["kept"],
            jumps_refused=self.verdicts["refused"],
            jumps_rolled_back=self.verdicts["rolled back"],
            refusals=dict(self.refusals),
            declined=dict(self.declined),
            skipped_updates=self.skipped,
            forward_samples=self.forward_samples,
            backward_samples=self.backward_samples,
            seconds=total,
            seconds_by_phase={str(phase): seconds for phase, seconds in self.seconds.items()},
            estimated_speedup=self.clock * self.mean_real_seconds() / total if total else None,
            worth_seconds=self._worth(left_out),
        )

    def _worth(self, left_out: int | None) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.verdicts:
            found["jumps"] = self.foreseen * self.mean_real_seconds() - self.seconds[Phase.PREDICT]
        if left_out and self.backward_samples:
            found["samples"] = left_out * self.real_seconds / self.backward_samples
        whole_steps = self.real_steps - self.short_steps
        if self.short_steps and whole_steps:
            whole = (self.real_seconds - self.short_seconds) / whole_steps
            found["depth"] = self.short_steps * whole - self.short_seconds
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Puts back what `to_dict` returned."""
        for name, value in saved.items():
            current = getattr(self, name)
            setattr(self, name, type(current)(value))


def _kind(reason: str) -> str:
    """A reason without its figures, so that alike ones are counted together."""
    words = ["#" if any(char.isdigit() for char in word) else word for word in reason.split()]
    return " ".join(words)
