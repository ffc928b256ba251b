"""What goes past arguments and results, or changes twice, is refused at the first visit instead of being wrong."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.memory.small import WIDTH, Block, Stack, equal, stack, stream_stack, train, weights
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.side_ways import tensors_in


@dataclass
class Hidden:
    """An object that pytree does not know."""

    value: Any


class Through(nn.Module):
    """A stack whose blocks are called in some way."""

    def __init__(self, kind: type[nn.Module], call: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind() for _ in range(3)])
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.call = call or (lambda block, x, _: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gate
        for block in self.blocks:
            x = self.call(block, x, self)
        return x


def run(kind: type[nn.Module], call: Any = None, **options: Any) -> None:
    model, optimizer, _ = stream_stack(Through(kind, call), **options)
    assert all(map(math.isfinite, train(model, optimizer, 2)))


class ReturnsObject(Block):
    """Its result is in an object."""

    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


class TakesObject(Block):
    """So is its argument, or a second one."""

    def forward(self, x: Any, other: Any = None) -> Tensor:
        return super().forward(x.value if isinstance(x, Hidden) else x * (1 if other is None else other.value))


def test_a_result_in_an_object_is_refused():
    with pytest.raises(ModelError, match=r"returns a Hidden.*Return a tensor"):
        run(ReturnsObject, lambda block, x, _: block(x).value)


def test_an_object_without_a_tensor_that_needs_a_gradient_is_a_constant():
    found = []
    for value in (2.0, torch.full((WIDTH,), 2.0)):
        constant = Hidden(value)

        def call(block: nn.Module, x: Tensor, _: Any, constant: Hidden = constant) -> Any:
            return block(x, constant)

        model, optimizer, _ = stream_stack(Through(TakesObject, call))
        train(model, optimizer, 3)
        plain = Through(TakesObject, call)
        train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), 3)
        found.append(equal(weights(model), weights(plain)))
    assert found == [True, True]


@pytest.mark.parametrize("value", [lambda x: x, lambda x: {"deep": [x]}], ids=["tensor", "nested"])
def test_an_object_with_a_tensor_that_needs_a_gradient_is_refused(value):
    with pytest.raises(ModelError, match="gets a Hidden with a tensor that needs a gradient"):
        run(TakesObject, lambda block, x, _: block(x, Hidden(value(x))))


def test_a_block_without_a_tensor_among_its_arguments_is_run():
    model, _, _ = stream_stack(Through(TakesObject))
    x = torch.ones(2, WIDTH)
    assert torch.equal(model.blocks[0](Hidden(x)), model.blocks[0](x))
    model.blocks[0](Hidden(x)).sum().backward()


def test_a_cache_that_a_block_fills_is_refused():
    class Fills(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            cache.value.append(x)
            return super().forward(x)

    with pytest.raises(ModelError, match=r"changes an object that it gets.*past_key_values"):
        run(Fills, lambda block, x, _: block(x, Hidden([])))


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_block_that_changes_its_argument_in_place_is_refused(needs_gradient):
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += super().forward(x)
            return x

    model, _, _ = stream_stack(Through(InPlace))
    model.gate.requires_grad_(needs_gradient)
    with pytest.raises(ModelError, match=r"changes one of its arguments in place.*`x = x"):
        model(torch.ones(2, WIDTH))


def test_a_loss_left_in_an_attribute_is_refused():
    class Leaves(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.linear.extra = [y.square().mean()]  # type: ignore[assignment]
            return y

    with pytest.raises(ModelError, match=r"attribute `linear.extra`.*Return it"):
        run(Leaves)


def test_what_is_only_looked_at_may_stay_in_an_attribute():
    class Looks(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.detach()
            self.angles = torch.arange(3.0)
            return super().forward(x)

    run(Looks)


@pytest.mark.parametrize("made", [lambda model, _: model.gate, lambda _, x: x], ids=["parameter", "computed"])
def test_a_tensor_that_a_block_reaches_by_an_attribute_is_refused(made):
    class Reaches(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gates[0]  # type: ignore[index]

    def call(block: Any, x: Tensor, model: nn.Module) -> Any:
        block.gates = [made(model, x)]
        return block(x)

    model, _, _ = stream_stack(Through(Reaches, call))
    before = weights(model)
    with pytest.raises(ModelError, match="neither an argument nor a parameter"):
        model(torch.ones(2, WIDTH)).sum().backward()
    assert equal(weights(model), before)


@pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm], ids=["old", "new"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_weight_that_a_block_computes_is_its_own(norm):
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            norm(self.linear)

    run(Normed)


class Counts(Block):
    """Counts its runs."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
        return super().forward(x)


