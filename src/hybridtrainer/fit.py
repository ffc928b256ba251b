"""The loop around `HybridTrainer.step`: data, progress, evaluation, checkpoints, signals, errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from hybridtrainer import ranks
from hybridtrainer.config_io import to_toml
from hybridtrainer.data.endless import endless
from hybridtrainer.errors import CorruptCheckpointError, ModelError
from hybridtrainer.fit_result import FitResult
from hybridtrainer.losses import LossFunction
from hybridtrainer.measure import batches_of, wait_for_device
from hybridtrainer.observe.environment import environment
from hybridtrainer.observe.observers import observers
from hybridtrainer.observe.progress import Progress, Unbreakable, make_progress
from hybridtrainer.observe.runlog import RunLog, last_evaluation
from hybridtrainer.observe.trackers import Maker, Tracker, Trackers, find_trackers
from hybridtrainer.observe.upkeep import Upkeep
from hybridtrainer.phases.policy import NOT_NAMED
from hybridtrainer.records import Planned, Record
from hybridtrainer.run_folder import RunFolder, open_run
from hybridtrainer.schedule import crossed
from hybridtrainer.signals import ChildDeaths, StopRequest

if TYPE_CHECKING:
    from hybridtrainer.trainer import HybridTrainer

ProgressMode = Literal["auto", "bar", "lines", "notebook", "off"]


def fit(
    trainer: HybridTrainer,
    loader: Iterable[Any],
    steps: int,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    validation: Iterable[Any] | None = None,
    metrics: Mapping[str, LossFunction] | None = None,
    eval_interval: int = 100,
    pause_at: int | None = None,
    progress: Progress | ProgressMode = "auto",
    config_text: str | None = None,
    trackers: Iterable[str | Tracker] = (),
    planned: Planned | None = None,
) -> FitResult:
    """Steps until the clock shows `steps`.

    Args:
        trainer: What to step.
        loader: Batches; gone through again and again. `trainer.loader(...)` makes one that resumes exactly.
        steps: Where the clock ends. Jumps move it too.
        run_dir: Where to keep log and checkpoints. Without it nothing is written.
        resume: Go on from the newest sound checkpoint in `run_dir`.
        validation: Batches to evaluate on every `eval_interval` steps and at the end.
        metrics: Further functions of model and batch to evaluate, by name.
        eval_interval: Steps between evaluations.
        pause_at: Stop, with a checkpoint, once the clock shows this; the run stays one of `steps` steps.
        progress: What to show meanwhile.
        config_text: Written as `config.toml`; the trainer's own settings where left out.
        trackers: Who follows the log besides: "tensorboard", "wandb", or objects as in `observe/trackers.py`.
        planned: What a plan says of this run: shown and logged before it, and held against what it took after it.

    Raises:
        ModelError: if an argument makes no sense, or the package of a tracker is not installed.
        DataError: if the loader is empty, or ends and cannot be gone through again.

    Any error leaves a checkpoint of the last completed step, and is raised as it was. SIGINT and SIGTERM end the
    run with a checkpoint after the step in progress; a second one ends it in the middle of it.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ModelError(f"fit cannot make {steps!r} steps.", "Ask for at least 1.")
    if eval_interval < 1:
        raise ModelError(f"fit cannot evaluate every {eval_interval} steps.", "Give an eval_interval of at least 1.")
    if trainer.config.memory.profile and run_dir is None:
        raise ModelError("memory.profile writes into a run folder, and there is none.", "Pass run_dir too.")
    makers, progress = (find_trackers(trackers), progress) if ranks.is_first() else ([], "off")
    if run_dir is None and (resume or makers):
        what = "Trackers follow the log of a run, and there is none" if makers else "fit cannot resume"
        raise ModelError(f"{what} without a run folder.", "Pass run_dir too.")
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        shown = Unbreakable(make_progress(progress)) if isinstance(progress, str) else progress
        loop = Loop(trainer, loader, steps, shown, validation, metrics or {}, eval_interval)
        loop.upkeep.plan.planned = planned
        if run_dir is not None:
            folder = stack.enter_context(open_run(run_dir, trainer.config.keep_last, resume))
            loop.keep_in(folder, resume, config_text, stack, makers)
        with loop:
            loop.note(planned.text if planned else "")
            loop.advance(steps if pause_at is None else pause_at, stop)
        return loop.finish(stop.signal)


