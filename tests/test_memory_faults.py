"""GPU memory runs out at every place of a resident run in every phase: done again smaller, done without, or explained.

forward, backward   the step is made again in parts, and is that of a run divided so from the start
update              explained; nothing is trained on or saved until a checkpoint is loaded
jump                the window, the probe or the displacement is given up, and training goes on
save                explained; the checkpoint before stays, the run is as it was
snapshot            of the buffers: explained, the run is as it was; of a jump: the jump is given up
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import EAGER, gpt_setup, text_splits
from torch import Tensor, nn

from hybridtrainer import checkpoint, tensor_file
from hybridtrainer import trainer as trainer_module
from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.errors import GpuMemoryError, TornStepError
from hybridtrainer.memory import phases
from hybridtrainer.memory.parking import Parking
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.predict.baselines import Past
from hybridtrainer.predict.history import WindowHistory
from hybridtrainer.predict.rollback import Snapshot
from hybridtrainer.records import JumpRecord, Notice, Phase, Record
from hybridtrainer.smaller_step import Division, SmallerStep
from hybridtrainer.trainer import HybridTrainer

BATCHES = gpt_setup().batches
PLACES = ("forward", "backward", "update", "jump", "save", "snapshot")
CASES = [pytest.param(place, phase, id=f"{place}-{phase}") for place in PLACES for phase in Phase]
pytestmark = pytest.mark.filterwarnings("ignore:GPU memory ran out")


class Injected(torch.OutOfMemoryError):
    """As torch raises it."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise Injected


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Injected


@dataclass
class Card:
    """A loss function with so much memory.

    Attributes:
        forward, backward: Samples at a time for which there is some, in either pass.
        probe: Whether there is any for a probe.
    """

    forward: int = 99
    backward: int = 99
    probe: bool = True

    def __call__(self, model: nn.Module, tokens: Tensor) -> Tensor:
        training = torch.is_grad_enabled()
        if tokens.is_meta:  # rehearsed, which takes no memory
            return gpt_loss(model, tokens)
        if (training and len(tokens) > self.forward) or (not training and not self.probe):
            raise Injected
        loss = gpt_loss(model, tokens)
        return _NoGradient.apply(loss) if training and len(tokens) > self.backward else loss


@dataclass
class Run:
    """A trainer on such a card."""

    card: Card = field(default_factory=Card)
    settings: dict[str, Any] = field(default_factory=dict)
    told: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        setup = gpt_setup(count=1)
        setup.loss_fn = self.card
        self.trainer = setup.trainer(settings=EAGER | self.settings)
        self.trainer.listeners.append(self.told.append)

    def notices(self) -> list[str]:
        return [record.text for record in self.told if isinstance(record, Notice)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Phase, Path]:
    """A checkpoint of one run in the middle of each phase."""
    trainer, found = Run().trainer, {}
    for batch in BATCHES:
        if trainer.current_phase not in found and trainer.step_count >= 4:
            found[trainer.current_phase] = tmp_path_factory.mktemp("run") / "checkpoint"
            trainer.save(found[trainer.current_phase])
        if len(found) == len(Phase):
            return found
        trainer.step(batch)
    raise AssertionError("a phase was never reached")


def at(saved: Path, **settings: Any) -> Run:
    """A run that goes on from there; what would have been a jump is refused unless the test is about one."""
    run = Run(settings=settings)
    run.trainer.load(saved)
    return run