class CountsAnew(Counts):
    """With a new tensor each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return Block.forward(self, x)


class Spectral(Block):
    """Torch's spectral norm, which goes one step of a power iteration in each run."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.linear)


@pytest.mark.parametrize(
    ("kind", "name"), [(Counts, "count"), (CountsAnew, "count"), (Spectral, "linear.parametrizations.weight.0._u")]
)
def test_a_buffer_that_every_run_changes_is_refused(kind, name):
    with pytest.raises(ModelError, match=f"changes its buffer `{name}`.*eval"):
        run(kind)


def test_a_block_that_counts_in_training_only_may_be_in_eval_mode():
    model, optimizer, _ = stream_stack(Through(Counts).eval())
    train(model, optimizer, 2)
    assert model.blocks[0].count.item() == 0
    model.train()
    with pytest.raises(ModelError, match="runs twice"):
        train(model, optimizer, 1)


def test_a_buffer_computed_when_it_is_first_needed_is_no_change():
    class Lazy(Counts):
        def forward(self, x: Tensor) -> Tensor:
            self.drawn = torch.rand(2)
            if self.count == 0:
                self.count = torch.full((), 3.0)
            self.register_buffer("other", torch.ones(2))
            return Block.forward(self, x)

    torch.manual_seed(3)
    run(Lazy)


def test_what_is_looked_for_draws_nothing_and_is_looked_for_once(monkeypatch):
    class Counted(Block):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.runs += 1
            return super().forward(x)

    model, optimizer, _ = stream_stack(Through(Counted))
    train(model, optimizer, 1)
    assert Counted.runs == 6
    for name in ("buffers_of", "require_closed", "require_nothing_left"):
        monkeypatch.setattr(f"hybridtrainer.memory.body.{name}", lambda *_: pytest.fail("a second look"))
    for name in ("require_arguments", "contents"):
        monkeypatch.setattr(f"hybridtrainer.memory.streamed_block.{name}", lambda *_: pytest.fail("a second look"))
    train(model, optimizer, 1)


def test_checkpointing_inside_a_block_that_torch_does_not_allow_says_what_to_switch_off():
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=True)

    with pytest.raises(ModelError, match=r"use_reentrant=True.*gradient_checkpointing_disable"):
        run(Checkpointed)


def test_what_hugging_face_takes_out_of_blocks_is_refused_where_it_could_be_trained_on():
    class Model(Stack):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            return super().forward(x)

    plain = Model()
    plain.config = SimpleNamespace(output_router_logits=False)  # type: ignore[assignment]
    model, _, _ = stream_stack(plain)
    x = torch.ones(1, WIDTH)
    model(x, output_attentions=False)
    with pytest.raises(ModelError, match=r"`output_attentions` takes tensors out"):
        model(x, output_attentions=True)
    model.config.output_router_logits = True
    with torch.no_grad():
        model(x, output_attentions=True)
    model(x, output_router_logits=False)
    with pytest.raises(ModelError, match=r"`output_router_logits`.*Set it to False"):
        model(x)


def test_tensors_are_found_in_containers_and_objects_but_not_in_modules():
    class Slotted:
        __slots__ = ("held",)

    a, b, c, d = (torch.ones(()) for _ in range(4))
    slotted = Slotted()
    slotted.held = c  # type: ignore[attr-defined]
    around: dict[str, Any] = {"list": [a, (b,)], "slots": slotted, "deque": deque([d]), "module": stack(), "text": "x"}
    around["itself"] = around
    assert {id(each) for each in tensors_in(around)} == {id(each) for each in (a, b, c, d)}
    assert {id(each) for each in tensors_in(around, objects=False)} == {id(each) for each in (a, b, d)}
