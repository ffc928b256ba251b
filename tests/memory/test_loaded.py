"""Weights that are loaded into a streamed model, as exactly as they are kept."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.memory.small import loss_of, stack, stream_stack, train


def exact(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.home.read(0, parameter.numel()) for parameter in model.parameters()]  # type: ignore[attr-defined]


def flat(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value.reshape(-1).float() for value in state.values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["fp32", "split8"])
def test_what_is_loaded_over_a_trained_model_is_what_it_has_to_the_last_bit(mode, dtype):
    model, optimizer, _ = stream_stack(mode=mode)
    train(model, optimizer, 3)
    given = {name: (value + 0.123).to(dtype) for name, value in stack().state_dict().items()}
    model.load_state_dict(given)
    assert equal(exact(model), flat(given))
    train(model, optimizer, 1)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_goes_on_exactly_whichever_of_its_two_states_is_loaded_first(model_first):
    model, optimizer, _ = stream_stack(mode="split8")
    train(model, optimizer, 3)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, 3, first=3)
    again, other, _ = stream_stack(mode="split8")
    train(again, other, 2)
    for part, state in ((again, kept[0]), (other, kept[1])) if model_first else ((other, kept[1]), (again, kept[0])):
        part.load_state_dict(state)
    assert train(again, other, 3, first=3) == expected


def test_a_part_of_a_state_leaves_the_other_weights_as_exact_as_they_were():
    model, optimizer, _ = stream_stack(mode="split8")
    train(model, optimizer, 3)
    before = exact(model)
    model.load_state_dict({"head.weight": torch.full((4, 4), 0.1)}, strict=False)
    after = exact(model)
    assert equal(after[:-1], before[:-1]) and torch.equal(after[-1], torch.full((16,), 0.1))
    loss_of(model).backward()
