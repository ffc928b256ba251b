"""Recorded windows: how exactly, at what size, and what can be done with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import tiny_gpt
from torch import Tensor, nn

from hybridtrainer.kernels.int8 import BLOCK, dequantize, quantize
from hybridtrainer.predict import history as history_module
from hybridtrainer.predict import strips as strips_module
from hybridtrainer.predict.groups import group_parameters
from hybridtrainer.predict.history import WindowHistory
from hybridtrainer.tree import fingerprint, pack, unpack
from hybridtrainer.weights import WeightGroup, Weights, flat


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3 * BLOCK), st.floats(-30, 30), st.integers(0, 10**6))
def test_an_error_is_at_most_half_a_scale_and_the_largest_is_exact(count, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 10.0**exponent
    codes, scales = quantize(values)
    assert codes.dtype == torch.int8
    back = dequantize(codes, scales)
    assert len(back) % BLOCK == 0 and not back[count:].any()
    for start in range(0, count, BLOCK):
        block, found = values[start : start + BLOCK], back[start : start + BLOCK][: count - start]
        scale = scales[start // BLOCK]
        largest = block.abs().max()
        assert scale.item() == pytest.approx(largest.item() / 127, rel=1e-6)
        assert bool(((block - found).abs() <= scale * 0.5001).all())
        at = block.abs().argmax()
        assert found[at].item() == pytest.approx(block[at].item(), rel=1e-6)


def test_zeros_stay_zero_and_do_not_become_undefined():
    codes, scales = quantize(torch.zeros(BLOCK + 3))
    assert not codes.any() and not scales.any()
    assert not dequantize(codes, scales).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_keep_the_precision_of_the_values(dtype):
    codes, scales = quantize(torch.randn(10, dtype=dtype))
    assert scales.dtype == dtype
    assert torch.equal(dequantize(codes, scales, 2.0), dequantize(codes, scales) * 2)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(30, 20), nn.Linear(20, 5)).to(dtype)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def history_of(model: nn.Module, capacity: int = 4, bucket_elements: int = 300) -> WindowHistory:
    conv, first, second = model.children()
    groups = [
        WeightGroup("one", 0, (*conv.parameters(), *second.parameters())),
        WeightGroup("two", 1, tuple(first.parameters())),
    ]
    return WindowHistory(Weights(groups, bucket_elements), capacity)


def walk(history: WindowHistory, windows: int, seed: int = 1, steps: int = 2) -> list[list[Tensor]]:
    """Moves the weights at random and records it. Returns each group's true displacement of each window."""
    generator = torch.Generator().manual_seed(seed)
    if not history.is_open:
        history.open()
    displacements = []
    for _ in range(windows):
        before = positions(history)
        for _ in range(steps):
            with torch.no_grad():
                for group in history.weights.groups:
                    for parameter in group.parameters:
                        parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype))
            history.count_step([0.1, 0.01])
        history.close()
        displacements.append([now - then for now, then in zip(positions(history), before, strict=True)])
    return displacements


def positions(history: WindowHistory) -> list[Tensor]:
    return [torch.cat([flat(parameter).double() for parameter in group.parameters]) for group in history.weights.groups]


def recorded(history: WindowHistory) -> list[list[Tensor]]:
    """What the windows hold, per window and group, in the order of `positions`."""
    found = []
    for window in history.windows:
        pieces: list[list[Tensor]] = [[] for _ in history.weights.groups]
        for index, bucket in enumerate(history.weights.buckets):
            whole = dequantize(window.codes[index], window.scales[index])
            pieces[bucket.group].append(whole[: bucket.elements].double())
        found.append([torch.cat(parts) for parts in pieces])
    return found


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_hold_the_displacements_to_half_a_scale(dtype):
    history = history_of(network(dtype))
    true = walk(history, 3)
    for window, found in zip(true, recorded(history), strict=True):
        for exact, approximate in zip(window, found, strict=True):
            assert (exact - approximate).abs().max() <= 0.51 * exact.abs().max() / 127
            assert torch.nn.functional.cosine_similarity(exact, approximate, dim=0) > 0.9999


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bucket_elements", [7, 100, 10**6])
def test_the_gram_matrix_is_that_of_the_recorded_windows(dtype, bucket_elements):
    history = history_of(network(dtype), bucket_elements=bucket_elements)
    walk(history, 6)
    windows = recorded(history)
    assert history.gram.shape == (2, 4, 4)
    for group in range(2):
        stacked = torch.stack([window[group] for window in windows])
        assert torch.allclose(history.gram[group], stacked @ stacked.t(), rtol=1e-4, atol=1e-5)
        assert torch.equal(history.gram[group], history.gram[group].t())


