"""Values as numbers and texts that can be shown."""

from __future__ import annotations

import pytest

from hybridtrainer.report.values import (
    NOTHING,
    byte_unit,
    count,
    listed,
    memory,
    number,
    plain,
    seconds,
    show,
    signed,
    time_unit,
    whole,
)


@pytest.mark.parametrize(
    "value", [None, "nan", "inf", "-inf", "2.5", float("nan"), float("inf"), True, [], {}, 10**400]
)
def test_what_is_no_finite_number_is_a_gap(value):
    assert number(value) is None
    assert whole(value) is None


def test_numbers_stay_what_they_are():
    assert number(3) == 3.0 and number(-0.5) == -0.5 and whole(2.6) == 3


def test_text_that_hides_or_turns_its_neighbours_is_made_visible():
    assert plain("a\u202eb\u200b\x00\x1b[31m") == "a\ufffdb\ufffd\ufffd\ufffd[31m"
    assert plain("two\n lines\t") == "two lines"


def test_endless_text_is_cut_and_says_so():
    cut = plain("x" * 5000)
    assert len(cut) < 450 and "4,600 more characters" in cut


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, NOTHING), (0.0, "0"), (2.42509, "2.425"), (123456.7, "123,457"), (0.895, "0.8950"), (1e-7, "1.00e-07"),
     (-3.14159, "-3.142"), (3e15, "3e+15")],
)  # fmt: skip
def test_numbers_are_shown_so_that_they_need_no_decoding(value, text):
    assert show(value) == text


def test_differences_have_a_sign_and_amounts_a_unit():
    assert signed(0.0123) == "+0.0123" and signed(-0.5) == "−0.500" and signed(None) == NOTHING  # noqa: RUF001
    assert memory(3 * 2**30) == "3.00 GiB" and memory(5 * 2**20) == "5.00 MiB" and memory(None) == NOTHING
    assert seconds(599.0) == "599.0 s" and seconds(660) == "11 min" and seconds(None) == NOTHING
    assert count(1, "jump") == "1 jump" and count(0, "jump") == "0 jumps" and count(None) == NOTHING
    assert listed([]) == "" and listed(["a"]) == "a" and listed(["a", "b"]) == "a and b"


def test_axes_get_a_unit_that_fits():
    assert [time_unit(length)[0] for length in (59, 3600, 10**6)] == ["s", "min", "h"]
    assert [byte_unit(size)[0] for size in (10, 2**31)] == ["MiB", "GiB"]
