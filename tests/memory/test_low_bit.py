"""Moments of few bits: close to AdamW, exact in what is promised to be, and the same after saving, jumping, undoing."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.memory.support import batches, build
from tests.support import EAGER, assert_same_tensors, gpt_setup, parameters_of
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import ForeignCheckpointError, ModelError
from hybridtrainer.memory.low_bit import LowBitAdamW
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.predict import directions
from hybridtrainer.trainer import HybridTrainer
from hybridtrainer.weights import WeightGroup, Weights

OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 30) -> float:
    torch.manual_seed(5)
    data = batches(4)
    for step in range(steps):
        loss = gpt_loss(model, data[step % 4]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )


@pytest.mark.parametrize(("bits", "share"), [(8, 0.28), (4, 0.16)])
def test_it_learns_as_adamw_does_in_a_fraction_of_the_memory(bits, share):
    plain, low = build(), build()
    theirs, ours = torch.optim.AdamW(plain.parameters(), **OPTIONS), LowBitAdamW(low.parameters(), **OPTIONS, bits=bits)
    first = gpt_loss(plain, batches(1)[0]).mean().item()
    expected, found = train(plain, theirs), train(low, ours)
    assert expected < 0.9 * first
    assert found == pytest.approx(expected, rel=0.02)
    assert state_bytes(ours) < share * state_bytes(theirs)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_small_tensors_are_updated_as_torch_does_to_the_bit(kind):
    torch.manual_seed(0)
    one, other = nn.Linear(63, 64), nn.Linear(63, 64)
    other.load_state_dict(one.state_dict())
    reference = (torch.optim.AdamW if kind == "adamw" else torch.optim.Adam)(one.parameters(), **OPTIONS)
    low = LowBitAdamW(other.parameters(), **OPTIONS, decoupled=kind == "adamw")
    for step in range(5):
        x = torch.randn(8, 63, generator=torch.Generator().manual_seed(step))
        for model, optimizer in ((one, reference), (other, low)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert_same_tensors(parameters_of(one), parameters_of(other))


def test_adams_decay_goes_through_the_moments():
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    for weight, decoupled in zip(weights, (True, False), strict=True):
        optimizer = LowBitAdamW([weight], lr=0.1, weight_decay=0.5, decoupled=decoupled)
        weight.grad = torch.zeros(64, 64)
        optimizer.step()
    assert torch.allclose(weights[0], torch.tensor(0.95))  # 1 - lr * decay
    assert torch.allclose(weights[1], torch.tensor(0.9), atol=1e-3)  # a whole step of lr


def test_a_gradient_laid_out_otherwise_reaches_its_own_weights():
    one, other = (nn.Parameter(torch.zeros(64, 128)) for _ in range(2))
    gradient = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for weight, grad in ((one, gradient), (other, gradient.t().contiguous().t())):
        optimizer = LowBitAdamW([weight], lr=0.1)
        weight.grad = grad
        optimizer.step()
    assert torch.equal(one, other)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_goes_through_torchs_dictionary_and_back(bits, dtype):
    model = build().to(dtype)
    optimizer = LowBitAdamW(model.parameters(), **OPTIONS, bits=bits, seed=4)
    train(model, optimizer, steps=3)
    twin = deepcopy(model)
    fresh = LowBitAdamW(twin.parameters(), lr=1.0, bits=bits)
    fresh.load_state_dict(deepcopy(optimizer.state_dict()))
    assert fresh.param_groups[0]["seed"] == 4
    train(model, optimizer, steps=3), train(twin, fresh, steps=3)
    assert_same_tensors(parameters_of(model), parameters_of(twin))


def test_random_rounding_follows_the_seed_and_the_place_among_all_parameters():
    def codes(seed: int, groups: int) -> list[Tensor]:
        weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
        split: list[dict[str, Any]] = [{"params": weights}] if groups == 1 else [{"params": [one]} for one in weights]
        optimizer = LowBitAdamW(split, seed=seed, bits=4)
        for weight in weights:
            weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        return [optimizer.state[weight]["m"] for weight in weights]

    first, second = codes(0, groups=1)
    assert not torch.equal(first, second)
    assert all(torch.equal(one, other) for one, other in zip((first, second), codes(0, groups=2), strict=True))
    assert not torch.equal(first, codes(1, groups=1)[0])


def test_the_state_of_other_bits_or_of_another_optimizer_is_refused():
    model = build()
    eight, four = (LowBitAdamW(model.parameters(), bits=bits) for bits in (8, 4))
    torchs = torch.optim.AdamW(model.parameters())
    for optimizer in (eight, torchs):
        train(model, optimizer, steps=1)
        with pytest.raises(ForeignCheckpointError, match="4-bit moments"):
            four.load_state_dict(optimizer.state_dict())
    assert not four.state


def test_moments_are_read_from_any_element_on():
    parameter = nn.Parameter(torch.zeros(40, 130))
    optimizer = LowBitAdamW([parameter], betas=(0.0, 0.0), bits=8)
    assert optimizer.moments(parameter, 0, 5) is None
    parameter.grad = torch.randn(40, 130, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    whole = optimizer.moments(parameter, 0, 5200)
    assert whole is not None
    assert torch.allclose(whole[0], parameter.grad.view(-1), atol=0.08)
    assert torch.allclose(whole[1], parameter.grad.view(-1).square(), atol=0.5)
    for start, stop in ((0, 1), (255, 257), (300, 5200), (5199, 5200)):
        part = optimizer.moments(parameter, start, stop)
        assert part is not None
        assert all(torch.equal(mine, all_[start:stop]) for mine, all_ in zip(part, whole, strict=True))


def test_the_momentum_direction_is_adams_step():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(64, 100))
    optimizer = LowBitAdamW([parameter], eps=1e-3)
    parameter.grad = torch.randn(64, 100)
    optimizer.step()
    before = parameter.detach().clone()
    assert directions.has_moments(optimizer)
    weights = Weights([WeightGroup("other", 0, (parameter,))], bucket_elements=1000)
    directions.momentum_displace_(weights, optimizer, torch.tensor([0.5], dtype=torch.float64))
    moments = optimizer.moments(parameter, 0, 6400)
    assert moments is not None
    expected = before - 0.5 * (moments[0] / (moments[1].sqrt() + 1e-3)).view(64, 100)
    assert torch.equal(parameter, expected) or torch.allclose(parameter, expected, rtol=1e-6)


def hybrid(bits: Any, **settings: Any) -> tuple[HybridTrainer, list[Any]]:
    setup = gpt_setup()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in setup.model.parameters() if p.dim() > 1]},
        {"params": [p for p in setup.model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]
    optimizer = LowBitAdamW(groups, lr=3e-3, bits=bits)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.9, total_iters=100)
    config = HybridTrainerConfig(**{**EAGER, "memory": {"optimizer_bits": bits}, **settings})
    trainer = HybridTrainer(
        setup.model, optimizer, setup.loss_fn, config, scheduler=scheduler, clip_norm=1.0, probe_batches=setup.probes
    )
    return trainer, setup.batches


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("forecaster", ["momentum", "line_fit"])
def test_a_run_with_jumps_resumes_to_the_same_bits(tmp_path, bits, forecaster):
    trainer, data = hybrid(bits, forecaster=forecaster)
    losses(trainer, data[:40])
    told = trainer.statistics()
    assert told.jumps_accepted if forecaster == "line_fit" else told.jumps_refused
    trainer.save(tmp_path / "checkpoint")
    expected = losses(trainer, data[40:60])
    other, _ = hybrid(bits, forecaster=forecaster)
    other.load(tmp_path / "checkpoint")
    assert losses(other, data[40:60]) == expected
    assert trainer.fingerprint() == other.fingerprint()


def test_a_refused_jump_leaves_every_bit_of_the_moments():
    plain, data = hybrid(8, predict="off")
    torch.manual_seed(1)
    expected = losses(plain, data[:40])
    trainer, _ = hybrid(8)
    trainer.jumps.forecaster = refused(trainer)
    torch.manual_seed(1)
    assert losses(trainer, data[:40]) == expected
    assert trainer.statistics().jumps_refused
    assert trainer.fingerprint()["optimizer"] == plain.fingerprint()["optimizer"]


def losses(trainer: HybridTrainer, data: list[Any]) -> list[float]:
    return [trainer.step(batch).loss for batch in data]


def refused(trainer: HybridTrainer) -> Any:
    """A forecaster whose jumps make everything worse."""
    own = trainer.jumps._baseline

    def backwards(*arguments: Any) -> Any:
        forecast = own(*arguments)
        object.__setattr__(forecast, "coefficients", forecast.coefficients * -50)
        return forecast

    return backwards


def test_checkpoints_of_other_bits_are_foreign(tmp_path):
    trainer, data = hybrid(8)
    trainer.step(data[0])
    trainer.save(tmp_path / "eight")
    other, _ = hybrid(4)
    before = other.fingerprint()
    with pytest.raises(ForeignCheckpointError, match="of 8 bits there and"):
        other.load(tmp_path / "eight")
    assert other.fingerprint() == before


def test_what_it_cannot_update_is_refused():
    with pytest.raises(ModelError, match="no moments of 16 bits"):
        LowBitAdamW([nn.Parameter(torch.zeros(4))], bits=16)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="float64"):
        LowBitAdamW([nn.Parameter(torch.zeros(4, dtype=torch.float64))])
    embedding = nn.Embedding(100, 64, sparse=True)
    optimizer = LowBitAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match="sparse"):
        optimizer.step()


def test_a_closure_is_called_with_gradients():
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = LowBitAdamW([weight])

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4096.0
    assert float(weight.detach().max()) < 1.0


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"eps": float("nan")}, {"weight_decay": -0.1}, {"betas": (2.0, 0.0)}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ModelError, match=next(iter(wrong)).removesuffix("s")):
        LowBitAdamW(nn.Linear(4, 4).parameters(), **wrong)


def test_a_copy_goes_on_as_the_original_does():
    torch.manual_seed(0)
    layer = nn.Linear(80, 80)
    pair = [(layer, LowBitAdamW(layer.parameters(), bits=4))]
    for _ in range(2):
        for model, optimizer in pair:
            model(torch.ones(1, 80)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if len(pair) == 1:
            pair.append(deepcopy(pair[0]))
    assert torch.equal(pair[0][0].weight, pair[1][0].weight)
