"""What happens in a run, as plain immutable data.

Nothing here computes. The phase policy reads these records, the run log writes them, hooks receive them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The four phases of a run."""

    WARMUP = "warmup"
    FULL = "full"
    PREDICT = "predict"
    CORRECT = "correct"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one call of `HybridTrainer.step` did.

    Attributes:
        step: The run's clock after this call; an accepted jump of h steps moves it by h.
        phase: The phase in which the call was made.
        loss: Training loss of a real step; mean probe loss after an accepted jump.
        predicted: How many steps were foreseen instead of computed; 0 for a real step.
        confidence: Confidence of the newest forecast, None where there is none.
        seconds: Wall-clock time of the call, refused jumps and roll-backs included.
        reason: Why the phase changed, or why an update was skipped; empty when nothing special happened.
        grad_norm: Global gradient norm before clipping; None for a jump.
        skipped: Whether the update was withheld because loss or gradients were not finite.
        forward_samples: Samples that went through the model, those of probes included.
        backward_samples: Samples whose gradient was computed.
    """

    step: int
    phase: Phase
    loss: float
    predicted: int
    confidence: float | None
    seconds: float
    reason: str
    grad_norm: float | None = None
    skipped: bool = False
    forward_samples: int = 0
    backward_samples: int = 0


@dataclass(frozen=True, slots=True)
class JumpRecord:
    """One attempt to foresee steps instead of computing them, from forecast to verdict.

    Attributes:
        step: The clock before the jump.
        horizon_steps: How many steps the forecast looked ahead.
        worth_steps: How many steps of the clock the jump was credited with; 0 where it was refused.
        forecaster: Which forecaster proposed it.
        confidence: The forecaster's confidence.
        verdict: "accepted" (the probe let it through), "refused" (undone at the probe), "kept"
            (verified after its correction steps) or "rolled back" (undone after some of them).
        reason: The figures behind the verdict.
        probe_before: Mean probe loss before the jump; None where it was not measured.
        probe_after: Mean probe loss after the jump, or after the correction steps.
        norm_ratio: Length of the jump over the length of the newest real window of as many steps.
        seconds: Wall-clock time of this part of the attempt.
    """

    step: int
    horizon_steps: int
    forecaster: str
    confidence: float
    verdict: str
    reason: str
    worth_steps: int = 0
    probe_before: float | None = None
    probe_after: float | None = None
    norm_ratio: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """A transition of the phase machine and the reason for it."""

    step: int
    before: Phase
    after: Phase
    reason: str


@dataclass(frozen=True, slots=True)
class PrecisionChange:
    """A change of arithmetic, with `memory.precision = "adaptive"`.

    Attributes:
        step: The clock after the step that led to it.
        before: "bf16" or "fp32".
        after: The arithmetic from the next step on.
        reason: What made the watch suspicious, or that nothing does any more.
    """

    step: int
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True)
class LossForecast:
    """A forecast of the smoothed training loss.

    Attributes:
        step: The clock when it was made.
        target_step: The clock for which it was made.
        loss: The loss expected there.
        low: Lower end of its 90% interval.
        high: Upper end of its 90% interval.
        window: Steps up to the target whose mean loss is meant; None for a twentieth of the run.
    """

    step: int
    target_step: int
    loss: float
    low: float
    high: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of the process at one moment; None where it cannot be told, never 0 for that.

    Attributes:
        step: The clock.
        phase: The phase of the step that has just been made.
        host_bytes: Resident memory of this process.
        device_bytes: GPU memory that tensors take.
        device_peak_bytes: Most GPU memory that torch has reserved since the process began.
        device_reserved_bytes: GPU memory that torch has reserved now.
        card_bytes: Memory in use on the whole card, by every process, as the driver says.
        weight_copies: How often this process has copied all weights.
        entered: The phase that has begun, where the phase has changed.
    """

    step: int
    phase: Phase
    host_bytes: int | None
    device_bytes: int | None
    device_peak_bytes: int | None
    device_reserved_bytes: int | None = None
    card_bytes: int | None = None
    weight_copies: int = 0
    entered: Phase | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a person should know of, in words."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Planned:
    """What a plan says of a run, as far as the run can be held against it. Kept in the run's folder.

    Attributes:
        text: The plan in one line.
        gpu_bytes: Most that torch will reserve on the GPU; None for a run on a CPU.
        host_bytes: Host memory of the process; on a CPU what a GPU would hold is in it.
        jump_host_bytes: Host memory beside that, where jumps are made.
        seconds: Of a step; None where they were not planned.
        why_no_seconds: Why not.
        waits_for_host: Whether a step takes as long as the host needs to launch it.
        speeds: Where the speeds of the machine are from, in words; empty where there are none.
    """

    text: str
    gpu_bytes: int | None
    host_bytes: int
    jump_host_bytes: int = 0
    seconds: float | None = None
    why_no_seconds: str = ""
    waits_for_host: bool = False
    speeds: str = ""


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """One figure of a plan beside what was measured.

    Attributes:
        name: "GPU memory", "host memory" or "seconds a step".
        planned: In bytes or seconds; None where it was not planned.
        actual: As measured; None where it could not be.
        difference: The plan over the measurement, less 1: below 0 where more was taken than planned.
        limit: How far off plans are said to be at most, as a share.
        missing: Why there is no difference; empty where there is one.
    """

    name: str
    planned: float | None
    actual: float | None
    difference: float | None
    limit: float
    missing: str


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A run beside its plan.

    Attributes:
        step: The clock at the end.
        from_step: The clock where this process began: peaks and seconds are those of the process.
        timed_steps: Real steps whose seconds count.
        figures: GPU memory, host memory and seconds of a step.
        remarks: What usually explains a figure that is further off than plans are said to be, and what to do.
    """

    step: int
    from_step: int
    timed_steps: int
    figures: tuple[PlanFigure, ...]
    remarks: tuple[str, ...]


Record = StepResult | JumpRecord | PhaseChange | PrecisionChange | LossForecast | Notice
"""What the trainer tells of."""
Event = Record | MemoryUse | PlanResult
"""What the log and the display are told of."""
