"""The trainer's view of the dynamics model: fed by real steps, told of in the log, never felt by the weights."""

from __future__ import annotations

import pytest
import torch
from tests.support import EAGER, assert_same_tensors, gpt_setup, parameters_of

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.foresight import TOLD_EVERY, kind_for
from hybridtrainer.records import LossForecast, StepResult

QUIET = {"predict": "auto", "warmup_steps": 10_000}  # no jump in so short a run


def test_a_model_forecasts_where_one_is_named_and_prediction_is_on():
    assert kind_for(HybridTrainerConfig(predict="off", dynamics="mlp")) is None
    assert kind_for(HybridTrainerConfig()) is None
    assert kind_for(HybridTrainerConfig(dynamics="rssm")) == "rssm"


def test_without_a_model_nothing_is_kept_and_with_prediction_off_none_is_accepted():
    trainer = gpt_setup(count=1).trainer(settings={"predict": "off"})
    assert trainer.state()["foresight"] is None
    assert trainer.forecasts() == []
    with pytest.raises(ModelError, match="nothing is forecast"):
        gpt_setup(count=1).trainer(settings={"predict": "off", "dynamics": "rssm"})


@pytest.mark.parametrize("kind", ["rssm", "mlp"])
def test_the_weights_of_a_run_are_those_of_plain_training_to_the_bit(kind):
    plain, followed = gpt_setup(count=160), gpt_setup(count=160)
    trainers = plain.trainer(), followed.trainer(settings=QUIET | {"dynamics": kind})
    for one, other in zip(plain.batches, followed.batches, strict=True):
        torch.manual_seed(0)
        trainers[0].step(one)
        torch.manual_seed(0)
        trainers[1].step(other)
    assert_same_tensors(parameters_of(plain.model), parameters_of(followed.model))
    assert [forecast.window for forecast in trainers[1].forecasts()] == [5, 10, 25]


def test_the_log_is_told_of_the_loss_50_steps_ahead_now_and_then():
    setup = gpt_setup(count=60)
    trainer = setup.trainer(settings=QUIET | {"dynamics": "linear"})
    told: list[LossForecast] = []
    losses: dict[int, float] = {}

    def listen(record: object) -> None:
        if isinstance(record, LossForecast):
            told.append(record)
        elif isinstance(record, StepResult):
            losses[record.step] = record.loss

    trainer.listeners.append(listen)
    for batch in (setup.batches * 10)[: 4 * TOLD_EVERY]:
        trainer.step(batch)
    assert [(forecast.step // TOLD_EVERY, forecast.target_step - forecast.step) for forecast in told] == [
        (number, 50) for number in (1, 2, 3, 4)
    ]
    for forecast in told:
        assert forecast.low <= forecast.loss <= forecast.high
        assert abs(forecast.loss - losses[forecast.step]) < 2


def test_the_coming_rates_are_those_of_the_schedule():
    setup = gpt_setup(count=60)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.9)
    trainer = setup.trainer(settings=QUIET | {"dynamics": "linear"}, scheduler=scheduler)
    for batch in setup.batches[:10]:
        trainer.step(batch)
    now = setup.optimizer.param_groups[0]["lr"]
    row = trainer.state()["foresight"]["dynamics"]["ring"]["rows"][9].tolist()
    assert row[10] == pytest.approx(sum(now * 0.9**k for k in range(5)) / 5, rel=1e-5)
    assert row[3] > 0  # the optimizer's moments are told at ticks
    assert setup.optimizer.param_groups[0]["lr"] == now


@pytest.mark.parametrize(("kind", "times"), [("linear", 4), ("blend", 0)])
def test_moments_are_looked_up_at_ticks_and_only_for_a_model_that_learns(kind, times, monkeypatch):
    looked: list[object] = []

    def sizes(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        looked.append(optimizer)
        return torch.ones(2)

    monkeypatch.setattr("hybridtrainer.foresight.moment_sizes", sizes)
    setup = gpt_setup(count=20)
    trainer = setup.trainer(settings=QUIET | {"dynamics": kind})
    for batch in setup.batches:
        trainer.step(batch)
    assert len(looked) == times


@pytest.mark.parametrize("kind", ["rssm", "mlp", "blend"])
def test_a_run_resumed_in_any_phase_forecasts_as_if_it_had_gone_on(kind, tmp_path):
    def made():
        setup = gpt_setup(count=60)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, 500)
        return setup, setup.trainer(settings=EAGER | {"dynamics": kind}, scheduler=scheduler)

    setup, trainer = made()
    batches, phases, saved = (setup.batches * 10)[:90], set(), {}
    for index, batch in enumerate(batches):
        trainer.step(batch)
        if index in (30, 44, 51):
            trainer.save(tmp_path / str(index))
            saved[index] = trainer.fingerprint()
        phases.add(trainer.current_phase)
    assert len(phases) == 4
    for index in (30, 44, 51):
        _, other = made()
        other.load(tmp_path / str(index))
        assert other.fingerprint() == saved[index]
        for batch in batches[index + 1 :]:
            other.step(batch)
        assert other.fingerprint() == trainer.fingerprint()
        assert other.forecasts() == trainer.forecasts()
