"""Jumps in real weights: proposed, tried without a trace, written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import EAGER, SETUPS, Setup, assert_same_tensors, parameters_of
from torch import nn

from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.predict.baselines import VELOCITIES, Forecast
from hybridtrainer.predict.coefficients import Fit
from hybridtrainer.predict.jump import Jumps
from hybridtrainer.predict.probe import Comparison
from hybridtrainer.state import Training, capture, restore_parameters
from hybridtrainer.trainer import HybridTrainer
from hybridtrainer.tree import fingerprint


def trained(kind: str = "gpt", windows: int = 3, **settings: Any) -> tuple[Setup, Jumps, Training]:
    """A setup with some windows recorded from real steps."""
    setup = SETUPS[kind]()
    training = Training(setup.model, setup.optimizer, None, None)
    config = HybridTrainerConfig(**settings)
    jumps = Jumps(training, CheckedLoss(setup.model, setup.loss_fn, "fp32"), BufferGuard(setup.model), config)
    jumps.history.open()
    for index in range(windows * 5):
        setup.loss_fn(setup.model, setup.batches[index]).mean().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        jumps.history.count_step([group["lr"] for group in setup.optimizer.param_groups])
        if index % 5 == 4:
            jumps.history.close()
    return setup, jumps, training


def forecast_of(jumps: Jumps, horizon: int = 10) -> Forecast:
    forecast = jumps.forecast(horizon)
    assert isinstance(forecast, Forecast)
    return forecast


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
@pytest.mark.parametrize("forecaster", [*VELOCITIES, "momentum", "auto", "learned"])
def test_trying_a_jump_out_leaves_no_trace(kind, forecaster):
    setup, jumps, training = trained(kind, forecaster=forecaster)
    kept = parameters_of(setup.model)
    before = fingerprint(capture(training))
    verdict = jumps.try_out(
        forecast_of(jumps), setup.probes, lambda: restore_parameters(training, {"parameters": kept})
    )
    assert isinstance(verdict, Comparison)
    assert verdict.before != verdict.after
    assert fingerprint(capture(training)) == before
    assert all(module.training for module in setup.model.modules())


def test_the_weights_are_put_back_even_if_the_probe_raises():
    setup, jumps, training = trained()
    kept = parameters_of(setup.model)

    def fail(batch: Any) -> Any:
        raise ZeroDivisionError

    jumps._loss.values = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        jumps.try_out(forecast_of(jumps), setup.probes, lambda: restore_parameters(training, {"parameters": kept}))
    assert_same_tensors(parameters_of(setup.model), kept)


def test_persistence_repeats_the_newest_window():
    setup, jumps, _ = trained(forecaster="persistence", trust_radius=10.0)
    now = parameters_of(setup.model)
    for index in range(15, 20):
        setup.loss_fn(setup.model, setup.batches[index]).mean().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        jumps.history.count_step([group["lr"] for group in setup.optimizer.param_groups])
    jumps.history.close()
    newest = {name: value - now[name] for name, value in parameters_of(setup.model).items()}
    before = parameters_of(setup.model)
    rounding = 2 * max(float(moved.abs().max()) for moved in newest.values()) / 127
    jumps.displace_(forecast_of(jumps, horizon=10))  # twice the window's five steps
    for name, value in parameters_of(setup.model).items():
        moved = value - before[name]
        if moved.abs().sum() == 0:
            continue  # a group whose windows disagree stays where it is
        assert torch.allclose(moved, 2 * newest[name], atol=rounding)


def test_momentum_moves_as_the_optimizer_would():
    setup, jumps, _ = trained(forecaster="momentum")
    before = parameters_of(setup.model)
    jumps.displace_(forecast_of(jumps, horizon=1))
    group = setup.optimizer.param_groups[0]
    for name, parameter in setup.model.named_parameters():
        state = setup.optimizer.state[parameter]
        step = -group["lr"] * 0.9 * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        assert torch.allclose(parameter - before[name], step, atol=1e-6)


class HalfAsFar:
    """Says that of every jump, and takes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def window_began(self) -> None:
        self.heard.append("began")

    def window_came(self, fit: Fit) -> None:
        self.heard.append(fit)

    def gain(self) -> float:
        return 0.5


