"""A plan beside what was measured: one comparison for `train`, `profile` and the report. Measures and plans nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hybridtrainer.records import PlanFigure, Planned, PlanResult
from hybridtrainer.sizes import as_seconds, as_size

MEMORY_LIMIT, SECONDS_LIMIT = 0.05, 0.15  # within which plans are said to be, see docs/PLANS.md
LEAST_STEPS = 5  # whose median is worth being told
GPU, HOST, SECONDS = "GPU memory", "host memory", "seconds a step"
CALIBRATE = "`hybridtrainer doctor --calibrate` measures this machine, for the next plan."
FILLING = "windows for jumps were filling up, and plans know what a jump takes in all"
NOTHING = "unavailable"
JumpMemory = Literal["nothing", "windows", "all"]


@dataclass(frozen=True)
class Actual:
    """What a process took; None where it could not be told.

    Attributes:
        step: The clock at the end.
        from_step: The clock where the process began.
        gpu_bytes: Most that torch had reserved on the GPU.
        host_bytes: Most host memory that the process had.
        seconds: Of a real step, the median.
        timed_steps: Of how many.
        jumps: Whether host memory has had nothing for jumps, some windows, or all that a jump takes.
        is_over: Whether all of it was measured; False where a log has no end.
    """

    step: int = 0
    from_step: int = 0
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    seconds: float | None = None
    timed_steps: int = 0
    jumps: JumpMemory = "nothing"
    is_over: bool = True


def against_plan(planned: Planned, actual: Actual) -> PlanResult:
    """The plan of a run beside what it took.

    >>> found = against_plan(Planned("", 1250, 500, seconds=0.25), Actual(20, 0, 1000, 500, 0.25, 12))
    >>> [figure.difference for figure in found.figures]
    [0.25, 0.0, 0.0]
    """
    not_over = "" if actual.is_over else "the log has no end"
    is_elsewhere = planned.gpu_bytes is not None and actual.gpu_bytes is None  # planned for a GPU, and here is none
    seconds = None if is_elsewhere else actual.seconds
    why_no_seconds = planned.why_no_seconds or not_over or ("there is no GPU" if is_elsewhere else "")
    why_no_seconds = why_no_seconds or f"{actual.timed_steps} steps could be timed, and {LEAST_STEPS} are needed"
    host_bytes = planned.host_bytes + (planned.jump_host_bytes if actual.jumps == "all" else 0)
    is_filling = actual.jumps == "windows" and planned.jump_host_bytes > MEMORY_LIMIT * host_bytes
    figures = (
        _figure(GPU, planned.gpu_bytes, actual.gpu_bytes, MEMORY_LIMIT, not_over or "there is no GPU"),
        _figure(HOST, host_bytes, actual.host_bytes, MEMORY_LIMIT, not_over or "the system does not say")
        if not is_filling
        else PlanFigure(HOST, host_bytes, actual.host_bytes, None, MEMORY_LIMIT, FILLING),
        _figure(SECONDS, planned.seconds, seconds, SECONDS_LIMIT, why_no_seconds),
    )
    return PlanResult(
        actual.step, actual.from_step, actual.timed_steps, figures, tuple(_remarks(planned, figures, actual))
    )


def _figure(name: str, planned: float | None, actual: float | None, limit: float, missing: str) -> PlanFigure:
    if planned is None or not actual:
        return PlanFigure(name, planned, actual or None, None, limit, missing)
    return PlanFigure(name, planned, actual, planned / actual - 1, limit, "")


def _remarks(planned: Planned, figures: tuple[PlanFigure, ...], actual: Actual) -> Iterator[str]:
    beyond = {
        figure.name: figure.difference
        for figure in figures
        if figure.difference is not None and abs(figure.difference) > figure.limit
    }
    if GPU in beyond:
        why = (
            "other tensors in this process, or segments of torch that do not grow (PYTORCH_CUDA_ALLOC_CONF)"
            if beyond[GPU] < 0
            else "steps smaller than planned: a model that has yet to grow, a batch that was divided"
        )
        yield (
            f"GPU memory is more than {MEMORY_LIMIT:.0%} off, usually by {why}; `hybridtrainer profile` shows what "
            "it is made of."
        )
    if HOST in beyond:
        why = (
            "that plans count a process with CUDA in it, 1.05 GiB, and this one ran on a CPU"
            if planned.gpu_bytes is None
            else "data that this process holds beside the model"
            if beyond[HOST] < 0
            else "other versions of Python, torch and CUDA, which take less than those that were measured"
        )
        yield f"Host memory is more than {MEMORY_LIMIT:.0%} off; what usually explains it is {why}."
    if SECONDS in beyond:
        is_measured = planned.speeds.startswith("measured")
        sheet = f"speeds that were not measured on this machine ({planned.speeds or 'of unknown origin'})"
        waits = "a step that waits for the host, whose speed changes by the minute"
        causes = [*([] if is_measured else [sheet]), *([waits] if planned.waits_for_host else [])]
        why = ", and ".join(causes) or "other processes on this GPU or its host"
        yield f"Seconds are more than {SECONDS_LIMIT:.0%} off; what usually explains it is {why}. {CALIBRATE}"
    if actual.from_step:
        yield f"Measured from step {actual.from_step:,} on, where this process resumed the run."


def result_text(found: PlanResult) -> str:
    """For people, a line for each figure."""
    lines = [f"{'plan against actual':20}{'planned':>12}{'actual':>12}  plan off by"]
    lines += [_line(figure, found.timed_steps) for figure in found.figures]
    return "\n".join([*lines, *found.remarks])


def _line(figure: PlanFigure, timed_steps: int) -> str:
    planned, actual = shown(figure.name, figure.planned), shown(figure.name, figure.actual)
    if figure.difference is None:
        last = f"{NOTHING}: {figure.missing}"
    else:
        last = f"{figure.difference:+.1%}" + (f" (median of {timed_steps:,})" if figure.name == SECONDS else "")
    return f"{figure.name:20}{planned:>12}{actual:>12}  {last}"


def shown(name: str, value: float | None) -> str:
    """A figure in its unit; a dash where there is none."""
    if value is None:
        return "-"
    return as_seconds(value) if name == SECONDS else as_size(value)
