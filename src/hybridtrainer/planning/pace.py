"""How long a step of a resident model takes: what the GPU computes, what the host launches, what the link carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybridtrainer.memory.recompute import Keep
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.offloaded import Away
from hybridtrainer.planning.rehearsal import Spent

UPDATE_PASSES = 14 + 3  # over all weights: torch's AdamW as a rehearsal counts it, and the norm with clipping
CODED_PASSES = 5  # one kernel: gradient read twice, weights read and written, codes of a quarter of that, the norm
FORWARD_SHARE = 1 / 3  # of both passes
# The rest is fitted to `benchmarks.resident_options` with 124M to 1.5B on an H200.
UPDATE_LAUNCHES, CODED_LAUNCHES = 2, 4  # that the host could make in the update of a tensor; of one with coded moments
HOST_OF_SEGMENTS: dict[Keep, float] = {"inputs": 1.35, "products": 2.1}  # times; hooks and modes there are in Python
OFFLOAD_LAUNCHES = 6.2  # that the host could make while it sends and fetches a tensor
OFFLOAD_SHARE = 1.19  # times what the link would take by itself


@dataclass(frozen=True)
class Work:
    """What there is to do in one step.

    Attributes:
        spent: On forward and backward of one micro-batch.
        accumulate: Micro-batches.
        trained_bytes: Parameters that are trained.
        trained_tensors: How many those are.
        coded_matrices: Whose moments are kept in few bits; 0 where all have 32.
        away: What its blocks keep in host memory.
        keep: What is kept of segments that are computed again; None where nothing is.
    """

    spent: Spent
    accumulate: int
    trained_bytes: int
    trained_tensors: int
    coded_matrices: int
    away: Away
    keep: Keep | None


class Pace(NamedTuple):
    """How long a step takes.

    Attributes:
        seconds: Of the step.
        compute_seconds: Of the same one without copies.
        waits_for_host: Whether the GPU, and the link, would have taken less.
    """

    seconds: float
    compute_seconds: float
    waits_for_host: bool


def pace_of(work: Work, hardware: Hardware) -> Pace:
    """The GPU's, or the host's where that takes longer."""
    spent, away = work.spent, work.away
    one_pass = hardware.seconds(spent.flops, spent.other_bytes)
    passes = CODED_PASSES if work.coded_matrices else UPDATE_PASSES
    update = hardware.seconds(0.0, passes * work.trained_bytes)
    launches = spent.kernels * (HOST_OF_SEGMENTS[work.keep] if work.keep else 1.0)
    in_update = UPDATE_LAUNCHES * (work.trained_tensors - work.coded_matrices) + CODED_LAUNCHES * work.coded_matrices

    def both(gpu_pass: float, launches: float) -> tuple[float, float]:
        return work.accumulate * gpu_pass + update, (work.accumulate * launches + in_update) * hardware.launch

    forward = FORWARD_SHARE * one_pass
    out, back = (OFFLOAD_SHARE * away.nbytes / speed for speed in (hardware.outward, hardware.inward))
    with_copies = max(forward, out) + max(one_pass - forward, back)
    gpu, host = both(with_copies, launches + OFFLOAD_LAUNCHES * away.tensors)
    return Pace(max(gpu, host), max(both(one_pass, launches)), host > gpu)
