from __future__ import annotations

import torch

from hybridtrainer.predict.gates import Correction
from hybridtrainer.predict.replay import LENGTH, Replay
from hybridtrainer.predict.rssm import CLASSES, RSSM, Size, size_for

SMALL = Size(16, 4, 2)
FEATURES, TICKS, EXPERTS = 6, (1, 3), 4


def model(size: Size = SMALL, seed: int = 0) -> RSSM:
    return RSSM(size, FEATURES, TICKS, EXPERTS, torch.Generator().manual_seed(seed))


def features(tick: int) -> torch.Tensor:
    return torch.sin(torch.arange(FEATURES) + tick / 3)


def latent_of(learner: RSSM) -> torch.Tensor:
    latent = learner.latent()
    assert latent is not None
    return latent


def lesson(learner: RSSM, ticks: int = 60) -> Replay:
    """Where the first feature is positive the first forecast is right, elsewhere the second."""
    latent = latent_of(learner)
    replay = Replay(FEATURES, len(TICKS), EXPERTS, (len(latent), latent.shape[1]))
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 2, (ticks,), generator=generator).float() * 2 - 1
    for tick in range(ticks):
        told = torch.zeros(FEATURES)
        told[0] = bits[tick] * 4
        before = latent_of(learner)
        learner.advance(told)
        experts = torch.tensor([2.0, -2.0, 0.0, 0.0]).expand(len(TICKS), EXPERTS)
        replay.add(told, experts, torch.full((len(TICKS), EXPERTS), 0.25), before)
        for horizon in range(len(TICKS)):
            replay.resolve(tick, horizon, 2.0 * float(bits[tick]))
    return replay


def train(learner: RSSM, replay: Replay, updates: int) -> list[float]:
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.Adam(list(learner.weights().values()), lr=1e-2)
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = learner.loss(replay, learner.lesson(replay, generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_that_has_learned_nothing_corrects_nothing():
    fresh = model()
    fresh.advance(features(0))
    gates, scale, gain = fresh.correction()
    assert gates.shape == (SMALL.members, len(TICKS), EXPERTS) and scale.shape == gates.shape[:2]
    assert gain.shape == (SMALL.members,)
    assert not gates.any() and not scale.any() and not gain.any()


def test_the_default_is_256_deterministic_numbers_32_categoricals_and_3_members():
    assert Size() == (256, 32, 3)
    assert size_for(10**9) == Size()
    small, middle = size_for(10_000), size_for(10_000_000)
    assert small.deterministic < middle.deterministic < 256


def corrections(learner: RSSM) -> list[Correction]:
    """What it says where the first feature is positive, and where it is negative."""
    found = []
    for bit in (4.0, -4.0):
        told = torch.zeros(FEATURES)
        told[0] = bit
        for _ in range(3):
            learner.advance(told)
        found.append(learner.correction())
    return found


def test_it_learns_what_the_features_say_of_what_comes():
    learner = model()
    replay = lesson(learner)
    losses = train(learner, replay, 120)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    gates = [each.gates[:, 0].mean(0) for each in corrections(learner)]
    leaning = [each[0] - each[1] for each in gates]
    assert leaning[0] > leaning[1] + 1


def test_it_learns_how_far_jumps_should_go():
    learner = model()
    replay = lesson(learner)
    for tick in range(replay.known()):
        replay.resolve_jump(tick, 0.4 if replay.features[tick, 0] > 0 else 0.1, 0.2)
    train(learner, replay, 200)
    said = [each.gain.mean().item() for each in corrections(learner)]
    assert said[0] > said[1] + 0.2


def test_latents_in_8_bits_take_at_least_three_quarters_less_and_come_back_nearly_as_they_were():
    learner = model(Size())
    for tick in range(5):
        learner.advance(features(tick))
    h, z = learner.state()["h"], learner.state()["z"]
    coded = latent_of(learner)
    assert coded.dtype == torch.int8
    assert coded.nbytes <= 0.25 * (h.nbytes + z.nbytes)
    decoded_h, decoded_z = learner._decode(coded[:, None])
    assert (decoded_h - h).abs().max() <= 0.5 / 127 + 1e-6
    assert (decoded_z - z).abs().max() <= 0.5 / 127 + 1e-6
    held = Replay(FEATURES, len(TICKS), EXPERTS, (len(coded), coded.shape[1]))
    deterministic = LENGTH * h.nbytes
    assert held.latent_bytes() <= 0.25 * (deterministic + LENGTH * z.nbytes)


def test_draws_are_classes_and_gradients_go_through_them():
    learner = model()
    logits = torch.randn(2, 3, 4 * CLASSES, requires_grad=True)
    z = learner._draw(logits, torch.rand(2, 3, 4, CLASSES, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(z.view(2, 3, 4, CLASSES).max(-1).values, torch.ones(2, 3, 4))
    torch.testing.assert_close(z.sum(-1), torch.full((2, 3), 4.0))
    (z * torch.randn(z.shape)).sum().backward()
    assert logits.grad is not None and logits.grad.any()


def test_prior_and_posterior_are_drawn_to_each_other():
    learner = model()
    prior = torch.zeros(2, 1, 4 * CLASSES, requires_grad=True)
    posterior = (5 * torch.randn(2, 1, 4 * CLASSES, generator=torch.Generator().manual_seed(0))).requires_grad_()
    learner._apart(prior, posterior).backward()
    assert prior.grad is not None
    assert posterior.grad is not None
    assert prior.grad.abs().sum() > 2 * posterior.grad.abs().sum() > 0  # the prior gives way ten times as much
    same = learner._apart(posterior.detach(), posterior.detach())
    torch.testing.assert_close(same, torch.tensor(1.1))  # the free nats, at both shares


def test_a_restored_belief_says_the_same():
    one, other = model(), model()
    for tick in range(4):
        one.advance(features(tick))
    other.restore({name: tensor.clone() for name, tensor in one.state().items()})
    for each in (one, other):
        each.advance(features(4))
    assert torch.equal(one.state()["h"], other.state()["h"]) and torch.equal(latent_of(one), latent_of(other))
