"""TensorBoard and Weights & Biases: they follow the run log, and can do a run no harm.

The log stays the source: a tracker is shown what has been written, never asked. One that fails is dropped with a
warning, and random numbers that a tracker draws are put back, so the run equals one without it.

A tracker of your own has two methods, `write(kind, fields)` and `close()`:

>>> class LastLoss:
...     def write(self, kind, fields):
...         if kind == "step":
...             self.loss = fields["loss"]
...     def close(self):
...         pass
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hybridtrainer.errors import ModelError
from hybridtrainer.randomness import RandomState
from hybridtrainer.records import Phase

PHASES = {str(phase): float(number) for number, phase in enumerate(Phase)}


class Tracker(Protocol):
    """Follows the log of one run."""

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A record of the log, as written: `kind`, and its fields."""

    def close(self) -> None:
        """The run is over."""


Maker = Callable[[Path, int | None], Tracker]
"""Makes a tracker for a run folder; for a resumed run, with the step from which it goes on."""


class TrackerWarning(UserWarning):
    """A tracker failed and was dropped; the run goes on."""


def find_trackers(wanted: Iterable[str | Tracker]) -> list[tuple[str, Maker]]:
    """What it takes to make each tracker, by name or as given. Nothing is written yet.

    Raises:
        ModelError: for a name that is not known, a package that is not installed, an object that cannot follow a log.
    """
    found: list[tuple[str, Maker]] = []
    for tracker in wanted:
        if isinstance(tracker, str):
            found.append((tracker, _named(tracker)))
        elif callable(getattr(tracker, "write", None)) and callable(getattr(tracker, "close", None)):
            found.append((type(tracker).__name__, _given(tracker)))
        else:
            raise ModelError(
                f"{type(tracker).__name__} cannot track a run: it needs the methods write(kind, fields) and close().",
                f"Pass an object with both, or one of the names {', '.join(MAKERS)}.",
            )
    return found


def _given(tracker: Tracker) -> Maker:
    return lambda _folder, _step: tracker


def _named(name: str) -> Maker:
    if name not in MAKERS:
        raise ModelError(f"There is no tracker {name!r}.", f"Use one of {', '.join(MAKERS)}.")
    load, make = MAKERS[name]
    try:
        with _unseen():
            package = load()
    except ImportError as error:
        raise ModelError(
            f"The tracker {name!r} needs a package that cannot be imported: {error}.",
            'Install it with: pip install ".[track]"',
        ) from error
    return lambda folder, step: make(package, folder, step)


class Trackers:
    """All trackers of a run, as one follower of its log.

    Args:
        makers: From `find_trackers`.
        folder: The run's folder.
        resumed_at: The step from which a resumed run goes on; None for a new one.
    """

    def __init__(self, makers: Iterable[tuple[str, Maker]], folder: Path, resumed_at: int | None = None) -> None:
        self._live: list[tuple[str, Tracker]] = []
        for name, make in makers:
            with self._guarded(name):
                self._live.append((name, make(folder, resumed_at)))

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows a record to every tracker that has not failed."""
        for name, tracker in list(self._live):
            with self._guarded(name, tracker):
                tracker.write(kind, fields)

    def close(self) -> None:
        """Closes all that are left."""
        for name, tracker in list(self._live):
            with self._guarded(name, tracker):
                tracker.close()
        self._live = []

    @contextmanager
    def _guarded(self, name: str, tracker: Tracker | None = None) -> Iterator[None]:
        try:
            with _unseen():
                yield
        except Exception as error:
            self._live = [known for known in self._live if known[1] is not tracker]
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"The tracker {name} is dropped, the run goes on: {reason}", TrackerWarning, stacklevel=4)


@contextmanager
def _unseen() -> Iterator[None]:
    """Whatever is drawn from the random generators inside is put back."""
    state = RandomState.capture()
    try:
        yield
    finally:
        state.restore()


def scalars(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a record that are worth a curve, by name; none for most kinds."""
    match kind:
        case "step":
            named = {f"train/{name}": fields.get(name) for name in ("loss", "grad_norm", "confidence", "predicted")}
            named |= {"train/step_seconds": fields.get("seconds"), "train/phase": PHASES.get(str(fields.get("phase")))}
        case "evaluation":
            named = {f"evaluation/{name}": value for name, value in fields.items() if name != "step"}
        case "jump":
            named = {f"jump/{name}": fields.get(name) for name in ("worth_steps", "confidence", "norm_ratio")}
            named["jump/kept"] = {"kept": 1.0, "rolled back": 0.0, "refused": 0.0}.get(str(fields.get("verdict")))
        case "memory":
            named = {f"memory/{name}": value for name, value in fields.items() if name.endswith("_bytes")}
        case _:
            named = {}
    # What is not finite is text in the log, and no point of a curve.
    return {name: float(value) for name, value in named.items() if isinstance(value, int | float)}


class TensorBoard:
    """Event files in `<run>/tensorboard`, by the clock."""

    def __init__(self, writer: Any, folder: Path, resumed_at: int | None) -> None:
        purge = None if resumed_at is None else resumed_at + 1
        self._writer = writer(log_dir=str(folder / "tensorboard"), purge_step=purge)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Adds the numbers of a record; what happened once and in words becomes text."""
        step = fields.get("step")
        for name, value in scalars(kind, fields).items():
            self._writer.add_scalar(name, value, step)
        if kind in ("notice", "error"):
            self._writer.add_text(kind, str(fields.get("text") or fields.get("error")), step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb in `<run>/wandb`: offline unless WANDB_MODE says otherwise."""

    def __init__(self, wandb: Any, folder: Path, resumed_at: int | None) -> None:
        path = folder.resolve()
        self._run = wandb.init(
            project=path.parent.name or "hybridtrainer",
            name=path.name,
            id=_lasting_id(folder / "wandb" / "id"),
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume=None if resumed_at is None else "allow",
            reinit="create_new",  # a run that the program has open already is its own
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        # Its own step may not go back, and the clock does when a jump is rolled back.
        self._run.define_metric("clock")
        self._run.define_metric("*", step_metric="clock")

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Logs the numbers of a record."""
        if values := scalars(kind, fields):
            self._run.log({"clock": fields["step"], **values})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _lasting_id(file: Path) -> str:
    """The same for all parts of a run that is interrupted and resumed."""
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text()


def _load_tensorboard() -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


def _load_wandb() -> Any:
    # It reports its own errors over the network as soon as it is imported; who wants that has said so.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


MAKERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Path, int | None], Tracker]]] = {
    "tensorboard": (_load_tensorboard, TensorBoard),
    "wandb": (_load_wandb, WeightsAndBiases),
}
"""By name: how its package is loaded, and how a tracker is made with it."""
