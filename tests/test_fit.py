"""The loop around the steps: data, checkpoints, signals, errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.memory.cards import GIB, FakeAllocator, card
from tests.support import EAGER, digit_splits, gpt_setup, text_splits

from hybridtrainer import checkpoint
from hybridtrainer.checkpoint import CheckpointStore
from hybridtrainer.errors import CorruptCheckpointError, DataError, ModelError, RunFolderError, SaveError
from hybridtrainer.observe import upkeep
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.records import Phase, Planned
from hybridtrainer.run_folder import RunFolder
from hybridtrainer.trainer import HybridTrainer


def fresh(**settings: Any) -> tuple[HybridTrainer, Any]:
    torch.manual_seed(0)
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER | {"save_interval": 10} | settings)
    return trainer, trainer.loader(text_splits().train, 8)


def quiet_fit(trainer: HybridTrainer, loader: Any, steps: int, **options: Any) -> Any:
    return trainer.fit(loader, steps, progress="off", **options)


def test_a_run_folder_gets_config_environment_log_checkpoints_and_statistics(tmp_path):
    trainer, loader = fresh()
    result = quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run", validation=gpt_setup().probes, eval_interval=25)
    assert result.status == "finished" and result.steps == 60 == trainer.step_count
    folder = tmp_path / "run"
    assert tomllib.loads((folder / "config.toml").read_text())["warmup_steps"] == EAGER["warmup_steps"]
    assert json.loads((folder / "environment.json").read_text())["torch"] == torch.__version__
    assert json.loads((folder / "statistics.json").read_text())["steps"] == 60
    assert len(CheckpointStore(folder / "checkpoints", 3).folders()) == 3  # keep_last
    records = read_log(folder / "log.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    assert sum(max(1, record["predicted"]) for record in steps) == 60
    assert {record["phase"] for record in steps} == set(Phase)
    assert [record["step"] for record in records if record["kind"] == "evaluation"][-1] == 60
    assert len(result.evaluations) == 3
    assert {"phase", "jump", "checkpoint", "end"} <= {record["kind"] for record in records}
    assert records[-1]["worth"] == trainer.statistics().worth_seconds != {}
    assert all(record["reason"] for record in records if record["kind"] in ("phase", "jump"))


def test_a_run_says_why_it_will_not_jump(tmp_path):
    setup = gpt_setup()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, T_max=20)
    trainer = setup.trainer(settings=EAGER | {"predict": "auto"}, scheduler=scheduler)
    quiet_fit(trainer, setup.batches, 20, run_dir=tmp_path / "run")
    (notice,) = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "notice"]
    assert notice["step"] == 0 and "the learning rate will fall" in notice["text"]
    assert trainer.jumps.history.windows == [] and not trainer.jumps.history.is_open


def test_without_a_run_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 15)
    assert list(tmp_path.iterdir()) == []


def test_pause_and_resume_equal_one_uninterrupted_run(tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 70, run_dir=tmp_path / "whole")
    whole = trainer.fingerprint()
    for pause in (17, 44):
        trainer, loader = fresh()
        run = tmp_path / str(pause)
        assert quiet_fit(trainer, loader, 70, run_dir=run, pause_at=pause).status == "paused"
        trainer, loader = fresh()
        assert quiet_fit(trainer, loader, 70, run_dir=run, resume=True).status == "finished"
        assert trainer.fingerprint() == whole
        one, other = (
            [(r["step"], r["loss"]) for r in read_log(folder / "log.jsonl") if r["kind"] == "step"]
            for folder in (tmp_path / "whole", run)
        )
        assert one == other


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 20, run_dir=tmp_path / "run")
    before = trainer.fingerprint()
    trainer, loader = fresh()
    result = quiet_fit(trainer, loader, 20, run_dir=tmp_path / "run", resume=True)
    assert result.status == "finished" and result.last is None
    assert trainer.fingerprint() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_a_step_boundary_and_resume_is_exact(number, tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 60, run_dir=tmp_path / "whole")
    whole = trainer.fingerprint()
    trainer, loader = fresh()

    class Interrupter:
        def after_backward(self, trainer: HybridTrainer) -> None:
            if trainer.step_count == 33:
                os.kill(os.getpid(), number)

    trainer.hooks.add(Interrupter())
    result = quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run")
    assert result.status == "interrupted" and result.signal == number
    assert 33 < result.steps < 60
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # ours are gone again
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run", resume=True)
    assert trainer.fingerprint() == whole


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    trainer, loader = fresh()

    class Impatient:
        def after_backward(self, trainer: HybridTrainer) -> None:
            if trainer.step_count == 25:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    trainer.hooks.add(Impatient())
    with pytest.raises(KeyboardInterrupt):
        quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run")
    assert trainer.step_count == 25
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 3).newest()
    assert newest is not None and 20 <= newest.step <= 25  # the last regular one


def test_an_empty_loader_is_said_so():
    trainer, _ = fresh()
    with pytest.raises(DataError, match="no batch at all"):
        quiet_fit(trainer, [], 10)


def test_data_that_ends_mid_phase_leaves_a_checkpoint_of_the_last_step(tmp_path):
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)
    with pytest.raises(DataError, match="ended after 43 batches"):
        quiet_fit(trainer, iter(setup.batches[:43]), 100, run_dir=tmp_path / "run")
    assert_saved_state_is_current(trainer, tmp_path)


def assert_saved_state_is_current(trainer: HybridTrainer, tmp_path: Any) -> None:
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 3).newest()
    assert newest is not None and newest.step == trainer.step_count
    expected = trainer.fingerprint()
    setup = gpt_setup()
    other = setup.trainer(settings=trainer.config.model_dump())
    other.load(newest)
    assert other.fingerprint() == expected


def test_a_loader_that_can_be_gone_through_again_is():
    setup = gpt_setup()
    trainer = setup.trainer()
    result = quiet_fit(trainer, setup.batches[:7], 30)
    assert result.status == "finished" and result.steps == 30


@pytest.mark.parametrize("at", [5, 20, 43])
def test_a_loader_that_raises_leaves_its_own_error_and_a_valid_checkpoint(at, tmp_path):
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)

    def failing() -> Iterator[Any]:
        yield from setup.batches[:at]
        raise OSError("the disk with the data is gone")

    with pytest.raises(OSError, match="the disk with the data is gone"):
        quiet_fit(trainer, failing(), 100, run_dir=tmp_path / "run")
    assert_saved_state_is_current(trainer, tmp_path)
    error = next(record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "error")
    assert "the disk with the data is gone" in error["error"]


class Suicidal:
    """A data set whose worker process dies at some sample."""

    def __init__(self, inner: Any, at: int) -> None:
        self.inner = inner
        self.at = at

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        if index == self.at and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner[index]


def test_a_killed_worker_leaves_torchs_error_and_a_valid_checkpoint(tmp_path):
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)
    loader = trainer.loader(Suicidal(text_splits().train, at=300), 8, shuffle=False, workers=1)
    # Torch hears of the death, or of a connection that breaks while a batch is handed over.
    with pytest.raises((RuntimeError, ConnectionError), match=r"worker|Connection"):
        quiet_fit(trainer, loader, 100, run_dir=tmp_path / "run")
    assert 20 < trainer.step_count < 60
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 3).newest()
    assert newest is not None and newest.step == trainer.step_count


@pytest.fixture
def on_sigchld() -> Iterator[None]:
    """A handler that raises wherever the program is, as torch's does when a worker has died."""

    def fail(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    before = signal.signal(signal.SIGCHLD, fail)
    yield
    assert signal.getsignal(signal.SIGCHLD) is fail  # put back
    signal.signal(signal.SIGCHLD, before)


def interrupted(function: Any) -> Any:
    """The function, with a child that dies in the middle of it."""

    def wrapped(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGCHLD)
        return function(*args, **options)

    return wrapped


@pytest.mark.usefixtures("on_sigchld")
def test_a_death_that_is_heard_of_during_the_last_save_does_not_lose_the_checkpoint(tmp_path, monkeypatch):
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)

    def failing() -> Iterator[Any]:
        yield from setup.batches[:20]
        raise ConnectionResetError("by the worker that died")

    monkeypatch.setattr(checkpoint, "_publish", interrupted(checkpoint._publish))
    with pytest.raises(ConnectionResetError, match="by the worker that died") as caught:
        quiet_fit(trainer, failing(), 100, run_dir=tmp_path / "run")
    assert caught.value.__notes__ == ["Meanwhile: DataLoader worker (pid 7) is killed by signal: Killed."]
    assert trainer.step_count == 20
    assert_saved_state_is_current(trainer, tmp_path)


