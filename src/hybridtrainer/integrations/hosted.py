"""A run whose loop belongs to another framework: the same log, report and state as a run of `fit`.

The host fetches batches, evaluates, saves and stops; steps come here. This module knows no framework.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.checkpoint import Checkpoint, CheckpointStore, write_checkpoint
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_io import to_toml
from hybridtrainer.errors import CorruptCheckpointError, ModelError
from hybridtrainer.fit import Loop
from hybridtrainer.fit_result import FitResult
from hybridtrainer.observe.environment import environment
from hybridtrainer.observe.progress import Silence
from hybridtrainer.observe.runlog import RunLog
from hybridtrainer.observe.status import Status
from hybridtrainer.records import Event, LossForecast, StepResult
from hybridtrainer.run_folder import RunFolder
from hybridtrainer.state import Streamed
from hybridtrainer.trainer import HybridTrainer
from hybridtrainer.tree import Tree, pack, unpack

RUN = "hybridtrainer"
"""Name of the run's folder, and of the state in a host's checkpoint."""
OF_THE_HOST = {"save_interval": "saves", "keep_last": "keeps checkpoints"}


def require_hostable(config: HybridTrainerConfig, host: str) -> None:
    """Refuses settings that the host has ones of its own for, or that need a loop of ours.

    Raises:
        ModelError: the first of them, or that they are no settings.
    """
    if not isinstance(config, HybridTrainerConfig):
        raise ModelError(f"The settings are {config!r}.", "Make some: HybridTrainerConfig(...).")
    for name, does in OF_THE_HOST.items():
        if name in config.model_fields_set:
            raise ModelError(f"{name} is set, and here {host} {does}.", f"Leave it out, and set that of {host}.")
    if config.memory.precision != "fp32":
        raise ModelError(
            f'memory.precision is "{config.memory.precision}", and here {host} chooses the precision.',
            f"Leave it out, and set that of {host}.",
        )
    if "samples" in config.predict:
        raise ModelError(
            f'predict has "samples", which needs a loader of `HybridTrainer.loader`, and here {host} has its own.',
            'Leave "samples" out, or train with `HybridTrainer.fit`.',
        )
    if config.sample_weights:
        raise ModelError(
            f"sample_weights is set, which needs a loader of `HybridTrainer.loader`, and here {host} has its own.",
            "Leave it out, or train with `HybridTrainer.fit`.",
        )


class HostedRun(Loop):
    """A run on its way in somebody else's loop.

    Open it (`with run:`) once it has a folder, if any; it is over with `finish`.

    Args:
        trainer: What makes the steps.
        steps: Where its clock ends.

    Attributes:
        save_wanted: Whether memory is short enough for a checkpoint to be made soon. Whoever makes one clears it.
    """

    def __init__(self, trainer: HybridTrainer, steps: int) -> None:
        self._followed = _Followed()
        super().__init__(trainer, (), steps, self._followed, None, {}, steps)
        self.save_wanted = False
        self._since = time.perf_counter()

    def write_into(self, run_dir: Path, known: Mapping[str, Any] | None, stack: ExitStack) -> None:
        """Opens the run's folder and its log.

        Args:
            run_dir: The folder.
            known: What `extra` gave for the checkpoint with which the run is resumed; None for a new run.
            stack: Closes them.
        """
        folder = stack.enter_context(RunFolder(run_dir, 1, resume=known is not None))
        if known is None or not (run_dir / "config.toml").exists():
            folder.write_text("config.toml", to_toml(self.trainer.config))
        folder.write_json("environment.json", environment())
        continues_at = None
        if known is not None:
            continues_at = int(known.get("log_bytes", 0)) if folder.log_path.exists() else 0
            self.result.training_seconds = float(known.get("training_seconds", 0.0))
            self._followed.status.final = LossForecast(**known["final"]) if known.get("final") else None
        self.folder, self._past = folder, None if continues_at is None else folder.log_path
        self.log = stack.enter_context(RunLog(folder.log_path, continues_at))
        self.upkeep.keep_in(folder.path, known, stack)

    def step(self, micro_batches: Sequence[Any]) -> StepResult:
        """One step with these micro-batches, of which there may be fewer than usual where the data ends."""
        trainer, usual = self.trainer, self.trainer.accumulate
        trainer.accumulate = len(micro_batches)
        try:
            result = trainer.step(list(micro_batches) if len(micro_batches) > 1 else micro_batches[0])
        finally:
            trainer.accumulate = usual
        self.result.last = result
        self.result.training_seconds += self._lap()
        return result

    @property
    def left(self) -> int:
        """Steps until the clock is at its end."""
        return max(0, self.steps - self.trainer.step_count)

    def told(self) -> dict[str, float | str]:
        """What a host shows of the run beside its own figures."""
        counted, final = self.trainer.statistics(), self._followed.status.final
        values: dict[str, float | str] = {
            "phase": str(self.trainer.current_phase if self.result.last is None else self.result.last.phase),
            "clock": self.trainer.step_count,
            "steps_foreseen": counted.foreseen_steps,
            "backward_reduction": counted.backward_reduction,
            "jumps_kept": counted.jumps_kept,
            "jumps_undone": counted.jumps_rolled_back,
        }
        if final is not None:
            values |= {"final_loss": final.loss, "final_low": final.low, "final_high": final.high}
        return values

    def evaluated(self, values: Mapping[str, float]) -> None:
        """The host has evaluated."""
        seconds, counted = self._lap(), self.trainer.statistics()
        self.result.evaluations.append({"step": self.trainer.step_count, **values})
        if self.log:
            self.log.write(
                "evaluation",
                step=self.trainer.step_count,
                seconds=seconds,
                training_seconds=self.result.training_seconds,
                forward_samples=counted.forward_samples,
                backward_samples=counted.backward_samples,
                **values,
            )

    def extra(self) -> dict[str, Any]:
        """What a checkpoint has besides the state: times and sizes, for whoever goes on from it."""
        sizes: dict[str, Any] = {"training_seconds": self.result.training_seconds, **self.upkeep.sizes()}
        final = self._followed.status.final
        sizes["final"] = None if final is None else asdict(final)
        if self.log and self.folder:
            self.log.sync()
            sizes |= {"log_bytes": self.log.size(), "run_name": self.folder.path.name}
        return sizes

    def saved(self, name: str) -> None:
        """The host has a checkpoint of that name."""
        self.save_wanted = False
        if self.log:
            self.log.write("checkpoint", step=self.trainer.step_count, folder=name)
        self._lap()

    def failed(self, error: BaseException) -> None:
        """The host's loop has ended with an error."""
        if self.log:
            self.log.write("error", step=self.trainer.step_count, error=f"{type(error).__name__}: {error}")

    def finish(self, signal: int | None = None) -> FitResult:
        """The end of the log, which says so where the model has not grown."""
        if self.trainer.depth.is_short:
            self.note("the run ends before the model has grown: saved weights are those that growth would give it")
        return super().finish(signal)

    def _lap(self) -> float:
        """Seconds since the host was last heard of."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds

    def _save_after_step(self) -> bool:
        self.save_wanted = True
        return True

    def _save(self) -> None:
        """The host saves."""


def free_folder(path: Path) -> Path:
    """The path, or the first with a number behind it that has no run: hosts train in the same place again."""
    tries = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in range(1, 1_000_000))
    return next(each for each in tries if not (each / "log.jsonl").exists())


class _Followed(Silence):
    """Shows nothing, and knows the newest of everything."""

    def __init__(self) -> None:
        self.status = Status()

    def start(self, step: int, steps: int) -> None:
        self.status.start(step, steps)

    def record(self, record: Event) -> None:
        self.status.update(record)


def kept_by_host(hybrid: HybridTrainer) -> frozenset[str]:
    """The parts of a state that a host's own files give back as they were.

    Weights of a model that has yet to grow are written grown. torch gives moments the type of the weights when it loads
    them, and the host has none of a streamed model.
    """
    theirs = set() if hybrid.depth.is_short else {"parameters"}
    if isinstance(hybrid.optimizer, Streamed):
        return frozenset(theirs)
    changed = any(
        value.dtype != weight.dtype
        for weight, values in hybrid.optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor) and key != "step"
    )
    return frozenset(theirs if changed else theirs | {"optimizer"})


class StateBeside(CheckpointStore):
    """Writes a run's state into a host's checkpoint, without those parts that the host writes itself.

    Args:
        folder: Where to; the host's own folder must be there.
        theirs: Names of the host's parts.
    """

    def __init__(self, folder: Path, theirs: Iterable[str]) -> None:
        super().__init__(folder.parent, keep_last=1)
        self._folder, self._theirs = folder, frozenset(theirs)

    def save(self, state: Tree, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes it, whole or not at all."""
        ours = {name: part for name, part in state.items() if name not in self._theirs}
        write_checkpoint(self._folder, ours, step, with_sums(state, self._theirs, extra))
        return self._folder


