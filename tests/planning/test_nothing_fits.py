"""Where nothing fits, the memory that is short is named, with what would do."""

from __future__ import annotations

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


def test_what_cuda_itself_takes_is_not_to_be_saved_by_shorter_sequences():
    with pytest.raises(MemoryBudgetError, match=r"0\.50 GiB .*too little for any model: CUDA itself takes") as raised:
        found("gpt2-124m", 0.5, 64)
    assert "memory.vram" in raised.value.remedy and "sequences" not in str(raised.value)


def test_host_memory_that_is_too_small_is_told_what_it_would_take():
    with pytest.raises(MemoryBudgetError, match=r"even `factored` needs 1\d\.\d GiB"):
        found("llama-7b", 16, 8)
