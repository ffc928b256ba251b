"""Whether host memory has room for what a jump needs: a snapshot to return to, and the windows it is forecast from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
from torch import Tensor

from hybridtrainer import ranks
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.memory.arena import RESERVE_BYTES
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.sizes import as_size
from hybridtrainer.state import Training

ANCHOR_BYTES = 4  # per parameter: the weights at which a window began
WINDOW_BYTES = 1.02  # per parameter and window: 8-bit codes and their scales


def obstacle_to_jumps(training: Training, config: HybridTrainerConfig) -> str:
    """Why there can be no jumps; empty if there can be, and where nobody wants any.

    What stands in the way on one rank does so on all.
    """
    if not config.jumps_allowed():
        return ""
    return next(filter(None, ranks.exchange("room for jumps", _obstacle(training, config))), "")


def _obstacle(training: Training, config: HybridTrainerConfig) -> str:
    if config.predict == "auto" and isinstance(training.optimizer, StreamedOptimizer):
        return (
            "the windows of a streamed model are taken by the CPU, which costs more than jumps save; "
            'predict = ["jumps"] makes them anyway'
        )
    needed = bytes_for_jumps(training, config.history_windows)
    available = psutil.virtual_memory().available - RESERVE_BYTES
    if needed > available:
        return (
            f"jumps need {as_size(needed, digits=1)} of host memory for a snapshot and the windows, and "
            f"{as_size(max(0, available), digits=1)} are available"
        )
    return ""


def bytes_for_jumps(training: Training, windows: int) -> int:
    """Host memory for a snapshot of all state and for the recorded windows."""
    parameters = list(training.model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    states = (value for state in training.optimizer.state.values() for value in state.values())
    held = sum(value.nbytes for value in states if isinstance(value, Tensor))
    if not held:  # before the first update
        held = _moments(training.optimizer.defaults) * sum(parameter.nbytes for parameter in trained)
    snapshot = sum(parameter.nbytes for parameter in parameters) + held
    return snapshot + window_bytes(sum(parameter.numel() for parameter in trained), windows + 1)  # one is being written


def window_bytes(trained: int, windows: int) -> int:
    """Of so many windows over so many parameters, and of the weights at which the newest began."""
    return int(trained * (ANCHOR_BYTES + windows * WINDOW_BYTES))


def _moments(defaults: Mapping[str, Any]) -> int:
    """How many tensors as large as the weights torch's optimizers with these settings will keep."""
    return 2 if "betas" in defaults else int(bool(defaults.get("momentum")))
