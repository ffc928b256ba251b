"""Amounts for people: nothing that is there is shown as nothing."""

from __future__ import annotations

import pytest

from hybridtrainer.sizes import GIB, KIB, MIB, as_count, as_difference, as_seconds, as_size, rounded_down


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 GiB"),
        (100, "0.1 KiB"),
        (100 * KIB, "100.0 KiB"),
        (103 * KIB, "0.1 MiB"),
        (102 * MIB, "102.0 MiB"),
        (103 * MIB, "0.10 GiB"),
        (1.5 * GIB, "1.50 GiB"),
    ],
)
def test_a_size_has_the_unit_that_shows_it(nbytes, text):
    assert as_size(nbytes) == text


def test_a_difference_has_its_sign_and_its_unit():
    assert [as_difference(n) for n in (GIB, -GIB, -3 * MIB, 0)] == ["+1.00 GiB", "-1.00 GiB", "-3.0 MiB", "same"]


def test_a_short_time_has_the_unit_that_shows_it():
    assert [as_seconds(s) for s in (12.345, 1.0, 0.1174, 0.0042)] == ["12.35 s", "1.00 s", "117 ms", "4.2 ms"]


@pytest.mark.parametrize("number", [1, 999, 1000, 999_999, 1_000_000, 50_000_000_000])
def test_no_number_of_parameters_is_shown_as_none(number):
    assert float(as_count(number).rstrip("kMB")) > 0


@pytest.mark.parametrize(("value", "shown"), [(2.2899, 2.28), (2.3, 2.3), (0.999, 0.99), (1.0, 1.0), (0.0, 0.0)])
def test_what_is_rounded_down_is_never_more_than_it_was(value, shown):
    assert rounded_down(value, 2) == shown <= value
