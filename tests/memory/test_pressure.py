"""A GPU that fills up: warned of, cleaned up by need, saved before it is full, each once."""

from __future__ import annotations

import pytest
from tests.memory.cards import FakeAllocator, FakeDriver, card

from hybridtrainer.memory.pressure import PAUSE_STEPS, Level, Pressure, level_of


class Watched:
    """A pressure and what it has said and asked for."""

    def __init__(self, cleanup_every: int = 0, saves: bool = True, clock: int = 0, budget: float | None = None) -> None:
        self.allocator = FakeAllocator(1, 1)
        self.said: list[str] = []
        self.saved = 0
        self.step = clock
        self.saves = saves
        self.pressure = Pressure(card(self.allocator, budget), self.said.append, self._save, cleanup_every, clock)

    def _save(self) -> bool:
        self.saved += 1
        return self.saves

    def steps(self, count: int, *holds: float | None) -> Watched:
        for _ in range(count):
            if holds:
                self.allocator.hold(*holds)  # type: ignore[arg-type]
            self.step += 1
            self.pressure.after_step(self.step)
        return self


@pytest.mark.parametrize(
    ("share", "level"),
    [
        (0.0, Level.CALM), (0.619, Level.CALM), (0.62, Level.WARN), (0.749, Level.WARN), (0.75, Level.CLEAN_UP),
        (0.869, Level.CLEAN_UP), (0.87, Level.EMERGENCY), (1.2, Level.EMERGENCY),
    ],
)  # fmt: skip
def test_the_thresholds(share, level):
    assert level_of(share) is level


def test_a_calm_gpu_is_left_alone():
    watched = Watched().steps(200, 4, 9.9)
    assert (watched.said, watched.saved, watched.allocator.given_back) == ([], 0, 0)


def test_a_warning_is_given_once_and_again_after_it_has_fallen():
    watched = Watched().steps(5, 10, 10)
    assert watched.said == ["62% of the GPU (16.0 GiB) is in use"]
    watched.steps(3, 9.5, 9.5).steps(3, 10, 10)  # fluttering about the threshold is one crossing
    assert len(watched.said) == 1
    watched.steps(1, 5, 5).steps(1, 10, 10)
    assert len(watched.said) == 2


def test_memory_is_given_back_where_torch_holds_more_than_its_tensors_ever_took():
    watched = Watched().steps(1, 4, 12.5, 11)
    assert watched.allocator.given_back == 1
    assert watched.pressure.cleanups == 1


def test_below_the_threshold_of_cleaning_up_nothing_is_given_back():
    watched = Watched().steps(3, 4, 11.9, 5)  # 74%, of which torch needs less than half
    assert watched.allocator.given_back == 0
    assert watched.said == ["74% of the GPU (16.0 GiB) is in use"]


def test_below_an_emergency_no_checkpoint_is_asked_for():
    watched = Watched().steps(3, 13, 13)
    assert watched.saved == 0
    assert watched.said == ["81% of the GPU (16.0 GiB) is in use"]


def test_what_the_next_step_needs_again_is_not_given_back():
    watched = Watched().steps(100, 4, 12.5, 12.4)  # little is taken between steps, but not in them
    assert watched.allocator.given_back == 0


def test_what_comes_back_at_once_is_given_back_only_now_and_then():
    watched = Watched().steps(PAUSE_STEPS, 4, 12.5, 11)
    assert watched.allocator.given_back == 1
    watched.steps(1, 4, 12.5, 11)
    assert watched.allocator.given_back == 2


def test_it_is_given_back_every_so_many_steps_where_asked():
    watched = Watched(cleanup_every=10, clock=7).steps(23, 1, 2)  # to step 30
    assert watched.allocator.given_back == 3
    assert watched.said == []


def test_an_emergency_asks_for_one_checkpoint_until_it_has_fallen():
    watched = Watched().steps(30, 14, 14)
    assert watched.saved == 1
    assert watched.said == ["88% of the GPU (16.0 GiB) is in use: a checkpoint is written, in case memory runs out"]
    watched.steps(5, 13.5, 13.5).steps(5, 14, 14)
    assert watched.saved == 1
    watched.steps(1, 8, 8).steps(1, 14, 14)
    assert watched.saved == 2


def test_an_emergency_that_cleaning_up_ends_is_none():
    watched = Watched().steps(1, 6, 14.5, 8)
    assert watched.saved == 0
    assert watched.allocator.given_back == 1


def test_no_checkpoint_is_promised_where_there_will_be_none():
    watched = Watched(saves=False).steps(1, 14, 14)
    assert watched.said == ["88% of the GPU (16.0 GiB) is in use"]


def test_against_a_budget_it_is_named():
    assert (
        Watched(budget=4).steps(1, 3.6, 3.6).said[0].startswith("90% of memory.vram (4.0 GiB) is in use: a checkpoint")
    )


def test_other_processes_are_named():
    said: list[str] = []
    pressure = Pressure(card(FakeAllocator(2, 2), driver=FakeDriver(11)), said.append, lambda: False)
    pressure.after_step(1)
    assert said == ["69% of the GPU (16.0 GiB) is in use, 9.0 GiB of it not by torch"]
