"""What is known of each sample: losses seen last, how they fade, and whom a chance is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtrainer.predict import ledger as ledger_module
from hybridtrainer.predict.ledger import BASE, EARLY, FADING_EPOCHS, LEAST, SURE, Ledger

EVERY = torch.arange(100)
KEPT = ("losses", "seen_at", "early")


def learned(losses: Tensor, first: float = 2.3) -> Ledger:
    """A ledger of a run that began with one loss for all and is at these now."""
    ledger = Ledger(len(losses))
    ledger.learn(torch.arange(len(losses)), torch.full((len(losses),), first))
    ledger.learn(torch.arange(len(losses)), losses)
    return ledger


def test_what_was_never_computed_is_computed_for_certain():
    ledger = Ledger(100)
    assert bool((ledger.chances(EVERY) == 1).all())
    ledger.learn(EVERY[:50], torch.linspace(0, 1, 50))
    chances = ledger.chances(EVERY)
    assert bool((chances[50:] == 1).all())
    assert not bool((chances[:40] == 1).any())


def test_a_chance_grows_with_the_loss_up_to_1_and_is_never_0():
    chances = learned(torch.tensor([0.0] * 97 + [0.1, 1.0, 2.0])).chances(EVERY)
    assert chances[0] == pytest.approx(BASE / (SURE + BASE))
    assert chances[0] < chances[97] < 1
    assert chances[98] == chances[99] == 1  # the hardest is not preferred to the hard
    assert bool((chances > 0).all())


def test_where_all_samples_are_alike_all_have_the_same_chance():
    chances = learned(torch.full((100,), 1.7)).chances(EVERY)
    assert chances.tolist() == [1.0] * 100


def test_the_less_losses_differ_the_less_is_left_out():
    def computed(spread: float) -> float:
        losses = 1.7 * torch.exp(spread * torch.linspace(-1, 1, 100))
        return float(learned(losses, first=1e6).chances(EVERY).mean())

    shares = [computed(spread) for spread in (0.0, 0.2, 1.0, 3.0, 9.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] > 0.8
    assert shares[-1] < 0.25


def test_what_is_half_as_hard_as_everything_was_at_first_is_always_computed():
    losses = torch.linspace(0.5, 3.5, 100)
    assert bool((learned(losses, first=4.0).chances(EVERY)[losses >= 2.0] == 1).all())
    assert not bool((learned(losses, first=40.0).chances(EVERY)[losses >= 2.0] == 1).all())


def test_where_most_is_known_only_the_hardest_are_certain():
    """Otherwise all that is not known would be computed as often as what is hardest, and known samples with it."""
    hard = torch.linspace(1.2, 2.2, 50)
    few, many = (learned(torch.cat([torch.full((50,), easy), hard])) for easy in (0.3, 0.1))
    assert few.known_share() == 0.0 and many.known_share() == 0.5
    assert bool((few.chances(EVERY)[50:] == 1).all())
    assert int((many.chances(EVERY)[50:] == 1).sum()) == 2
    assert float(many.chances(EVERY)[0]) < float(few.chances(EVERY)[0])


def test_a_sample_is_known_when_little_is_left_of_the_loss_that_samples_had_at_first():
    losses = torch.cat([torch.full((40,), 0.2), torch.full((60,), 0.3)])
    assert learned(losses, first=2.3).known_share() == pytest.approx(0.4)
    assert learned(losses - 0.2, first=0.5).known_share() == pytest.approx(0.4)
    assert learned(losses - 7.0, first=-4.7).known_share() == 1.0  # measured from the lowest
    assert learned(losses, first=4.0).known_share() == 1.0
    unseen = Ledger(200)
    unseen.learn(torch.arange(100), losses)
    assert unseen.known_share() == 0.0


def test_losses_below_zero_are_losses_too():
    below = learned(torch.linspace(-5, -1, 100), first=0.0).chances(EVERY)
    above = learned(torch.linspace(0, 4, 100), first=5.0).chances(EVERY)
    torch.testing.assert_close(below, above)


def test_a_sketch_stands_for_all_where_there_are_many(monkeypatch):
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(1)) ** 8
    whole = learned(losses).chances(torch.arange(1000))
    monkeypatch.setattr(ledger_module, "SKETCH", 300)
    part = learned(losses).chances(torch.arange(1000))
    assert not torch.equal(part, whole)
    torch.testing.assert_close(part, whole, rtol=0.3, atol=0.0)


def test_a_sample_that_is_worse_than_at_the_start_counts_like_any():
    """As one with a wrong label does: the model is sure of something else."""
    losses = torch.cat([torch.linspace(0, 0.3, 90), torch.full((5,), 2.0), torch.full((5,), 6.0)])
    chances = learned(losses).chances(EVERY)
    assert bool((chances[90:95] > 0.7).all())
    assert bool((chances[95:] < 0.5).all())
    assert float(chances[95]) == pytest.approx(float(chances.mean()), abs=0.05)


def test_a_forecast_goes_back_to_the_mean_until_the_sample_is_looked_at_again():
    losses = torch.tensor([0.0] * 50 + [1.0] * 50)

    def chances(epochs: float, again: int = 0) -> Tensor:
        """When so much more has been computed, all of it the last sample; and some at the end."""
        ledger = learned(losses)
        ledger.learn(torch.full((int(100 * epochs),), 99), torch.ones(int(100 * epochs)))
        ledger.learn(EVERY[:again], losses[:again])
        return ledger.chances(EVERY)

    fresh, old, ancient = (chances(epochs) for epochs in (0, FADING_EPOCHS, 1000))
    assert fresh[0] < old[0] < ancient[0]
    assert fresh[60] > old[60] > ancient[60]
    assert float(ancient[0]) == pytest.approx(float(ancient[60]))
    assert float((old[0] - fresh[0]) / (ancient[0] - fresh[0])) == pytest.approx(0.632, abs=0.03)
    again = chances(FADING_EPOCHS, again=1)
    assert float(again[0]) == pytest.approx(float(fresh[0]), rel=0.01)
    assert float(again[1]) == pytest.approx(float(old[1]), rel=0.01)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_written_down_at_once_is_what_would_be_one_by_one(bad):
    drawn = torch.Generator().manual_seed(2)
    at_once, one_by_one = Ledger(5000), Ledger(5000)
    for _ in range(60):
        indices = torch.randint(5000, (64,), generator=drawn)  # some come twice
        losses = torch.rand(64, generator=drawn)
        losses[:3] = bad
        for ledger in (at_once, one_by_one):
            ledger.learn(indices, losses)
        one_by_one.state()
    assert torch.equal(at_once.chances(torch.arange(5000)), one_by_one.chances(torch.arange(5000)))
    found, expected = at_once.state(), one_by_one.state()
    assert all(torch.equal(found[name].nan_to_num(9.0), expected[name].nan_to_num(9.0)) for name in KEPT)
    assert found["computed"] == expected["computed"]


def test_of_a_sample_that_came_twice_the_last_loss_counts():
    ledger = Ledger(3)
    for loss in (0.5, 0.25):
        ledger.learn(torch.tensor([1, 1]), torch.tensor([7.0, loss]))
    assert ledger.state()["losses"][1] == 0.25
    assert ledger.state()["seen_at"][1] == pytest.approx(4 / 3)


@pytest.mark.parametrize("count", [1, 99, 100, 101, 5000])
def test_the_highest_hundredth_is_that_of_torch(count):
    losses = torch.rand(count, generator=torch.Generator().manual_seed(count)).mul(20).round().double()
    assert ledger_module._highest(losses) == losses.kthvalue(count - int(0.01 * count)).values


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_teaches_nothing(bad):
    ledger = learned(torch.linspace(0, 1, 100))
    before = ledger.chances(EVERY)
    ledger.learn(EVERY[:3], torch.tensor([bad, 0.5, bad]))
    after = ledger.chances(EVERY)
    assert after[0] == pytest.approx(float(before[0]), rel=0.05)
    assert after[1] > before[1]
    assert bool(after.isfinite().all())


@pytest.mark.parametrize("loss", [0.0, -1.0, 1e-17, 1e-40, 1e30, 3e38])
def test_losses_that_are_all_the_same_are_all_computed_however_large_or_small(loss):
    chances = learned(torch.full((100,), loss), first=max(loss, 1.0)).chances(EVERY)
    assert chances.tolist() == [1.0] * 100


def test_a_few_that_are_beyond_all_measure_hide_nothing():
    losses = torch.cat([torch.zeros(50), torch.linspace(0.1, 2, 49), torch.tensor([3e38])])
    chances = learned(losses).chances(EVERY)
    assert float(chances[0]) < 0.2
    assert 0.2 < float(chances[70]) <= 1
    assert LEAST <= float(chances.min()) < float(chances.max()) == 1


def test_hard_samples_of_a_model_that_was_trained_before_are_not_taken_for_wrong_ones():
    losses = torch.cat([torch.full((95,), 0.01), torch.full((5,), 3.0)])
    ledger = Ledger(100)
    ledger.learn(EVERY, losses)
    assert bool((ledger.chances(EVERY)[95:] > 0.7).all())


def test_it_takes_8_bytes_a_sample_and_comes_back_with_all_it_knows():
    ledger = learned(torch.linspace(0, 1, 100))
    state = ledger.state()
    assert state["losses"].nbytes + state["seen_at"].nbytes == 8 * 100
    assert state["early"].nbytes <= 4 * EARLY
    other = Ledger(100)
    other.restore(state)
    for each in (ledger, other):
        each.learn(EVERY[:9], torch.ones(9))
    assert ledger.computed == other.computed == 209
    assert torch.equal(other.chances(EVERY), ledger.chances(EVERY))
    assert not torch.equal(Ledger(100).chances(EVERY), ledger.chances(EVERY))