@contextmanager
def running_out(run: Run, place: str, phase: Phase, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as patched:
        if place in ("forward", "backward"):
            setattr(run.card, place, 4)
        if place == "update":
            patched.setattr(torch.optim.AdamW, "step", half_an_update)
        if place == "jump" and phase is Phase.PREDICT:
            run.card.probe = False
        elif place == "jump":
            patched.setattr(WindowHistory, "close", out_of_memory)
        if place == "save":
            patched.setattr(tensor_file, "tensor_bytes", out_of_memory)
        if place == "snapshot":
            owner, name = (Snapshot, "take") if phase is Phase.PREDICT else (BufferGuard, "remember")
            patched.setattr(owner, name, out_of_memory)
        yield
    run.card.forward, run.card.backward, run.card.probe = 99, 99, True


def half_an_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        for parameter in parameters[: len(parameters) // 2]:
            parameter.add_(1.0)
    raise Injected


def refuse_jumps(*runs: Run) -> None:
    for run in runs:
        run.trainer.jumps.forecaster = lambda past, horizon, ahead: _malformed(past, horizon)


def _malformed(past: Past, horizon: int) -> Any:
    from tests.test_trainer_faults import forecast_of

    return forecast_of(past.tau * float("nan"), past, horizon)


@pytest.mark.parametrize(("place", "phase"), CASES)
def test_each_phase_recovers_or_explains_at_each_place(checkpoints, tmp_path, monkeypatch, place, phase):
    run, twin = at(checkpoints[phase]), at(checkpoints[phase])
    assert run.trainer.current_phase is phase
    if phase is Phase.PREDICT and place in ("forward", "backward", "update"):
        refuse_jumps(run, twin)  # so that a real step is made
    CHECKS[place](run, twin, phase, checkpoints[phase], monkeypatch, tmp_path)


def check_divided(place: str, run: Run, twin: Run, phase: Phase, saved: Path, patch: pytest.MonkeyPatch) -> None:
    with running_out(run, place, phase, patch):
        divided = run.trainer.step(BATCHES[0])
    random_state = torch.get_rng_state()
    assert divided.phase is (Phase.FULL if phase is Phase.PREDICT else phase) and not divided.skipped
    (notice,) = run.notices()
    assert notice == (
        f"GPU memory ran out in the {place} pass: from now on 4 of 8 samples are computed at a time, with the same "
        "samples in a step"
    )
    assert run.trainer.state()["division"] == {"parts": 2, "weighing": None}
    twin.trainer.load(saved)
    step = twin.trainer._real_step
    assert isinstance(step, SmallerStep)
    step.division = Division(2)
    assert twin.trainer.step(BATCHES[0]).loss == divided.loss
    assert torch.equal(torch.get_rng_state(), random_state)
    assert run.trainer.fingerprint() == twin.trainer.fingerprint()
    after = run.trainer.state()["random"]["torch"].clone()
    losses = [run.trainer.step(batch).loss for batch in BATCHES[1:4]]
    torch.set_rng_state(after)
    assert [twin.trainer.step(batch).loss for batch in BATCHES[1:4]] == losses
    assert run.trainer.fingerprint() == twin.trainer.fingerprint()
    assert len(run.notices()) == 1  # said once


def assert_explained(error: GpuMemoryError, doing: str, phase: Phase) -> None:
    text = str(error)
    assert f"Out of GPU memory in {doing}" in text and f"(phase {phase.value}, after step " in text
    assert "CUDA out of memory. Tried to allocate 2.00 GiB. " in text and "And more" not in text
    assert "What takes less, the cheapest first:\n" in text and 'memory.mode = "split8"' in text
    assert isinstance(error.__cause__, torch.OutOfMemoryError)


def assert_goes_on(run: Run, saved: Path) -> None:
    """The checkpoint loads, and the future is that of a run to which nothing has happened."""
    undisturbed = at(saved)
    expected = [undisturbed.trainer.step(batch).loss for batch in BATCHES[:3]]
    run.trainer.jumps.forecaster = undisturbed.trainer.jumps.forecaster
    run.trainer.load(saved)
    assert [run.trainer.step(batch).loss for batch in BATCHES[:3]] == expected
    assert run.trainer.fingerprint() == undisturbed.trainer.fingerprint()


def check_update(run: Run, twin: Run, phase: Phase, saved: Path, patch: pytest.MonkeyPatch, folder: Path) -> None:
    heard: list[BaseException] = []
    run.trainer.hooks.add(type("Ear", (), {"on_error": lambda self, trainer, error: heard.append(error)})())
    with running_out(run, "update", phase, patch), pytest.raises(GpuMemoryError) as raised:
        run.trainer.step(BATCHES[0])
    assert_explained(raised.value, "the update of the optimizer", phase)
    assert "until a checkpoint is loaded" in str(raised.value) and "foreach=False" in raised.value.remedy
    assert heard == [raised.value]
    for use in (run.trainer.fingerprint, lambda: run.trainer.step(BATCHES[0]), lambda: run.trainer.save(folder / "x")):
        with pytest.raises(TornStepError, match="between two steps"):
            use()
    assert list(folder.iterdir()) == []
    assert_goes_on(run, saved)


def check_jump(run: Run, twin: Run, phase: Phase, saved: Path, patch: pytest.MonkeyPatch, folder: Path) -> None:
    parts = ("parameters", "optimizer", "buffers", "scheduler", "random")
    failures = run.trainer.state()["standing"]["policy"]["failures"]
    with running_out(run, "jump", phase, patch):
        made = 0
        for batch in BATCHES:
            before = run.trainer.current_phase
            result, made = run.trainer.step(batch), made + 1
            if run.trainer.state()["standing"]["policy"]["failures"] != failures:
                break
    assert before is (Phase.FULL if phase is Phase.CORRECT else phase)  # a window ends with a Full phase
    assert "GPU memory ran out in " in result.reason or phase is Phase.WARMUP
    after = {part: run.trainer.fingerprint()[part] for part in parts}
    twin.trainer.load(saved)
    if phase is Phase.PREDICT:
        refuse_jumps(twin)
        (jump,) = (record for record in run.told if isinstance(record, JumpRecord))
        assert (jump.verdict, jump.reason) == ("refused", "GPU memory ran out in the probe")
    for batch in BATCHES[:made]:
        twin.trainer.step(batch)
    assert {part: twin.trainer.fingerprint()[part] for part in parts} == after
    assert run.trainer.current_phase is (Phase.WARMUP if phase is Phase.WARMUP else Phase.FULL)
    # Jumps come back with the memory.
    assert any(run.trainer.step(batch).phase is Phase.PREDICT for batch in BATCHES[made : made + 100])


def check_save(run: Run, twin: Run, phase: Phase, saved: Path, patch: pytest.MonkeyPatch, folder: Path) -> None:
    path = folder / "checkpoint"
    run.trainer.save(path)
    before = run.trainer.fingerprint()
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    with running_out(run, "save", phase, patch), pytest.raises(GpuMemoryError) as raised:
        run.trainer.save(path)
    assert_explained(raised.value, "a save", phase)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == files
    assert [entry.name for entry in folder.iterdir()] == ["checkpoint"]
    assert run.trainer.fingerprint() == before
    assert_goes_on(run, path)


def check_snapshot(run: Run, twin: Run, phase: Phase, saved: Path, patch: pytest.MonkeyPatch, folder: Path) -> None:
    if phase is Phase.PREDICT:
        with running_out(run, "snapshot", phase, patch):
            result = run.trainer.step(BATCHES[0])
        assert result.reason == "jump refused: GPU memory ran out in the snapshot"
        assert not run.trainer.state()["undo"] and run.trainer.step(BATCHES[1]).phase is Phase.FULL
        return
    before = run.trainer.fingerprint()
    with running_out(run, "snapshot", phase, patch), pytest.raises(GpuMemoryError) as raised:
        run.trainer.step(BATCHES[0])
    assert_explained(raised.value, "the copy of buffers", phase)
    assert run.trainer.fingerprint() == before
    assert_goes_on(run, saved)


CHECKS: dict[str, Callable[..., None]] = {
    "forward": lambda *given: check_divided("forward", *given[:-1]),
    "backward": lambda *given: check_divided("backward", *given[:-1]),
    "update": check_update,
    "jump": check_jump,
    "save": check_save,
    "snapshot": check_snapshot,
}


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_what_fits_in_no_part_is_explained_and_leaves_the_last_state(checkpoints, place):
    for phase in (Phase.WARMUP, Phase.CORRECT):
        run = at(checkpoints[phase])
        before = run.trainer.fingerprint()
        setattr(run.card, place, 0)
        with pytest.raises(GpuMemoryError) as raised:
            run.trainer.step(BATCHES[0])
        assert_explained(raised.value, f"the {place} pass", phase)
        text = str(raised.value)
        assert "It was not divided further: that was one sample at a time." in text
        assert "Planned were " in text and "optimizer states 0.3 MiB" in text
        assert run.trainer.fingerprint() == before and not run.notices()


def test_what_a_hook_draws_before_the_step_is_not_drawn_again(checkpoints):
    class Draws:
        def before_step(self, trainer: HybridTrainer, batch: Any) -> None:
            torch.rand(3)

    runs = at(checkpoints[Phase.FULL]), at(checkpoints[Phase.FULL])
    for run in runs:
        run.trainer.hooks.add(Draws())
    run, twin = runs
    run.card.forward = 4
    result = run.trainer.step(BATCHES[0])
    twin.trainer.load(checkpoints[Phase.FULL])
    assert isinstance(twin.trainer._real_step, SmallerStep)
    twin.trainer._real_step.division = Division(2)
    assert twin.trainer.step(BATCHES[0]).loss == result.loss


def test_with_retry_smaller_off_nothing_is_divided(checkpoints):
    run = at(checkpoints[Phase.FULL], memory={"retry_smaller": False})
    run.card.forward = 4
    before = run.trainer.fingerprint()
    with pytest.raises(GpuMemoryError) as raised:
        run.trainer.step(BATCHES[0])
    _, *edits = raised.value.remedy.splitlines()
    assert any(
        re.fullmatch(r"  memory.retry_smaller = true: saves .* MiB, \+0% time, the same .*", edit) for edit in edits
    )
    times = [float(found[1]) for edit in edits if (found := re.search(r"MiB, ([+-]\d+)% time", edit))]
    assert times == sorted(times) and times[-1] > 10  # the blocks computed again
    assert run.trainer.fingerprint() == before


def test_a_divided_run_equals_one_that_accumulates():
    run, twin = Run(Card(forward=4), {"predict": "off"}), gpt_setup(count=1)
    accumulating = twin.trainer(settings={"predict": "off"}, accumulate=2)
    torch.manual_seed(1)
    losses = [run.trainer.step(batch).loss for batch in BATCHES[:5]]
    torch.manual_seed(1)
    assert [accumulating.step(list(batch.chunk(2))).loss for batch in BATCHES[:5]] == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(run.trainer.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_resumed_run_divides_as_the_one_before_it_did(tmp_path):
    def fit(card: Card, name: str, **options: Any) -> HybridTrainer:
        torch.manual_seed(0)
        trainer = Run(card, {"save_interval": 5}).trainer
        trainer.fit(trainer.loader(text_splits().train, 8), 40, progress="off", run_dir=tmp_path / name, **options)
        return trainer

    whole = fit(Card(forward=2), "whole").fingerprint()
    fit(Card(forward=2), "run", pause_at=27)
    assert fit(Card(), "run", resume=True).fingerprint() == whole  # with all the memory there is
    (notice,) = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "notice"]
    assert "2 of 8 samples are computed at a time" in notice["text"]


@pytest.mark.parametrize("where", ["probe", "jump", "window"])
def test_prediction_is_switched_off_after_three_in_a_row_and_training_is_plain(monkeypatch, where):
    run, plain = Run(settings={"max_failures": 3}), Run(settings={"predict": "off"})
    run.card.probe = where != "probe"
    if where == "jump":
        tried = run.trainer.jumps.try_out
        monkeypatch.setattr(run.trainer.jumps, "try_out", lambda *a, **k: _then_fail(run, monkeypatch, tried(*a, **k)))
    if where == "window":
        monkeypatch.setattr(WindowHistory, "open", out_of_memory)
    torch.manual_seed(1)
    losses = [run.trainer.step(batch).loss for batch in BATCHES[:80]]
    torch.manual_seed(1)
    assert [plain.trainer.step(batch).loss for batch in BATCHES[:80]] == losses
    off = run.trainer.state()["standing"]["policy"]["off"]
    assert off == "3 jumps in a row failed, the last for want of GPU memory"
    jumps = [record for record in run.told if isinstance(record, JumpRecord)]
    assert len(jumps) == (0 if where == "window" else 3) and all(jump.verdict == "refused" for jump in jumps)


def _then_fail(run: Run, patch: pytest.MonkeyPatch, verdict: Any) -> Any:
    """From here on no weight can be displaced: the probe was made, and the jump itself runs out."""
    patch.setattr("hybridtrainer.phases.horizon.probed_worth", _worth)
    patch.setattr(run.trainer.jumps, "displace_", out_of_memory)
    return verdict


def _worth(*given: Any) -> Any:
    from hybridtrainer.phases.horizon import Worth

    return Worth(given[4], "fooled")


def test_fit_ends_with_the_explanation_and_a_checkpoint_of_the_last_step(tmp_path):
    class Shrinking(Card):
        def __call__(self, model: nn.Module, tokens: Tensor) -> Tensor:
            self.forward = 0 if run.trainer.step_count == 7 else 99
            return super().__call__(model, tokens)

    run = Run(Shrinking())
    loader = run.trainer.loader(text_splits().train, 8)
    with pytest.raises(GpuMemoryError, match="one sample at a time"):
        run.trainer.fit(loader, 20, progress="off", run_dir=tmp_path / "run")
    newest = checkpoint.CheckpointStore(tmp_path / "run" / "checkpoints", 3).newest()
    assert newest is not None and newest.step == 7
    (error,) = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "error"]
    assert "Planned were" in error["error"]


def test_an_evaluation_that_does_not_fit_is_explained(checkpoints):
    run = at(checkpoints[Phase.FULL])
    before = run.trainer.fingerprint()
    run.card.probe = False
    with pytest.raises(GpuMemoryError, match=r"(?s)in an evaluation .*smaller batches to evaluate on: "):
        run.trainer.evaluate(BATCHES[:2])
    assert run.trainer.fingerprint() == before


def test_an_average_that_does_not_fit_leaves_nothing_to_save(monkeypatch):
    run = Run(settings={"readout": "averaged"})
    monkeypatch.setattr("hybridtrainer.predict.readout.AveragedReadout.observe", out_of_memory)
    with pytest.raises(GpuMemoryError, match="the average of the weights"):
        run.trainer.step(BATCHES[0])
    with pytest.raises(TornStepError):
        run.trainer.fingerprint()


class _OnAGpu(phases.PredictMemory):
    """On a CPU, with everything leaving as on a GPU."""

    def __init__(self, training: Any, memory: Any, step_seconds: Any) -> None:
        super().__init__(training, memory, step_seconds, leaves=lambda tensor: tensor.dim() > 0)


@contextmanager
def returns_fail(monkeypatch: pytest.MonkeyPatch, where: Callable[[], bool]) -> Iterator[None]:
    """What was parked does not fit on the device while `where` says so."""
    original = Parking.bring_back

    def bring_back(self: Parking) -> None:
        if self.is_used and where():
            raise Injected
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Parking, "bring_back", bring_back)
        yield