def test_inner_products_of_a_large_group_are_estimated_closely_from_a_sample(monkeypatch):
    monkeypatch.setattr(strips_module, "SAMPLE_ELEMENTS", 1 << 16)
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1024)  # as wide as four blocks: a sample at equal distances would see the same columns
    weight, bias = layer.parameters()
    groups = [WeightGroup("large", 0, (weight,)), WeightGroup("small", 0, (bias,))]
    history = WindowHistory(Weights(groups, 300_000), capacity=4)
    history.open()
    drift = torch.linspace(0, 0.02, 1024).expand(1024, 1024)
    for _ in range(4):
        with torch.no_grad():
            layer.weight.add_(drift + 0.02 * torch.randn(1024, 1024))
            layer.bias.add_(torch.randn(1024))
        history.count_step([0.1])
        history.close()
    windows = recorded(history)
    for group, tolerance in enumerate([0.02, 1e-6]):  # in cosine; the small group is not sampled
        stacked = torch.stack([window[group] for window in windows])
        exact = stacked @ stacked.t()
        norms = exact.diagonal().sqrt()
        assert ((history.gram[group] - exact) / norms[:, None] / norms).abs().max() < tolerance


def test_a_direction_is_compared_with_every_window_and_with_itself():
    history = history_of(network())
    walk(history, 6)
    generator = torch.Generator().manual_seed(9)
    drawn = [torch.randn(bucket.elements, generator=generator) for bucket in history.weights.buckets]
    direction = dict(zip(map(id, history.weights.buckets), drawn, strict=True))
    products = history.compare(history.sample(lambda bucket: direction[id(bucket)]))
    assert products.shape == (2, 5)
    for group in range(2):
        own = torch.cat([each for each, b in zip(drawn, history.weights.buckets, strict=True) if b.group == group])
        windows = torch.stack([window[group] for window in recorded(history)])
        expected = torch.cat([windows @ own.double(), (own.double() @ own.double())[None]])
        sizes = torch.cat([windows.norm(dim=1), own.double().norm()[None]]) * own.double().norm()
        assert ((products[group] - expected) / sizes).abs().max() < 0.01  # rounded to 8 bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_displacing_adds_the_combination_of_windows_group_by_group(dtype):
    history = history_of(network(dtype))
    walk(history, 4)
    before, windows = positions(history), recorded(history)
    pointers = [p.data_ptr() for group in history.weights.groups for p in group.parameters]
    coefficients = torch.tensor([[0.5, -1.0, 0.0, 2.0], [0.0, 0.0, 0.25, -3.0]], dtype=torch.float64)
    history.displace_(coefficients)
    resolution = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for group, after in enumerate(positions(history)):
        added = sum(float(c) * window[group] for c, window in zip(coefficients[group], windows, strict=True))
        assert torch.allclose(after, before[group] + added, rtol=resolution, atol=resolution)
        assert not torch.allclose(after, before[group], atol=0.1)
    assert pointers == [p.data_ptr() for group in history.weights.groups for p in group.parameters]


