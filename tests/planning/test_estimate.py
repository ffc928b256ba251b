"""Sums over components."""

from __future__ import annotations

import math

from hybridtrainer.planning.estimate import Estimate


def test_totals_are_the_sums_of_their_components():
    found = Estimate({"a": 1, "b": 2}, {"c": 4, "d": 8}, 16, 2.0, 1.5)
    assert (found.gpu_bytes, found.host_bytes, found.share_of_compute) == (3, 12, 0.75)


def test_a_share_of_what_is_not_known_is_not_known():
    assert math.isnan(Estimate({}, {}, 0, None, None).share_of_compute)
