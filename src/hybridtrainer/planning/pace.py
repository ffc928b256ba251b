"""How long a step of a resident model takes: what the GPU computes, what the host launches, what the link carries."""

from __future__ import annotations

from dataclasses import dataclass

from hybridtrainer.memory.recompute import Keep
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.offloaded import Away
from hybridtrainer.planning.rehearsal import Spent

UPDATE_PASSES = 14 + 3  # over all weights: torch's AdamW as a rehearsal counts it, and the norm with clipping
CODED_PASSES = 5  # one kernel: gradient read twice, weights read and written, codes of a quarter of that, the norm
FORWARD_SHARE = 1 / 3  # of both passes
# The rest is fitted to `benchmarks.resident_options` with 124M and 350M on an H200.
CODED_LAUNCHES = 6  # that the host could make while it starts the update of one matrix with coded moments
HOST_OF_SEGMENTS: dict[Keep, float] = {"inputs": 1.5, "products": 2.0}  # times; torch's hooks there are in Python
OFFLOAD_SHARE = 1.4  # times; tensors are sent and fetched one by one


@dataclass(frozen=True)
class Work:
    """What there is to do in one step.

    Attributes:
        spent: On forward and backward of one micro-batch.
        accumulate: Micro-batches.
        trained_bytes: Parameters that are trained.
        coded_matrices: Whose moments are kept in few bits; 0 where all have 32.
        away: What its blocks keep in host memory.
        keep: What is kept of segments that are computed again; None where nothing is.
    """

    spent: Spent
    accumulate: int
    trained_bytes: int
    coded_matrices: int
    away: Away
    keep: Keep | None


def seconds_of(work: Work, hardware: Hardware) -> tuple[float, float]:
    """Of the step, and of the same one without copies."""
    spent, away = work.spent, work.away
    one_pass = hardware.seconds(spent.flops, spent.other_bytes)
    launched = spent.kernels * hardware.launch * (HOST_OF_SEGMENTS[work.keep] if work.keep else 1.0)
    passes = CODED_PASSES if work.coded_matrices else UPDATE_PASSES
    update = hardware.seconds(0.0, passes * work.trained_bytes)
    update = max(update, work.coded_matrices * CODED_LAUNCHES * hardware.launch)
    alone = work.accumulate * max(one_pass, launched) + update
    if not away.nbytes:
        return alone, alone
    forward = FORWARD_SHARE * one_pass
    out, back = away.nbytes / hardware.outward, away.nbytes / hardware.inward
    with_copies = OFFLOAD_SHARE * (max(forward, out) + max(one_pass - forward, back))
    return work.accumulate * max(with_copies, launched) + update, alone
