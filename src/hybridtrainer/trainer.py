"""The whole algorithm: real steps, jumps, corrections, and the order in which they happen.

    step(batch):
        Predict    forecast, displace, probe; accept it, or put every bit back and make a real step instead
        otherwise  forward, backward, check, update; in Correct: keep the jump, or roll it back
        decide     the next phase, with its reason

This is the only file that knows the order of events. What a forecast is, what a jump is worth, when a loss is
alarming, how state is kept: each of these is in the module that its name says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hybridtrainer import schedule
from hybridtrainer.checkpoint import Checkpoint, CheckpointStore, read_checkpoint, write_checkpoint
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.loader import MapDataset, PositionedLoader
from hybridtrainer.errors import DataError, DivergenceError
from hybridtrainer.hooks import Hooks
from hybridtrainer.losses import CheckedLoss, LossFunction
from hybridtrainer.measure import evaluate
from hybridtrainer.observe.tally import Statistics, Tally
from hybridtrainer.phases import divergence, horizon, policy
from hybridtrainer.predict.jump import Jumps
from hybridtrainer.predict.rollback import Snapshot
from hybridtrainer.randomness import RandomState
from hybridtrainer.real_step import Outcome, RealStep
from hybridtrainer.records import JumpRecord, Phase, PhaseChange, StepResult
from hybridtrainer.setup_checks import check_setup
from hybridtrainer.state import BufferGuard, Training, capture, require_same, restore, restore_parameters, signature
from hybridtrainer.tree import Tree, fingerprint

if TYPE_CHECKING:
    from hybridtrainer.fit import FitResult

BAD_STEPS_ALLOWED = 3

Record = StepResult | JumpRecord | PhaseChange


class HybridTrainer:
    """Trains a model in phases; what a forecast foresees is not computed, and what does not pay is undone.

    Args:
        model: Any module. Put it on its device first.
        optimizer: Any torch optimizer over the model's parameters.
        loss_fn: `loss_fn(model, batch)` returns the loss, or one loss for each sample.
        config: Settings; the defaults where left out.
        scheduler: A torch learning-rate scheduler, stepped once per step and once per step foreseen.
        scaler: A `GradScaler`; made where `memory.precision` is "fp16" and none is given.
        clip_norm: Largest global gradient norm; None does not clip.
        accumulate: Micro-batches in one step; `step` then takes a list of that many.
        probe_batches: Held-out batches on which jumps are judged. Without them the batch that arrives is used.
        hooks: Objects called at named moments, see `hybridtrainer.hooks`.

    Raises:
        ModelError: if these do not fit together.

    >>> import torch
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = HybridTrainer(model, optimizer, lambda model, x: model(x).square().mean())
    >>> result = trainer.step(torch.ones(8, 4))
    >>> result.step, result.phase.value, result.predicted
    (1, 'warmup', 0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        config: HybridTrainerConfig | None = None,
        scheduler: Any | None = None,
        scaler: GradScaler | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        probe_batches: Iterable[Any] | None = None,
        hooks: Iterable[object] = (),
    ) -> None:
        self.config = config or HybridTrainerConfig()
        probes = None if probe_batches is None else list(probe_batches)
        check_setup(model, optimizer, scheduler, scaler, clip_norm, accumulate, probes, self.config)
        if scaler is None and self.config.memory.precision == "fp16":
            scaler = GradScaler(next(model.parameters()).device.type)
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        self.hooks = Hooks(hooks, self.config.hooks)
        self.listeners: list[Callable[[Record], None]] = []
        self.end_step: int | None = None  # where the run ends, if known: no jump goes beyond
        self.accumulate = accumulate
        self._training = Training(model, optimizer, scheduler, scaler)
        self._loss = CheckedLoss(model, loss_fn, self.config.memory.precision)
        self._real_step = RealStep(self._training, self._loss, clip_norm)
        self._buffers = BufferGuard(model)
        self.jumps = Jumps(self._training, self._loss, self._buffers, self.config)
        self._probes = probes
        self._undo = Snapshot()
        self._policy = policy.start(self.config)
        self._watch = divergence.Watch()
        self._clock = 0
        self._jump: JumpRecord | None = None  # the accepted jump that is being corrected
        self._correction_losses: list[float] = []
        self._confidence: float | None = None
        self._loader: PositionedLoader | None = None
        self._data: Tree = None  # position and identity of the loader at the last completed step
        self._tally = Tally()

    # A step ---------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Makes one step with this batch: a real one, or a jump for which the batch serves as probe.

        Whatever is raised inside leaves the state of the last completed step, random numbers and buffers included.

        Raises:
            LossError: if `loss_fn` returns no loss.
            DivergenceError: after three steps in a row whose loss or gradient was not finite; none was applied.
        """
        started = time.perf_counter()
        micro_batches = self._micro_batches(batch)
        with self._undone_on_error():
            self.hooks.emit("before_step", self, batch)
            refusal = ""
            if self._policy.phase is Phase.PREDICT:
                jump = self._predict(micro_batches)
                if jump.worth_steps:
                    loss = jump.probe_after if jump.probe_after is not None else math.nan
                    return self._finish(StepResult(
                        self._clock, Phase.PREDICT, loss, jump.worth_steps, self._confidence,
                        time.perf_counter() - started, jump.reason,
                    ))  # fmt: skip
                refusal = f"jump refused: {jump.reason}"
            phase = self._policy.phase
            outcome = self._real_step(
                micro_batches,
                lambda micro_batch: self.hooks.emit("before_forward", self, micro_batch),
                lambda: self.hooks.emit("after_backward", self),
            )
            reason = self._after_real_step(outcome)
        result = self._finish(StepResult(
            self._clock, phase, outcome.loss, 0, self._confidence, time.perf_counter() - started,
            refusal or reason, outcome.norm, skipped=bool(outcome.problem) or outcome.overflow,
        ))  # fmt: skip
        if self._watch.bad >= BAD_STEPS_ALLOWED:
            raise DivergenceError(
                f"Loss or gradients were not finite for {BAD_STEPS_ALLOWED} steps in a row ({outcome.problem} at step "
                f"{result.step}). None of these updates was applied.",
                "Lower the learning rate, clip gradients, or look at the data of these batches.",
            )
        return result

    def _after_real_step(self, outcome: Outcome) -> str:
        """Clock, watch and the next phase. Returns the reason for whatever is special about this step."""
        rates = schedule.learning_rates(self._training.optimizer)
        schedule.advance(self._training.scheduler, 1, outcome.loss)
        self._clock += 1
        finding: str | None = None
        if outcome.problem:
            self._buffers.put_back()
            self._watch = divergence.observe_bad(self._watch)
            finding = outcome.problem
        elif not outcome.overflow:
            self._watch, finding = divergence.observe(
                self._watch, outcome.loss, outcome.norm, self.config.divergence_sigma
            )
        if not self._policy.off:
            self.jumps.history.count_step(rates)
        if self._policy.phase is Phase.CORRECT:
            return self._correct(outcome.loss, finding)
        reason = self._move(*policy.after_real_step(self._policy, self.config, finding))
        if self._policy.off:
            return finding or reason
        if self.jumps.history.open_steps >= self.config.full_steps and self._policy.phase is Phase.WARMUP:
            self.jumps.history.close()
        if self._policy.phase is Phase.FULL and self._policy.steps_in_phase >= self.config.full_steps:
            reason = self._look_ahead() or reason
        return finding or reason

    # Predict --------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> str:
        """Ends the window and decides whether the next step shall be a jump. Returns the reason, for or against."""
        self.jumps.history.close()
        reach, reason = self._next_horizon()
        forecast = self.jumps.forecast(reach) if reach else reason
        if isinstance(forecast, str):
            reason = self._move(policy.to_full(self._policy), forecast)
        else:
            self._confidence = policy.confidence(self._policy, forecast.confidence)
            reason = self._move(*policy.consider(self._policy, self.config, self._confidence))
        if self._policy.phase is not Phase.PREDICT:
            self._tally.count_declined(reason)
        return reason

    def _predict(self, micro_batches: Sequence[Any]) -> JumpRecord:
        """Tries a jump. Accepted, the weights are displaced; refused, every bit is as before."""
        started = time.perf_counter()
        reach, reason = self._next_horizon()
        forecast = self.jumps.forecast(reach) if reach else reason
        if isinstance(forecast, str):  # what allowed a jump when the last step ended does not hold any more
            self._move(policy.to_full(self._policy), forecast)
            return self._emit_jump(JumpRecord(self._clock, 0, "none", 0.0, "refused", forecast))
        self.hooks.emit("before_jump", self, forecast)
        record = JumpRecord(
            self._clock, reach, forecast.forecaster, forecast.confidence, "refused", "", norm_ratio=forecast.norm_ratio
        )
        self._undo.take(self._undo_state())
        verdict = self.jumps.try_out(
            forecast,
            micro_batches if self._probes is None else self._probes,
            put_back=lambda: restore_parameters(self._training.model, self._undo.tree()),
        )
        worth = 0
        if isinstance(verdict, str):
            reason = verdict
        else:
            pace = divergence.progress_per_step(self._watch.losses, self._policy.real_steps)
            worth, reason = horizon.worth_steps(
                verdict.gain, verdict.chance_better, pace, reach, self.config.confidence_threshold
            )
            reason = f"probe loss {verdict.before:.4f} to {verdict.after:.4f}, {reason}"
            record = replace(record, probe_before=verdict.before, probe_after=verdict.after)
        if worth:
            self.jumps.displace_(forecast)
            schedule.advance(self._training.scheduler, worth, record.probe_after or 0.0)
            self._clock += worth
            record = replace(record, verdict="accepted", worth_steps=worth)
            self._jump, self._correction_losses = record, []
            self.jumps.history.open()  # the next window must not contain the jump
            self._move(policy.after_accepted(self._policy, reach, worth, self._jump_cost()), reason)
        else:
            self._undo.drop()
            harmless = not isinstance(verdict, str) and verdict.chance_better >= self.config.confidence_threshold
            state, off = policy.after_refused(self._policy, self.config, self._jump_cost(), harmless)
            self._move(state, off or f"jump refused: {reason}")
        return self._emit_jump(replace(record, reason=reason, seconds=time.perf_counter() - started))

    # Correct --------------------------------------------------------------------------------------------------

    def _correct(self, loss: float, finding: str | None) -> str:
        """Counts a correction step; on an alarm, or where the last one shows no recovery, undoes the jump."""
        self._policy = policy.after_correction_step(self._policy)
        self._correction_losses.append(loss)
        if finding is None:
            if self._policy.steps_in_phase < self.config.correct_steps:
                return ""
            before = tuple(self._undo.tree()["watch"]["losses"])
            finding = divergence.not_recovered(before, self._correction_losses, self.config.divergence_sigma)
        return self._keep() if finding is None else self._roll_back(finding)

    def _keep(self) -> str:
        self._settle_jump("kept", "the loss recovered")
        self._policy = policy.after_kept(self._policy, self.config)
        self._undo.drop()
        reach, reason = self._next_horizon()
        return self._look_ahead() if reach else self._move(policy.to_full(self._policy), reason)

    def _roll_back(self, finding: str) -> str:
        """Returns to the moment before the jump, with everything but the counters of the phase machine."""
        assert self._jump is not None
        undo = self._undo.tree()
        reason = f"rolled back {self._clock - undo['clock']} steps: {finding}"
        restore(self._training, undo)
        self.jumps.history.open()  # a jump starts where a window ended
        self._clock = undo["clock"]
        self._watch = divergence.Watch.from_tree(undo["watch"])
        self._restore_data(undo["data"])
        state, off = policy.after_rolled_back(self._policy, self.config, self._jump.worth_steps)
        self._settle_jump("rolled back", reason)
        self._undo.drop()
        self._move(state, off or reason)
        return reason

    def _settle_jump(self, verdict: str, reason: str) -> None:
        assert self._jump is not None
        losses = self._correction_losses
        settled = replace(
            self._jump, verdict=verdict, reason=reason, probe_after=math.fsum(losses) / len(losses), seconds=0.0
        )
        self._jump, self._correction_losses = None, []
        self._emit_jump(settled)

    # Around a step --------------------------------------------------------------------------------------------

    def _micro_batches(self, batch: Any) -> Sequence[Any]:
        if self.accumulate == 1:
            return [batch]
        if not isinstance(batch, list | tuple) or len(batch) != self.accumulate:
            got = f"{len(batch)} of them" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
            raise DataError(
                f"step needs a list of {self.accumulate} micro-batches, as accumulate says; it got {got}.",
                "Pass that many batches in a list, or use `fit`, which gathers them.",
            )
        return batch

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Puts random states, buffers, gradients and the data position back where a step does not complete."""
        random_state = RandomState.capture()
        self._buffers.remember()
        if self._policy.real_steps == 0 and not self._policy.off and not self.jumps.history.is_open:
            self.jumps.history.open()
        try:
            yield
        except BaseException as error:
            self._real_step.abandon()
            self._buffers.put_back()
            random_state.restore()
            self._restore_data(self._data)
            self._tell_hooks(error)
            raise

    def _tell_hooks(self, error: BaseException) -> None:
        try:
            self.hooks.emit("on_error", self, error)
        except Exception as second:  # the first error is the one that matters
            error.add_note(f"The on_error hook failed too: {second}")

    def _finish(self, result: StepResult) -> StepResult:
        if self._loader is not None:
            self._data = {"position": self._loader.position(), "identity": self._loader.identity()}
        self._emit(result)
        return result

    def _move(self, state: policy.PolicyState, reason: str) -> str:
        """Enters a state of the phase machine; a change of phase is recorded with its reason."""
        before, self._policy = self._policy.phase, state
        if state.phase is not before:
            change = PhaseChange(self._clock, before, state.phase, reason)
            self._emit(change)
            self.hooks.emit("on_phase_change", self, change)
        return reason

    def _emit_jump(self, record: JumpRecord) -> JumpRecord:
        self._emit(record)
        self.hooks.emit("after_jump", self, record)
        return record

    def _emit(self, record: Record) -> None:
        self._tally.observe(record)
        for listener in self.listeners:
            listener(record)

    def _next_horizon(self) -> tuple[int, str]:
        left = None if self.end_step is None else self.end_step - self._clock
        return horizon.next_horizon(self._policy, self.config, self._jump_cost(), left)

    def _jump_cost(self) -> float:
        return horizon.jump_cost(self.accumulate if self._probes is None else len(self._probes))

    # What users call besides `step` -----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._training.model

    @property
    def current_phase(self) -> Phase:
        """The phase of the next step."""
        return self._policy.phase

    @property
    def step_count(self) -> int:
        """The run's clock: real steps that were not undone, and steps foreseen."""
        return self._clock

    def fit(self, loader: Iterable[Any], steps: int, **options: Any) -> FitResult:
        """Steps until the clock shows `steps`, with progress, checkpoints and signals handled.

        See `hybridtrainer.fit.fit` for the options.
        """
        from hybridtrainer.fit import fit

        return fit(self, loader, steps, **options)

    def loader(self, dataset: MapDataset, batch_size: int, **options: Any) -> PositionedLoader:
        """A loader whose position is part of this run's state; see `PositionedLoader` for the options.

        A position loaded from a checkpoint before this call is taken up.
        """
        self._loader = PositionedLoader(dataset, batch_size, seed=self.config.seed, **options)
        self._restore_data(self._data)
        return self._loader

    def evaluate(self, batches: Iterable[Any], metric: LossFunction | None = None) -> float:
        """Mean of the loss, or of `metric(model, batch)`, over batches; leaves no trace in the run."""
        function = self._loss.values if metric is None else lambda batch: metric(self.model, batch)
        return evaluate(self.model, function, batches, self._buffers, self.config.seed)

    def statistics(self) -> Statistics:
        """Backward passes avoided, jumps and their fate, seconds by phase."""
        return self._tally.statistics()

    # State ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes everything that decides the future of this run into the folder `path`, whole or not at all.

        Raises:
            SaveError: if the disk is full, read-only or failing; what was there before is still there.
        """
        write_checkpoint(Path(path), self.state(), self._clock, {"tally": self._tally.to_dict()})
        self.hooks.emit("on_checkpoint", self, Path(path))

    def save_in(self, store: CheckpointStore, **extra: Any) -> Path:
        """Writes the next of a run's numbered checkpoints; returns its folder."""
        folder = store.save(self.state(), self._clock, {"tally": self._tally.to_dict(), **extra})
        self.hooks.emit("on_checkpoint", self, folder)
        return folder

    def load(self, path: str | Path | Checkpoint) -> None:
        """Continues from a checkpoint: the steps that follow are bit for bit those of the run that saved it.

        Without `trainer.loader` the data position is the caller's to restore.

        Raises:
            CorruptCheckpointError: if it is damaged or incomplete.
            ForeignCheckpointError: if it belongs to another setup. In both cases nothing has changed.
        """
        checkpoint = path if isinstance(path, Checkpoint) else read_checkpoint(Path(path))
        saved = checkpoint.state()
        require_same(saved["signature"], self._signature(), str(checkpoint.folder))
        if self._loader is not None and saved["data"] is not None:
            require_same(saved["data"]["identity"], self._loader.identity(), str(checkpoint.folder))
        restore(self._training, saved)
        self._clock = saved["clock"]
        self._policy = policy.PolicyState.from_tree(saved["policy"])
        self._watch = divergence.Watch.from_tree(saved["watch"])
        self._confidence = saved["confidence"]
        self.jumps.history.restore(saved["history"])
        self._jump = None if saved["jump"] is None else JumpRecord(**saved["jump"])
        self._correction_losses = list(saved["correction_losses"])
        self._undo.drop()
        if saved["undo"] is not None:
            self._undo.take(saved["undo"])
        self._restore_data(saved["data"])
        self._tally.restore(checkpoint.manifest["extra"].get("tally", {}))

    def state(self) -> dict[str, Tree]:
        """Everything that decides the future of this run, as a tree of live tensors and plain values."""
        return {
            **capture(self._training),
            "signature": self._signature(),
            "clock": self._clock,
            "policy": self._policy.to_tree(),
            "watch": self._watch.to_tree(),
            "confidence": self._confidence,
            "history": self.jumps.history.state(),
            "jump": None if self._jump is None else asdict(self._jump) | {"seconds": 0.0},
            "correction_losses": self._correction_losses,
            "undo": self._undo.tree() if self._undo.taken else None,
            "data": self._data,
        }

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each part of the state, and of all of it: equal fingerprints have equal futures."""
        return fingerprint(self.state())

    def _undo_state(self) -> dict[str, Tree]:
        return {
            **capture(self._training),
            "clock": self._clock,
            "watch": self._watch.to_tree(),
            "data": self._data,
        }

    def _signature(self) -> dict[str, Tree]:
        chosen = self.config.model_dump(include={"history_windows", "full_steps", "predict", "forecaster"})
        return signature(self._training) | {"accumulate": self.accumulate, "settings": chosen}

    def _restore_data(self, data: Tree) -> None:
        self._data = data
        if self._loader is not None and data is not None:
            self._loader.restore(data["position"])
