"""The whole algorithm: real steps, jumps, corrections, and the order in which they happen.

    step(batch):
        Predict    forecast, displace, probe until jumps are trusted; or put every bit back and make a real step instead
        otherwise  forward, backward, check, update; in Correct: keep the jump, or roll it back
        decide     the next phase, with its reason

This is the only file that knows the order of events. What a forecast is, what a jump is worth, when a loss is
alarming, how state is kept: each of these is in the module that its name says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hybridtrainer import ranks, schedule
from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.checkpoint import Checkpoint, CheckpointStore, read_checkpoint, write_checkpoint
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.loader import MapDataset, PositionedLoader
from hybridtrainer.determinism import settle_vector_math
from hybridtrainer.errors import ForeignCheckpointError
from hybridtrainer.feed import Feed
from hybridtrainer.foresight import Foresight
from hybridtrainer.hooks import Hooks
from hybridtrainer.losses import CheckedLoss, LossFunction, samples_in
from hybridtrainer.measure import evaluate, measure
from hybridtrainer.memory.phases import PredictMemory, arrange_blocks, as_they_are
from hybridtrainer.memory.room import obstacle_to_jumps
from hybridtrainer.observe.chronicle import Chronicle
from hybridtrainer.observe.tally import Statistics
from hybridtrainer.phases import divergence, horizon, policy
from hybridtrainer.planning.post_mortem import A_STEP, PostMortem
from hybridtrainer.planning.remedies import EVALUATION
from hybridtrainer.predict.baselines import Forecast
from hybridtrainer.predict.depth import make_depth
from hybridtrainer.predict.jump import Jumps
from hybridtrainer.predict.probe import Comparison
from hybridtrainer.predict.readout import Readout, make_readout
from hybridtrainer.predict.rollback import NO_MEMORY, Snapshot
from hybridtrainer.randomness import RandomState
from hybridtrainer.rank_checks import own_probes
from hybridtrainer.real_step import Outcome, micro_batches_of
from hybridtrainer.records import JumpRecord, LossForecast, Notice, Phase, PhaseChange, StepResult
from hybridtrainer.setup_checks import checked_config, checked_end, checked_setup
from hybridtrainer.standing import Standing
from hybridtrainer.state import capture, require_fits, restore, restore_parameters, signature
from hybridtrainer.streamed_step import make_real_step, where_weights_are
from hybridtrainer.tree import Tree, fingerprint

DECISIVE = {"history_windows", "full_steps", "predict", "forecaster", "readout", "depth", "dynamics", "residuals"}

SAME_BLOCKS = "Train the same blocks as it did, all of them, in one process."

if TYPE_CHECKING:
    from hybridtrainer.fit_result import FitResult


class HybridTrainer:
    """Trains a model in phases; what a forecast foresees is not computed, and what does not pay is undone.

    Args:
        model: Any module. Put it on its device first.
        optimizer: Any torch optimizer over the model's parameters; None for a streamed model, which has its own.
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
        optimizer: Optimizer | None,
        loss_fn: LossFunction,
        config: HybridTrainerConfig | None = None,
        scheduler: Any | None = None,
        scaler: GradScaler | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        probe_batches: Iterable[Any] | None = None,
        hooks: Iterable[object] = (),
    ) -> None:
        settle_vector_math()
        self.config = checked_config(config, loss_fn)
        self.model, self.accumulate = model, accumulate
        self._probes = None if probe_batches is None else own_probes(probe_batches)
        self._training = checked_setup(
            model, optimizer, scheduler, scaler, clip_norm, accumulate, self._probes, self.config
        )
        self.optimizer = self._training.optimizer
        self.hooks = Hooks(hooks, self.config.hooks)
        self._chronicle = Chronicle(self.hooks)
        self.listeners = self._chronicle.listeners
        self._end_step: int | None = None
        memory = self.config.memory
        whole = as_they_are(model) if "depth" in self.config.predict else model
        self.depth = make_depth(whole, self.config, self._training.optimizer)
        self._blocks = arrange_blocks(model, memory)
        self._loss = CheckedLoss(model, loss_fn, lambda: self._at.arithmetic(memory.precision))
        self._buffers = BufferGuard(model)
        self._real_step = make_real_step(
            self._training, self._loss, clip_norm, self._buffers, memory.retry_smaller, self._say
        )
        self._feed = Feed(self.config, self._loss, self._say)
        self._predict_memory = PredictMemory(self._training, memory, self._chronicle.tally.mean_real_seconds)
        self._foresight = Foresight(self._training, self.config)
        probing = self._predict_memory.probing
        self.jumps = Jumps(self._training, self._loss, self._buffers, self.config, probing, self._foresight)
        self.readout, self._undo = self._make_readout(), Snapshot()
        self._post_mortem = PostMortem(self._training, loss_fn, self.config, accumulate, bool(self._probes))
        self._at = Standing(policy.start(self.config, obstacle_to_jumps(self._training, self.config)))
        if self.depth.is_short:
            self._at.policy = policy.in_warmup(self._at.policy)

    def step(self, batch: Any) -> StepResult:
        """Makes one step with this batch: a real one, or a jump for which the batch serves as probe.

        Whatever is raised inside leaves the state of the last completed step, random numbers and buffers included.

        Raises:
            LossError: if `loss_fn` returns no loss.
            DivergenceError: after three steps in a row whose loss or gradient was not finite; none was applied.
            GpuMemoryError: if the step does not fit, however small its parts.
        """
        started = time.perf_counter()
        micro_batches: list[Any] = []
        self._probed_samples = 0
        jump: JumpRecord | None = None
        self._real_step.require_whole()
        with self._undone_on_error(micro_batches) as random_state:
            micro_batches += micro_batches_of(batch, self.accumulate)
            self._feed.expect(len(micro_batches))
            if self.depth.is_open and not self._at.clock:
                self._decide_depth(micro_batches)
            self.hooks.emit("before_step", self, batch)
            if self.current_phase is Phase.PREDICT:
                jump = self._predict(micro_batches)
            phase = self._blocks.enter(self.current_phase)
            if jump is None or not jump.worth_steps:
                outcome = self._real_step(
                    micro_batches,
                    lambda micro_batch: self.hooks.emit("before_forward", self, micro_batch),
                    lambda: self.hooks.emit("after_backward", self),
                    None if self.hooks.hears("before_step", "before_jump") else random_state,
                )
        # Weights have changed: from here on the step counts, whatever else happens.
        if jump is not None and jump.worth_steps:
            return self._finish(started, Phase.PREDICT, self._loss_after(jump), jump.reason, foreseen=jump.worth_steps)
        self._feed.samples.learn()
        share = self.depth.share  # of the blocks: what a short model computes counts as so much less
        reason = self._after_real_step(outcome, micro_batches)
        if jump is not None:
            reason = f"jump refused: {jump.reason}"
        samples = ranks.count() * max(1, round(share * sum(map(samples_in, micro_batches))))
        result = self._finish(started, phase, outcome.loss, reason, outcome=outcome, samples=samples)
        if self._at.watch.bad >= divergence.BAD_STEPS_ALLOWED:
            error = divergence.bad_steps_error(outcome.problem, result.step)
            self.hooks.emit_error(self, error)
            raise error
        return result

    def _after_real_step(self, outcome: Outcome, micro_batches: Sequence[Any]) -> str:
        """Clock, watch and the next phase. Returns the reason for whatever is special about this step."""
        at, history = self._at, self.jumps.history
        rates = schedule.learning_rates(self._training.optimizer)
        at.clock += 1
        self._feed.note(self._at)
        schedule.advance(self._training.scheduler, 1, outcome.loss)
        finding: str | None = None
        if outcome.problem:
            self._buffers.put_back()
            at.watch = divergence.observe_bad(at.watch)
            finding = outcome.problem
        elif not outcome.overflow:
            at.watch, finding = divergence.observe(at.watch, outcome.loss, outcome.norm, self.config.divergence_sigma)
            self._foresight.observe(outcome, at, self._chronicle.note)
        if (change := at.adapt(self.config.memory.precision, finding)) is not None:
            self._chronicle.note(change)
        with self._explained("the average of the weights"), self._real_step.torn_by_error():
            self.readout.observe()
        if not at.policy.off and history.is_open:
            history.count_step(rates)
        if self.current_phase is Phase.CORRECT:
            return self._correct(outcome.loss, finding)
        reason = self._move(*policy.after_real_step(at.policy, self.config, finding, self.depth.is_short))
        if finding is None and self.depth.is_due(at.clock, self._end_step, micro_batches):
            self._grow()
        elif not at.policy.off and not self.depth.is_short:
            if self.current_phase is Phase.WARMUP and history.open_steps >= self.config.full_steps:
                self._count_lack(self.jumps.close_window())
            if policy.full_is_over(at.policy, self.config):
                reason = self._look_ahead() or reason
        return finding or reason

    def _decide_depth(self, batches: Sequence[Any]) -> None:
        """Before the first step: whether the model begins short."""
        with self._blocks_as_they_are():
            said = self.depth.decide(self._end_step, batches, lambda: self._loss_on(self._probes or batches))
        if self.depth.is_short:
            self._at.policy = policy.in_warmup(self._at.policy)
            self.jumps.history.leave_open_window()
        self._say(said)

    @contextmanager
    def _blocks_as_they_are(self) -> Iterator[None]:
        as_they_are(self.model)
        try:
            yield
        finally:
            self._blocks = arrange_blocks(self.model, self.config.memory)

    def _loss_on(self, batches: Iterable[Any]) -> float:
        return evaluate(self.model, self._loss.values, batches, self._buffers, self.config.seed)

    def _make_readout(self) -> Readout:
        arguments = (self.model, self._loss.values, self._probes or (), self._buffers, self.config.seed)
        probe = (lambda: measure(*arguments)) if self._probes else None
        return make_readout(self._training, self.config, probe, self._say)

    def _grow(self) -> None:
        """Makes a short model deep; what was learned of the short one's losses and weights says nothing any more."""
        optimizer = self._training.optimizer
        with self._explained("the growth of the model"):
            states = self.depth.new_states(optimizer)
            with self._real_step.torn_by_error():
                self._say(self.depth.grow(optimizer, states))
        self._chronicle.tally.count_growth()
        self.readout, self._at.watch = self._make_readout(), divergence.Watch()
        self._move(policy.after_growth(self._at.policy, self.config), "the model has grown")

    def _look_ahead(self) -> str:
        """Ends the window and decides whether the next step shall be a jump. Returns the reason, for or against."""
        if not self._at.policy.rate_checked:  # nobody has said where the run ends
            self._check_rate(schedule.FAR_AHEAD)
            if self._at.policy.off:
                return self._move(policy.to_full(self._at.policy), self._at.policy.off)
        lack = self.jumps.close_window()
        self._count_lack(lack)
        proposal = lack or self._propose()
        if isinstance(proposal, str):
            reason = self._move(policy.to_full(self._at.policy), proposal)
        else:
            self._at.confidence = policy.confidence(self._at.policy, proposal.confidence)
            progress = self._foresight.chance_of_progress()
            reason = self._move(*policy.consider(self._at.policy, self.config, self._at.confidence, progress))
        if self.current_phase is not Phase.PREDICT:
            self._chronicle.tally.count_declined(reason)
        return reason

    def _predict(self, micro_batches: Sequence[Any]) -> JumpRecord:
        """Tries a jump. Accepted, the weights are displaced; refused, every bit is as before."""
        started, clock = time.perf_counter(), self._at.clock
        forecast = self._propose()
        if isinstance(forecast, str):  # what allowed a jump when the last step ended does not hold any more
            self._move(policy.to_full(self._at.policy), forecast)
            return self._chronicle.note(JumpRecord(clock, 0, "none", 0.0, "refused", forecast))
        self.hooks.emit("before_jump", self, forecast)
        record = JumpRecord(
            clock, forecast.horizon_steps, forecast.forecaster, forecast.confidence, "refused", "",
            norm_ratio=forecast.norm_ratio,
        )  # fmt: skip
        probes = micro_batches if self._probes is None else self._probes
        verdict = self._undo.take_if_it_fits(self._to_undo()) or self._try_out(forecast, probes)
        worth = self._judge(forecast, verdict)
        reason = worth.reason
        if isinstance(verdict, Comparison):
            self._probed_samples = self.jumps.probed_samples
            record = replace(record, probe_before=verdict.before, probe_after=verdict.after)
            reason = f"probe loss {verdict.before:.4f} to {verdict.after:.4f}, {reason}"
        accepted = replace(record, verdict="accepted", worth_steps=worth.steps)
        lack = self._accept(forecast, accepted, reason) if worth.steps else ""
        if worth.steps and not lack:
            record = accepted
        else:
            self._undo.drop()
            reason = lack or reason
            if not self._count_lack(reason):
                state, off = policy.after_refused(self._at.policy, self.config, self._jump_cost())
                self._move(state, off or f"jump refused: {reason}")
        return self._chronicle.note(replace(record, reason=reason, seconds=time.perf_counter() - started))

    def _to_undo(self) -> dict[str, Any]:
        """The live tensors themselves; who holds on to them keeps their memory from being given up in a probe."""
        return {**capture(self._training, frozen=False), **self._at.to_undo(), "readout": self.readout.state()}

    def _try_out(self, forecast: Forecast, probes: Sequence[Any]) -> Comparison | str | None:
        """What a probe says, or what is wrong with the forecast; None where it is trusted without a probe."""
        if not self._at.policy.needs_probe:
            return self.jumps.problem_of(forecast) or None
        saved, memory = self._undo.tree(), self._predict_memory

        def put_back() -> None:
            memory.bring_back(states=False)
            restore_parameters(self._training, saved)

        with self._real_step.torn_by_error(lambda: memory.is_away), memory.trying(saved, forecast.horizon_steps):
            return self.jumps.try_out(forecast, probes, put_back)

    def _judge(self, forecast: Forecast, verdict: Comparison | str | None) -> horizon.Worth:
        state, steps, pace = self._at.policy, forecast.horizon_steps, divergence.pace(self._at.watch) or 0.0
        if not isinstance(verdict, Comparison):
            return horizon.Worth(0, verdict) if verdict else horizon.trusted_worth(state, steps)
        return horizon.probed_worth(verdict, forecast.confidence, pace, steps, state, self.config)

    def _accept(self, forecast: Forecast, record: JumpRecord, reason: str) -> str:
        """Displaces the weights; returns why every bit is as before where memory has run out."""
        try:
            self.jumps.displace_(forecast)
            schedule.advance(self._training.scheduler, record.worth_steps, self._loss_after(record))
            self.jumps.begin_window()  # the next one must not contain the jump
        except BaseException as error:
            restore(self._training, self._undo.tree())
            self.jumps.open_window()
            self._undo.drop()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            return f"{NO_MEMORY} in the jump"
        self._at.clock += record.worth_steps
        self._at.jump, self._at.correction_losses = record, []
        self._feed.note(self._at)
        steps, worth, cost = record.horizon_steps, record.worth_steps, self._jump_cost()
        self._move(policy.after_accepted(self._at.policy, steps, worth, cost, record.probe_before), reason)
        return ""

    def _propose(self) -> Forecast | str:
        """A forecast for as far as the next jump may reach, or why there is none."""
        left = None if self._end_step is None else self._end_step - self._at.clock
        seen, cost = self.jumps.seen_steps, self._jump_cost()
        reach, reason = horizon.next_horizon(self._at.policy, self.config, cost, seen, left)
        if not reach:
            return reason
        if divergence.pace(self._at.watch) is None:
            return "too few losses are known to say what a real step is worth"
        return self.jumps.forecast(reach)

    def _loss_after(self, record: JumpRecord) -> float:
        """What the loss is after a jump; where that was not measured, what it was before."""
        level, _ = divergence.level_and_spread(self._at.watch.losses) or (math.nan, 0.0)
        return level if record.probe_after is None else record.probe_after

    def _jump_cost(self) -> float:
        batches = self.accumulate if self._probes is None else len(self._probes)
        return horizon.jump_cost(batches * self._at.policy.needs_probe, where_weights_are(self._training))

    def _correct(self, loss: float, finding: str | None) -> str:
        """Counts a correction step; on an alarm, or where the last one shows no recovery, undoes the jump."""
        at = self._at
        at.policy = policy.after_correction_step(at.policy)
        at.correction_losses.append(loss)
        assert at.jump is not None
        if finding is None:
            if at.policy.steps_in_phase < horizon.correction_steps(at.jump.horizon_steps, self.config):
                return ""
            before = tuple(self._undo.tree()["watch"]["losses"])
            finding = divergence.not_recovered(before, at.correction_losses, self.config.divergence_sigma)
        if finding is not None:
            return self._roll_back(at.jump, finding)
        self._settle_jump(at.jump, "kept", "the loss recovered")
        self._undo.drop()
        return self._move(policy.to_full(policy.after_kept(self._at.policy, self.config)), "the jump was kept")

    def _roll_back(self, jump: JumpRecord, finding: str) -> str:
        """Returns to the moment before the jump, with everything but the counters of the phase machine."""
        at, undo = self._at, self._undo.tree()
        reason = f"rolled back {at.clock - undo['clock']} steps: {finding}"
        state, off = policy.after_rolled_back(at.policy, self.config, jump.worth_steps)
        restore(self._training, undo)
        self.readout.restore(undo["readout"])
        at.undo(undo)
        self._feed.rewind(self._at)
        self.jumps.open_window()  # a jump starts where a window ended
        self._settle_jump(jump, "rolled back", reason)
        self._undo.drop()
        self._move(state, off or reason)
        return reason

    def _settle_jump(self, jump: JumpRecord, verdict: str, reason: str) -> None:
        at = self._at
        after = math.fsum(at.correction_losses) / len(at.correction_losses)
        settled = replace(jump, verdict=verdict, reason=reason, probe_after=after, seconds=0.0)
        at.jump, at.correction_losses = None, []
        self._chronicle.note(settled)

    def _count_lack(self, reason: str) -> bool:
        """Takes note of a jump that memory did not suffice for; too many of them switch prediction off."""
        lacking = reason.startswith(NO_MEMORY)
        if lacking:
            state, off = policy.after_no_memory(self._at.policy, self.config)
            self._move(state, off or f"no jump: {reason}")
        return lacking

    @contextmanager
    def _undone_on_error(self, batches: Sequence[Any]) -> Iterator[RandomState]:
        """Puts everything back where a step does not get as far as changing the weights; gives the random state."""
        standing, random_state = replace(self._at), RandomState.capture()
        with self._explained("the copy of buffers that a failed step returns to"):
            self._buffers.remember()
        first = not (self._at.policy.off or self.jumps.history.is_open or self.depth.is_short)
        if first:
            self._count_lack(self.jumps.open_window())
        try:
            yield random_state
        except BaseException as error:
            self._at = standing
            self._chronicle.forget()
            if first:
                self.jumps.history.leave_open_window()
            if standing.jump is None:
                self._undo.drop()
            if not standing.clock:
                self.depth.reopen()
            self._real_step.abandon(error)
            self._buffers.put_back()
            random_state.restore()
            self._feed.rewind(self._at)
            told = ranks.named(self._post_mortem.told(error, A_STEP, self.current_phase, self.step_count, batches))
            self.hooks.emit_error(self, told)
            if told is error:
                raise
            raise told from error

    def _finish(
        self, started: float, phase: Phase, loss: float | None, reason: str, *, foreseen: int = 0,
        outcome: Outcome | None = None, samples: int = 0,
    ) -> StepResult:  # fmt: skip
        result = StepResult(
            step=self._at.clock, phase=phase, loss=math.nan if loss is None else loss, predicted=foreseen,
            confidence=self._at.confidence, seconds=time.perf_counter() - started, reason=reason,
            grad_norm=outcome.norm if outcome else None,
            skipped=outcome is not None and (bool(outcome.problem) or outcome.overflow),
            forward_samples=samples + self._probed_samples, backward_samples=samples,
        )  # fmt: skip
        self._chronicle.tell(result, self)
        return result

    def _move(self, state: policy.PolicyState, reason: str) -> str:
        """Enters a state of the phase machine; a change of phase is recorded with its reason."""
        before, self._at.policy = self._at.policy.phase, state
        if state.phase is not before:
            self._chronicle.note(PhaseChange(self._at.clock, before, state.phase, reason))
        return reason

    def _say(self, text: str) -> None:
        self._chronicle.note(Notice(self._at.clock, text))

    def _explained(self, doing: str) -> AbstractContextManager[None]:
        return self._post_mortem.explained(doing, self.current_phase, self._at.clock)

    @property
    def current_phase(self) -> Phase:
        """The phase of the next step."""
        return self._at.policy.phase

    @property
    def step_count(self) -> int:
        """The run's clock: real steps that were not undone, and steps foreseen."""
        return self._at.clock

    @property
    def weight_copies(self) -> int:
        """How often this process has copied all weights: for roll-backs, for windows, for averages."""
        return self._undo.copies + self.jumps.history.copies + self.readout.copies

    def expect_end(self, end_step: int | None) -> str:
        """Says where the clock will end, None if nobody knows: no jump goes beyond.

        Returns:
            Why there will be no jump at all; empty if there may be. See `policy.unless_rate_falls`.
        """
        self._end_step = checked_end(end_step)
        if end_step is not None and not self._at.policy.rate_checked:
            self._check_rate(end_step - self._at.clock)
        return self._at.policy.off

    def _check_rate(self, steps: int) -> None:
        left = schedule.share_left(self._training.optimizer, self._training.scheduler, steps)
        self._at.policy = policy.unless_rate_falls(self._at.policy, self.config, left)
        if self._at.policy.off:
            self._chronicle.tally.count_declined(self._at.policy.off)
            self.jumps.history.leave_open_window()

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
        return self._feed.loader(self._at, dataset, batch_size, **options)

    def evaluate(self, batches: Iterable[Any], metric: LossFunction | None = None) -> float:
        """Mean of the loss, or of `metric(model, batch)`, over batches, at the weights that are read out.

        Leaves no trace in training.
        """
        function = self._loss.values if metric is None else lambda batch: metric(self.model, batch)
        with self._explained(EVALUATION), self.read_out():
            return evaluate(self.model, function, batches, self._buffers, self.config.seed)

    def read_out(self) -> AbstractContextManager[None]:
        """While open the model has the weights to evaluate and to keep: an average, where `readout` says so."""
        return self.readout.in_place()

    def forecasts(self) -> list[LossForecast]:
        """Where the loss is heading, 5, 20 and 50 steps ahead with 90% intervals; none where nobody forecasts."""
        return self._foresight.forecasts()

    def statistics(self) -> Statistics:
        """Backward passes avoided, jumps and their fate, seconds by phase."""
        return self._chronicle.tally.statistics(self._feed.left_out())

    def save(self, path: str | Path) -> None:
        """Writes everything that decides the future of this run into the folder `path`, whole or not at all.

        Raises:
            SaveError: if the disk is full, read-only or failing; what was there before is still there.
            TornStepError: if an update has failed since the last checkpoint was loaded.
        """
        with self._explained("a save"):
            write_checkpoint(Path(path), self.state(), self._at.clock, {"tally": self._chronicle.tally.to_dict()})
        self.hooks.emit("on_checkpoint", self, Path(path))

    def save_in(self, store: CheckpointStore, **extra: Any) -> Path:
        """Writes the next of a run's numbered checkpoints; returns its folder."""
        with self._explained("a save"):
            folder = store.save(self.state(), self._at.clock, {"tally": self._chronicle.tally.to_dict(), **extra})
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
        saved = checkpoint.state(self.jumps.history.weights.sharded)
        require_fits(saved, self._signature(), self._training, str(checkpoint.folder))
        standing = Standing.from_tree(saved["standing"])
        self._feed.require_same(standing, str(checkpoint.folder))
        if saved["depth"]["short"] and not self.depth.can_be_short:
            raise ForeignCheckpointError(f"{checkpoint.folder} is of a model that has yet to grow.", SAME_BLOCKS)
        self._predict_memory.bring_back()
        restore(self._training, saved)
        self.readout.restore(saved["readout"])
        self._foresight.restore(saved["foresight"])
        self._feed.samples.restore(saved.get("samples"))
        with self._blocks_as_they_are():
            self.depth.restore(saved["depth"])
        if not standing.clock:
            self.depth.reopen()
        self._real_step.restore(saved.get("division"))
        self._at = standing
        self.jumps.restore(saved["history"])
        self._undo.drop()
        if saved["undo"] is not None:
            self._undo.take(saved["undo"])
        self._feed.rewind(self._at)
        self._chronicle.tally.restore(checkpoint.manifest["extra"].get("tally", {}))

    def state(self) -> dict[str, Tree]:
        """Everything that decides the future of this run, as a tree of live tensors and plain values."""
        return {
            **capture(self._training),
            "division": self._real_step.state(),
            "signature": self._signature(),
            "standing": self._at.to_tree(),
            "history": self.jumps.state(),
            "readout": self.readout.state(),
            "foresight": self._foresight.state(),
            "samples": self._feed.samples.state(),
            "depth": self.depth.state(),
            "undo": self._undo.tree() if self._undo.taken else None,
        }

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each part of the state, and of all of it: equal fingerprints have equal futures."""
        return fingerprint(self.state())

    def _signature(self) -> dict[str, Tree]:
        settings = self.config.model_dump(include=DECISIVE)
        return signature(self._training) | {"accumulate": self.accumulate, "settings": settings}
