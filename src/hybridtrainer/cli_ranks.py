"""The command line on several ranks: what torchrun has started, and how they find each other.

torchrun starts the same command once for each rank and tells each by its environment which one it is. Nothing heavy is
imported before a run begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from hybridtrainer.errors import ModelError

TIMEOUT = timedelta(minutes=10)  # after which a rank that does not answer counts as lost; torch's own for GPUs
VERBS = ("train", "resume")


def launched_ranks() -> int:
    """How many ranks this command was started on; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first_launched() -> bool:
    """Whether this is the rank that answers."""
    return launched_ranks() == 1 or os.environ["RANK"] == "0"


def command() -> str:
    """How this program was started, for whoever is to start it again."""
    if launched_ranks() == 1:
        return "hybridtrainer"
    return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', launched_ranks())} -m hybridtrainer"


def require_one_process(verb: str | None) -> None:
    """Refuses a verb that would do the same on every rank, side by side.

    Raises:
        ModelError: for every verb but `train` and `resume`, on several ranks.
    """
    if launched_ranks() > 1 and verb not in VERBS:
        raise ModelError(
            f"`hybridtrainer {verb or ''}` was started on {launched_ranks()} ranks, and works in one process.",
            "Start it without torchrun; `train` and `resume` work on several ranks.",
        )


@contextmanager
def joined(device: str) -> Iterator[None]:
    """While open, the ranks that torchrun has started belong together; does nothing for one process.

    Args:
        device: As `train.device`: on GPUs each rank takes the one of its number.
    """
    if launched_ranks() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    yield
    dist.destroy_process_group()  # not after an error: it may wait for those who have gone
