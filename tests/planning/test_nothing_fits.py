"""Where nothing fits, the memory that is short is named, with what would do."""

from __future__ import annotations

import re

import pytest
from tests.planning.test_planner import found

from hybridtrainer.errors import MemoryBudgetError


def test_a_card_that_is_too_small_is_told_what_it_would_take():
    with pytest.raises(MemoryBudgetError, match="GPU memory are too little") as raised:
        found("llama-7b", 2, 64)
    needed = float(str(raised.value).split("it needs ")[1].split(" GiB")[0])
    assert found("llama-7b", needed + 0.1, 64)
    with pytest.raises(MemoryBudgetError):
        found("llama-7b", needed - 0.2, 64)


def test_a_batch_that_is_too_large_is_told_the_largest_half_that_fits():
    with pytest.raises(MemoryBudgetError) as raised:
        found("llama-7b", 4, 64, tokens=16384, context=2048)
    told = re.search(r"--seq (\d+) --tokens (\d+), .*train.batch_size = (\d+)", raised.value.remedy)
    assert told is not None
    context, tokens, samples = map(int, told.groups())
    assert samples * context == tokens
    assert found("llama-7b", 4, 64, tokens=tokens, context=context)
    with pytest.raises(MemoryBudgetError):
        found("llama-7b", 4, 64, tokens=2 * tokens, context=context)


def test_where_no_batch_is_small_enough_none_is_advised():
    with pytest.raises(MemoryBudgetError, match="No batch is small enough") as raised:
        found("llama-7b", 2, 64)
    assert "1 slot it" in raised.value.what and "--tokens" not in raised.value.remedy


def test_what_cuda_itself_takes_is_not_to_be_saved_by_shorter_sequences():
    with pytest.raises(MemoryBudgetError, match=r"0\.50 GiB .*too little for any model: CUDA itself takes") as raised:
        found("gpt2-124m", 0.5, 64)
    assert "memory.vram" in raised.value.remedy and "sequences" not in str(raised.value)


def test_host_memory_that_is_too_small_is_told_what_it_would_take():
    with pytest.raises(MemoryBudgetError, match=r"even `factored` needs 1\d\.\d GiB"):
        found("llama-7b", 16, 8)
