"""A step made again in parts equals one made in those parts from the start; what would be another training is not."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import TornStepError
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.parts import divide
from hybridtrainer.randomness import RandomState
from hybridtrainer.real_step import UPDATE
from hybridtrainer.smaller_step import Division, NothingSmaller, SmallerStep
from hybridtrainer.state import Training
from hybridtrainer.trainer import HybridTrainer


def quiet(*_: object) -> None:
    pass


def mean_loss(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).sub(batch[1]).square().mean()


class Hungry:
    """A loss with memory for so many samples at a time."""

    def __init__(self, fits: int, loss_fn: Any = mean_loss) -> None:
        self.fits, self.loss_fn = fits, loss_fn
        self.seen: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        loss = self.loss_fn(model, batch)  # by then dropout has drawn
        if torch.is_grad_enabled():
            self.seen.append(len(batch[0]))
            if len(batch[0]) > self.fits:
                raise torch.OutOfMemoryError("injected")
        return loss


def make(
    loss_fn: Any, allowed: bool = True, model: nn.Module | None = None
) -> tuple[SmallerStep, nn.Module, list[str]]:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None, None)
    said: list[str] = []
    guard = BufferGuard(model)
    guard.remember()
    step = SmallerStep(training, CheckedLoss(model, loss_fn, "fp32"), None, guard, allowed, said.append)
    return step, model, said


def batch_of(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
@pytest.mark.parametrize(("samples", "fits", "parts"), [(8, 4, 2), (8, 1, 8), (7, 3, 4), (5, 1, 5)])
def test_the_step_is_that_of_a_division_from_the_start(samples, fits, parts):
    hungry = Hungry(fits)
    step, model, said = make(hungry)
    twin, model_of_twin, _ = make(mean_loss)
    twin.division = Division(parts)
    for number in range(3):
        torch.manual_seed(number)
        outcome = step([batch_of(samples, number)], quiet, quiet)
        after = RandomState.capture()
        torch.manual_seed(number)
        assert twin([batch_of(samples, number)], quiet, quiet) == outcome
        assert torch.equal(RandomState.capture().torch_cpu, after.torch_cpu)
        assert same(model, model_of_twin)
    assert step.division == Division(parts)
    assert len(said) == 1 and f"of {samples} samples are computed at a time" in said[0]
    assert max(hungry.seen[-2:]) <= fits  # it stays divided


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
def test_the_gradient_is_that_of_the_whole_batch():
    plain, model_of_plain, _ = make(mean_loss, model=nn.Linear(4, 1))
    step, model, _ = make(Hungry(2), model=nn.Linear(4, 1))
    model.load_state_dict(model_of_plain.state_dict())
    for number in range(3):  # 7 and 5: parts of unequal size
        batches = [batch_of(7, number), batch_of(5, number + 10)]
        outcome, expected = step(batches, quiet, quiet), plain(batches, quiet, quiet)
        assert outcome.loss == pytest.approx(expected.loss, rel=1e-5)
        assert outcome.norm == pytest.approx(expected.norm, rel=1e-5)
    torch.testing.assert_close(model.weight, model_of_plain.weight, rtol=1e-5, atol=1e-7)


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).view(-1, 1).expand(-1, 3) * torch.arange(3.0), batch[1])


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
def test_a_mean_over_targets_is_weighed_by_targets_when_that_first_makes_a_difference():
    plain, model_of_plain, _ = make(masked_loss, model=nn.Linear(4, 1))
    step, model, _ = make(Hungry(2, masked_loss), model=nn.Linear(4, 1))
    model.load_state_dict(model_of_plain.state_dict())
    for number, targets in enumerate(([0, 1, 2, 0], [0, -100, -100, -100], [-100, -100, 1, 2], [0, -100, 1, 2])):
        batch = batch_of(4, number)[0], torch.tensor(targets)
        outcome, expected = step([batch], quiet, quiet), plain([batch], quiet, quiet)
        assert outcome.loss == pytest.approx(expected.loss, rel=1e-5)
        assert outcome.norm == pytest.approx(expected.norm, rel=1e-5)
        assert step.division == Division(2, "targets" if number else None)


def summed(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().sum()


def unsliceable(model: nn.Module, batch: Any) -> Any:
    return model(batch[0].view(8, 4)).mean()


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "off": ({"loss_fn": Hungry(4), "allowed": False}, batch_of(8), "`memory.retry_smaller` is off"),
    "one sample": ({"loss_fn": Hungry(0)}, batch_of(8), "that was one sample at a time"),
    "structure": ({"loss_fn": Hungry(4)}, (*batch_of(8), torch.zeros(3)), "a tensor of 3 stands beside one of 8"),
    "a sum": ({"loss_fn": Hungry(4, summed)}, batch_of(8), "not the mean of the losses of its parts"),
    "its shape is fixed": ({"loss_fn": Hungry(4, unsliceable)}, batch_of(8), "parts of the batch cannot be computed"),
    "batch norm": (
        {"loss_fn": Hungry(4), "model": nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))},
        batch_of(8),
        "batch norms would see fewer samples",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_would_be_another_training_is_not_divided_and_nothing_has_changed(name):
    options, batch, why = REFUSED[name]
    step, model, said = make(**options)
    before, random_state = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(NothingSmaller, match="injected") as raised:
        step([batch], quiet, quiet)
    assert why in raised.value.refusal
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not said and step.division == Division()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_whether_a_loss_is_a_mean_is_seen_with_fewer_samples_where_all_do_not_fit():
    class Starved(Hungry):
        def __call__(self, model: nn.Module, batch: Any) -> Any:
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("injected")
            return super().__call__(model, batch)

    step, _, _ = make(Starved(2))
    with pytest.warns(UserWarning, match="2 of 8 samples are computed at a time"):
        step([batch_of(8)], quiet, quiet)
    step, _, _ = make(Starved(2, summed))
    with pytest.raises(NothingSmaller) as raised:
        step([batch_of(8)], quiet, quiet)
    assert "not the mean" in raised.value.refusal


def test_the_module_that_ran_out_is_named():
    class Greedy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("injected")

    step, _, _ = make(mean_loss, model=nn.Sequential(nn.Linear(4, 4), nn.Sequential(Greedy(), nn.Linear(4, 1))))
    with pytest.raises(NothingSmaller) as raised:
        step([batch_of(1)], quiet, quiet)
    assert raised.value.module == "1.0"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("injected"), KeyError("mine")])
def test_a_failed_update_is_not_made_again_and_nothing_goes_on_until_a_checkpoint_is_loaded(monkeypatch, error):
    step, _, _ = make(mean_loss)
    step([batch_of(8)], quiet, quiet)
    whole = step.state()

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", fail)
        with pytest.raises(type(error)) as raised:
            step([batch_of(8)], quiet, quiet)
    if isinstance(raised.value, NothingSmaller):
        assert raised.value.doing == UPDATE and "between two steps" in raised.value.refusal
    for use in (step.state, step.require_whole, lambda: step([batch_of(8)], quiet, quiet)):
        with pytest.raises(TornStepError, match="Load the last checkpoint"):
            use()
    step.restore(whole)
    step([batch_of(8)], quiet, quiet)


def test_a_part_without_targets_is_left_out():
    step, _, _ = make(masked_loss, model=nn.Linear(4, 1))
    step.division = Division(2, "targets")
    batch = batch_of(4)[0], torch.tensor([0, 1, -100, -100])
    assert torch.isfinite(torch.tensor(step([batch], quiet, quiet).loss))
    assert not isinstance(divide(batch, 2), str)


def test_what_the_failed_pass_held_on_to_is_free_before_anything_else_is_computed():
    held: list[weakref.ref[Tensor]] = []

    def greedy(model: nn.Module, batch: Any) -> Any:
        assert all(each() is None for each in held)
        if torch.is_grad_enabled() and len(batch[0]) > 4:
            activation = torch.zeros(3)
            held.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("injected")
        return mean_loss(model, batch)

    step, _, _ = make(greedy)
    with pytest.warns(UserWarning, match="4 of 8 samples"):
        step([batch_of(8)], quiet, quiet)
    assert len(held) == 1


class _Scaled(nn.Module):
    """A layer with a buffer that others change."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.temperature
        return out


