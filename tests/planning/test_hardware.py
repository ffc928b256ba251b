"""Seconds of computing."""

from __future__ import annotations

from hybridtrainer.planning.hardware import Hardware


def test_seconds_are_those_of_products_and_those_of_other_kernels():
    machine = Hardware("small", 100.0, 10.0, 1.0, 1.0, 1.0, 0)
    assert machine.seconds(200.0, 30.0) == 2.0 + 3.0
