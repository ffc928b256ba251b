"""Inputs of blocks that wait for the backward pass, on the device or in host memory."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.inputs import AHEAD, DeviceInputs, HostInputs
from hybridtrainer.memory.lanes import ThreadLanes

CPU = torch.device("cpu")


class Watched(ThreadLanes):
    """Counts what goes which way; slow enough that whoever does not wait reads too early."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(lambda _: time.sleep(seconds))
        self.lanes: list[str] = []

    def submit(self, lane: Any, work: Any, after: Any) -> Any:
        self.lanes.append(lane)
        return super().submit(lane, work, after)


def hidden(number: int, shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[0, 0]])
def test_what_comes_back_is_equal_bit_for_bit(dtype, make):
    x = make(hidden(0, dtype=dtype))
    mask = torch.ones(2, dtype=torch.bool)
    kept = HostInputs(ThreadLanes(), CPU).keep([x, mask])
    found, other = kept.get()
    assert torch.equal(found, x)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert other is mask  # small and shared: it did not travel
    assert found.data_ptr() != x.data_ptr()


def test_a_block_that_gets_no_tensor_has_nothing_to_send():
    kept = HostInputs(ThreadLanes(), CPU).keep([])
    assert kept.get() == []
    kept.release()


def test_not_even_the_bits_of_a_nan_change():
    x = torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32)
    (found,) = HostInputs(ThreadLanes(), CPU).keep([x]).get()
    assert torch.equal(found.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_the_inputs_of_many_blocks_come_back_in_backward_order(seconds):
    inputs = HostInputs(Watched(seconds), CPU)
    for round_ in range(3):
        kept = []
        for number in range(6):
            x = hidden(10 * round_ + number)
            kept.append(inputs.keep([x]))
            del x  # its memory is free for others as soon as nobody needs it
        for number in reversed(range(6)):
            each = kept.pop()
            assert torch.equal(each.get()[0], hidden(10 * round_ + number))
            each.release()


def test_any_order_works():
    inputs = HostInputs(Watched(0.002), CPU)
    kept = [inputs.keep([hidden(number)]) for number in range(5)]
    for number in (2, 0, 4, 1, 3):
        assert torch.equal(kept[number].get()[0], hidden(number))
        kept[number].release()


def test_the_one_before_is_fetched_while_this_one_is_used():
    lanes = Watched()
    inputs = HostInputs(lanes, CPU)
    kept = [inputs.keep([hidden(number)]) for number in range(3)]
    assert lanes.lanes == ["inputs out"] * 3
    kept[2].get()
    assert lanes.lanes[3:] == ["inputs in", "inputs in"]
    kept[2].get()
    assert lanes.lanes[3:] == ["inputs in", "inputs in"]  # nothing twice
    kept[2].release()
    kept[1].get()
    assert lanes.lanes[3:] == ["inputs in", "inputs in", "inputs in"]
    kept[1].release()
    kept[0].get()
    assert len(lanes.lanes) == 6


def test_memory_is_used_again():
    inputs = HostInputs(ThreadLanes(), CPU)
    homes, buffers = set(), set()
    for _ in range(4):
        kept = [inputs.keep([hidden(number)]) for number in range(3)]
        for each in reversed(kept):
            buffers.add(each.get()[0].data_ptr())
            homes.add(each.home.data_ptr())  # type: ignore[attr-defined]
            each.release()
    assert len(homes) == 3
    assert len(buffers) == AHEAD


def test_another_size_gets_memory_of_its_own():
    inputs = HostInputs(ThreadLanes(), CPU)
    for shape in ((3, 5), (2, 2), (3, 5), (8, 8)):
        kept = inputs.keep([hidden(0, shape)])
        assert torch.equal(kept.get()[0], hidden(0, shape))
        kept.release()


def test_only_a_few_hidden_states_are_held_until_they_are_out():
    inputs = HostInputs(Watched(0.002), CPU)
    kept = [inputs.keep([hidden(number)]) for number in range(6)]
    assert len(inputs._leaving) == AHEAD
    assert kept[-1] is not None


def test_what_nobody_waits_for_any_more_is_not_fetched():
    lanes = Watched(0.002)
    inputs = HostInputs(lanes, CPU)
    first, dead, last = (inputs.keep([hidden(number)]) for number in range(3))
    del dead
    gc.collect()
    last.get()  # fetches the first along, not the dead one
    last.release()
    assert lanes.lanes[3:] == ["inputs in", "inputs in"]
    assert torch.equal(first.get()[0], hidden(0))
    assert lanes.lanes[3:] == ["inputs in", "inputs in"]


def test_what_is_on_its_way_is_held_though_a_failed_pass_never_asks_for_it():
    inputs = HostInputs(Watched(0.05), CPU)
    first, last = inputs.keep([hidden(0)]), inputs.keep([hidden(1)])
    last.get()  # the first is on its way
    coming = weakref.ref(first.buffer)  # type: ignore[attr-defined]
    del first, last
    inputs.lanes.finish()  # the lane itself holds nothing, as that of a GPU does not
    gc.collect()
    assert coming() is not None
    for number in range(AHEAD):
        kept = inputs.keep([hidden(number)])
        kept.get()
        kept.release()
    assert len(inputs._coming) == AHEAD
    gc.collect()
    assert coming() is None


@pytest.mark.parametrize("inputs", [DeviceInputs(), HostInputs(ThreadLanes(), CPU)], ids=["device", "host"])
def test_what_was_released_cannot_be_had_again(inputs):
    kept = inputs.keep([hidden(0)])
    assert torch.equal(kept.get()[0], hidden(0))
    kept.release()
    others = [inputs.keep([hidden(1)])]
    kept.release()
    others.append(inputs.keep([hidden(2)]))  # what was released twice is not given to two
    with pytest.raises(ModelError, match="second backward pass"):
        kept.get()
    assert [torch.equal(each.get()[0], hidden(1 + number)) for number, each in enumerate(others)] == [True, True]


def test_on_the_device_they_stay_where_they_are():
    x, mask = hidden(0), torch.ones(2)
    found = DeviceInputs().keep([x, mask]).get()
    assert found[0] is x and found[1] is mask
