"""Seconds of a resident step, with numbers that can be checked in the head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.offloaded import Away
from hybridtrainer.planning.pace import (
    CODED_LAUNCHES,
    CODED_PASSES,
    HOST_OF_SEGMENTS,
    OFFLOAD_LAUNCHES,
    OFFLOAD_SHARE,
    UPDATE_LAUNCHES,
    UPDATE_PASSES,
    Work,
    pace_of,
)
from hybridtrainer.planning.rehearsal import Spent

CARD = Hardware("card", flops=100.0, memory=10.0, inward=2.0, outward=1.0, both=2.0, context_bytes=0, launch=0.0)
PASSES = Spent(flops=600.0, other_bytes=30, kernels=50)  # 6 s and 3 s
WORK = Work(PASSES, accumulate=1, trained_bytes=10, trained_tensors=4, coded_matrices=0, away=Away(), keep=None)


def test_the_gpu_computes_each_micro_batch_and_one_update():
    assert pace_of(WORK, CARD) == (9 + UPDATE_PASSES, 9 + UPDATE_PASSES, False)
    assert pace_of(replace(WORK, accumulate=3), CARD)[0] == 27 + UPDATE_PASSES
    assert pace_of(replace(WORK, coded_matrices=1), CARD)[0] == 9 + CODED_PASSES


def test_where_the_host_takes_longer_its_launches_count():
    slow = replace(CARD, launch=2.0)
    assert pace_of(WORK, slow)[0] == 2 * (50 + 4 * UPDATE_LAUNCHES)
    assert pace_of(WORK, slow).waits_for_host
    coded = replace(WORK, accumulate=2, coded_matrices=3)
    assert pace_of(coded, slow)[0] == 2 * (2 * 50 + UPDATE_LAUNCHES + 3 * CODED_LAUNCHES)
    for keep, times in HOST_OF_SEGMENTS.items():
        assert pace_of(replace(WORK, keep=keep), slow)[0] == pytest.approx(2 * (times * 50 + 4 * UPDATE_LAUNCHES))


def test_what_leaves_waits_for_the_link_where_that_is_slower():
    work = replace(WORK, away=Away(nbytes=20, tensors=5))
    seconds, alone, waits_for_host = pace_of(work, CARD)
    assert not waits_for_host
    assert alone == pace_of(WORK, CARD)[0]
    assert seconds == pytest.approx(
        OFFLOAD_SHARE * (20 + 10) + UPDATE_PASSES
    )  # forward 3 s, backward 6 s: the link is slower
    slow = replace(CARD, launch=2.0)
    assert pace_of(work, slow)[0] == 2 * (50 + 5 * OFFLOAD_LAUNCHES + 4 * UPDATE_LAUNCHES)
