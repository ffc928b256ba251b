"""A block whose forward runs in the engine is, for autograd and for its callers, the block it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.memory.small import stack, stream_stack
from torch import Tensor, nn

from hybridtrainer.memory.streamed_block import attach


class Rich(nn.Module):
    """Takes and returns more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor | None = None, *, flag: bool = False) -> Any:
        out = x * self.linear(x) if other is None else self.linear(x) * other
        return {"hidden": out, "best": out.argmax(dim=-1), "flag": flag, "unused": out.detach() + 1}


class Model(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Rich(), Rich()])


def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    streamed, _, _ = stream_stack(Model(), clipping="exact")
    return plain, streamed


def test_nested_results_and_flags_pass_through():
    plain, streamed = pair()
    x = torch.randn(3, 4)
    expected, found = (model.layers[0](x, flag=True) for model in (plain, streamed))
    assert list(found) == list(expected)
    assert torch.equal(found["hidden"], expected["hidden"])
    assert torch.equal(found["best"], expected["best"])
    assert found["flag"] is True
    assert found["hidden"].requires_grad and not found["best"].requires_grad


def test_gradients_reach_every_tensor_that_needs_one():
    plain, streamed = pair()
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 3, 4, generator=generator)
    found = []
    for model in (plain, streamed):
        x, other = (value.clone().requires_grad_() for value in values)
        model.layers[1](model.layers[0](x)["hidden"], other=other)["hidden"].square().sum().backward()
        found.append((x.grad, other.grad))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_result_that_is_used_in_part_only_has_its_gradient():
    plain, streamed = pair()
    found: list[Any] = []
    for model in (plain, streamed):
        x = torch.ones(3, 4, requires_grad=True)
        model.layers[0](x)["hidden"][1:].sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_whole_numbers_as_inputs_need_no_gradient():
    ids = torch.ones(3, 4, dtype=torch.int64)
    found: list[Any] = []
    for model in pair():
        x = torch.ones(3, 4, requires_grad=True)
        model.layers[0](x, other=ids)["hidden"].sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    assert ids.grad is None


def test_without_gradients_no_graph_is_made_and_nothing_is_kept(monkeypatch):
    model, _, engine = stream_stack()
    monkeypatch.setattr(engine, "keep", lambda _: pytest.fail("an input was kept"))
    with torch.no_grad():
        out = model.blocks[0](torch.ones(2, 4, requires_grad=True))
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(model.blocks[0](torch.ones(2, 4)), out)


def test_class_names_and_hooks_stay():
    plain = stack()
    called: list[str] = []
    plain.blocks[0].register_forward_pre_hook(lambda *_: called.append("before"))
    plain.blocks[0].linear.register_forward_hook(lambda *_: called.append("inside"))
    kind, names = type(plain.blocks[0]), [name for name, _ in plain.named_modules()]
    model, _, _ = stream_stack(plain)
    assert type(model.blocks[0]) is kind
    assert [name for name, _ in model.named_modules()] == names
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert called == ["before", "inside"]


def test_only_this_one_module_is_changed():
    class Engine:
        anchor = torch.zeros(())

        def forward(self, index: int, *_: Any, **__: Any) -> Any:
            raise RuntimeError(f"block {index}")

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    engine: Any = Engine()
    attach(one, engine, 7)
    with pytest.raises(RuntimeError, match="block 7"):
        one(torch.ones(1, 2))
    other(torch.ones(1, 2))
