"""How a parameter and its optimizer state are kept in memory, by update mode.

Only layouts: names, types and lengths. What the numbers mean is in `reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

from hybridtrainer.errors import ModelError

Mode = Literal["fp32", "split8", "sr8", "sr4", "factored"]
Format = Literal["fp32", "split32", "split8", "sr8", "sr4", "sr32", "full8", "full4", "factored"]
Bits = Literal[8, 4]

# Biases and norms: together under a thousandth of a model, and a rounding error in one of them touches every token.
FULL_PRECISION_BELOW = 4096


class Codes(NamedTuple):
    """Whole numbers that stand for moments, with one scale for each block of neighbours.

    Attributes:
        bits: Of one code.
        block: Elements that share a scale. Few bits need short blocks, where fewer outliers set the scale.
        first_top: The largest code of a first moment, which has a sign.
        second_top: The largest code of a second moment, which has none.
    """

    bits: int
    block: int
    first_top: int
    second_top: int


CODES: dict[str, Codes] = {
    "split8": Codes(bits=8, block=256, first_top=127, second_top=255),
    "sr8": Codes(bits=8, block=256, first_top=127, second_top=255),
    "sr4": Codes(bits=4, block=128, first_top=7, second_top=15),
    "full8": Codes(bits=8, block=256, first_top=127, second_top=255),
    "full4": Codes(bits=4, block=128, first_top=7, second_top=15),
}


def format_for(mode: Mode, shape: Sequence[int]) -> Format:
    """The format of one parameter in a mode: small and one-dimensional ones keep full precision in every mode.

    Raises:
        ModelError: for a mode that does not exist.

    >>> format_for("sr8", (1024, 1024)), format_for("sr8", (1024,)), format_for("fp32", (1024,))
    ('sr8', 'split32', 'fp32')
    """
    if mode not in get_args(Mode):
        raise ModelError(f"There is no update mode {mode!r}.", f"Choose one of {', '.join(get_args(Mode))}.")
    if mode != "fp32" and (len(shape) < 2 or math.prod(shape) < FULL_PRECISION_BELOW):
        return "split32"
    return mode


def resident_format(bits: Bits, shape: Sequence[int], dtype: torch.dtype) -> Format:
    """The format of a parameter that stays in its own type: only its moments are coded, and small ones' are not.

    Raises:
        ModelError: for a type that no kernel knows.

    >>> resident_format(8, (1024, 1024), torch.float32), resident_format(8, (1024,), torch.float32)
    ('full8', 'fp32')
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(
            f"A parameter is {dtype}, and moments of {bits} bits are kept for fp32 and bf16 weights only.",
            "Train in fp32 weights (`memory.precision` sets the arithmetic), or use 32 bits.",
        )
    is_small = len(shape) < 2 or math.prod(shape) < FULL_PRECISION_BELOW
    if dtype == torch.float32:
        return "fp32" if is_small else ("full8" if bits == 8 else "full4")
    return "sr32" if is_small else ("sr8" if bits == 8 else "sr4")


def weight_dtype(kind: Format) -> torch.dtype:
    """The type the weight itself is kept in, which is the one the model computes with."""
    return torch.float32 if kind in ("fp32", "full8", "full4") else torch.bfloat16


def state_fields(kind: Format, shape: Sequence[int]) -> dict[str, tuple[torch.dtype, int]]:
    """Name, type and length of each flat state tensor of a parameter; all start as zeros.

    `low` holds the 16 bits below a bf16 weight, `m` and `v` the moments, and `rows` and `columns` the means of the
    squared gradient over a matrix, of which the first dimension counts the rows and the others together the columns.

    Raises:
        ModelError: for a factored state of a parameter with fewer than two dimensions.

    >>> state_fields("sr4", (100, 100))["m"]
    (torch.uint8, 5000)
    """
    elements = math.prod(shape)
    full = {"m": (torch.float32, elements), "v": (torch.float32, elements)}
    low = {"low": (torch.int16, elements)}
    if kind in ("fp32", "sr32"):
        return full
    if kind == "split32":
        return low | full
    if kind == "factored":
        if len(shape) < 2:
            raise ModelError(
                f"A parameter of shape {tuple(shape)} has no rows and columns to factor.",
                "Take the format that `format_for` gives for it.",
            )
        return {"rows": (torch.float32, shape[0]), "columns": (torch.float32, math.prod(shape[1:]))}
    codes = CODES[kind]
    scales = -(-elements // codes.block)
    length = -(-elements * codes.bits // 8)
    coded = {
        "m": (torch.int8 if codes.bits == 8 else torch.uint8, length),
        "v": (torch.uint8, length),
        "m_scale": (torch.float32, scales),
        "v_scale": (torch.float32, scales),
    }
    return low | coded if kind == "split8" else coded


def elements_per_entry(kind: Format) -> dict[str, int]:
    """How many elements of a parameter each entry of a state stands for; those that are not named stand for one.

    A factored state has none that belong to some elements alone.
    """
    if kind not in CODES:
        return {}
    bits, block, *_ = CODES[kind]
    return {"m": 8 // bits, "v": 8 // bits, "m_scale": block, "v_scale": block}


def bytes_per_parameter(kind: Format) -> float:
    """Memory for weight and state of one parameter of a large matrix; the gradient is not counted.

    >>> round(bytes_per_parameter("split8"), 2)
    6.03
    """
    side = 1 << 14
    state = sum(dtype.itemsize * length for dtype, length in state_fields(kind, (side, side)).values())
    return weight_dtype(kind).itemsize + state / side**2
