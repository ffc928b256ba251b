"""Lightning, with HybridTrainer making its steps: a Strategy whose backward pass is made elsewhere, or not at all.

    training_step     of all but the last micro-batch of a step: it is held
                      of the last one: one step of HybridTrainer over all of them, real or foreseen
    backward          nothing is left to do
    optimizer_step    calls the closure, and nothing else

Data, validation, logging, callbacks and checkpoints stay Lightning's; the state of the run is inside its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtrainer.checkpoint import Checkpoint, CheckpointStore
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import ForeignCheckpointError
from hybridtrainer.integrations.clock import HostScheduler, IdleOnce
from hybridtrainer.integrations.host_files import require_whole
from hybridtrainer.integrations.hosted import (
    RUN,
    HostedRun,
    free_folder,
    kept_by_host,
    load_beside,
    require_hostable,
    with_sums,
)
from hybridtrainer.integrations.lightning_checks import require_end, require_possible
from hybridtrainer.integrations.lightning_epochs import LeftOut
from hybridtrainer.integrations.lightning_loss import StepLoss
from hybridtrainer.integrations.optional import require
from hybridtrainer.measure import batches_of
from hybridtrainer.randomness import RandomState
from hybridtrainer.trainer import HybridTrainer
from hybridtrainer.tree import Tree, pack

pl = require("lightning.pytorch", "lightning")
call = require("lightning.pytorch.trainer.call", "lightning")
signatures = require("lightning.pytorch.utilities.signature_utils", "lightning")


class HybridStrategy(pl.strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
    """For `Trainer(strategy=HybridStrategy(...))`: HybridTrainer makes the steps of automatic optimization.

    Args:
        config: Settings; the defaults where left out. `predict = "off"` is Lightning's own training, bit for bit.
        device: Where to train. Where left out it is the first GPU, or the CPU where there is none or the Trainer's
            `accelerator` says so.
        probe_batches: Held-out batches, on the device, on which jumps are judged by `training_step`. Without them
            the batches that arrive are used.
        hooks: Objects called at named moments, see `hybridtrainer.hooks`.
        run_dir: Where the run's log goes; `hybridtrainer` in the trainer's `default_root_dir` where left out, with a
            number behind it where a run is there already.
        options: As for Lightning's strategy for a single device.

    Attributes:
        hybrid: The `HybridTrainer`, from when training begins.
    """

    def __init__(
        self,
        config: HybridTrainerConfig | None = None,
        device: str | torch.device | None = None,
        *,
        probe_batches: Iterable[Any] | None = None,
        hooks: Iterable[object] = (),
        run_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        chosen = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        super().__init__(device=torch.device(chosen), **options)
        self.hybrid: Any = None
        self._follows_accelerator = device is None
        self._settings = config or HybridTrainerConfig()
        require_hostable(self._settings, "Lightning's Trainer")
        self._probes = batches_of(probe_batches, "probe_batches")
        self._hooks = list(hooks)
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._run: HostedRun | None = None
        self._known: dict[str, Any] | None = None
        self._random: RandomState | None = None
        self._stack, self._validation = ExitStack(), ExitStack()
        self._held: list[Any] = []

    # Beginning and end

    def setup_environment(self) -> None:
        """As ever, on the CPU where that is the Trainer's accelerator and nothing else was said."""
        if self._follows_accelerator and isinstance(self.accelerator, pl.accelerators.CPUAccelerator):
            self._root_device = torch.device("cpu")
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """As ever; where it trains, HybridTrainer is made for the model and its optimizer."""
        super().setup(trainer)
        if trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
            return
        require_possible(trainer, self)
        if not any(isinstance(each, _EpochEnd) for each in trainer.callbacks):
            trainer.callbacks.insert(0, _EpochEnd())  # before those that save
        scaler, config = getattr(self.precision_plugin, "scaler", None), (self.lr_scheduler_configs or [None])[0]
        clock = None
        if config is not None:
            moves = config.interval == "step" and not config.reduce_on_plateau
            clock = HostScheduler(config.scheduler, moves=moves)
            # It is also moved where an epoch is left, though no step is made then.
            config.scheduler = IdleOnce(config.scheduler) if moves else config.scheduler
        self._loss = StepLoss(self, trainer)
        step = self.lightning_module.training_step
        index = (0,) if signatures.is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        self.hybrid = HybridTrainer(
            self.lightning_module,
            self.optimizers[0],
            self._loss,
            self._settings,
            scheduler=clock,
            scaler=scaler,
            clip_norm=trainer.gradient_clip_val or None,
            accumulate=trainer.accumulate_grad_batches,
            probe_batches=None if self._probes is None else [(batch, *index) for batch in self._probes],
            hooks=[_GradientHooks(trainer, self.optimizers[0]), *self._hooks],
        )

    def on_train_start(self) -> None:
        """The run begins: its folder, its log, its end."""
        super().on_train_start()
        trainer = self.lightning_module.trainer
        require_end(trainer)
        self._left_out = LeftOut(trainer, self._known)
        self._run = HostedRun(self.hybrid, self._left_out.end(int(trainer.estimated_stepping_batches)))
        folder = self._run_dir or Path(trainer.default_root_dir) / RUN
        folder = free_folder(folder) if self._known is None else folder.with_name(self._known["run_name"])
        self._run.write_into(folder, self._known, self._stack)
        self._stack.enter_context(self._run)
        loop = trainer.fit_loop
        if self._random is not None:  # whatever was drawn since the checkpoint was read has not been in the run
            self._random.restore()
            if not loop.epoch_loop.batch_progress.current.ready:  # in the middle of an epoch the loader knows its place
                iter(loop._data_fetcher)
        if self._settings.predict != "off":
            if loop.max_epochs not in (None, -1):  # room for what a roll-back makes again; `max_steps` ends the run
                loop.max_epochs = 2 * loop.max_epochs + 1
            self._move_end(trainer, made=0)

    def _move_end(self, trainer: Any, made: int) -> None:
        assert self._run is not None
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + made + self._run.left
        trainer.should_stop = trainer.should_stop or not self._run.left  # lets it validate where an epoch is cut short

    def note_epoch(self) -> None:
        """An epoch ends; what it has left out is not made later."""
        if self._run is not None and self._settings.predict != "off" and self._left_out.note():
            self._run.steps = self._left_out.end(self._run.steps)
            self.hybrid.expect_end(self._run.steps)
            self._move_end(self.lightning_module.trainer, made=0)

    def on_train_end(self) -> None:
        """The run is over."""
        if self._run is not None:
            self._run.finish()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """The run has ended with an error."""
        if self._run is not None:
            self._run.failed(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """As ever; the run's folder is given free."""
        self._run = None
        self._stack.close()
        for config in self.lr_scheduler_configs:
            config.scheduler = getattr(config.scheduler, "inner", config.scheduler)
        super().teardown()

    # Steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A step begins with nothing held: an epoch that was left within one has taken its batches with it."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0:
            self._held = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Holds a micro-batch; with the last one of a step, HybridTrainer makes it."""
        trainer = self.lightning_module.trainer
        if self._run is None:
            return super().training_step(*args, **kwargs)
        self._held.append(args)
        if trainer.fit_loop._should_accumulate():
            return None
        held, self._held = self._held, []
        self._loss.begin()
        result = self._run.step(held)
        for config in self.lr_scheduler_configs:
            if isinstance(config.scheduler, IdleOnce):
                config.scheduler.made = True
        if self._settings.predict != "off":
            self._move_end(trainer, made=1)
        return self._loss.output(result)

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Nothing: the backward pass, if there was one, is part of the step that has been made."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002
        """Calls the closure, in which the step is made."""
        return closure()

    # Validation and checkpoints

    def on_validation_start(self) -> None:
        """Validation is made at the weights that are read out."""
        super().on_validation_start()
        self.note_epoch()  # a checkpoint may follow
        if self.hybrid is not None:
            self._validation.enter_context(self.hybrid.read_out())

    def on_validation_end(self) -> None:
        """What was found goes into the log."""
        self._validation.close()
        super().on_validation_end()
        trainer = self.lightning_module.trainer
        values = {name: value for name, value in trainer.callback_metrics.items() if name.startswith(("val_", "val/"))}
        found = {name[len("val_") :]: value for name, value in values.items()}
        if self._run is not None and "loss" in found:
            self._run.evaluated({name: float(value) for name, value in found.items()})

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As ever; of a model that has yet to grow, the weights that it would have, so that they can be used alone."""
        if self.hybrid is not None:
            foreseen: dict[str, Any] | None = self.hybrid.depth.foreseen(self.lightning_module, self.hybrid.optimizer)
            if foreseen is not None:
                return foreseen
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As ever, with the run's state in it where it is a checkpoint to go on from."""
        if self._run is not None and self.hybrid is not None and "optimizer_states" in checkpoint:
            extra = self._run.extra() | self._left_out.state()
            self.hybrid.save_in(_StateInside(checkpoint, kept_by_host(self.hybrid)), **extra)
            self._run.saved(Path(filepath).name)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As ever; a file that was not written to its end is refused by name."""
        if Path(checkpoint_path).is_file():  # it may be an address
            require_whole([Path(checkpoint_path)])
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As ever, and the run's state with it."""
        super().load_optimizer_state_dict(checkpoint)
        if self.hybrid is None:
            return
        inside = checkpoint.get(RUN)
        if inside is None:
            raise ForeignCheckpointError(
                "The checkpoint has no state of HybridTrainer in it: it was saved by another strategy.",
                "Resume it with that one, or begin a new run from its weights.",
            )
        manifest, document = json.loads(inside["manifest"]), json.loads(inside["document"])
        load_beside(self.hybrid, Checkpoint(Path("The checkpoint"), manifest, document), inside["tensors"])
        self._known, self._random = dict(manifest["extra"]), RandomState.capture()


class _StateInside(CheckpointStore):
    """Puts a run's state into one of Lightning's checkpoints, before that is written."""

    def __init__(self, checkpoint: dict[str, Any], theirs: Set[str]) -> None:
        super().__init__(Path(), keep_last=1)
        self._checkpoint, self._theirs = checkpoint, theirs

    def save(self, state: Tree, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        tensors, document = pack({name: part for name, part in state.items() if name not in self._theirs})
        # The copy to return to lies in slabs of bytes, and torch refuses to save one storage as several types.
        tensors = {name: each.clone() if _is_part(each) else each for name, each in tensors.items()}
        manifest = {"step": step, "extra": with_sums(state, self._theirs, extra)}
        # As text: Lightning reads no types but torch's own from a file.
        texts = {"manifest": json.dumps(manifest), "document": json.dumps(document)}
        self._checkpoint[RUN] = {**texts, "tensors": tensors}
        return Path(RUN)


def _is_part(tensor: Tensor) -> bool:
    return tensor.nbytes != tensor.untyped_storage().nbytes()


class _EpochEnd(pl.Callback):  # type: ignore[misc, name-defined]
    """Tells the strategy what Lightning tells only callbacks."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        trainer.strategy.note_epoch()


class _GradientHooks:
    """Lets Lightning's callbacks see gradients when there are some."""

    def __init__(self, trainer: Any, optimizer: Any) -> None:
        self._trainer, self._optimizer = trainer, optimizer

    def after_backward(self, _trainer: HybridTrainer) -> None:
        for event, arguments in (("on_after_backward", ()), ("on_before_optimizer_step", (self._optimizer,))):
            call._call_callback_hooks(self._trainer, event, *arguments)
            call._call_lightning_module_hook(self._trainer, event, *arguments)
