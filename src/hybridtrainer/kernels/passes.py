"""The Triton passes over a tensor: one for Adam's formats, three for a factored second moment.

Each program writes what belongs to its own tiles and nothing else: a pass reads and writes a tensor once, and gives the
same bits each time. Offsets have 64 bits. Without Triton the module can be imported, but nothing in it called.
"""

from __future__ import annotations

from hybridtrainer.kernels import quant
from hybridtrainer.kernels.quant import jit

try:
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    tl = constexpr = tensor = None


@jit
def adam_pass(
    weight: tensor, low: tensor, m: tensor, v: tensor, m_scale: tensor, v_scale: tensor,
    gradient: tensor, scale: tensor, ok: tensor, elements: tensor, entries: tensor, first_element: tensor,
    gain1: tensor, gain2: tensor, decay: tensor, step_size: tensor, root_unit: tensor, eps: tensor,
    weight_key_low: tensor, weight_key_high: tensor, key_low: tensor, key_high: tensor,
    LOW: constexpr, BITS: constexpr, TOP1: constexpr, TOP2: constexpr, SMALLEST: constexpr,  # noqa: N803
    BLOCK: constexpr, BLOCKS: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """AdamW on a tile of BLOCKS rows, each a block of codes.

    m += (g - m) * gain1; v += (g^2 - v) * gain2; w = w * decay - step_size * m / (sqrt(v) * root_unit + eps)

    LOW: the weight has its lower half in `low`; otherwise an fp32 one is stored as it is, and a bf16 one rounded
    randomly. BITS: of the moments, 32, 8 or 4.
    """
    if tl.load(ok) == 0:
        return
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = index < elements

    g = tl.load(gradient + index, inside, 0.0).to(tl.float32) * tl.load(scale)
    if BITS == 32:
        first = tl.load(m + index, inside, 0.0)
        second = tl.load(v + index, inside, 0.0)
    else:
        first, second = read_coded(m, v, m_scale, v_scale, block, entries, BITS, TOP1, TOP2, BLOCK)

    first += (g - first) * gain1
    second += (g * g - second) * gain2
    root = tl.sqrt(second)
    step = step_size * (first / (root * root_unit + eps))
    if LOW:
        values = quant.join(tl.load(weight + index, inside, 0.0), tl.load(low + index, inside, 0)) * decay - step
        high, rest = quant.split(values)
        tl.store(weight + index, high, inside)
        tl.store(low + index, rest, inside)
    else:
        values = tl.load(weight + index, inside, 0.0).to(tl.float32) * decay - step
        if weight.dtype.element_ty == tl.float32:
            tl.store(weight + index, values, inside)
        else:
            bits = quant.random_bits(index + first_element, weight_key_low, weight_key_high)
            tl.store(weight + index, quant.round_randomly(values, bits), inside)

    if BITS == 32:
        tl.store(m + index, first, inside)
        tl.store(v + index, second, inside)
    else:
        # Beyond the end the moments are 0, as the gradient is, and leave the scale of the last block alone.
        bits = quant.random_bits(index + first_element, key_low, key_high)
        write_coded(
            m, m_scale, first, tl.sqrt(tl.abs(first)), bits & 0xFFFF, block, entries, BITS, TOP1, 2, SMALLEST, BLOCK
        )
        write_coded(v, v_scale, second, root, bits >> 16, block, entries, BITS, TOP2, 4, SMALLEST, BLOCK)


@jit
def read_coded(
    m: tensor, v: tensor, m_scale: tensor, v_scale: tensor, block: tensor, entries: tensor,
    BITS: constexpr, TOP1: constexpr, TOP2: constexpr, BLOCK: constexpr,  # noqa: N803
) -> tensor:  # fmt: skip
    """The moments of a tile in fp32; 0 beyond the end."""
    per_block: tl.constexpr = BLOCK * BITS // 8
    entry = block[:, None] * per_block + tl.arange(0, per_block)[None, :]
    first, second = tl.load(m + entry, entry < entries, 0), tl.load(v + entry, entry < entries, 0)
    if BITS == 4:
        first, second = (quant.unpack(first) ^ 8) - 8, quant.unpack(second)
    has_scale = block * per_block < entries
    first_scale, second_scale = tl.load(m_scale + block, has_scale, 0.0), tl.load(v_scale + block, has_scale, 0.0)
    return quant.decode(first, first_scale, TOP1, 2), quant.decode(second, second_scale, TOP2, 4)


@jit
def write_coded(
    coded: tensor, scales: tensor, values: tensor, root: tensor, bits: tensor, block: tensor, entries: tensor,
    BITS: constexpr, TOP: constexpr, POWER: constexpr, SMALLEST: constexpr, BLOCK: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Codes and scales of one moment of a tile."""
    per_block: tl.constexpr = BLOCK * BITS // 8
    entry = block[:, None] * per_block + tl.arange(0, per_block)[None, :]
    codes, scale = quant.encode(values, root, bits, TOP, POWER, SMALLEST)
    if BITS == 4:
        codes = quant.pack(codes)
    tl.store(coded + entry, codes.to(coded.dtype.element_ty), entry < entries)
    tl.store(scales + block, scale, block * per_block < entries)


@jit
def square_sums_pass(
    gradient: tensor, row_sums: tensor, column_sums: tensor, height: tensor, width: tensor, tiles: tensor,
    ROWS: constexpr, COLUMNS: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Sums of g^2 along the rows and columns of a program's strip: `tiles` tiles, one below the other.

    row_sums is (strips across, height), column_sums is (strips down, width); their sums over the strips are the whole
    rows' and columns'.
    """
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, COLUMNS)
    down, along = program // across, program % across
    column = along * COLUMNS + tl.arange(0, COLUMNS)
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tiles):
        row = (down * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < height)[:, None] & (column < width)[None, :]
        g = tl.load(gradient + row[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
        totals += g * g
        tl.store(row_sums + along * height + row, tl.sum(g * g, axis=1), row < height)
    tl.store(column_sums + down * width + column, tl.sum(totals, axis=0), column < width)


@jit
def factored_square_pass(
    gradient: tensor, scale: tensor, rows: tensor, columns: tensor, sums: tensor,
    height: tensor, width: tensor, eps: tensor,
    ROWS: constexpr, COLUMNS: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """The sum of squares of the update before it is clipped, one for each program's tile."""
    row, column, _ = matrix_tile(height, width, ROWS, COLUMNS)
    update = unclipped(gradient, scale, rows, columns, row, column, height, width, eps)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(update * update, axis=1), axis=0))


@jit
def factored_pass(
    weight: tensor, gradient: tensor, scale: tensor, rows: tensor, columns: tensor, rate: tensor, ok: tensor,
    height: tensor, width: tensor, decay: tensor, eps: tensor, weight_key_low: tensor, weight_key_high: tensor,
    ROWS: constexpr, COLUMNS: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """w = w * decay - rate * g / (sqrt(r * c) + eps), rounded randomly; `rate` has the clipping in it."""
    if tl.load(ok) == 0:
        return
    row, column, inside = matrix_tile(height, width, ROWS, COLUMNS)
    index = row * width + column
    update = unclipped(gradient, scale, rows, columns, row, column, height, width, eps)
    values = tl.load(weight + index, inside, 0.0).to(tl.float32) * decay - tl.load(rate) * update
    bits = quant.random_bits(index, weight_key_low, weight_key_high)
    tl.store(weight + index, quant.round_randomly(values, bits), inside)


@jit
def matrix_tile(height: tensor, width: tensor, ROWS: constexpr, COLUMNS: constexpr) -> tensor:  # noqa: N803
    """Rows, columns and bounds of this program's tile; programs count along the rows first."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, COLUMNS)
    row = ((program // across) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((program % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < height) & (column < width)


@jit
def unclipped(
    gradient: tensor, scale: tensor, rows: tensor, columns: tensor,
    row: tensor, column: tensor, height: tensor, width: tensor, eps: tensor,
) -> tensor:  # fmt: skip
    """g / (sqrt(r * c) + eps) on a tile; 0 outside of the matrix."""
    inside = (row < height) & (column < width)
    g = tl.load(gradient + row * width + column, inside, 0.0).to(tl.float32) * tl.load(scale)
    # One load for each row and column of the tile, not for each element. Beyond the matrix g is 0.
    second = tl.load(rows + row, row < height, 1.0) * tl.load(columns + column, column < width, 1.0)
    return g / (tl.sqrt(second) + eps)