def with_sums(state: Mapping[str, Tree], theirs: Iterable[str], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What goes beside a state whose parts named `theirs` the host writes: sums to know them by when they come back."""
    return {**(extra or {}), "theirs": {name: _sums(state[name]) for name in theirs}}


def _sums(part: Tree) -> dict[str, int]:
    """For each type of tensor the sum over all bits of that type: fast, and one wrong bit changes it."""
    found: Counter[str] = Counter()
    for tensor in pack(part)[0].values():
        if tensor.numel() and type(tensor) in (Tensor, nn.Parameter):
            whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
            found[str(tensor.dtype)] += int(tensor.detach().reshape(-1).view(whole).sum(dtype=torch.int64))
    return dict(found)


@dataclass(frozen=True)
class Beside(Checkpoint):
    """A checkpoint of which the host has loaded some parts already: they are taken as they are now.

    Attributes:
        live: The whole state as it is now.
        tensors: Ours, where the host has them in a file of its own.
    """

    live: Mapping[str, Tree] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] | None = None

    def state(self, sharded: bool = False) -> Tree:
        """The whole state.

        Raises:
            CorruptCheckpointError: if the host has loaded something else than it saved.
        """
        for name, saved in self.manifest["extra"].get("theirs", {}).items():
            if _sums(self.live[name]) != saved:
                raise CorruptCheckpointError(
                    f"{self.folder} was saved with other {name} than what is loaded: a file beside it is missing, "
                    "damaged or of another run, or the frozen weights are others. Nothing was loaded.",
                    "Use an older one, or begin a new run from its weights.",
                )
        ours = super().state(sharded) if self.tensors is None else unpack(self.document, self.tensors.__getitem__)
        return {**self.live, **ours}


def save_beside(hybrid: HybridTrainer, folder: Path, extra: Mapping[str, Any]) -> None:
    """Writes what a host's checkpoint lacks of a run's state into a folder of its own, with `extra` beside it."""
    hybrid.save_in(StateBeside(folder, kept_by_host(hybrid)), **extra)


def load_beside(hybrid: HybridTrainer, found: Checkpoint, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Goes on from what `kept_by_host` has left to us, once the host has loaded the rest.

    Args:
        hybrid: What goes on.
        found: Our part of the checkpoint.
        tensors: Of that part, where the host has them in a file of its own.

    Raises:
        CorruptCheckpointError: if the host has loaded something else than it saved.
        ForeignCheckpointError: if the checkpoint belongs to another setup.
    """
    if "optimizer" not in found.manifest["extra"].get("theirs", {}) and not isinstance(hybrid.optimizer, Streamed):
        hybrid.optimizer.state.clear()  # what the host has loaded of it has lost its types
    hybrid.load(Beside(found.folder, found.manifest, found.document, hybrid.state(), tensors))
