"""A run's memory looked after: profile in its folder, pressure where there is a GPU."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from tests.memory.cards import FakeAllocator, card
from tests.support import EAGER, gpt_setup
from torch import nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.vram import Vram
from hybridtrainer.observe import upkeep as module
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.observe.snapshots import read_snapshots
from hybridtrainer.observe.upkeep import Upkeep


def upkeep(**memory: object) -> Upkeep:
    model = nn.Linear(3, 1)
    return Upkeep(model, torch.optim.SGD(model.parameters(), lr=0.1), MemoryConfig.model_validate(memory))


def never() -> bool:
    raise AssertionError("nothing is to be saved")


def test_without_a_gpu_nothing_presses_and_a_setting_that_does_nothing_is_said():
    said: list[str] = []
    assert upkeep().start(said.append, never, 0) is None
    assert said == []
    assert upkeep(cleanup_every=10).start(said.append, never, 0) is None
    assert said == ["memory.cleanup_every does nothing here: there is no GPU"]
    said.clear()
    upkeep(offload_activations=True, predict_states="leave", predict_int8=True).start(said.append, never, 0)
    assert [words.split()[0] for words in said] == ["memory.offload_activations", "memory.predict_states"]
    said.clear()
    upkeep(mode="split8", offload_activations=True).start(said.append, never, 0)
    assert said == []


def test_without_being_asked_no_profile_is_kept(tmp_path):
    kept = upkeep()
    with ExitStack() as stack:
        kept.keep_in(tmp_path, None, stack)
    assert list(tmp_path.iterdir()) == [] and kept.sizes() == {}


def test_a_run_with_a_profile_has_a_line_for_each_step_and_resumes_it(tmp_path):
    settings = EAGER | {"memory": {"profile": True}}
    run = tmp_path / "run"
    for options in ({"pause_at": 23}, {"resume": True}):
        setup = gpt_setup()
        trainer = setup.trainer(settings=settings)
        trainer.fit(setup.batches, 40, run_dir=run, progress="off", **options)
    steps = [(r["step"], r["phase"]) for r in read_log(run / "log.jsonl") if r["kind"] == "step"]
    taken = read_snapshots(run / "profile.csv")
    assert [(each.step, each.phase) for each in taken] == steps
    assert {each.phase for each in taken} >= {"warmup", "full"}
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert all(each.weights_bytes is not None and each.weights_bytes >= weights for each in taken)
    assert not trainer.optimizer._optimizer_step_pre_hooks


def test_what_was_profiled_after_the_checkpoint_is_cut_off_when_the_run_is_resumed(tmp_path):
    settings = EAGER | {"memory": {"profile": True}, "save_interval": 10}
    setup = gpt_setup()
    trainer = setup.trainer(settings=settings)

    class Killed(BaseException):
        pass

    def kill(trainer: object, batch: object) -> None:
        if trainer.step_count >= 14:  # type: ignore[attr-defined]
            raise Killed

    trainer.hooks.add(type("Kill", (), {"before_step": staticmethod(kill)})())
    with pytest.raises(Killed):  # no exception of ours: no checkpoint is written
        trainer.fit(setup.batches, 20, run_dir=tmp_path / "run", progress="off")
    assert len(read_snapshots(tmp_path / "run" / "profile.csv")) == 14
    setup = gpt_setup()
    setup.trainer(settings=settings).fit(setup.batches, 20, run_dir=tmp_path / "run", progress="off", resume=True)
    log = [r["step"] for r in read_log(tmp_path / "run" / "log.jsonl") if r["kind"] == "step"]
    assert [each.step for each in read_snapshots(tmp_path / "run" / "profile.csv")] == log


def test_a_profile_needs_a_run_folder(tmp_path):
    setup = gpt_setup()
    with pytest.raises(ModelError, match="run folder"):
        setup.trainer(settings={"memory": {"profile": True}}).fit(setup.batches, 3, progress="off")


def filling(allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is on a card that a test fills."""

    def vram(*_: object) -> Vram:
        return card(allocator)

    monkeypatch.setattr(module, "vram_of", vram)


def test_an_emergency_writes_one_checkpoint_before_the_next_step(tmp_path, monkeypatch):
    allocator = FakeAllocator(1, 1)
    filling(allocator, monkeypatch)
    setup = gpt_setup()
    trainer = setup.trainer(settings={"predict": "off", "save_interval": 1000})
    full_from = 4

    def fill(trainer: object, batch: object) -> None:
        if trainer.step_count == full_from:  # type: ignore[attr-defined]
            allocator.hold(14, 14)

    trainer.hooks.add(type("Fill", (), {"before_step": staticmethod(fill)})())
    trainer.fit(setup.batches, 10, run_dir=tmp_path / "run", progress="off")
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [r["step"] for r in records if r["kind"] == "checkpoint"] == [5, 10]
    (notice,) = [r for r in records if r["kind"] == "notice" and "GPU" in r["text"]]
    assert notice["step"] == 5 and "88% of the GPU" in notice["text"] and "a checkpoint is written" in notice["text"]
    (use,) = [r for r in records if r["kind"] == "memory"]
    assert use["device_reserved_bytes"] == 14 << 30


def test_a_change_of_phase_is_logged_with_memory_and_weight_copies(tmp_path):
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)
    trainer.fit(setup.batches, 60, run_dir=tmp_path / "run", progress="off")
    records = read_log(tmp_path / "run" / "log.jsonl")
    entered = [r["entered"] for r in records if r["kind"] == "memory" and r["entered"]]
    assert {"full", "predict"} <= set(entered)
    copies = [r["weight_copies"] for r in records if r["kind"] == "memory"]
    assert copies == sorted(copies) and copies[-1] > copies[0] > 0
    tried = sum(r["kind"] == "jump" and r["verdict"] in ("accepted", "refused") for r in records)
    assert trainer.weight_copies > tried > 0
