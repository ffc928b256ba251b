"""Host memory in pieces of whole pages."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch

from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.memory.arena import PAGE_BYTES, RESERVE_BYTES, Arena, paged, require_room

CPU = torch.device("cpu")


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (8192, 8192)])
def test_sizes_are_rounded_up_to_whole_pages(asked, given):
    assert paged(asked) == given


def test_pieces_have_the_exact_size_and_do_not_overlap():
    arena = Arena(paged(5000) + paged(3), CPU)
    first, second = arena.take(5000), arena.take(3)
    assert (len(first.shown), len(second.shown)) == (5000, 3)
    assert second.shown.data_ptr() - first.shown.data_ptr() == 8192
    first.shown.fill_(7)
    assert second.shown.tolist() == [0, 0, 0]


def test_new_memory_is_zero_and_begins_on_a_page():
    piece = Arena(paged(100), CPU).take(100)
    assert not piece.shown.any()
    assert piece.shown.data_ptr() % PAGE_BYTES == 0


def test_exactly_as_much_as_there_is_can_be_taken_and_no_more():
    arena = Arena(3 * PAGE_BYTES, CPU)
    arena.take(PAGE_BYTES)
    arena.take(2 * PAGE_BYTES)
    assert not len(arena.take(0).shown)
    with pytest.raises(ValueError, match=f"{4 * PAGE_BYTES} bytes were taken of {3 * PAGE_BYTES}"):
        arena.take(1)


def test_the_two_tensors_of_a_piece_share_bytes_but_not_their_count_of_writes():
    piece = Arena(PAGE_BYTES, CPU).take(16)
    before = piece.version()
    piece.lanes.fill_(9)
    assert piece.shown.tolist() == [9] * 16
    assert piece.version() == before
    piece.shown[3:5].view(torch.int8).fill_(1)  # a view counts too: it is how parameters are written
    assert piece.lanes.tolist() == [9] * 3 + [1] * 2 + [9] * 11
    assert piece.version() > before


def test_pieces_outlive_the_arena():
    piece = Arena(PAGE_BYTES, CPU).take(16)
    piece.shown.fill_(5)
    assert piece.lanes.tolist() == [5] * 16


def _machine_with(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    memory = psutil.virtual_memory()._replace(available=free_bytes + RESERVE_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_too_little_memory_is_said_before_any_is_allocated(monkeypatch):
    _machine_with(monkeypatch, 1 << 20)
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("memory was allocated"))
    with pytest.raises(MemoryBudgetError, match=r"need 0\.50 GiB of host memory and 1\.0 MiB are available") as raised:
        Arena(1 << 29, CPU, remedy="Do so.")
    assert raised.value.remedy == "Do so."


def test_a_reserve_is_left_to_the_machine(monkeypatch):
    _machine_with(monkeypatch, 1000)
    require_room(1000)
    with pytest.raises(MemoryBudgetError):
        require_room(1001)
    _machine_with(monkeypatch, -5)
    with pytest.raises(MemoryBudgetError, match=r"and 0\.00 GiB are available"):
        require_room(1)


def test_a_limit_of_ours_counts_where_it_is_the_smaller_one(monkeypatch):
    _machine_with(monkeypatch, 1 << 30)
    require_room(1 << 20, limit_bytes=1 << 20)
    with pytest.raises(MemoryBudgetError, match=r"0\.25 GiB are allowed by `memory\.ram`"):
        require_room(1 << 29, limit_bytes=1 << 28)
    with pytest.raises(MemoryBudgetError, match=r"1\.00 GiB are available"):
        require_room(1 << 31, limit_bytes=1 << 40)


class _Cudart:
    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if not self.error:
            self.registered[pointer] = nbytes
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


def test_pieces_for_a_gpu_are_registered_one_by_one_and_taken_back(monkeypatch):
    cudart = _Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(paged(5000) + paged(3), torch.device("cuda"))
    first, second, nothing = arena.take(5000), arena.take(3), arena.take(0)
    assert cudart.registered == {first.shown.data_ptr(): 8192, second.shown.data_ptr(): 4096}
    assert not len(nothing.lanes)
    arena.close()
    assert cudart.registered == {}
    arena.close()
    kept = Arena(PAGE_BYTES, torch.device("cuda"))
    kept.take(1)
    assert len(cudart.registered) == 1
    del kept  # its memory may be mapped for something else
    assert cudart.registered == {}


def test_a_registration_that_cuda_refuses_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Cudart(error=2))
    with pytest.raises(MemoryBudgetError, match=r"error 2") as raised:
        Arena(PAGE_BYTES, torch.device("cuda")).take(10)
    assert "ulimit -l" in raised.value.remedy
