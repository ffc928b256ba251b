"""Hugging Face's Trainer, with HybridTrainer making its steps.

    get_batch_samples    the micro-batches of one optimizer step are held
    training_step        all but the last of them: nothing, so that a callback may still end the run before the step
                         the last: one step of HybridTrainer over all of them, real or foreseen
    clip, step, zero     HybridTrainer has done it; the host's calls find nothing to do

Data, evaluation, logging, callbacks, checkpoints and everything else stay Hugging Face's. `state.global_step` counts
the sets of batches that were consumed, as ever, so that a resumed run finds its data; `state.max_steps` moves with
jumps and roll-backs, so that the run ends when the learning-rate schedule does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridtrainer.checkpoint import read_checkpoint
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import ForeignCheckpointError
from hybridtrainer.integrations import huggingface_checks as checks
from hybridtrainer.integrations.clock import HostScheduler, Idle, noticed, unwrapped
from hybridtrainer.integrations.hosted import RUN, HostedRun, free_folder, load_beside, require_hostable, save_beside
from hybridtrainer.integrations.huggingface_loss import StepLoss
from hybridtrainer.integrations.huggingface_streamed import (
    has_adapters,
    is_streamed,
    load_adapters_,
    require_same_settings,
    written_by_tensors,
)
from hybridtrainer.integrations.optional import require
from hybridtrainer.measure import batches_of
from hybridtrainer.memory.load import load_weights_
from hybridtrainer.records import StepResult
from hybridtrainer.trainer import HybridTrainer

_Base: Any = Any if TYPE_CHECKING else object  # what it stands before is known when a class is derived

NOT_METRICS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


class HybridTrainerMixin(_Base):  # type: ignore[misc]
    """Put before a `transformers.Trainer`, or one of its subclasses, it lets HybridTrainer make the steps.

    Args:
        args: As for the class it stands before.
        hybrid: Settings; the defaults where left out. `predict = "off"` is that class's own training, bit for bit.
        probe_batches: Held-out batches, as the data collator makes them, on which jumps are judged. Without them the
            batches that arrive are used.
        hooks: Objects called at named moments, see `hybridtrainer.hooks`.
        run_dir: Where the run's log goes; `hybridtrainer` in the output folder where left out, with a number behind it
            where a run is there already.
        kwargs: As for the class it stands before.

    Raises:
        ModelError: when training begins, if the arguments ask for what cannot be done with it.

    Attributes:
        hybrid: The `HybridTrainer`, from when training begins.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        hybrid: HybridTrainerConfig | None = None,
        probe_batches: Iterable[Any] | None = None,
        hooks: Iterable[object] = (),
        run_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        checks.require_known(type(self), HybridTrainerMixin)
        self.hybrid: Any = None
        self._settings = hybrid or HybridTrainerConfig()
        require_hostable(self._settings, "TrainingArguments")
        self._probes = batches_of(probe_batches, "probe_batches")
        self._hybrid_hooks = list(hooks)
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._run: HostedRun | None = None
        self._stack = ExitStack()
        self._held: list[Any] = []
        self._arrived = 0  # of those that are held
        self._has_best = self._waits = False  # whether the best checkpoint is loaded; whether a step is not whole
        self._result: StepResult | None = None
        self._rate: float | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(require("hybridtrainer.integrations.huggingface_callback", "hf").HybridCallback)
        if is_streamed(self.model):
            self.accelerator.device_placement = False  # the weights live where `stream` has put them

    # Beginning and end

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ever; True goes on from the newest checkpoint that was written to its end."""
        resume_from_checkpoint = checks.to_resume(resume_from_checkpoint, Path(self.args.output_dir))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, with room for the steps that a roll-back makes again: `max_steps` ends the run, not the epochs."""
        epochs, *others = super().set_initial_training_values(*args, **kwargs)
        self._epochs = epochs
        return ((epochs if self._settings.predict == "off" else min(2 * epochs + 1, sys.maxsize)), *others)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        try:
            output = super()._inner_training_loop(batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval)
            if self._run is not None:
                self._run.finish()
            return output
        except BaseException as error:
            if self._run is not None:
                self._run.failed(error)
            raise
        finally:
            self._run, self._rate = None, None
            self._follow()
            self._stack.close()
            self.optimizer, self.lr_scheduler = unwrapped(self.optimizer), unwrapped(self.lr_scheduler)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        checks.require_possible(self)
        if is_streamed(self.model):
            require_same_settings(self.args, self.model.optimizer)
            self.optimizer = self.model.optimizer
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.state.num_train_epochs = self._epochs
        self.hybrid, self._has_best = self._make_hybrid(prepared[0]), False
        known = None if resume_from_checkpoint is None else self._load_hybrid(Path(resume_from_checkpoint))
        self._begin(max_steps, known)
        self.optimizer = self.callback_handler.optimizer = Idle(self.optimizer)
        if not checks.is_moved_by_metrics(self.lr_scheduler):
            self.lr_scheduler = self.callback_handler.lr_scheduler = Idle(self.lr_scheduler)
        return prepared

    def _make_hybrid(self, model: nn.Module) -> HybridTrainer:
        scaler = self.accelerator.scaler
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's stands around it
        moves = not checks.is_moved_by_metrics(self.lr_scheduler)
        self._clock = HostScheduler(self.lr_scheduler, moves=moves, scaler=noticed(scaler, optimizer))
        self._loss = StepLoss(self, model)
        return HybridTrainer(
            self.model,
            optimizer,
            self._loss,
            self._settings,
            scheduler=self._clock,
            scaler=scaler,
            clip_norm=self.args.max_grad_norm if self.args.max_grad_norm > 0 else None,
            accumulate=self.args.gradient_accumulation_steps,
            probe_batches=self._probes,
            hooks=self._hybrid_hooks,
        )

    def _begin(self, max_steps: int, known: dict[str, Any] | None) -> None:
        self._run = HostedRun(self.hybrid, max_steps)
        folder = self._run_dir or Path(self.args.output_dir) / RUN
        folder = free_folder(folder) if known is None else folder.with_name(known["run_name"])
        self._run.write_into(folder, known, self._stack)
        self._stack.enter_context(self._run)
        self._follow()
        self.state.max_steps = self.state.global_step + self._run.left

    def _follow(self) -> None:
        """Tells the callback of the run; it comes first, so that the others see what it adds."""
        callbacks = self.callback_handler.callbacks
        for each in [each for each in callbacks if type(each).__name__ == "HybridCallback"]:
            callbacks.insert(0, callbacks.pop(callbacks.index(each)))
            each.follow(self._run)

    # Steps

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As ever; the micro-batches of the step are held. A run that was resumed at its end gets none."""
        if self._run is not None and not self._run.left and self._settings.predict != "off":
            self.control.should_training_stop = True
            return [], None
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._held, self._result, self._arrived = list(samples), None, 0
        # Of data without a length the host makes no step where they end: gradients wait in the weights for the next.
        self._waits = len(samples) < num_batches
        return samples, count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of a micro-batch; with the last one of a step, HybridTrainer makes the whole step."""
        if self._run is None or (self._waits and not is_streamed(self.model)):
            alone: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return alone
        if self._waits:
            return self._loss.alone(inputs, num_items_in_batch, len(self._held))
        self._arrived += 1
        if self._arrived < len(self._held):
            return torch.zeros((), device=self.args.device)  # reported with the last
        return self._loss.report(self._make_step(model, num_items_in_batch), len(self._held))

    def _make_step(self, model: nn.Module, items: Any) -> StepResult:
        assert self._run is not None
        run, every = self._run, self.args.torch_empty_cache_steps
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if every is not None and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._rate = None
        self._rate = self._get_learning_rate()
        self._clock.before_step()
        self._loss.begin(items)
        self._result = run.step(self._held)
        self.state.max_steps = self.state.global_step + 1 + run.left
        self.control.should_save = self.control.should_save or run.save_wanted
        return self._result

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return super()._clip_grad_norm(model) if self._result is None else self._norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm) if self._result is None else self._norm()

    def _norm(self) -> Tensor:
        norm = None if self._result is None else self._result.grad_norm
        return torch.tensor(0.0 if norm is None else norm)

    def _get_learning_rate(self) -> float:
        """That of the step just made; the schedule is one ahead of it when the host asks."""
        return super()._get_learning_rate() if self._rate is None else self._rate

    # Evaluation, checkpoints

    def _read_out(self) -> AbstractContextManager[None]:
        return nullcontext() if self.hybrid is None or self._has_best else self.hybrid.read_out()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, at the weights that are read out."""
        with self._read_out():
            return super().evaluation_loop(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super()._evaluate(*args, **kwargs)
        if self._run is not None:
            named = {name.removeprefix("eval_"): value for name, value in metrics.items()}
            numbers = {name: float(value) for name, value in named.items() if isinstance(value, int | float)}
            self._run.evaluated({name: value for name, value in numbers.items() if not name.endswith(NOT_METRICS)})
        return metrics

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_streamed(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
        if self._run is not None and self.hybrid is not None:
            save_beside(self.hybrid, Path(output_dir) / RUN, self._run.extra())
            self._run.saved(Path(output_dir).name)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not is_streamed(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_hybrid(self, checkpoint: Path) -> dict[str, Any]:
        if not (checkpoint / RUN).is_dir():
            raise ForeignCheckpointError(
                f"{checkpoint} has no state of HybridTrainer in it: it was saved without, or with `save_only_model`.",
                "Resume it with `transformers.Trainer`, or begin a new run from its weights.",
            )
        found = read_checkpoint(checkpoint / RUN)
        load_beside(self.hybrid, found)
        return dict(found.manifest["extra"])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ever: in a checkpoint the weights in training, otherwise those that evaluations see."""
        with nullcontext() if _internal_call and self._run is not None else self._read_out():
            super().save_model(output_dir, _internal_call)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._has_best = True
        if self.hybrid is not None and self.hybrid.depth.is_short:
            self.hybrid.depth.be(short=False)  # what was loaded has all blocks

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        depth = None if self.hybrid is None else self.hybrid.depth
        if state_dict is None and depth is not None and not is_streamed(self.model):
            state_dict = depth.foreseen(self.model, self.hybrid.optimizer)
        instead = {} if depth is None else depth.sources(self.hybrid.optimizer)
        with written_by_tensors(self.model, instead) as adapters:
            super()._save(output_dir, state_dict if adapters is None else adapters)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_streamed(self.model):
            load = load_adapters_ if has_adapters(self.model) else load_weights_
            load(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not is_streamed(model):
            super()._move_model_to_device(model, device)


def __getattr__(name: str) -> Any:
    """`Trainer`: that of Hugging Face with the mixin before it, made when it is first asked for."""
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("accelerate", "hf")  # or transformers would tell of a Trainer that cannot be imported
    base = require("transformers", "hf").Trainer
    made = type("Trainer", (HybridTrainerMixin, base), {"__module__": __name__, "__doc__": HybridTrainerMixin.__doc__})
    globals()["Trainer"] = made
    return made