@pytest.mark.usefixtures("on_sigchld")
def test_a_death_in_the_middle_of_an_update_is_heard_of_when_the_step_is_complete(tmp_path, monkeypatch):
    setup, twin = gpt_setup(dropout=0.0), gpt_setup(dropout=0.0)
    trainer = setup.trainer()

    class Deadly:
        def after_backward(self, trainer: HybridTrainer) -> None:
            if trainer.step_count == 6:
                monkeypatch.setattr(setup.optimizer, "step", interrupted(setup.optimizer.step))

    trainer.hooks.add(Deadly())
    with pytest.raises(RuntimeError, match="worker"):
        quiet_fit(trainer, setup.batches, 100, run_dir=tmp_path / "run")
    quiet_fit(twin_trainer := twin.trainer(), twin.batches, 7)
    assert trainer.fingerprint()["parameters"] == twin_trainer.fingerprint()["parameters"]
    assert trainer.step_count == 7
    assert_saved_state_is_current(trainer, tmp_path)


@pytest.mark.usefixtures("on_sigchld")
def test_a_death_after_the_last_batch_does_not_cost_the_last_checkpoint(tmp_path, monkeypatch):
    trainer, loader = fresh()
    monkeypatch.setattr(checkpoint, "_publish", interrupted(checkpoint._publish))
    assert quiet_fit(trainer, loader, 5, run_dir=tmp_path / "run").status == "finished"
    assert_saved_state_is_current(trainer, tmp_path)