def test_coefficients_of_zero_leave_a_group_as_it_is():
    history = history_of(network())
    walk(history, 2)
    before = positions(history)
    history.displace_(torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    after = positions(history)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_going_back_along_a_window_returns_to_where_it_began():
    history = history_of(network(torch.float64))
    start = positions(history)
    walk(history, 3)
    history.displace_(torch.full((2, 3), -1.0, dtype=torch.float64))
    for there, here in zip(start, positions(history), strict=True):
        assert (there - here).abs().max() < 0.01  # three times half a scale


def test_the_ring_drops_the_oldest_window():
    history = history_of(network(), capacity=3)
    true = walk(history, 5)
    assert len(history.windows) == 3
    for exact, found in zip(true[2:], recorded(history), strict=True):
        assert torch.nn.functional.cosine_similarity(exact[0], found[0], dim=0) > 0.9999
    assert history.gram.shape == (2, 3, 3)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_no_more_windows_are_kept_than_asked_for(capacity):
    history = history_of(network(), capacity=capacity)
    walk(history, 7)
    assert len(history.windows) == history.gram.shape[1] == capacity


def test_a_window_costs_one_byte_and_a_sixty_fourth_a_parameter():
    weight = nn.Parameter(torch.randn(1 << 20))
    history = WindowHistory(Weights([WeightGroup("all", 0, (weight,))]), 8)
    history.open()
    for _ in range(3):
        with torch.no_grad():
            weight.add_(0.01)
        history.count_step([0.1])
        history.close()
    assert history.nbytes() / (3 * weight.numel()) == pytest.approx(1 + 4 / BLOCK)
    assert history.nbytes() <= 1.02 * 3 * weight.numel()


def pieces(history: WindowHistory) -> list[Tensor]:
    return [piece for window in history.windows for piece in (*window.codes, *window.scales)]


def test_host_memory_is_asked_for_once_a_window_and_written_again():
    history = history_of(network(), capacity=3)
    seen: set[int] = set()
    for _ in range(9):
        walk(history, 1)
        for window in history.windows:
            slabs = {piece.untyped_storage().data_ptr() for piece in (*window.codes, *window.scales)}
            assert len(slabs) == 1
            seen |= slabs
    assert len(seen) == 3 + 1  # one is always free to be written


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("beside", [False, True])
def test_a_window_that_fails_halfway_leaves_the_others_to_the_bit(call, beside, monkeypatch):
    monkeypatch.setattr(strips_module, "runs_beside", lambda _: beside)
    monkeypatch.setattr(strips_module, "STRIP_ELEMENTS", 600)
    history = history_of(network(), capacity=3)
    walk(history, 5)
    windows, before, gram = history.windows, [piece.clone() for piece in pieces(history)], history.gram
    left = [call]

    def running_out(values: Tensor) -> Any:
        if not left[0]:
            raise torch.OutOfMemoryError("injected")
        left[0] -= 1
        return quantize(values)

    with monkeypatch.context() as patched:
        patched.setattr(history_module, "quantize", running_out)
        with pytest.raises(torch.OutOfMemoryError):
            walk(history, 1)
    assert history.windows is windows and history.gram is gram
    assert all(torch.equal(now, then) for now, then in zip(pieces(history), before, strict=True))
    history.open()
    walk(history, 4)
    assert len(history.windows) == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strip_elements", [1, 600, 10**6])
def test_on_a_device_beside_the_host_the_same_is_recorded_to_the_bit(dtype, strip_elements, monkeypatch):
    monkeypatch.setattr(strips_module, "SAMPLE_ELEMENTS", 300)  # less than each group has
    ours = history_of(network(dtype))
    monkeypatch.setattr(strips_module, "runs_beside", lambda _: True)
    monkeypatch.setattr(strips_module, "STRIP_ELEMENTS", strip_elements)
    theirs = history_of(network(dtype))
    for history in (ours, theirs):
        walk(history, 6)
    assert fingerprint({"history": theirs.state()}) == fingerprint({"history": ours.state()})
    restored = history_of(network(dtype))
    restored.restore(through_json(ours.state()))
    with torch.no_grad():
        for mine, other in zip(ours.weights.groups, restored.weights.groups, strict=True):
            for a, b in zip(mine.parameters, other.parameters, strict=True):
                b.copy_(a)
    for history in (ours, theirs, restored):
        walk(history, 2, seed=9)
    assert fingerprint({"history": theirs.state()}) == fingerprint({"history": ours.state()})
    assert fingerprint({"history": restored.state()}) == fingerprint({"history": ours.state()})


def test_the_host_waits_for_inner_products_and_for_no_large_copy(monkeypatch):
    monkeypatch.setattr(strips_module, "runs_beside", lambda _: True)
    history = history_of(network())
    history.open()
    history.count_step([0.1, 0.01])
    told: list[str] = []

    def on_its_way(parts: Any) -> Any:
        told.append("products begin")
        return lambda: told.append("they are waited for") or tuple(parts)  # type: ignore[func-returns-value]

    def moving(*given: Any) -> Tensor:
        told.append("copies are queued")
        return move(*given)

    move = history_module._move_anchor
    monkeypatch.setattr(history_module, "on_its_way", on_its_way)
    monkeypatch.setattr(history_module, "_move_anchor", moving)
    monkeypatch.setattr(history.weights, "wait_for_copies", lambda: told.append("all is waited for"))
    history.close()
    assert told == ["products begin", "copies are queued", "they are waited for"]
    history.state()
    assert told[3:] == ["all is waited for"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_next_step_does_not_overtake_the_copies_of_a_window():
    weight = nn.Parameter(torch.zeros(1 << 25, device="cuda"))
    history = WindowHistory(Weights([WeightGroup("all", 0, (weight,))]), 2)
    history.open()
    for number in range(1, 6):
        with torch.no_grad():
            weight.add_(float(number))
            history.count_step([0.1])
            history.close()
            weight.mul_(1.0)
            weight.add_(100.0)  # what must be in no window
            weight.sub_(100.0)
    state = history.state()
    assert [window["steps"] for window in state["windows"]] == [1, 1]
    for window, number in zip(state["windows"], (4, 5), strict=True):
        for codes, scales in zip(window["codes"], window["scales"], strict=True):
            assert bool((codes == 127).all()) and torch.allclose(scales * 127, torch.tensor(float(number)))
    assert all(bool((anchor == 15.0).all()) for anchor in state["anchors"])
    assert history.gram[0, 1, 1].item() == pytest.approx(25.0 * (1 << 25), rel=1e-3)


def test_steps_and_learning_rates_of_a_window_add_up():
    history = history_of(network())
    history.open()
    for rates in ([0.1, 0.01], [0.2, 0.02], [0.3, 0.03]):
        history.count_step(rates)
    assert history.open_steps == 3
    history.close()
    assert history.windows[0].steps == 3
    assert history.windows[0].lr_time == pytest.approx((0.6, 0.06))
    assert history.open_steps == 0 and history.is_open


def test_a_window_without_steps_goes_on():
    history = history_of(network())
    history.open()
    history.close()
    assert history.windows == [] and history.is_open


def test_opening_again_starts_at_the_present_weights():
    history = history_of(network())
    assert not history.is_open
    history.open()
    with torch.no_grad():
        for group in history.weights.groups:
            for parameter in group.parameters:
                parameter.add_(100.0)
    history.count_step([0.1, 0.01])
    history.open()  # as after a jump: what came before belongs to no window
    assert history.open_steps == 0
    true = walk(history, 1)
    assert true[0][0].abs().max() < 10
    assert torch.allclose(recorded(history)[0][0], true[0][0], atol=0.01)


def through_json(tree: Any) -> Any:
    tensors, document = pack(tree)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return unpack(json.loads(json.dumps(document)), copies.__getitem__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("opened", [True, False])
def test_a_restored_history_is_exact_and_goes_on_alike(dtype, opened):
    ours = history_of(network(dtype))
    if opened:
        walk(ours, 3)
        ours.count_step([0.1, 0.01])
    state = through_json(ours.state())
    theirs = history_of(network(dtype))
    with torch.no_grad():
        for mine, other in zip(ours.weights.groups, theirs.weights.groups, strict=True):
            for a, b in zip(mine.parameters, other.parameters, strict=True):
                b.copy_(a)
    theirs.restore(state)
    assert fingerprint({"history": theirs.state()}) == fingerprint({"history": ours.state()})
    assert theirs.is_open is opened
    walk(ours, 2, seed=9)
    walk(theirs, 2, seed=9)
    assert fingerprint({"history": theirs.state()}) == fingerprint({"history": ours.state()})


def test_a_restored_history_does_not_change_what_it_was_restored_from():
    ours = history_of(network())
    walk(ours, 2)
    state = through_json(ours.state())
    before = fingerprint({"history": state})
    theirs = history_of(network())
    theirs.restore(state)
    walk(theirs, 3)
    assert fingerprint({"history": state}) == before


def test_tied_weights_are_displaced_once():
    torch.manual_seed(0)
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = WindowHistory(Weights(group_parameters(model, optimizer)), 2)
    history.open()
    with torch.no_grad():
        model.embedding.weight.add_(1.0)
    history.count_step([0.1])
    history.close()
    before = model.embedding.weight.detach().clone()
    history.displace_(torch.ones(len(history.weights.groups), 1, dtype=torch.float64))
    assert torch.allclose(model.head.weight, before + 1.0, atol=1e-5)
    assert history.weights.elements() == sum(parameter.numel() for parameter in model.parameters())
