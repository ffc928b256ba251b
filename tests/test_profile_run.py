"""A few steps of a configuration, profiled: as long as asked, nothing kept, planned where a plan is possible."""

from __future__ import annotations

from typing import Any

import pytest
from tests.memory.cards import GIB, FakeAllocator, card

from hybridtrainer import profile_run as module
from hybridtrainer.config_io import parse_config
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.observe import upkeep
from hybridtrainer.observe.against_plan import GPU, HOST, SECONDS
from hybridtrainer.observe.progress import Silence
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.observe.snapshots import read_snapshots
from hybridtrainer.planning.cards import BUILT_IN
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.machine import Gpu
from hybridtrainer.profile_run import plan_of, profile_run
from hybridtrainer.tasks import build_task

TRAIN = {"batch_size": 2, "eval_batches": 1, "device": "cpu"}


@pytest.fixture
def small(tmp_path_factory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("what a run takes, step by step. " * 2000)
    return {
        "model": {"name": "nano", "context": 32},
        "data": {"source": "text", "path": str(path), "probe_batches": 1},
        "train": TRAIN,
    }


def test_so_many_steps_are_made_and_only_the_profile_is_kept(small, tmp_path):
    config = parse_config(small, "a test")
    found = profile_run(config, 6, tmp_path, 1 << 20, Silence())
    assert [taken.step for taken in found.snapshots] == [1, 2, 3, 4, 5, 6]
    assert (found.report.steps, found.signal) == (6, None)
    assert found.plan == "plans are for a GPU, and this run is on the CPU"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "log.jsonl", "profile.csv"]
    assert read_snapshots(tmp_path / "profile.csv") == found.snapshots
    assert read_log(tmp_path / "log.jsonl")[-1]["kind"] == "end"


def test_a_run_that_is_over_sooner_ends_there(small, tmp_path):
    config = parse_config(small | {"train": TRAIN | {"steps": 3}, "schedule": {"warmup_steps": 1}}, "a test")
    assert profile_run(config, 20, tmp_path, 1 << 20, Silence()).report.steps == 3


@pytest.mark.parametrize("memory", [{}, {"mode": "split8", "split": 2}, {"checkpoint_every": 2, "precision": "bf16"}])
def test_a_decoder_on_a_gpu_has_a_plan(small, memory):
    task = build_task(parse_config(small | {"memory": memory}, "a test"))
    plan = plan_of(task, on_gpu=True)
    assert isinstance(plan, Estimate)
    weights = sum(parameter.nbytes for parameter in task.trainer.model.parameters())
    streams = bool(memory.get("mode"))
    assert (0 < plan.gpu["weights"] < weights * 4) if streams else plan.gpu["weights"] == weights


@pytest.mark.parametrize("given", [{}, {"readout": "averaged"}, {"predict": "off"}])
def test_the_plan_has_the_averages_that_the_run_keeps(small, given):
    task = build_task(parse_config(small | given, "a test"))
    task.trainer.readout.observe()
    state: Any = task.trainer.readout.state() or {}
    averages = [tensor for each in state.get("averages", [state]) for tensor in each.get("average", [])]
    plan = plan_of(task, on_gpu=True)
    assert isinstance(plan, Estimate)
    assert plan.gpu.get("averages", 0) == sum(tensor.nbytes for tensor in averages)
    streamed = build_task(parse_config(small | given | {"memory": {"mode": "split8"}}, "a test"))
    plan = plan_of(streamed, on_gpu=True)
    assert isinstance(plan, Estimate)
    assert "averages" not in plan.gpu and ("averages" in plan.host) == ("readout" in given)


def test_the_plan_of_a_streamed_run_keeps_on_the_gpu_what_the_run_does(small):
    task = build_task(
        parse_config(small | {"memory": {"mode": "split8", "vram": "1GB", "max_gpu_blocks": 2}}, "a test")
    )
    passing = plan_of(task, on_gpu=True)
    optimizer = task.trainer.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    optimizer.engine.is_link_bound = True
    kept = plan_of(task, on_gpu=True)
    assert isinstance(kept, Estimate)
    assert isinstance(passing, Estimate)
    assert kept.gpu["weights"] > passing.gpu["weights"]