class _Cooler:
    def before_step(self, trainer: Any, _: Any) -> None:
        trainer.model.temperature.mul_(0.5)


def test_what_a_hook_did_to_buffers_before_the_step_is_kept_when_it_is_made_again():
    results = []
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    for limit in (99, 4):

        def loss(model: nn.Module, batch: Tensor, limit: int = limit) -> Tensor:
            if torch.is_grad_enabled() and len(batch) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            out: Tensor = model(batch).square().mean()
            return out

        torch.manual_seed(0)
        model = _Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = HybridTrainer(model, optimizer, loss, HybridTrainerConfig(predict="off"), hooks=[_Cooler()])
        if limit == 99:
            trainer._real_step.division = Division(2)  # type: ignore[union-attr]
        results.append((trainer.step(x).loss, float(model.temperature), model.layer.weight.tolist()))
    assert results[0] == results[1]
    assert results[0][1] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_are_divided_too(dtype):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        out: Tensor = model(batch).square().mean()
        return out

    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = HybridTrainer(model, optimizer, loss, HybridTrainerConfig(predict="off"))
        trainer.step(torch.randn(8, 8).to(dtype))
        assert trainer._real_step.division.parts == 2  # type: ignore[union-attr]


class _Counting(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        out: Tensor = self.out(self.embedding(x))
        return out


def test_a_measurement_in_the_middle_of_a_step_does_not_count_samples_twice():
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        x, y = batch
        if torch.is_grad_enabled():
            calls += 1
            if len(x) > 4 or calls == 5:  # the second part of the second micro-batch
                raise torch.OutOfMemoryError("CUDA out of memory")
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    torch.manual_seed(1)
    one, two = torch.randint(0, 9, (8, 5)), torch.randint(0, 9, (8, 5))
    targets = two.clone()
    targets[0, 1:] = -100
    model = _Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = HybridTrainer(model, optimizer, loss, HybridTrainerConfig(predict="off"), accumulate=2)
    trainer.step([(one, one.clone()), (two, targets)])
    assert trainer._real_step.division.parts == 4  # type: ignore[union-attr]
    assert model.seen == 16


class Shares:
    """A sum over the targets of a step, divided by their number; without gradients the mean over a batch."""

    is_share = parts_add = True

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        errors = model(batch[0]).sub(batch[1]).square()
        return errors.sum() / 12 if torch.is_grad_enabled() else errors.mean()


def test_parts_of_a_share_are_added_as_micro_batches_are():
    linear = nn.Linear(4, 1)
    whole, model, _ = make(Shares(), model=linear)
    twin = nn.Linear(4, 1)
    twin.load_state_dict(model.state_dict())
    divided, other, said = make(Hungry(2, Shares()), model=twin)
    divided._loss._loss_fn.is_share = divided._loss._loss_fn.parts_add = True  # type: ignore[attr-defined]
    batches = [batch_of(8), batch_of(4, seed=1)]
    loss = whole(batches, quiet, quiet).loss
    with pytest.warns(UserWarning, match="2 of 8 samples"):
        assert divided(batches, quiet, quiet).loss == pytest.approx(loss)
    assert said
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
