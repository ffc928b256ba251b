"""Decoders of one's own: planned with their own loss, resident and streamed, as they really train."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrainer import HybridTrainer, HybridTrainerConfig, MemoryConfig, plan, stream
from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.cross_entropy import head_loss
from hybridtrainer.models.gpt import GPT, GPTConfig
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.planner import choose
from hybridtrainer.planning.rehearsal import Ledger
from hybridtrainer.planning.rehearsals import Rehearsals
from hybridtrainer.sizes import GIB

SAMPLES, CONTEXT, WIDTH, VOCABULARY = 4, 128, 64, 1000


class Block(nn.Module):
    """Returns what the next one is given, and something for whoever wants to look."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = state["hidden"]
        return {"hidden": hidden + self.down(F.gelu(self.up(self.norm(hidden))))}


class Own(nn.Module):
    """Nothing about it is known: no `config`, blocks that pass dictionaries, a forward of its own."""

    def __init__(self, tied: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.LayerNorm(WIDTH)
        self.head = None if tied else nn.Linear(WIDTH, VOCABULARY, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.emb.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, scale: float) -> Tensor:
        state = {"hidden": scale * self.emb(tokens) + self.places}
        for layer in self.layers:
            state = layer(state)
        hidden: Tensor = self.last(state["hidden"])
        return hidden


def own_loss(model: Any, tokens: Tensor) -> Tensor:
    return head_loss(model(tokens[:, :-1], 1.0), model.weight, tokens[:, 1:]).mean(dim=1)


def test_a_resident_plan_counts_what_a_step_really_keeps():
    model = Own()
    found = plan(model, "2GB", "4GB", tokens=SAMPLES * CONTEXT, context=CONTEXT, loss=own_loss)
    assert found.best.memory.mode == "resident"
    assert found.best.estimate.gpu["weights"] == sum(each.nbytes for each in model.parameters())
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1))
    with Ledger([*model.parameters(), tokens]) as ledger:
        kept = own_loss(model, tokens).mean()
    really = ledger.spent().left_bytes
    del kept
    rehearsals = Rehearsals(model, SAMPLES * CONTEXT, CONTEXT, loss=own_loss)
    assert rehearsals.resident("fp32", 0).spent.kept_bytes == pytest.approx(really, rel=0.01)


class Summing(Block):
    """Returns a number of the whole batch too, which cannot be put together from parts of it."""

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = super().forward(state)
        return found | {"sum": found["hidden"].sum()}


def test_what_a_model_cannot_do_is_not_offered_and_the_rest_is():
    model = Own()
    model.layers = nn.ModuleList(Summing() for _ in range(3))
    rehearsals = Rehearsals(model, SAMPLES * CONTEXT, CONTEXT, loss=own_loss)
    tried: list[MemoryConfig] = []

    def is_allowed(memory: MemoryConfig) -> bool:
        tried.append(memory)
        return True

    assert choose(rehearsals, 2 * GIB, 4 * GIB, is_allowed=is_allowed).best
    assert {memory.split for memory in tried} == {1}
    assert {memory.checkpoint_every for memory in tried} == {0, 1}
    for given in ({"split": 2}, {"checkpoint_every": 2}):
        with pytest.raises(ModelError, match="A block returns a"):
            choose(rehearsals, 2 * GIB, 4 * GIB, given=given)


@pytest.mark.parametrize("tied", [False, True])
def test_a_streamed_plan_counts_what_a_step_really_takes(tied):
    model = Own(tied)
    rehearsals = Rehearsals(model, SAMPLES * CONTEXT, CONTEXT, loss=own_loss)
    option = choose(rehearsals, 2 * GIB, 4 * GIB, is_allowed=lambda memory: memory.mode == "split8").best
    pieces = rehearsals.streamed("split8", 1)
    assert pieces.hidden_bytes == SAMPLES * CONTEXT * WIDTH * 2
    assert pieces.tied_bytes == (VOCABULARY * WIDTH * 2 if tied else 0)
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1))
    hidden = torch.zeros(SAMPLES, CONTEXT, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    norm, weight = model.last.bfloat16(), nn.Parameter(model.weight.detach().bfloat16())
    with Ledger([hidden, weight, tokens, *norm.parameters()]) as ledger:
        mean = head_loss(norm(hidden), weight, tokens[:, 1:]).mean(dim=1).mean()
        grads = torch.autograd.grad(mean, [hidden, weight, *norm.parameters()])
    assert pieces.head.peak_bytes == pytest.approx(ledger.spent().peak_bytes, rel=0.02)
    assert pieces.head.flops == pytest.approx(ledger.spent().flops, rel=0.01)
    del grads
    streamed: Any = stream(Own(tied), MemoryConfig(mode="split8"), device="cpu")
    assert option.estimate.host["weights and states"] == streamed.optimizer.host_bytes
    trainer = HybridTrainer(streamed, None, own_loss, HybridTrainerConfig(predict="off"))
    assert trainer.step(tokens).loss > 0


def test_with_the_same_loss_a_head_that_is_known_takes_the_same():
    model = GPT(GPTConfig("llama", 3, 64, 4, vocabulary=4096, context=32))
    known = rehearse_pieces(model, "split8", 64, 32, 1)
    found = rehearse_pieces(model, "split8", 64, 32, 1, loss=partial(language_loss))
    assert found.tied_bytes == known.tied_bytes > 0
    assert found.head.flops == known.head.flops
    assert found.head.peak_bytes == pytest.approx(known.head.peak_bytes + 2 * known.hidden_bytes, rel=0.05)  # the norm
    assert (found.forward, found.backward) == (known.forward, known.backward)


def test_a_loss_of_whole_logits_is_counted_where_the_model_is_streamed():
    def whole(model: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(
            F.linear(model(tokens[:, :-1], 1.0), model.weight).flatten(0, 1), tokens[:, 1:].flatten()
        )

    tiles, logits = (rehearse_pieces(Own(), "split8", 64, CONTEXT, 1, loss=each) for each in (own_loss, whole))
    assert logits.head.peak_bytes > tiles.head.peak_bytes + 64 * CONTEXT * VOCABULARY * 2


def asks_for_values(model: Any, tokens: Tensor) -> Tensor:
    loss = own_loss(model, tokens)
    return loss * loss.sum().item()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (language_loss, "`plan` takes it as `loss=`"),
        (lambda model, batch: own_loss(model, batch.tokens), r"it gets tokens of \(4, 129\)"),
        (asks_for_values, "that have no values"),
    ],
)
def test_losses_that_cannot_be_planned_are_told_why(loss, words):
    with pytest.raises(ModelError, match=words):
        plan(Own(), "2GB", "4GB", tokens=SAMPLES * CONTEXT, context=CONTEXT, loss=loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: own_loss(model, batch.tokens), "cannot be run without values"),
        (asks_for_values, "behind its blocks"),
        (lambda model, _: model.places.mean(), "did not call its first block"),
    ],
)
def test_losses_that_fail_in_a_streamed_step_are_told_where(loss, words):
    with pytest.raises(ModelError, match=words):
        rehearse_pieces(Own(), "split8", SAMPLES, CONTEXT, 1, loss=loss)