class Loop:
    """A run on its way: it goes to the end in as many stretches as its owner likes.

    Open it (`with loop:`), `advance` as often as needed, and `finish`.

    Args:
        trainer: What to step.
        loader: Batches; gone through again and again.
        steps: Where the clock ends.
        progress: Told of everything.
        validation: Batches to evaluate on.
        metrics: Further functions of model and batch to evaluate, by name.
        eval_interval: Steps between evaluations.

    Attributes:
        upkeep: Of memory, and of the plan that the run is held against.
    """

    def __init__(
        self,
        trainer: HybridTrainer,
        loader: Iterable[Any],
        steps: int,
        progress: Progress,
        validation: Iterable[Any] | None,
        metrics: Mapping[str, LossFunction],
        eval_interval: int,
    ) -> None:
        self.trainer = trainer
        self.steps = steps
        self.progress = progress
        self.validation = batches_of(validation, "validation")
        self.metrics = metrics
        self.eval_interval = eval_interval
        self.result = FitResult()
        self.folder: RunFolder | None = None
        self.log: RunLog | None = None
        self.upkeep = Upkeep(trainer.model, trainer.optimizer, trainer.config.memory)
        self._save_next = False
        self._batches = endless(loader, trainer.accumulate)
        self._deaths = ChildDeaths()
        self._past: Path | None = None
        self._listeners: list[Callable[[Record], None]] = []
        self._saved_at: int | None = None
        self._evaluated_at: int | None = None
        self._began = time.perf_counter()

    def keep_in(
        self,
        folder: RunFolder,
        resume: bool,
        config_text: str | None,
        stack: ExitStack,
        makers: Iterable[tuple[str, Maker]] = (),
    ) -> None:
        """Uses a run folder: loads its newest checkpoint if asked to, opens its log and whoever follows it."""
        self.folder = folder
        checkpoint = folder.checkpoints.newest() if resume else None
        if resume and checkpoint is None and folder.checkpoints.folders():
            raise CorruptCheckpointError(
                f"None of the checkpoints in {folder.checkpoints.root} is sound.",
                "Restore one from a copy, or start anew in another folder.",
            )
        if checkpoint is not None:
            self.trainer.load(checkpoint)
            self._saved_at = checkpoint.step
            self.progress.message(f"resumed from {checkpoint.folder.name}")
        else:
            folder.write_text("config.toml", config_text or to_toml(self.trainer.config))
        folder.write_json("environment.json", environment())
        continues_at = 0 if resume and folder.log_path.exists() else None
        if checkpoint is not None:
            continues_at = int(checkpoint.manifest["extra"].get("log_bytes", 0))
            self.result.training_seconds = float(checkpoint.manifest["extra"].get("training_seconds", 0.0))
        if ranks.is_first():  # the others keep no log, and nothing else either
            self.log = stack.enter_context(RunLog(folder.log_path, continues_at))
            self._past = None if continues_at is None else folder.log_path
            self.upkeep.keep_in(folder.path, None if checkpoint is None else checkpoint.manifest["extra"], stack)
        self._evaluated_at = ranks.exchange("last evaluation", last_evaluation(self._past))[0]
        if makers and self.log:
            trackers = Trackers(makers, folder.path, None if continues_at is None else self.trainer.step_count)
            stack.callback(trackers.close)
            self.log.followers.append(trackers)

    def __enter__(self) -> Self:
        try:
            self.progress.start(self.trainer.step_count, self.steps)
            trainer, clock = self.trainer, self.trainer.step_count
            pressure = self.upkeep.start(self.note, self._save_after_step, clock, lambda: trainer.depth.is_short)
            self._listeners = observers(
                self.progress, self.log, self.steps, clock, self._past, pressure, lambda: trainer.weight_copies
            )
            self._listeners.append(self.upkeep.record)
            trainer.listeners += self._listeners
            off = trainer.expect_end(self.steps)
            self.note(f"no jumps: {off}" if off and off != NOT_NAMED else "")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        self.upkeep.stop()
        self.trainer.expect_end(None)
        self.trainer.listeners[:] = [each for each in self.trainer.listeners if each not in self._listeners]

    def note(self, text: str) -> None:
        """Shows and logs what was decided; nothing where there is nothing to say."""
        if text:
            self.progress.message(text)
        if text and self.log:
            self.log.write("notice", step=self.trainer.step_count, text=text)

    def advance(self, until: int, stop: StopRequest) -> bool:
        """Steps until the clock shows `until`, to the end of the run, or to a signal.

        Returns:
            Whether the run is at its end, which has been evaluated then.
        """
        trainer, end = self.trainer, min(until, self.steps)
        with self._deaths:
            try:
                while trainer.step_count < end and stop.heard(self._save_next) is None:
                    before, clock = trainer.step_count, self._step()
                    if crossed(before, clock, self.eval_interval) and clock < self.steps:
                        self._evaluate()
                    needed = self._save_next if ranks.count() == 1 else stop.noted
                    if needed or crossed(before, clock, trainer.config.save_interval):
                        self._save()
                self._settle()
                if trainer.step_count >= self.steps:
                    self._evaluate()
            except Exception as error:
                self._save_after(error)
                raise
        return trainer.step_count >= self.steps

    def finish(self, signal: int | None = None) -> FitResult:
        """A last checkpoint and the end of the log; how the run ended or where it paused."""
        with self._deaths:
            self._save()
        result = self.result
        if self.trainer.step_count < self.steps:
            result.status = "paused" if signal is None else "interrupted"
        result.signal, result.steps, result.seconds = signal, self.trainer.step_count, time.perf_counter() - self._began
        result.against_plan = self.upkeep.plan.finish(self.log, self.trainer.jumps.has_windows)
        if self.folder and self.log:
            counted = self.trainer.statistics().to_dict()
            times = {"seconds": result.seconds, "training_seconds": result.training_seconds}
            self.log.write("end", step=result.steps, status=result.status, **times, worth=counted["worth_seconds"])
            self.folder.write_json("statistics.json", counted)
        return result

    def _step(self) -> int:
        """One batch and one step with it; both are training time. Returns the clock."""
        began = time.perf_counter()
        with self._deaths.heard():
            batch = ranks.each("batch", lambda: next(self._batches))
        self.result.last = self.trainer.step(batch)
        self.result.training_seconds += time.perf_counter() - began
        return self.trainer.step_count

    def _settle(self) -> None:
        """Waits for the device: what it still computes is training of this run, and of no other."""
        began = time.perf_counter()
        wait_for_device(self.trainer.model)
        self.result.training_seconds += time.perf_counter() - began

    def _save_after_step(self) -> bool:
        self._save_next = self.folder is not None
        return self._save_next

    def _evaluate(self) -> None:
        if self.validation is None or self._evaluated_at == self.trainer.step_count:
            return
        self._settle()
        trainer, began = self.trainer, time.perf_counter()
        with trainer.read_out():  # the same weights for all of them
            values = {"loss": trainer.evaluate(self.validation)}
            values |= {name: trainer.evaluate(self.validation, metric) for name, metric in self.metrics.items()}
        choosing = trainer.readout.choosing_seconds  # whoever stops here has spent it to get these weights, once
        spent, trained = time.perf_counter() - began - choosing, self.result.training_seconds + choosing
        self._evaluated_at = trainer.step_count
        self.result.evaluations.append({"step": trainer.step_count, **values})
        if self.log:
            counted = trainer.statistics()
            self.log.write(
                "evaluation", step=trainer.step_count, seconds=spent, training_seconds=trained,
                forward_samples=counted.forward_samples, backward_samples=counted.backward_samples, **values,
            )  # fmt: skip
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.progress.message(f"step {trainer.step_count}: validation {shown}")

    def _save(self) -> None:
        self._save_next = False
        if self.folder is None or self._saved_at == self.trainer.step_count:
            return
        sizes = self.upkeep.sizes()
        if self.log:
            self.log.sync()
            sizes["log_bytes"] = self.log.size()
        folder = self.trainer.save_in(self.folder.checkpoints, **sizes, training_seconds=self.result.training_seconds)
        if self.log:
            self.log.write("checkpoint", step=self.trainer.step_count, folder=folder.name)
        self._saved_at = self.trainer.step_count

    def _save_after(self, error: BaseException) -> None:
        """A last checkpoint; if that fails too, the first error still is the one that is raised."""
        try:
            if self.log:
                self.log.write("error", step=self.trainer.step_count, error=f"{type(error).__name__}: {error}")
            if ranks.was_told(error):  # or the others are not there to save with
                self._save()
        except Exception as second:
            if str(second) != str(error):  # a full disk says the same of everything
                error.add_note(f"The checkpoint after this error could not be written either: {second}")