def test_the_plan_of_a_streamed_run_is_in_its_arithmetic(small):
    found = []
    for precision in ("fp32", "bf16"):
        memory = {"mode": "split8", "precision": precision}
        plan = plan_of(build_task(parse_config(small | {"memory": memory}, "a test")), on_gpu=True)
        assert isinstance(plan, Estimate)
        found.append(plan.gpu["activations"])
    assert found[0] < found[1]


def test_where_no_plan_is_possible_the_reason_is_told(small):
    other = build_task(parse_config(small | {"optimizer": {"name": "sgd", "momentum": 0.9}}, "a test"))
    assert plan_of(other, on_gpu=True) == (
        "plans of a resident model count the states of AdamW, and the optimizer is sgd"
    )
    pytest.importorskip("sklearn", reason="the digits need scikit-learn")
    images = build_task(parse_config({"model": {"name": "cnn-small"}, "data": {"source": "digits"}}, "a test"))
    assert plan_of(images, on_gpu=True) == "plans are for decoders, and cnn-small is none"


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    """A card with known speeds that a test fills."""
    speeds, allocator = BUILT_IN["rtx-4070"], FakeAllocator(1, 2)
    monkeypatch.setattr(upkeep, "vram_of", lambda *_: card(allocator))
    monkeypatch.setattr(module, "gpu_at_hand", lambda index: Gpu(speeds.name, 16 * GIB))
    monkeypatch.setattr(module, "speeds_at_hand", lambda name: speeds if name == speeds.name else None)
    return allocator


def test_on_a_gpu_memory_and_seconds_stand_beside_the_plan_and_in_the_log(small, tmp_path, fake_gpu):
    found = profile_run(parse_config(small | {"memory": {"precision": "bf16"}}, "a test"), 12, tmp_path, 1, Silence())
    assert isinstance(found.plan, Estimate) and found.against_plan is not None
    figures = {figure.name: figure for figure in found.against_plan.figures}
    assert (figures[GPU].planned, figures[GPU].actual) == (found.plan.gpu_bytes, 2 * GIB)
    assert figures[HOST].planned == found.plan.host_bytes and figures[HOST].actual
    assert figures[SECONDS].planned == found.plan.seconds is not None
    assert 0 < (figures[SECONDS].actual or 0) < 5 and found.against_plan.timed_steps == 12 - 3
    kinds = [record["kind"] for record in read_log(tmp_path / "log.jsonl")]
    assert kinds[-2:] == ["plan", "end"]


def test_without_speeds_seconds_are_unavailable_and_damaged_ones_are_an_error_before_a_step(
    small, tmp_path, fake_gpu, monkeypatch
):
    config = parse_config(small | {"memory": {"precision": "bf16"}}, "a test")
    monkeypatch.setattr(module, "speeds_at_hand", lambda name: None)
    found = profile_run(config, 2, tmp_path, 1, Silence()).against_plan
    assert found is not None and "doctor --calibrate" in found.figures[2].missing

    def damaged(name: str) -> None:
        raise ModelError("damaged", "Measure again.")

    monkeypatch.setattr(module, "speeds_at_hand", damaged)
    (tmp_path / "again").mkdir()
    with pytest.raises(ModelError, match="damaged"):
        profile_run(config, 2, tmp_path / "again", 1, Silence())
    assert list((tmp_path / "again").iterdir()) == []


def test_a_budget_alone_is_held_against_what_was_taken_on_a_cpu_too(small, tmp_path):
    found = profile_run(parse_config(small | {"memory": {"vram": "2GB"}}, "a test"), 2, tmp_path, 1, Silence())
    assert found.against_plan is not None
    assert [figure.difference is None for figure in found.against_plan.figures] == [True, False, True]