def test_an_error_after_which_nothing_can_be_saved_is_still_the_first_error(tmp_path, monkeypatch):
    trainer, loader = fresh()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("mine")

    def no_space(*_: Any, **__: Any) -> None:
        raise SaveError("No space left.", "")

    quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run", pause_at=15)
    trainer.hooks.add(type("Fail", (), {"before_step": staticmethod(fail)})(), policy="raise")
    monkeypatch.setattr(CheckpointStore, "save", no_space)
    monkeypatch.setattr(trainer, "step", fail)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        quiet_fit(trainer, loader, 60, run_dir=tmp_path / "other")
    assert any("No space left" in note for note in caught.value.__notes__)


def test_a_save_that_fails_stops_the_run_with_a_typed_error(tmp_path, monkeypatch):
    trainer, loader = fresh()

    def no_space(*_: Any, **__: Any) -> None:
        raise SaveError("No space left.", "Free some.")

    monkeypatch.setattr(CheckpointStore, "save", no_space)
    with pytest.raises(SaveError) as caught:
        quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run")
    assert not hasattr(caught.value, "__notes__")  # the last attempt to save fails alike: once is enough


def test_a_progress_display_that_there_is_not_is_refused_before_anything_is_written(tmp_path):
    trainer, loader = fresh()
    with pytest.raises(ModelError, match="no progress display 'nonsense'"):
        trainer.fit(loader, 10, run_dir=tmp_path / "run", progress="nonsense")
    assert trainer.step_count == 0 and not (tmp_path / "run").exists()


def test_a_folder_in_use_is_left_alone(tmp_path):
    trainer, loader = fresh()
    with RunFolder(tmp_path / "run", keep_last=3), pytest.raises(RunFolderError):
        quiet_fit(trainer, loader, 10, run_dir=tmp_path / "run")
    assert trainer.step_count == 0


def test_zero_steps_are_refused():
    trainer, loader = fresh()
    with pytest.raises(ModelError, match="at least 1"):
        quiet_fit(trainer, loader, 0)


def test_accumulation_gathers_micro_batches_across_epochs():
    setup = gpt_setup()
    trainer = setup.trainer(accumulate=3)
    result = quiet_fit(trainer, setup.batches[:4], 5)
    assert result.steps == 5


def test_metrics_are_evaluated_beside_the_loss():
    from tests.support import cnn_setup

    from hybridtrainer.models.cnn import image_accuracy

    setup = cnn_setup()
    trainer = setup.trainer()
    result = quiet_fit(
        trainer, setup.batches, 150, validation=setup.probes, metrics={"accuracy": image_accuracy}, eval_interval=50
    )
    assert [evaluation["step"] for evaluation in result.evaluations] == [50, 100, 150]
    assert result.evaluations[-1]["accuracy"] > 0.5
    assert len(digit_splits().validation) > 100


def test_checkpoints_are_announced_to_hooks(tmp_path):
    trainer, loader = fresh()
    seen: list[str] = []

    class Seer:
        def on_checkpoint(self, trainer: HybridTrainer, folder: Any) -> None:
            assert (folder / "manifest.json").is_file()
            seen.append(folder.name)

    trainer.hooks.add(Seer())
    quiet_fit(trainer, loader, 30, run_dir=tmp_path / "run")
    assert [name.split("-")[0] for name in seen] == ["000001", "000002", "000003"]


