"""Trackers: they see what the log has, and can do a run no harm."""

from __future__ import annotations

import importlib.util
import random
import socket
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrainer.errors import ModelError
from hybridtrainer.observe import trackers
from hybridtrainer.observe.runlog import RunLog
from hybridtrainer.observe.trackers import Trackers, TrackerWarning, find_trackers, scalars
from hybridtrainer.records import Phase, StepResult

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason='needs TensorBoard: pip install ".[track]"'
)
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason='needs wandb: pip install ".[track]"'
)


class Recorder:
    """A tracker that remembers, and fails when told to."""

    def __init__(self, fail_on: str = "") -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.closed = 0
        self.fail_on = fail_on

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == self.fail_on:
            raise OSError("the server is gone")
        self.seen.append((kind, dict(fields)))

    def close(self) -> None:
        self.closed += 1
        if self.fail_on == "close":
            raise OSError("the server is gone")


def together(*given: Any, folder: Path = Path()) -> Trackers:
    return Trackers(find_trackers(given), folder)


def step(number: int, loss: float = 2.5) -> StepResult:
    return StepResult(number, Phase.FULL, loss, 0, 0.9, 0.1, "", grad_norm=1.5)


def test_a_tracker_is_shown_every_record_as_it_is_in_the_log(tmp_path):
    tracker = Recorder()
    with RunLog(tmp_path / "log.jsonl") as log:
        log.followers.append(together(tracker))
        log.record(step(1, float("nan")))
        log.write("end", step=1, status="finished")
    (kind, fields), end = tracker.seen
    assert (kind, fields["step"], fields["loss"], fields["phase"]) == ("step", 1, "nan", "full")
    assert end == ("end", {"step": 1, "status": "finished"})


def test_a_tracker_that_fails_is_dropped_with_one_warning_and_the_others_go_on():
    bad, good = Recorder(fail_on="step"), Recorder()
    all_of_them = together(bad, good)
    all_of_them.write("phase", {"step": 1})
    with pytest.warns(TrackerWarning, match="Recorder is dropped, the run goes on: OSError: the server is gone"):
        all_of_them.write("step", {"step": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_of_them.write("step", {"step": 2})
        all_of_them.close()
        all_of_them.close()
    assert [kind for kind, _ in good.seen] == ["phase", "step", "step"]
    assert (bad.closed, good.closed) == (0, 1)


def test_a_tracker_that_fails_to_start_or_to_end_is_a_warning_too(tmp_path):
    def fail(folder: Path, step: int | None) -> Recorder:
        raise RuntimeError("no login")

    other = Recorder()
    with pytest.warns(TrackerWarning, match="mine is dropped, the run goes on: RuntimeError: no login"):
        all_of_them = Trackers([("mine", fail), ("other", lambda folder, step: other)], tmp_path)
    all_of_them.write("step", {"step": 1})
    assert len(other.seen) == 1
    with pytest.warns(TrackerWarning, match="server is gone"):
        together(Recorder(fail_on="close")).close()


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Recorder):
        def write(self, kind: str, fields: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together(Interrupted()).write("step", {"step": 1})


def test_random_numbers_that_a_tracker_draws_are_put_back():
    class Gambler(Recorder):
        def write(self, kind: str, fields: Mapping[str, Any]) -> None:
            random.random()
            torch.rand(3)
            super().write(kind, fields)

    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(2).tolist(), random.random()
    for fail_on in ("", "step"):
        torch.manual_seed(0)
        random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrackerWarning)
            together(Gambler(fail_on)).write("step", {"step": 1})
        assert (torch.rand(2).tolist(), random.random()) == expected


def test_an_unknown_name_and_an_object_without_the_methods_are_refused():
    with pytest.raises(ModelError, match=r"no tracker 'mlflow'.*tensorboard, wandb"):
        find_trackers(["mlflow"])
    with pytest.raises(ModelError, match="int cannot track"):
        find_trackers([3])  # type: ignore[list-item]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_package_that_is_missing_is_named_with_how_to_get_it(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelError, match=r'pip install "\.\[track\]"') as caught:
        find_trackers([name])
    assert caught.value.exit_code == 2 and name in caught.value.what


def test_the_numbers_of_each_kind_of_record():
    told = {"step": 7, "loss": 2.5, "grad_norm": None, "confidence": 0.9, "seconds": 0.1, "phase": "correct"}
    assert scalars("step", told | {"predicted": 0}) == {
        "train/loss": 2.5, "train/confidence": 0.9, "train/predicted": 0.0, "train/step_seconds": 0.1,
        "train/phase": 3.0,
    }  # fmt: skip
    assert "train/loss" not in scalars("step", told | {"loss": "nan"})
    assert scalars("evaluation", {"step": 7, "loss": 2.0, "accuracy": 0.5}) == {
        "evaluation/loss": 2.0, "evaluation/accuracy": 0.5,
    }  # fmt: skip
    jump = {"step": 7, "worth_steps": 4, "confidence": 0.9, "norm_ratio": None, "verdict": "accepted"}
    assert scalars("jump", jump) == {"jump/worth_steps": 4.0, "jump/confidence": 0.9}
    assert scalars("jump", jump | {"verdict": "kept"})["jump/kept"] == 1.0
    memory = {"step": 7, "phase": "full", "host_bytes": 12, "device_bytes": None, "device_peak_bytes": None}
    assert scalars("memory", memory) == {"memory/host_bytes": 12.0}
    assert scalars("end", {"step": 7, "status": "finished"}) == {}


def fill(all_of_them: Trackers, numbers: range) -> None:
    for number in numbers:
        all_of_them.write("step", {"step": number, "loss": 100.0 + number, "phase": "full", "predicted": 0})
    all_of_them.write("notice", {"step": 0, "text": "plain training"})
    all_of_them.close()


@needs_tensorboard
def test_tensorboard_has_the_curve_of_a_run_that_was_interrupted_and_resumed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    makers = find_trackers(["tensorboard"])
    fill(Trackers(makers, tmp_path), range(1, 11))
    fill(Trackers(makers, tmp_path, resumed_at=5), range(6, 9))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (n, 100.0 + n) for n in range(1, 9)
    ]
    assert "notice/text_summary" in events.Tags()["tensors"]