def test_an_adviser_is_told_of_every_window_and_says_how_far_a_learned_jump_goes():
    made = []
    for adviser in (None, HalfAsFar()):
        setup = SETUPS["gpt"]()
        training = Training(setup.model, setup.optimizer, None, None)
        loss, config = (
            CheckedLoss(setup.model, setup.loss_fn, "fp32"),
            HybridTrainerConfig(forecaster="learned", trust_radius=100),
        )
        jumps = Jumps(training, loss, BufferGuard(setup.model), config, adviser=adviser)
        jumps.open_window()
        for batch in setup.batches[:20]:
            setup.loss_fn(setup.model, batch).mean().backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            jumps.history.count_step([group["lr"] for group in setup.optimizer.param_groups])
            if jumps.history.open_steps == 5:
                jumps.close_window()
        made.append(forecast_of(jumps))
        if adviser is not None:
            fits = [each for each in adviser.heard if each != "began"]
            assert adviser.heard.count("began") == 5 and len(fits) == 2  # of the third window and the fourth
            assert fits[-1] == jumps.fit
    whole, half = made
    assert whole.coefficients.any()
    assert torch.allclose(half.coefficients, whole.coefficients / 2)


def scheduled(setup: Setup, jumps: Jumps, scheduler: Any) -> Jumps:
    """The same jumps under a schedule."""
    setup.optimizer.step()  # torch warns of a schedule that moves before its optimizer
    other = Jumps(Training(setup.model, setup.optimizer, scheduler, None), jumps._loss, jumps._buffers, jumps._config)
    other.history.restore(jumps.history.state())
    return other


def test_too_few_windows_and_an_ending_schedule_are_reasons_not_to_jump():
    _, jumps, _ = trained(windows=1)
    assert jumps.forecast(10) == "1 windows are recorded and 2 are needed"
    setup, jumps, _ = trained()
    ending = scheduled(setup, jumps, torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, 1e-3, total_steps=5))
    assert ending.forecast(10) == "the learning-rate schedule ends within the horizon"
    assert isinstance(ending.forecast(3), Forecast)


def test_a_decaying_rate_shortens_the_jump():
    setup, jumps, _ = trained(trust_radius=100.0)
    decaying = scheduled(setup, jumps, torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5))
    steady, short = forecast_of(jumps, 10), forecast_of(decaying, 10)
    lengths = [float(forecast.coefficients.abs().sum()) for forecast in (steady, short)]
    assert lengths[1] == pytest.approx(lengths[0] * 0.2, rel=0.01)


def test_sparse_optimizer_state_means_no_jump_and_training_goes_on():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = HybridTrainer(
        model, optimizer, lambda model, batch: model(batch).square().mean(), HybridTrainerConfig(**EAGER)
    )
    for step in range(60):
        trainer.step(torch.tensor([step % 10, 1, 3]))
    statistics = trainer.statistics()
    assert statistics.real_steps == 60 and statistics.jumps_accepted == 0
    assert any("sparse state" in reason for reason in statistics.declined)


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("injected")


def test_a_window_without_memory_is_lost_and_the_others_stay(monkeypatch):
    _, jumps, _ = trained()
    windows = list(jumps.history.windows)
    monkeypatch.setattr("hybridtrainer.predict.history.quantize", out_of_memory)
    jumps.history.count_step([0.1])
    assert jumps.close_window() == "GPU memory ran out in a window"
    assert jumps.history.windows == windows and not jumps.history.is_open
    assert jumps.close_window() == "no window is open"
    assert jumps.open_window() == "" and jumps.history.is_open
    monkeypatch.setattr("hybridtrainer.predict.history._move_anchor", out_of_memory)
    assert jumps.open_window() == "GPU memory ran out in a window" and not jumps.history.is_open


def test_a_probe_without_memory_refuses_the_jump_and_puts_every_weight_back(monkeypatch):
    setup, jumps, _ = trained()
    before = parameters_of(setup.model)

    def put_back() -> None:
        with torch.no_grad():
            for name, parameter in setup.model.named_parameters():
                parameter.copy_(before[name])

    monkeypatch.setattr("hybridtrainer.predict.jump.measure", out_of_memory)
    assert jumps.try_out(forecast_of(jumps), setup.probes, put_back) == "GPU memory ran out in the probe"
    assert_same_tensors(parameters_of(setup.model), before)


def test_whether_host_memory_has_windows_is_known_of_those_made_and_those_loaded():
    _, jumps, _ = trained(windows=1)
    setup = SETUPS["gpt"]()
    training = Training(setup.model, setup.optimizer, None, None)
    loss = CheckedLoss(setup.model, setup.loss_fn, "fp32")
    other = Jumps(training, loss, BufferGuard(setup.model), HybridTrainerConfig())
    assert jumps.has_windows and not other.has_windows
    other.restore(jumps.state())
    assert other.history.copies == 0 and other.has_windows
