"""Norms, clipping, settings by group, and the check before each update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.memory.arena import Arena
from hybridtrainer.memory.layout import Kind, lay_out
from hybridtrainer.memory.portions import divide
from hybridtrainer.memory.units import Unit
from hybridtrainer.memory.updates import EPSILON, LAST_NORM, Gatherer, Updates, apply_

CPU = torch.device("cpu")
SHAPES = ((7, 5), (11,), (3, 3, 3), (1,))


def make(
    clip_norm: float | None = None, last_norm: float | None = None, seed: int = 0
) -> tuple[Updates, list[Unit], list[dict[str, Any]]]:
    """Four units of one parameter each, in two groups."""
    units = []
    for key, shape in enumerate(SHAPES):
        layout = lay_out([Kind("w", shape, "fp32", True)])
        nothing = Arena(0, CPU).take(0)
        states = Arena(1 << 16, CPU).take(layout.state_bytes)
        units.append(Unit(key, layout, (nn.Parameter(torch.zeros(shape)),), nothing, states, nothing))
    parameters = [unit.parameters[0] for unit in units]
    groups = [
        {"params": parameters[:2], "lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
        {"params": parameters[2:], "lr": torch.tensor(0.25), "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    ]
    groups[0][LAST_NORM] = last_norm
    return Updates(groups, parameters, len(units), CPU, clip_norm, seed), units, groups


def gradients(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10**number for number, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_the_norm_is_torchs_bit_for_bit_in_whatever_order_gradients_come(order, seed):
    updates, units, _ = make()
    grads = gradients(seed)
    for key in order:
        updates.measure(units[key], [grads[key]])
    assert torch.equal(updates.norm(), torch.nn.utils.get_total_norm(grads))


def test_the_norm_of_nothing_is_zero_and_a_gradient_that_grows_counts_once():
    updates, units, _ = make()
    assert updates.norm() == 0
    updates.measure(units[0], [torch.ones(7, 5)])
    updates.measure(units[0], [torch.full((7, 5), 2.0)])
    assert torch.equal(updates.norm(), torch.full((7, 5), 2.0).norm())
    updates.begin()
    assert updates.norm() == 0


def test_the_norm_of_a_unit_is_in_fp32_whatever_its_gradients_are_in():
    updates, _, _ = make()
    shapes = [(7, 5), (11,), (3, 3)]
    layout = lay_out([Kind(f"w{number}", shape, "split8", True) for number, shape in enumerate(shapes)])
    parameters = tuple(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    updates._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    nothing = Arena(0, CPU).take(0)
    unit = Unit(0, layout, parameters, nothing, nothing, nothing)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    found = updates.measure(unit, grads)
    assert torch.equal(found, torch.stack([grad.detach().norm().float() for grad in grads]).norm())
    assert not found.requires_grad and not updates.norm().requires_grad


def test_the_exact_factor_is_torchs_own():
    for clip in (1e-3, 1.0, 1e9):
        updates, units, _ = make(clip)
        grads = gradients()
        clipped = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        for unit, parameter, grad in zip(units, clipped, grads, strict=True):
            updates.measure(unit, [grad])
            parameter.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(clipped, clip)
        for parameter, grad in zip(clipped, grads, strict=True):
            assert parameter.grad is not None
            assert torch.equal(grad * updates.exact_factor(), parameter.grad)
    updates, units, _ = make(None)
    updates.measure(units[0], [torch.full((7, 5), 1e9)])
    assert updates.exact_factor() == 1


def admitted(updates: Updates, unit: Unit, norm: float) -> Any:
    grad = torch.zeros(SHAPES[unit.key])
    grad.view(-1)[0] = norm
    scale, ok = updates.admit(unit, updates.measure(unit, [grad]))
    assert (scale.dtype, ok.dtype) == (torch.float32, torch.int32)  # as kernels read them
    return float(scale), bool(ok)


def test_a_fused_update_is_clipped_by_the_last_norm():
    updates, units, _ = make(clip_norm=1.0, last_norm=4.0)
    assert admitted(updates, units[0], 0.1) == (pytest.approx(1 / (4 + EPSILON)), True)
    assert admitted(updates, units[1], 3.9) == (pytest.approx(1 / (4 + EPSILON)), True)


def test_a_unit_whose_own_norm_is_larger_is_clipped_by_that():
    updates, units, _ = make(clip_norm=1.0, last_norm=4.0)
    assert admitted(updates, units[0], 10.0) == (pytest.approx(1 / 10), True)
    assert admitted(updates, units[1], 0.1) == (pytest.approx(1 / 4), True)


def test_in_the_first_step_all_units_count_as_alike():
    updates, units, _ = make(clip_norm=1.0)
    assert admitted(updates, units[0], 3.0) == (pytest.approx(1 / (3 * 4**0.5)), True)
    assert admitted(updates, units[1], 0.1) == (1.0, True)


def test_small_gradients_are_never_made_larger_and_without_clipping_none_smaller():
    updates, units, _ = make(clip_norm=100.0, last_norm=1e-3)
    assert admitted(updates, units[0], 1.0) == (1.0, True)
    updates, units, _ = make(clip_norm=None, last_norm=1e9)
    assert admitted(updates, units[0], 1e9) == (1.0, True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_stops_the_updates_from_its_unit_on(bad):
    updates, units, groups = make(clip_norm=1.0, last_norm=4.0)
    assert [admitted(updates, units[key], norm)[1] for key, norm in ((3, 1.0), (2, bad), (0, 1.0))] == [
        True, False, False,
    ]  # fmt: skip
    assert not updates.is_finite()
    assert updates.end() == {3: True, 2: False, 0: False}
    assert groups[0][LAST_NORM] == 4.0
    assert admitted(updates, units[0], 1.0)[1]  # the next step is a new one


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_loss_that_is_not_finite_stops_every_update(bad):
    updates, units, _ = make()
    updates.watch_loss(torch.tensor(1.0, requires_grad=True))
    assert updates.is_finite()
    updates.watch_loss(torch.tensor(bad))
    updates.watch_loss(torch.tensor(1.0))
    assert not updates.is_finite()
    assert not admitted(updates, units[0], 1.0)[1]


def test_the_last_norm_is_kept_in_the_first_group():
    updates, units, groups = make(clip_norm=1.0)
    admitted(updates, units[0], 3.0)
    admitted(updates, units[3], 4.0)
    assert updates.end() == {0: True, 3: True}
    assert groups[0][LAST_NORM] == pytest.approx(5.0)
    assert isinstance(groups[0][LAST_NORM], float)
    assert updates.end() == {}
    assert groups[0][LAST_NORM] == pytest.approx(5.0)  # a step without gradients says nothing of norms


def test_settings_are_those_of_the_group_at_the_time():
    updates, units, groups = make(seed=9)
    first, last = (updates.hyper(units[key].parameters[0], 3) for key in (0, 3))
    assert (first.lr, first.beta1, first.beta2, first.eps, first.weight_decay) == (0.5, 0.9, 0.99, 1e-8, 0.1)
    assert (last.lr, last.beta1, last.beta2, last.eps, last.weight_decay) == (0.25, 0.8, 0.95, 1e-6, 0.0)
    assert (first.step, first.seed, first.tensor, last.tensor) == (3, 9, 0, 3)
    groups[0]["lr"] = 0.125  # as a scheduler does
    assert updates.hyper(units[0].parameters[0], 4).lr == 0.125


@pytest.mark.parametrize("ok", [0, 1])
def test_an_update_is_made_only_where_it_is_allowed(ok):
    updates, units, _ = make()
    unit = units[0]
    ((target, parameter),) = unit.targets
    hyper = updates.hyper(parameter, 1)
    weight, state = parameter.detach(), target.state_views(unit.states.lanes)
    grad = torch.full(SHAPES[0], 2.0)
    allowed = torch.tensor(ok, dtype=torch.int32)
    (portion,) = divide(unit.layout)
    apply_(portion, [state], [target], [weight], [grad], [hyper], torch.tensor(0.5), allowed, Gatherer())
    expected = nn.Parameter(torch.zeros(SHAPES[0]))
    expected.grad = grad * 0.5
    torch.optim.AdamW([expected], lr=0.5, betas=(0.9, 0.99), weight_decay=0.1, foreach=False).step()
    assert torch.equal(weight, expected if ok else torch.zeros(SHAPES[0]))
    assert bool(state["v"].any()) == bool(ok)


def test_gradients_of_vectors_are_put_side_by_side_with_zeros_between():
    kinds = [Kind("a", (3,), "split32", True), Kind("w", (80, 80), "sr8", True), Kind("b", (2, 2), "split32", True)]
    layout = lay_out(kinds)
    gather = Gatherer()
    for factor in (1.0, 2.0):  # the same memory serves again
        grads = [torch.full(kind.shape, factor * (number + 1)) for number, kind in enumerate(kinds)]
        matrix, vectors = (gather(target, grads) for target in layout.targets)
        assert matrix.data_ptr() == grads[1].data_ptr()
        members = [vectors[start : start + grads[number].numel()] for number, start in layout.targets[1].members]
        assert [each.tolist() for each in members] == [[factor] * 3, [3 * factor] * 4]
        assert vectors.sum() == factor * (3 + 12)
        assert len(vectors) == layout.targets[1].weight.elements


def test_vectors_updated_together_are_those_updated_alone():
    together, apart = (
        lay_out([Kind(name, (size,), "split32", True, group=group) for name, size, group in shapes])
        for shapes in ([("a", 300, 0), ("b", 7, 0)], [("a", 300, 0), ("b", 7, 1)])
    )
    assert (len(together.targets), len(apart.targets)) == (1, 2)
    updates, units, _ = make()
    hyper = updates.hyper(units[0].parameters[0], 1)
    one, yes = torch.tensor(1.0), torch.tensor(1, dtype=torch.int32)
    results = []
    for layout in (together, apart):
        generator = torch.Generator().manual_seed(5)
        weights, states = (torch.zeros(n, dtype=torch.uint8) for n in (layout.weight_bytes, layout.state_bytes))
        for _ in range(3):
            grads = [torch.randn(entry.shape, generator=generator) for entry in layout.entries]
            (portion,) = divide(layout)
            apply_(
                portion, [target.state_views(states) for target in layout.targets],
                layout.targets, [target.weight.view(weights) for target in layout.targets], grads,
                [hyper] * len(layout.targets), one, yes, Gatherer(),
            )  # fmt: skip
        results.append([(entry.weight_view(weights), entry.state_views(states)) for entry in layout.entries])
    for (weight, state), (other_weight, other_state) in zip(*results, strict=True):
        assert torch.equal(weight, other_weight) and weight.any()
        assert all(torch.equal(state[name], other_state[name]) for name in ("low", "m", "v"))
