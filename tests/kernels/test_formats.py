"""Formats: what is kept of a parameter, and what that costs."""

from __future__ import annotations

from math import prod

import pytest
import torch
from tests.kernels.making import FORMATS

from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.formats import (
    CODES,
    FULL_PRECISION_BELOW,
    bytes_per_parameter,
    format_for,
    resident_format,
    state_fields,
    weight_dtype,
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("fp32", 12.0),
        ("split32", 12.0),
        ("split8", 6.03),
        ("sr8", 4.03),
        ("sr4", 3.06),
        ("sr32", 10.0),
        ("full8", 6.03),
        ("full4", 5.06),
        ("factored", 2.0),
    ],
)
def test_bytes_per_parameter_are_those_promised(kind, expected):
    assert round(bytes_per_parameter(kind), 2) == expected


@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (257,), (5000,), (64, 64), (3, 5, 7)])
def test_fields_have_room_for_every_element_and_no_more(shape):
    n = prod(shape)
    full = {"m": (torch.float32, n), "v": (torch.float32, n)}
    low = {"low": (torch.int16, n)}
    scales = dict.fromkeys(("m_scale", "v_scale"), (torch.float32, (n + 255) // 256))
    assert state_fields("fp32", shape) == full
    assert state_fields("split32", shape) == low | full
    assert state_fields("sr8", shape) == {"m": (torch.int8, n), "v": (torch.uint8, n)} | scales
    assert state_fields("split8", shape) == low | state_fields("sr8", shape)
    assert state_fields("sr4", shape) == {
        "m": (torch.uint8, (n + 1) // 2),
        "v": (torch.uint8, (n + 1) // 2),
        "m_scale": (torch.float32, (n + 127) // 128),
        "v_scale": (torch.float32, (n + 127) // 128),
    }


def test_a_factored_state_has_one_number_for_each_row_and_column():
    assert state_fields("factored", (3, 5, 7)) == {"rows": (torch.float32, 3), "columns": (torch.float32, 35)}
    with pytest.raises(ModelError, match="no rows and columns"):
        state_fields("factored", (35,))


@pytest.mark.parametrize("mode", ["split8", "sr8", "sr4", "factored"])
def test_small_and_one_dimensional_parameters_keep_full_precision(mode):
    assert format_for(mode, (64, 64)) == mode
    assert format_for(mode, (64, 63)) == "split32"
    assert format_for(mode, (FULL_PRECISION_BELOW * 2,)) == "split32"
    assert format_for(mode, ()) == "split32"
    assert format_for(mode, (16, 16, 16)) == mode


def test_fp32_is_fp32_for_every_shape():
    assert {format_for("fp32", shape) for shape in [(), (3,), (64, 64), (1 << 20,)]} == {"fp32"}


def test_an_unknown_mode_is_refused_with_those_that_exist():
    with pytest.raises(ModelError, match=r"no update mode 'split32'.*fp32, split8, sr8, sr4, factored"):
        format_for("split32", (64, 64))  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_resident_weight_keeps_its_type_and_a_small_one_its_moments(bits):
    assert resident_format(bits, (64, 64), torch.float32) == f"full{bits}"
    assert resident_format(bits, (64, 64), torch.bfloat16) == f"sr{bits}"
    for shape in ((64, 63), (1 << 20,), ()):
        assert resident_format(bits, shape, torch.float32) == "fp32"
        assert resident_format(bits, shape, torch.bfloat16) == "sr32"
    with pytest.raises(ModelError, match=r"float16.*fp32 and bf16 weights only"):
        resident_format(bits, (64, 64), torch.float16)


def test_a_weight_is_kept_in_the_type_the_model_computes_with():
    assert {kind: weight_dtype(kind) for kind in FORMATS} == {
        kind: torch.float32 if kind in ("fp32", "full8", "full4") else torch.bfloat16 for kind in FORMATS
    }


def test_codes_fit_their_bits():
    for codes in CODES.values():
        assert codes.second_top == 2**codes.bits - 1
        assert codes.first_top == 2 ** (codes.bits - 1) - 1
        assert 1024 % codes.block == 0