def up_to_a_jump(memory: dict[str, Any], saved: Path | None = None) -> tuple[HybridTrainer, Iterator[Any]]:
    setup = gpt_setup(count=120)
    trainer, batches = setup.trainer(settings=EAGER | {"memory": memory}), iter(setup.batches)
    while trainer.current_phase is not Phase.PREDICT:
        trainer.step(next(batches))
        if saved is not None and trainer.step_count == 20:
            trainer.save(saved)
    return trainer, batches


def test_weights_that_wait_for_a_probe_return_once_its_activations_are_gone(monkeypatch):
    # Once they were fetched while the error of the probe still held its activations, and stayed away as NaN.
    monkeypatch.setattr(trainer_module, "PredictMemory", _OnAGpu)
    trainer, batches = up_to_a_jump({"predict_int8": True})
    held: list[Any] = []

    def full(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            return gpt_loss(model, batch)
        activation = torch.zeros(1000)
        held.append(weakref.ref(activation))
        raise Injected

    monkeypatch.setattr(trainer._loss, "_loss_fn", full)
    with returns_fail(monkeypatch, lambda: bool(held) and held[-1]() is not None):
        result = trainer.step(next(batches))
    assert "memory" in result.reason and held
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


@pytest.mark.parametrize("memory", [{"predict_int8": True}, {"predict_states": "leave"}], ids=str)
def test_what_cannot_return_after_a_jump_is_neither_trained_on_nor_saved_until_a_checkpoint_is_loaded(
    monkeypatch, tmp_path, memory
):
    monkeypatch.setattr(trainer_module, "PredictMemory", _OnAGpu)
    trainer, batches = up_to_a_jump(memory, tmp_path / "before")
    with returns_fail(monkeypatch, lambda: True), pytest.raises(GpuMemoryError):
        trainer.step(next(batches))
    for refused in (lambda: trainer.step(next(batches)), lambda: trainer.save(tmp_path / "after")):
        with pytest.raises(TornStepError):
            refused()
    trainer.load(tmp_path / "before")
    assert not trainer._predict_memory.is_away
    assert math.isfinite(trainer.step(next(batches)).loss)
