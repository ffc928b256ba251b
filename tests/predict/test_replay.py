from __future__ import annotations

import math

import pytest
import torch

from hybridtrainer.predict.replay import DOUBT, LENGTH, Replay


def filled(ticks: int) -> Replay:
    replay = Replay(features=2, horizons=1, experts=2, latent=(1, 3))
    for tick in range(ticks):
        replay.add(
            torch.full((2,), float(tick)),
            torch.tensor([[-1.0, 1.0]]),
            torch.tensor([[0.5, 0.5]]),
            torch.full((1, 3), tick % 100, dtype=torch.int8),
        )
    return replay


def places(replay: Replay) -> torch.Tensor:
    return replay.draw(1, torch.Generator().manual_seed(0))


def test_the_oldest_tick_is_overwritten_and_its_outcome_ignored():
    replay = filled(LENGTH + 2)
    assert replay.known() == LENGTH
    replay.resolve(1, 0, 3.0)  # overwritten by tick LENGTH + 1
    assert torch.isnan(replay.state()["_came"]).all()
    replay.resolve(2, 0, 3.0)
    assert replay.state()["_came"][2, 0] == 3


def test_only_ticks_that_are_known_are_drawn_and_newer_ones_more_often():
    replay, generator = filled(40), torch.Generator().manual_seed(0)
    drawn = torch.cat([replay.draw(2, generator).flatten() for _ in range(200)])
    assert drawn.min() >= 0 and drawn.max() < 40
    assert (drawn >= 20).float().mean() > 0.6


def test_sequences_are_neighbours_in_order():
    sequences = filled(30).draw(2, torch.Generator().manual_seed(0), length=6)
    assert sequences.shape[2] == 6
    assert (sequences.diff(dim=-1) == 1).all()


def test_the_misfit_is_the_error_and_that_of_its_scale_and_nothing_where_nothing_came():
    replay = filled(3)
    replay.resolve(0, 0, 1.0)
    gates, scale = torch.tensor([[[0.0, math.log(3)]]]), torch.tensor([[math.log(2)]])
    # weights 1/4 and 3/4 of -1 and 1: half a scale
    expected = 0.5 + 0.5 / 2 + math.log(2)
    torch.testing.assert_close(replay.lesson(torch.tensor([0])).misfit(gates, scale), torch.tensor([[expected]]))
    assert replay.lesson(torch.tensor([1])).misfit(gates, scale).item() == 0


def test_a_jump_that_goes_as_far_as_it_should_fits_best():
    replay = filled(3)
    replay.resolve_jump(0, 0.1, 0.2)
    replay.resolve_jump(-LENGTH, 9.0, 9.0)  # long overwritten
    gains = torch.tensor([0.0, math.log(0.5), -1.5])
    fits = replay.lesson(torch.tensor([0, 0, 0])).misjump(gains)
    torch.testing.assert_close(fits[:2], torch.tensor([0.2 - 2 * 0.1, 0.2 / 4 - 2 * 0.1 / 2]))
    assert fits.argmin() == 1
    unknown = torch.zeros(1, requires_grad=True)
    replay.lesson(torch.tensor([1])).misjump(unknown).sum().backward()
    assert unknown.grad is not None and unknown.grad.item() == 0


def test_outliers_count_no_more_than_four_scales():
    replay = filled(1)
    replay.resolve(0, 0, 100.0)
    assert replay.state()["_came"][0, 0] == 4


def test_what_was_undone_teaches_nothing():
    replay = filled(2)
    replay.resolve(1, 0, 1.0)
    replay.drop(1)
    assert torch.isnan(replay.state()["_came"]).all()


def test_what_came_of_like_ticks_is_recalled_and_little_of_others():
    replay = Replay(features=2, horizons=1, experts=2)
    for tick in range(101):
        side = 5.0 if tick % 2 else -5.0
        replay.add(torch.full((2,), side), torch.zeros(1, 2), torch.full((1, 2), 0.5), None)
        if tick < 100:
            replay.resolve(tick, 0, 2.0 if side > 0 else -1.0)
    assert replay.recalled(100).item() == pytest.approx(-50 / (50 + DOUBT), rel=1e-4)
    assert replay.recalled(99).item() == pytest.approx(100 / (50 + DOUBT), rel=1e-4)
    assert filled(3).recalled(2).item() == 0


def test_latents_come_back_for_each_member():
    replay = filled(20)
    ticks = places(replay)
    assert torch.equal(replay.latents(ticks)[0, :, 0].long(), ticks[0])


def test_a_restored_replay_is_equal():
    replay, other = filled(10), Replay(features=2, horizons=1, experts=2, latent=(1, 3))
    replay.resolve(4, 0, 0.5)
    other.restore({k: v.clone() if torch.is_tensor(v) else v for k, v in replay.state().items()})
    assert other.count == 10
    assert torch.equal(places(replay), places(other))
    gates, scale, at = torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.tensor([4])
    assert torch.equal(replay.lesson(at).misfit(gates, scale), other.lesson(at).misfit(gates, scale))
