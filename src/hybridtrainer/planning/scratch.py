"""What a GPU's reductions take beside their result: partial sums of all thread blocks that work on one output.

The gradient of a bias is a sum over all tokens. Where there are many, torch divides them among thread blocks, which
leave their sums in memory that it takes for the while: up to four times what the summed tensor itself takes in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

SUM_BYTES = 4  # partial sums of 16- and 32-bit values are in fp32
THREADS, WARP, VECTOR = 512, 32, 4  # of a block, of a warp; outputs that a thread loads together
LEAST_VALUES, MOST_VALUES = 16, 256  # that a thread sums by itself, where several blocks share an output
BLOCKS = 132 * 2048  # threads that run at a time on an H200, on most cards fewer: then less is taken


def reduction_bytes(tensor: Tensor, dims: Sequence[int] | None) -> int:
    """What a sum over these dimensions takes for the while.

    Args:
        tensor: What is summed.
        dims: Those that are summed over; None for all.

    >>> import torch
    >>> reduction_bytes(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), [0]) >> 20
    128
    """
    summed = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    kept = [dim for dim in range(tensor.dim()) if dim not in summed and tensor.shape[dim] > 1]
    summed = {dim for dim in summed if tensor.shape[dim] > 1}
    outputs = math.prod(tensor.shape[dim] for dim in kept)
    values = math.prod(tensor.shape[dim] for dim in summed)
    if not kept or not summed or not outputs * values:
        return 0
    nearest = min(kept, key=tensor.stride)
    if tensor.stride(nearest) > min(map(tensor.stride, summed)):
        return 0  # values of one output lie side by side, and a warp sums them: little is left to others
    vector = math.gcd(VECTOR, tensor.shape[nearest]) if tensor.stride(nearest) == 1 else 1
    threads = THREADS // vector
    wide, high = (min(_power(length), threads) for length in (outputs // vector, values))
    height = min(high, threads // min(wide, WARP))
    width = min(wide, threads // height)
    a_thread = math.ceil(values / height)
    blocks = math.ceil(outputs / vector / width)
    most = BLOCKS // (width * height)
    if values < min(16 * height, MOST_VALUES) or a_thread < MOST_VALUES or blocks > most:
        return 0
    shares = max(min(math.ceil(most / blocks), math.ceil(a_thread / LEAST_VALUES)), math.ceil(a_thread / MOST_VALUES))
    return SUM_BYTES * outputs * shares * width * vector if shares > 1 else 0


def _power(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << max(0, number.bit_length() - 1)
