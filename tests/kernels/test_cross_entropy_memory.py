"""The head's loss where GPU memory runs out: computed again in smaller tiles, or a note that says what to do."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtrainer.kernels import cross_entropy
from hybridtrainer.kernels.cross_entropy import FEWEST_TOKENS, head_loss

TOKENS, WIDTH, VOCABULARY = 256, 12, 37


def run(**options: Any) -> tuple[Tensor, ...]:
    """Losses and the gradients of hidden states, weight and bias."""
    torch.manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    bias = torch.randn(VOCABULARY, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2, TOKENS // 2))
    losses = head_loss(hidden, weight, targets, bias=bias, **options)
    return (losses.detach(), *torch.autograd.grad(losses.square().sum(), [hidden, weight, bias]))


def run_out(monkeypatch: pytest.MonkeyPatch, name: str, fits: int, skip: int = 0) -> list[int]:
    """From its call number `skip` on the function has memory for so many tokens. Returns the tiles it is given."""
    original, tiles = getattr(cross_entropy, name), []

    def hungry(logits: Tensor, *args: Any) -> Any:
        tiles.append(len(logits))
        if len(tiles) > skip and len(logits) > fits:
            raise torch.OutOfMemoryError("injected")
        return original(logits, *args)

    monkeypatch.setattr(cross_entropy, name, hungry)
    return tiles


@pytest.mark.parametrize("skip", [0, 1], ids=["first tile", "second tile"])
def test_a_tile_that_does_not_fit_forward_gives_the_bits_of_half_the_tile(monkeypatch, skip):
    expected = run(tile_tokens=64)
    tiles = run_out(monkeypatch, "_log_sum_exp_", 64, skip)
    with pytest.warns(UserWarning, match="computed again, 64 tokens at a time. Pass `tile_tokens=64`") as told:
        found = run(tile_tokens=128)
    assert len(told) == 1
    assert tiles == [128] * (skip + 1) + [64] * 4
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("skip", [0, 1], ids=["first tile", "second tile"])
def test_a_tile_that_does_not_fit_backward_adds_nothing_twice(monkeypatch, skip):
    losses, *_ = run(tile_tokens=128)
    _, *expected = run(tile_tokens=64)
    tiles = run_out(monkeypatch, "_slope_", 64, skip)
    with pytest.warns(UserWarning, match="64 tokens at a time"):
        found, *gradients = run(tile_tokens=128)
    assert tiles == [128] * (skip + 1) + [64] * 4
    assert torch.equal(found, losses)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)  # losses were taken in larger tiles


def test_backward_begins_with_the_tile_that_fitted_forward(monkeypatch):
    run_out(monkeypatch, "_log_sum_exp_", 64)
    tiles = run_out(monkeypatch, "_slope_", 64)
    with pytest.warns(UserWarning, match="computed again") as told:
        run(tile_tokens=256)
    assert [str(each.message).split(" tokens")[0].split()[-1] for each in told] == ["128", "64"]
    assert tiles == [64] * 4


def test_a_tile_larger_than_the_batch_is_halved_from_the_batch_on(monkeypatch):
    tiles = run_out(monkeypatch, "_log_sum_exp_", 128)
    with pytest.warns(UserWarning, match="128 tokens at a time"):
        run(tile_tokens=10_000)
    assert tiles == [256, 128, 128]


@pytest.mark.parametrize("name", ["_log_sum_exp_", "_slope_"])
@pytest.mark.filterwarnings("ignore:GPU memory ran out")
def test_where_a_smaller_tile_would_not_help_the_error_says_what_would(monkeypatch, name):
    tiles = run_out(monkeypatch, name, 0)
    with pytest.raises(torch.OutOfMemoryError, match="injected") as raised:
        run(tile_tokens=128)
    assert tiles == [128, 64, 32]
    assert tiles[-1] == FEWEST_TOKENS
    (note,) = raised.value.__notes__
    assert "32 tokens at a time" in note and "frozen head" in note and "smaller batch" in note
    assert re.search(r"takes \d+\.\d KiB", note)


def test_a_small_tile_is_not_made_smaller(monkeypatch):
    tiles = run_out(monkeypatch, "_log_sum_exp_", 0)
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError):
        warnings.simplefilter("error")
        run(tile_tokens=8)
    assert tiles == [8]


def test_nothing_is_said_where_there_is_memory():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a word about memory would raise
        found = run()
    assert found is not None
