"""What blocks keep in host memory: the same bits, and nothing of it on the device meanwhile."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.memory.support import DEVICES, LLAMA, SMALL, batches, build, plain, same, train
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory import offload
from hybridtrainer.memory.offload import HostTensors, _has_no_overlap, forget_sent, offload_blocks
from hybridtrainer.memory.recompute import recompute_blocks
from hybridtrainer.models.gpt import build_gpt, gpt_loss


def everything(tensor: Tensor) -> bool:
    return True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What has been sent, and a little delay in every copy."""
    found: list[Tensor] = []
    send = HostTensors.send

    def noted(self: HostTensors, tensor: Tensor) -> Any:
        waiting = send(self, tensor)
        found.append(waiting.home)
        return waiting

    monkeypatch.setattr(HostTensors, "send", noted)
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 512)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("every", "keep"), [(0, "inputs"), (1, "inputs"), (2, "inputs"), (3, "inputs"), (2, "products")]
)
@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_the_same_to_the_bit(sent, device, every, keep, shape, accumulate):
    data = batches(3, device)
    expected = train(*plain(build(shape), device), data, accumulate=accumulate, clip=1.0)
    model, optimizer = plain(build(shape), device)
    recompute_blocks(model, every, keep)
    offload_blocks(model, leaves=everything)
    assert same(train(model, optimizer, data, accumulate=accumulate, clip=1.0), expected)
    blocks, calls = shape.blocks, 3 * accumulate
    if every:
        assert len(sent) == calls * -(-blocks // every)  # one input for each segment, and nothing else
    else:
        assert len(sent) > 5 * calls * blocks


def test_weights_are_not_sent(sent):
    model = build(LLAMA)
    weights = {tuple(parameter.shape) for block in model.blocks for parameter in block.parameters()}
    offload_blocks(model, leaves=everything)
    gpt_loss(model, batches(1, samples=7)[0]).mean().backward()  # no activation has the shape of a weight
    assert sent
    turned = {shape[::-1] for shape in weights}
    assert not any(tuple(home.shape) in weights | turned for home in sent)


def test_sixteen_bit_arithmetic_is_the_same_to_the_bit(sent):
    (batch,) = batches(1)
    gradients = []
    for on in (False, True):
        model = build()
        offload_blocks(model, on, leaves=everything)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = gpt_loss(model, batch).mean()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert sent
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_without_gradients_nothing_is_sent(sent):
    model = build().eval()
    offload_blocks(model, leaves=everything)
    with torch.no_grad():
        gpt_loss(model, batches(1)[0])
    assert not sent


def test_what_is_in_host_memory_already_stays(sent):
    model = build()
    offload_blocks(model)
    gpt_loss(model, batches(1)[0]).mean().backward()
    assert not sent


def test_a_second_backward_pass_and_a_graph_that_is_dropped_are_no_problem(sent):
    model = build().eval()
    (batch,) = batches(1)
    offload_blocks(model, leaves=everything)
    loss = gpt_loss(model, batch).mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    last = next(model.blocks[-1].parameters())
    dropped = gpt_loss(model, batch).mean()
    torch.autograd.grad(dropped, [last])
    del dropped
    gc.collect()
    loss = gpt_loss(model, batch).mean()
    assert all(
        torch.equal(one, other)
        for one, other in zip(first, torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )
    assert sent


def test_it_can_be_taken_back_and_asked_for_twice():
    model = build()
    own = [block.forward for block in model.blocks]
    offload_blocks(model)
    offload_blocks(model)
    offload_blocks(model, on=False)
    assert [block.forward for block in model.blocks] == own


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError, match="No repeated blocks"):
        offload_blocks(nn.Linear(3, 3))


def test_a_copy_keeps_the_strides():
    host = HostTensors(everything)
    whole = torch.randn(8, 12, 16)
    for tensor in (whole, whole.transpose(0, 2), whole[:, ::2], whole[..., 3:9]):
        waiting = host.send(tensor)
        back = host.get(waiting)
        assert torch.equal(back, tensor) and back.stride() == tensor.stride()
        assert back.data_ptr() != tensor.data_ptr()


def test_elements_that_share_a_place_are_seen():
    assert _has_no_overlap(torch.zeros(3, 4).t())
    assert not _has_no_overlap(torch.zeros(3, 1).expand(3, 4))
    assert not _has_no_overlap(torch.zeros(10).as_strided((4, 4), (1, 1)))


def test_after_a_failed_pass_nothing_is_held_on_to(sent):
    model = build_gpt("nano")
    offload_blocks(model, leaves=lambda tensor: True)
    host = getattr(model.blocks[0].forward, "_offloaded_to")  # noqa: B009
    model(torch.zeros(2, 64, dtype=torch.long))  # and the head fails
    assert host._leaving
    forget_sent(model)
    assert not host._leaving and not host._fetched
    loss = model(torch.zeros(2, 64, dtype=torch.long)).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("every", [0, 2])
def test_what_was_sent_comes_back_once_and_is_let_go(sent, every, monkeypatch):
    fetched: list[int] = []
    fetch = HostTensors._fetch

    def noted(self: HostTensors, waiting: Any) -> None:
        if waiting.back is None:
            fetched.append(waiting.number)
        fetch(self, waiting)

    monkeypatch.setattr(HostTensors, "_fetch", noted)
    model = build_gpt("nano")
    recompute_blocks(model, every)
    offload_blocks(model, leaves=everything)
    host = getattr(model.blocks[0].forward, "_offloaded_to")  # noqa: B009
    gpt_loss(model, torch.zeros(2, 64, dtype=torch.long)).mean().backward()
    assert len(sent) >= 2
    assert sorted(fetched) == sorted(set(fetched))
    assert not host._fetched


@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_a_gpu_a_step_takes_less_memory(device):
    def peak(on: bool) -> int:
        torch.manual_seed(0)
        model = build_gpt("nano", context=512).to(device)
        offload_blocks(model, on)
        tokens = torch.randint(0, 256, (32, 513), device=device)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            gpt_loss(model, tokens).mean().backward()
            model.zero_grad()
        return torch.cuda.max_memory_allocated()

    assert peak(on=True) < 0.6 * peak(on=False)