def test_resuming_where_every_checkpoint_is_damaged_is_refused(tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 20, run_dir=tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").glob("*/state.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    trainer, loader = fresh()
    with pytest.raises(CorruptCheckpointError, match="None of the checkpoints"):
        quiet_fit(trainer, loader, 40, run_dir=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log


def test_a_run_that_died_before_its_first_checkpoint_starts_its_log_anew(tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 7, run_dir=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 9, run_dir=tmp_path / "run", resume=True)
    steps = [record["step"] for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "step"]
    assert steps == list(range(1, 10))


@pytest.mark.parametrize("options", [{"eval_interval": 0}, {"resume": True}])
def test_options_that_make_no_sense_are_refused(options):
    trainer, loader = fresh()
    with pytest.raises(ModelError):
        quiet_fit(trainer, loader, 9, **options)


def test_an_error_before_the_first_step_leaves_no_listener(tmp_path):
    setup = gpt_setup()
    table = [1.0] * 10
    scheduler = torch.optim.lr_scheduler.LambdaLR(setup.optimizer, lambda step: table[step])
    trainer = setup.trainer(settings=EAGER | {"predict": "auto"}, scheduler=scheduler)
    with pytest.raises(IndexError):
        quiet_fit(trainer, setup.batches, 30, run_dir=tmp_path / "run")
    assert trainer.listeners == []


class SlowParts:
    """A clock that only moves when a batch is fetched (1 s), a step is made (10 s) or something is measured (100 s)."""

    def __init__(self, trainer: HybridTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        step, evaluate, save = trainer.step, trainer.evaluate, trainer.save_in
        monkeypatch.setattr("hybridtrainer.fit.time.perf_counter", lambda: self.now)
        monkeypatch.setattr(trainer, "step", lambda batch: self._taking(10.0, step, batch))
        monkeypatch.setattr(trainer, "evaluate", lambda *a: self._taking(100.0, evaluate, *a))
        monkeypatch.setattr(trainer, "save_in", lambda *a, **k: self._taking(1000.0, save, *a, **k))

    def _taking(self, seconds: float, function: Any, *arguments: Any, **named: Any) -> Any:
        self.now += seconds
        return function(*arguments, **named)

    def fetching(self, loader: Any) -> Iterator[Any]:
        for batch in loader:
            self.now += 1.0
            yield batch


def test_training_time_is_batches_and_steps_and_goes_on_after_a_resume(tmp_path, monkeypatch):
    for steps in (7, 12):
        trainer, loader = fresh(predict="off", save_interval=5)
        clock = SlowParts(trainer, monkeypatch)
        result = trainer.fit(
            clock.fetching(loader), 12, run_dir=tmp_path / "run", resume=steps == 12, pause_at=steps,
            validation=gpt_setup().probes, eval_interval=3, progress="off",
        )  # fmt: skip
        assert result.training_seconds == 11.0 * steps
    evaluations = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "evaluation"]
    assert [record["training_seconds"] for record in evaluations] == [33.0, 66.0, 99.0, 132.0]
    assert [record["seconds"] for record in evaluations] == [100.0] * 4
    assert [record["backward_samples"] for record in evaluations] == [24, 48, 72, 96]
    ends = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "end"]
    assert ends[-1]["training_seconds"] == 132.0


def test_the_choice_of_what_to_read_out_counts_once_in_the_time_of_each_evaluation(tmp_path):
    trainer, loader = fresh(readout="last")
    trainer.readout.choosing_seconds = 1000.0
    quiet_fit(trainer, loader, 9, run_dir=tmp_path / "run", validation=gpt_setup().probes, eval_interval=3)
    evaluations = of_kind(tmp_path / "run", "evaluation")
    assert [record["training_seconds"] // 1000 for record in evaluations] == [1, 1, 1]
    assert all(record["seconds"] < 0 for record in evaluations)  # it was in none of them
    assert of_kind(tmp_path / "run", "end")[-1]["training_seconds"] < 1000


def of_kind(run: Any, *kinds: str) -> list[dict[str, Any]]:
    return [record for record in read_log(run / "log.jsonl") if record["kind"] in kinds]


def test_forecasts_are_the_same_after_a_resume(tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 90, run_dir=tmp_path / "whole")
    for pause in (25, 52):
        trainer, loader = fresh()
        quiet_fit(trainer, loader, 90, run_dir=tmp_path / str(pause), pause_at=pause)
        trainer, loader = fresh()
        quiet_fit(trainer, loader, 90, run_dir=tmp_path / str(pause), resume=True)
        assert of_kind(tmp_path / str(pause), "forecast") == of_kind(tmp_path / "whole", "forecast")
    told = of_kind(tmp_path / "whole", "forecast")
    assert len(told) >= 8 and {record["target_step"] for record in told[1::2]} == {90}


def test_memory_is_logged_at_phase_changes_and_every_tenth_step(tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run")
    records = of_kind(tmp_path / "run", "step", "phase", "memory")
    for index, record in enumerate(records):
        if record["kind"] == "phase":
            following = [later["kind"] for later in records[index:]]
            assert following.index("memory") == following.index("step") + 1
    found = [record for record in records if record["kind"] == "memory"]
    assert {record["phase"] for record in found} == set(Phase)
    assert all(record["host_bytes"] > 2**20 for record in found)


class Follower:
    """A tracker that fails at some record, or never."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.seen: list[str] = []
        self.fail_at = fail_at
        self.closed = False

    def write(self, kind: str, fields: Any) -> None:
        torch.rand(1)
        if len(self.seen) == self.fail_at:
            raise OSError("gone")
        self.seen.append(kind)

    def close(self) -> None:
        self.closed = True


def test_trackers_follow_the_log_and_a_run_with_one_that_fails_is_bit_equal(tmp_path):
    trainer, loader = fresh()
    quiet_fit(trainer, loader, 60, run_dir=tmp_path / "without")
    expected = trainer.fingerprint()
    good, bad = Follower(), Follower(fail_at=20)
    trainer, loader = fresh()
    with pytest.warns(UserWarning, match="Follower is dropped, the run goes on") as caught:
        quiet_fit(trainer, loader, 60, run_dir=tmp_path / "with", trackers=[good, bad])
    assert len([warning for warning in caught if "dropped" in str(warning.message)]) == 1
    assert trainer.fingerprint() == expected
    assert good.seen == [record["kind"] for record in read_log(tmp_path / "with" / "log.jsonl")]
    assert good.closed and not bad.closed and len(bad.seen) == 20


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_cannot_be_had_is_refused_before_the_folder_is_made(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    trainer, loader = fresh()
    with pytest.raises(ModelError, match=name):
        quiet_fit(trainer, loader, 60, run_dir=tmp_path / "run", trackers=[name])
    assert trainer.step_count == 0 and list(tmp_path.iterdir()) == []


def test_trackers_without_a_run_folder_are_refused():
    trainer, loader = fresh()
    with pytest.raises(ModelError, match="there is none without a run folder"):
        quiet_fit(trainer, loader, 60, trackers=[Follower()])


def test_a_planned_run_is_held_against_its_plan_and_so_is_its_resumed_part(tmp_path, monkeypatch):
    allocator, run = FakeAllocator(1, 5), tmp_path / "run"
    monkeypatch.setattr(upkeep, "vram_of", lambda *_: card(allocator))
    planned = Planned("planned: in a test", 4 * GIB, GIB, seconds=1000.0)
    trainer, loader = fresh(predict="off")
    first = quiet_fit(trainer, loader, 30, run_dir=run, planned=planned, pause_at=14).against_plan
    assert first is not None and (first.step, first.from_step, first.timed_steps) == (14, 0, 11)
    assert (first.figures[0].planned, first.figures[0].actual) == (4 * GIB, 5 * GIB)
    records = read_log(run / "log.jsonl")
    assert [record["kind"] for record in records][-2:] == ["plan", "end"]
    assert {"v": 1, "kind": "notice", "step": 0, "text": "planned: in a test"} in records[:2]
    allocator.hold(1, 2)
    trainer, loader = fresh(predict="off")
    later = quiet_fit(trainer, loader, 30, run_dir=run, resume=True).against_plan
    assert later is not None and (later.step, later.from_step, later.timed_steps) == (30, 14, 13)
    assert (later.figures[0].planned, later.figures[0].actual) == (4 * GIB, 2 * GIB)
    (record,) = [record for record in read_log(run / "log.jsonl") if record["kind"] == "plan"]
    assert (record["from_step"], record["figures"][2]["planned"]) == (14, 1000.0)


def test_a_run_without_a_plan_says_nothing_of_one(tmp_path):
    trainer, loader = fresh()
    assert quiet_fit(trainer, loader, 5, run_dir=tmp_path / "run").against_plan is None
    assert not (tmp_path / "run" / "plan.json").exists()
    assert "plan" not in {record["kind"] for record in read_log(tmp_path / "run" / "log.jsonl")}


def test_steps_of_a_model_that_has_yet_to_grow_are_not_what_was_planned(tmp_path):
    trainer, loader = fresh(predict=["depth"], depth={"share": 0.5, "until": 0.5})
    found = quiet_fit(trainer, loader, 24, planned=Planned("", None, GIB)).against_plan
    assert not trainer.depth.is_short
    assert found is not None and found.timed_steps == 24 - 11 - 3  # the twelfth ends with the whole model