@needs_wandb
def test_wandb_stays_offline_quiet_and_in_the_run_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked something"))
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1"), address
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    makers = find_trackers(["wandb"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrackerWarning)
        fill(Trackers(makers, run), range(1, 11))
        fill(Trackers(makers, run, resumed_at=5), range(6, 12))
    parts = sorted((run / "wandb").glob("offline-run-*-*"))
    assert len({part.name.rsplit("-", 1)[1] for part in parts}) == 1  # one run, in parts
    assert all(list(part.glob("run-*.wandb")) for part in parts)
    assert capfd.readouterr() == ("", "")


@needs_wandb
def test_a_run_of_wandb_that_the_program_has_open_is_left_open(tmp_path):
    import wandb

    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    try:
        fill(Trackers(find_trackers(["wandb"]), tmp_path), range(1, 3))
        own.log({"mine": 1})
        assert wandb.run is own
    finally:
        own.finish()


def test_a_wandb_mode_that_the_user_has_set_is_kept(tmp_path, monkeypatch):
    asked: dict[str, Any] = {}

    class Fake:
        Settings = dict

        def init(self, **options: Any) -> Any:
            asked.update(options)
            return self

        def define_metric(self, *_: Any, **__: Any) -> None:
            pass

    monkeypatch.delenv("WANDB_MODE", raising=False)
    trackers.WeightsAndBiases(Fake(), tmp_path, None)
    assert (asked["mode"], asked["name"], asked["resume"]) == ("offline", tmp_path.name, None)
    first = asked["id"]
    monkeypatch.setenv("WANDB_MODE", "online")
    trackers.WeightsAndBiases(Fake(), tmp_path, 7)
    assert (asked["mode"], asked["resume"], asked["id"]) == ("online", "allow", first)
