from __future__ import annotations

import pytest
import torch

from hybridtrainer.predict.gates import LARGEST, LARGEST_GAIN, FeedForward, bounded
from hybridtrainer.predict.replay import Replay


def model(hidden: int, members: int = 2) -> FeedForward:
    return FeedForward(4, 3, 5, members, hidden, torch.Generator().manual_seed(0))


def lesson(ticks: int = 64) -> Replay:
    """Where the first feature is positive the first forecast is right, elsewhere the second."""
    replay, generator = Replay(4, 3, 5), torch.Generator().manual_seed(1)
    for tick in range(ticks):
        features = torch.randn(4, generator=generator)
        experts = torch.tensor([2.0, -2.0, 0.0, 0.0, 0.0]).expand(3, 5)
        replay.add(features, experts, torch.full((3, 5), 0.2), None)
        for horizon in range(3):
            replay.resolve(tick, horizon, 2.0 if features[0] > 0 else -2.0)
    return replay


@pytest.mark.parametrize("hidden", [0, 8])
def test_a_model_that_has_learned_nothing_corrects_nothing(hidden):
    fresh = model(hidden)
    fresh.advance(torch.ones(4))
    gates, scale, gain = fresh.correction()
    assert gates.shape == (2, 3, 5) and scale.shape == (2, 3) and gain.shape == (2,)
    assert not gates.any() and not scale.any() and not gain.any()


@pytest.mark.parametrize("hidden", [0, 8])
def test_it_learns_which_forecast_the_features_speak_for(hidden):
    learner, replay, generator = model(hidden), lesson(), torch.Generator().manual_seed(2)
    weights = list(learner.weights().values())
    optimizer = torch.optim.Adam(weights, lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        learner.loss(replay, learner.lesson(replay, generator)).backward()
        optimizer.step()
    learner.advance(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    assert (learner.correction().gates[..., 0] > learner.correction().gates[..., 1] + 1).all()
    learner.advance(torch.tensor([-2.0, 0.0, 0.0, 0.0]))
    assert (learner.correction().gates[..., 1] > learner.correction().gates[..., 0] + 1).all()


def test_no_correction_is_larger_than_its_bound():
    gates, scale, gain = bounded(torch.tensor([[1e6, -1e6, 0.1]]), torch.tensor([-1e6]))
    assert gates.abs().max() <= LARGEST and abs(scale.item() - 0.1) < 1e-3
    assert gain.item() == -LARGEST_GAIN


@pytest.mark.parametrize("hidden", [0, 8])
def test_it_learns_how_far_jumps_should_go(hidden):
    learner, replay, generator = model(hidden), lesson(), torch.Generator().manual_seed(2)
    for tick in range(replay.known()):
        along = 0.2 if replay.features[tick, 0] > 0 else 0.05
        replay.resolve_jump(tick, along, 0.1)  # twice as far would be right, or half as far
    optimizer = torch.optim.Adam(list(learner.weights().values()), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        learner.loss(replay, learner.lesson(replay, generator)).backward()
        optimizer.step()
    learner.advance(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    assert (learner.correction().gain > 0.3).all()
    learner.advance(torch.tensor([-2.0, 0.0, 0.0, 0.0]))
    assert (learner.correction().gain < -0.3).all()


def test_members_learn_from_draws_of_their_own():
    learner, replay = model(0), lesson()
    learner.loss(replay, learner.lesson(replay, torch.Generator().manual_seed(3))).backward()
    gradient = learner.weights()["last"].grad
    assert gradient is not None
    assert not torch.equal(gradient[0], gradient[1])


def test_a_restored_model_says_the_same():
    one, other = model(8), model(8)
    one.advance(torch.arange(4.0))
    with torch.no_grad():
        for mine, theirs in zip(one.weights().values(), other.weights().values(), strict=True):
            mine.add_(0.1)
            theirs.copy_(mine)
    other.restore({"features": one.state()["features"].clone()})
    assert torch.equal(one.correction().gates, other.correction().gates)
