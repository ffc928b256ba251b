"""How a call of `fit` ended, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hybridtrainer.records import PlanResult, StepResult


@dataclass
class FitResult:
    """How a call of `fit` ended.

    Attributes:
        status: "finished", "interrupted" by a signal, or "paused" at `pause_at`.
        signal: The signal's number, where there was one.
        steps: The clock at the end.
        seconds: Wall-clock time of the whole call.
        training_seconds: Time the run has trained, resumed parts included: fetching batches and stepping, with every
            probe, roll-back and forecast. Evaluations and checkpoints are not in it.
        last: The last step's result; None if no step was made.
        evaluations: What was measured on the validation batches, each with its step.
        against_plan: What this process has taken beside the run's plan; None where the run was not planned.
    """

    status: Literal["finished", "interrupted", "paused"] = "finished"
    signal: int | None = None
    steps: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    last: StepResult | None = None
    evaluations: list[dict[str, float]] = field(default_factory=list)
    against_plan: PlanResult | None = None
