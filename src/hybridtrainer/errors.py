"""Every error HybridTrainer raises on purpose: what happened, and what to do about it.

Errors of the user's own model, loss or loader are not wrapped: they arrive as they were raised.
`exit_code` is what the command line exits with; docs/TROUBLESHOOTING.md lists them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class HybridTrainerError(Exception):
    """Base of all typed errors.

    Args:
        what: What happened and why, in full sentences.
        remedy: What the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what} {remedy}")
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes, for example from a loader's worker.
        return type(self), (self.what, self.remedy)


class Problem(NamedTuple):
    """One mistake in a configuration: the key as typed, what is wrong, and what might be meant."""

    key: str
    message: str
    suggestion: str | None = None

    def __str__(self) -> str:
        hint = f" {self.suggestion}" if self.suggestion else ""
        return f"{self.key}: {self.message}{hint}"


class ConfigError(HybridTrainerError):
    """A configuration with at least one mistake; `problems` lists every one of them."""

    exit_code = 2

    def __init__(
        self,
        source: str,
        problems: Sequence[Problem],
        remedy: str = "Correct the keys named above; `hybridtrainer init` writes a file with every key explained.",
    ) -> None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        super().__init__(f"{source} has {count}:\n{lines}\n", remedy)
        self.source = source
        self.problems = list(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.problems, self.remedy)


class DataError(HybridTrainerError):
    """Data that is missing, empty, too small, or ended before the run did."""

    exit_code = 3


class ModelError(HybridTrainerError):
    """A model, optimizer, scheduler or scaler that cannot be trained as given."""

    exit_code = 2


class MissingPackageError(HybridTrainerError, ImportError):
    """A package that an integration needs is not installed."""

    exit_code = 2


class LossError(HybridTrainerError):
    """A `loss_fn` whose result is not a loss."""

    exit_code = 2


class DivergenceError(HybridTrainerError):
    """Loss or gradients were not finite several steps in a row; no such update was applied."""

    exit_code = 6


class CheckpointError(HybridTrainerError):
    """Base of everything that can be wrong with a checkpoint."""

    exit_code = 4


class SaveError(CheckpointError):
    """A checkpoint could not be written; the one before it is untouched."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint that is incomplete, damaged, or not one of ours."""


class ForeignCheckpointError(CheckpointError):
    """A sound checkpoint that belongs to another model, optimizer or version."""


class MemoryBudgetError(HybridTrainerError):
    """Host or GPU memory that is too small for what was asked."""

    exit_code = 8


class GpuMemoryError(MemoryBudgetError):
    """GPU memory ran out where nothing smaller could be tried: what took it, and which settings take less."""


class TornStepError(HybridTrainerError):
    """A step failed when some weights were updated and others were not: the model is between two steps."""

    exit_code = 8


def torn_step(updated: int) -> TornStepError:
    """The error for a model of which `updated` parts are one step ahead of the others."""
    return TornStepError(
        f"A step failed while the model was updated, with {updated} parts done and others not: it is between two "
        "steps, and is neither saved nor trained on.",
        'Load the last checkpoint. With `MemoryConfig(clipping="exact")` only a failure inside an update does this.',
    )


def torn_update() -> TornStepError:
    """The error for a resident model whose optimizer did not get to the end of an update."""
    return TornStepError(
        "A step failed while the optimizer updated the weights, with some of them changed and others not: the model is "
        "between two steps, and is neither saved nor trained on.",
        "Load the last checkpoint.",
    )


class RunFolderError(HybridTrainerError):
    """A run folder that cannot be used: bad name, read-only, or in the way of another."""

    exit_code = 5


class LockedError(RunFolderError):
    """Another live process trains in this run folder."""


class RankError(HybridTrainerError):
    """A process of a distributed run has failed, has gone, or is not where the others are; all of them stop."""

    exit_code = 9


class HookError(HybridTrainerError):
    """A hook failed and its policy is to stop; the hook's own error is the cause."""

    exit_code = 1
