"""HybridTrainer: trains PyTorch models in phases, and computes only what cannot be foreseen.

Names are loaded when they are first used: importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtrainer.config import HybridTrainerConfig
    from hybridtrainer.config_memory import MemoryConfig
    from hybridtrainer.fit_result import FitResult
    from hybridtrainer.memory.stream import stream
    from hybridtrainer.models.language import language_loss
    from hybridtrainer.planning.planner import plan
    from hybridtrainer.records import JumpRecord, Phase, PhaseChange, StepResult
    from hybridtrainer.trainer import HybridTrainer

__version__ = "0.1.0"

_HOMES = {
    "FitResult": "fit_result",
    "HybridTrainer": "trainer",
    "HybridTrainerConfig": "config",
    "JumpRecord": "records",
    "MemoryConfig": "config_memory",
    "Phase": "records",
    "PhaseChange": "records",
    "StepResult": "records",
    "language_loss": "models.language",
    "plan": "planning.planner",
    "stream": "memory.stream",
}

__all__ = [
    "FitResult",
    "HybridTrainer",
    "HybridTrainerConfig",
    "JumpRecord",
    "MemoryConfig",
    "Phase",
    "PhaseChange",
    "StepResult",
    "language_loss",
    "plan",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
