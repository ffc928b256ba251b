"""A loop of your own, Accelerate's too, with the run folder of `fit`: its log, evaluations, checkpoints and report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hybridtrainer import ranks
from hybridtrainer.errors import ModelError, RunFolderError
from hybridtrainer.fit import Loop
from hybridtrainer.losses import LossFunction
from hybridtrainer.observe.progress import make_progress
from hybridtrainer.observe.trackers import Tracker, find_trackers
from hybridtrainer.records import StepResult
from hybridtrainer.run_folder import open_run
from hybridtrainer.schedule import crossed
from hybridtrainer.trainer import HybridTrainer


@contextmanager
def own_loop(
    trainer: HybridTrainer,
    steps: int,
    run_dir: str | Path,
    *,
    resume: bool = False,
    validation: Iterable[Any] | None = None,
    metrics: Mapping[str, LossFunction] | None = None,
    eval_interval: int = 100,
    trackers: Iterable[str | Tracker] = (),
) -> Iterator[OwnLoop]:
    """A run whose batches come from a loop of your own; everything else is that of `fit`.

    Args:
        trainer: What to step.
        steps: Where the clock ends. Jumps move it too; nothing stops the loop but the loop itself, see `left`.
        run_dir: Where to keep log and checkpoints.
        resume: Go on from the newest sound checkpoint in `run_dir`. Where the data stands is yours to restore, unless
            it comes from `trainer.loader`.
        validation: As for `fit`.
        metrics: As for `fit`.
        eval_interval: As for `fit`.
        trackers: As for `fit`.

    Raises:
        ModelError: if an argument makes no sense, or the package of a tracker is not installed.

    An error inside, Ctrl-C and `sys.exit` too, leaves a checkpoint of the last completed step, and is raised as it was.
    Other signals are the loop's.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = HybridTrainer(model, optimizer, lambda model, x: model(x).square().mean())
    >>> folder = tempfile.TemporaryDirectory()
    >>> with folder, own_loop(trainer, 5, f"{folder.name}/run") as run:
    ...     while run.left:
    ...         result = run.step(torch.ones(8, 4))
    ...     result.step
    5
    """
    if not all(isinstance(count, int) and count >= 1 for count in (steps, eval_interval)):
        raise ModelError(
            f"A run cannot have {steps!r} steps with an evaluation every {eval_interval!r}.",
            "Give at least 1 for each.",
        )
    with ExitStack() as stack:
        makers = find_trackers(trackers) if ranks.is_first() else []
        folder = stack.enter_context(open_run(run_dir, trainer.config.keep_last, resume))
        run = OwnLoop(trainer, (), steps, make_progress("off"), validation, metrics or {}, eval_interval)
        run.keep_in(folder, resume, None, stack, makers)
        with run:
            try:
                yield run
                run.settle()
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                run._save_after(error)
                raise
            finally:
                run.is_over = True
        run.finish()


class OwnLoop(Loop):
    """A run on its way; `own_loop` makes it.

    Attributes:
        is_over: Whether the `with` block has been left.
    """

    is_over = False

    @property
    def left(self) -> int:
        """Steps until the clock is at its end."""
        return max(0, self.steps - self.trainer.step_count)

    def step(self, batch: Any) -> StepResult:
        """One step of the trainer, and after it an evaluation or a checkpoint where one is due.

        Raises:
            RunFolderError: after the `with` block.
        """
        self._require_open()
        trainer, before = self.trainer, self.trainer.step_count
        self._batches = iter((batch,))
        clock = self._step()
        if crossed(before, clock, self.eval_interval) and clock < self.steps:
            self._evaluate()
        if (self._save_next and ranks.count() == 1) or crossed(before, clock, trainer.config.save_interval):
            self._save()
        assert self.result.last is not None
        return self.result.last

    def save(self) -> None:
        """A checkpoint now."""
        self._require_open()
        self._save()

    def _require_open(self) -> None:
        if self.is_over:
            assert self.folder is not None
            raise RunFolderError(
                f"The run in {self.folder.path} is over: its `with` block has been left, and its log is closed.",
                "Make steps inside the block; `own_loop(..., resume=True)` goes on with the run.",
            )

    def settle(self) -> None:
        """Waits for the device; at the end of the run it is evaluated."""
        self._settle()
        if not self.left:
            self._evaluate()
