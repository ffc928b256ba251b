"""Steps go into the ring, 64 numbers come out, and the documents say what they are."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from hybridtrainer.kernels.feature_reference import COLUMNS, LENGTH
from hybridtrainer.predict.features import NAMES, FeatureRing, StepSigns

PAGE = Path(__file__).parents[2] / "docs" / "PREDICTION.md"


def filled(steps: int) -> FeatureRing:
    ring = FeatureRing()
    for step in range(steps):
        ring.write(StepSigns(loss=2 + 1 / (1 + step), grad_norm=1 + 0.1 * (step % 3), rate=1e-3, clock=step + 1))
    return ring


def test_a_step_has_one_value_for_each_column():
    assert tuple(field.name for field in fields(StepSigns)) == COLUMNS


def test_the_newest_step_overwrites_the_oldest():
    ring = filled(LENGTH + 3)
    clock = ring.rows[:, COLUMNS.index("clock")]
    assert clock[:4].tolist() == [LENGTH + 1, LENGTH + 2, LENGTH + 3, 4]


@pytest.mark.parametrize("gap", [1, 3, 7, LENGTH - 1, LENGTH, 2 * LENGTH + 5])
def test_steps_that_are_sent_together_stand_where_they_would_stand_alone(gap):
    together, alone = FeatureRing(), FeatureRing()
    for step in range(3 * LENGTH):
        for ring in (together, alone):
            ring.write(StepSigns(loss=float(step), grad_norm=1.0, rate=1e-3, clock=step + 1))
        assert len(alone.rows) == LENGTH  # looked at, it is sent
        if step % gap == gap - 1:
            assert torch.equal(together.rows, alone.rows)
    assert torch.equal(together.rows, alone.rows)


def test_values_that_are_on_the_device_are_written_there():
    ring = filled(5)
    ring.write_on_device("first_moment", torch.tensor([3.0, 4.0]))
    row = ring.rows[4]
    assert row[COLUMNS.index("first_moment")] == 3 and row[COLUMNS.index("second_moment")] == 4
    assert ring.rows[3, COLUMNS.index("first_moment")] == 0


def test_nothing_can_be_read_from_an_empty_ring():
    with pytest.raises(IndexError, match="no step"):
        FeatureRing().read()


def test_a_restored_ring_goes_on_to_the_bit():
    ring, other = filled(300), FeatureRing()
    other.restore({name: value.clone() if torch.is_tensor(value) else value for name, value in ring.state().items()})
    for each in (ring, other):
        each.write(StepSigns(loss=1.5, grad_norm=0.5, rate=5e-4, clock=301))
    assert torch.equal(ring.read(), other.read())


def test_the_page_lists_all_64_in_order():
    section = PAGE.read_text().split("### The 64 features\n", 1)[1].split("\n### ", 1)[0]
    told = [name for row in re.findall(r"^\| (`.*?) \|", section, flags=re.M) for name in re.findall(r"`(\w+)`", row)]
    assert tuple(told) == NAMES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits_for_the_device():
    ring = FeatureRing("cuda")
    for step in range(4):  # the first launch compiles
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            ring.write(StepSigns(loss=2.0, grad_norm=1.0, rate=1e-3, clock=step + 1))
            ring.write_on_device("first_moment", torch.ones(1, device="cuda"))
            found = ring.read()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(found).all()
