"""A run in somebody else's loop keeps the log of one of ours."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from tests.integrations.making import ALL_PHASES, log_of, statistics, timeless
from tests.support import gpt_setup

from hybridtrainer.checkpoint import read_checkpoint
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import CorruptCheckpointError, ModelError
from hybridtrainer.integrations.hosted import (
    Beside,
    HostedRun,
    StateBeside,
    free_folder,
    kept_by_host,
    load_beside,
    require_hostable,
    save_beside,
)
from hybridtrainer.trainer import HybridTrainer


def test_a_hosts_loop_leaves_the_records_of_fit(tmp_path):
    setup = gpt_setup()
    with ExitStack() as stack:
        run = HostedRun(setup.trainer(settings=ALL_PHASES), 40)
        run.write_into(tmp_path / "hosted", None, stack)
        with run:
            for batch in setup.batches:
                if run.left:
                    run.step([batch])
            run.evaluated({"loss": 2.5})
            run.saved("checkpoint-40")
        run.finish()
    native = gpt_setup()
    native.trainer(settings=ALL_PHASES).fit(native.batches, 40, run_dir=tmp_path / "native", progress="off")
    hosted, ours = log_of(tmp_path / "hosted"), log_of(tmp_path / "native")
    kinds = ("step", "jump", "phase")
    assert timeless(hosted, *kinds) == timeless(ours, *kinds)
    assert {record["kind"] for record in hosted} == {record["kind"] for record in ours} | {"evaluation"}
    assert hosted[-1].keys() == ours[-1].keys()
    assert hosted[-1]["status"] == ours[-1]["status"]
    assert (tmp_path / "hosted" / "config.toml").read_text() == (tmp_path / "native" / "config.toml").read_text()
    assert statistics(tmp_path / "hosted").keys() == statistics(tmp_path / "native").keys()


def test_a_step_may_have_fewer_micro_batches_than_usual():
    setup = gpt_setup()
    run = HostedRun(setup.trainer(accumulate=3), 10)
    run.step(setup.batches[:3])
    run.step(setup.batches[3:5])
    run.step(setup.batches[5:6])
    assert run.trainer.step_count == 3
    assert run.trainer.accumulate == 3


def test_what_the_host_keeps_is_not_kept_twice_and_the_rest_comes_back(tmp_path):
    setup = gpt_setup()
    trainer = setup.trainer(settings=ALL_PHASES)
    for batch in setup.batches[:20]:
        trainer.step(batch)
    folder = trainer.save_in(StateBeside(tmp_path / "ours", ("parameters", "optimizer")))
    found = read_checkpoint(folder)
    assert "parameters" not in found.state()
    before = trainer.fingerprint()
    parameters = {name: value.clone() for name, value in setup.model.state_dict().items()}
    for batch in setup.batches[20:25]:
        trainer.step(batch)
    other = gpt_setup(seed=0)
    again = other.trainer(settings=ALL_PHASES)
    for batch in other.batches[:20]:  # the host's part: the same weights and optimizer
        again.step(batch)
    other.model.load_state_dict(parameters)
    again.load(Beside(found.folder, found.manifest, found.document, live=again.state()))
    assert again.fingerprint() == before


@pytest.mark.parametrize("part", ["parameters", "optimizer", "types of the optimizer", "all of the optimizer"])
def test_where_the_host_has_loaded_something_else_nothing_is_loaded(tmp_path, part):
    setup = gpt_setup()
    trainer = setup.trainer(settings=ALL_PHASES)
    trainer.step(setup.batches[0])
    found = read_checkpoint(trainer.save_in(StateBeside(tmp_path / "ours", ("parameters", "optimizer"))))
    if part == "parameters":
        next(setup.model.parameters()).view(torch.int32).view(-1)[7] ^= 1
    elif part == "optimizer":
        next(iter(trainer.optimizer.state.values()))["exp_avg"].view(torch.int32).view(-1)[7] ^= 1
    elif part == "types of the optimizer":
        for values in trainer.optimizer.state.values():
            values["exp_avg"] = values["exp_avg"].bfloat16()
    else:
        trainer.optimizer.state.clear()
    before = trainer.fingerprint()
    with pytest.raises(CorruptCheckpointError, match=f"saved with other {part.split()[-1]}"):
        trainer.load(Beside(found.folder, found.manifest, found.document, live=trainer.state()))
    assert trainer.fingerprint() == before


def test_moments_that_a_host_would_give_another_type_are_kept_here_and_come_back(tmp_path):
    def build(seed: int) -> HybridTrainer:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 2).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return HybridTrainer(model, optimizer, lambda model, x: model(x).float().square().mean(), settings)

    settings = HybridTrainerConfig(predict="off")
    trainer, again = build(0), build(1)
    trainer.step(torch.ones(3, 4).bfloat16())
    assert kept_by_host(trainer) == {"parameters", "optimizer"}
    for values in trainer.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].float() + 1e-7  # not a bf16 number
    assert kept_by_host(trainer) == {"parameters"}
    save_beside(trainer, tmp_path / "ours", {})
    again.model.load_state_dict(trainer.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    load_beside(again, read_checkpoint(tmp_path / "ours"))
    assert again.fingerprint() == trainer.fingerprint()


def test_the_same_place_again_is_a_new_folder(tmp_path):
    assert free_folder(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").touch()
    assert free_folder(tmp_path / "run") == tmp_path / "run-2"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_last": 2}, "keep_last is set, and here Lightning keeps checkpoints"),
        ({"predict": ["jumps", "samples"]}, "needs a loader"),
        ({"sample_weights": True}, "sample_weights is set, which needs a loader"),
        ({"memory": {"precision": "fp16"}}, "chooses the precision"),
    ],
)
def test_settings_that_a_host_would_override_are_refused(settings, words):
    with pytest.raises(ModelError, match=words):
        require_hostable(HybridTrainerConfig(**settings), "Lightning")


@pytest.mark.parametrize("settings", [{"predict": "off"}, "off"])
def test_settings_that_are_none_are_refused(settings):
    with pytest.raises(ModelError, match=r"The settings are .*off"):
        require_hostable(settings, "Lightning")


def test_an_error_of_the_host_is_in_the_log(tmp_path):
    setup = gpt_setup()
    with ExitStack() as stack:
        run = HostedRun(setup.trainer(), 10)
        run.write_into(tmp_path / "run", None, stack)
        run.failed(KeyError("labels"))
    assert timeless(log_of(tmp_path / "run"), "error") == [
        {"v": 1, "kind": "error", "step": 0, "error": "KeyError: 'labels'"}
    ]
