"""Whether host memory has room for a streamed run, said before any of it is taken.

`Arena` knows what weights and states take. The inputs of blocks that wait in host memory depend on the batch, and on a
CPU what a GPU would hold is there too: a plan knows both.
"""

from __future__ import annotations

import psutil
import torch
from torch import nn

from hybridtrainer.config import RunConfig
from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.memory.arena import RESERVE_BYTES
from hybridtrainer.planning.estimate import WORKSPACE_BYTES
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.streamed import estimate_streamed
from hybridtrainer.predict.averages import averages_of
from hybridtrainer.sizes import as_size


def require_host_room(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Refuses a streamed run that host memory cannot hold.

    Args:
        model: What will be streamed, without memory.
        config: Of the run, with nothing left to be planned.
        device: Where it computes.

    Raises:
        MemoryBudgetError: naming what is needed and what there is.
    """
    memory, train = config.memory, config.train
    assert memory.mode != "resident" and memory.mode != "auto"  # noqa: PLR1714, PT018
    samples, context = train.batch_size, config.model.context
    pieces = rehearse_pieces(model, memory.mode, samples, context, memory.split, precision=memory.precision)
    is_cpu = device.type == "cpu"
    # A CPU keeps no blocks: they are where they would be kept.
    budgeted = memory.model_copy(update={"vram": None}) if is_cpu else memory
    averages = averages_of(model, config, None, is_streamed=True)
    estimate = estimate_streamed(pieces, budgeted, None, averages=averages)
    needed = estimate.host_bytes - estimate.host["process"]
    on_device = estimate.gpu_bytes - WORKSPACE_BYTES - estimate.gpu["fragments"] if is_cpu else 0
    available = max(0, psutil.virtual_memory().available - RESERVE_BYTES)
    if needed + on_device <= available:
        return
    also = f", {as_size(on_device)} of it what a GPU would hold" if is_cpu else ""
    averaged = ' readout = "last",' if averages.copies else ""
    machine = "Use a machine with a GPU, or " if is_cpu else "Use "
    raise MemoryBudgetError(
        f"Training {config.model.name} with `{memory.mode}` takes {as_size(needed + on_device)} of host memory{also}, "
        f"and {as_size(available)} are available.",
        f"{machine}a smaller model, a smaller train.batch_size,{averaged} or a mode with fewer bytes per parameter "
        "(split8 6, sr8 4, sr4 3, factored 2); `hybridtrainer plan` finds what fits.",
    )
