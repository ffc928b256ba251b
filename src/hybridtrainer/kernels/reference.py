"""The optimizer updates in plain PyTorch: what every kernel must compute, and what runs where there is no GPU.

fp32 weights are stored as they come out. A weight of 16 bits keeps what it learns in one of two ways: the bits below it
are kept too ("split", exact), or it is rounded up or down at random so that small steps add up on average ("sr").
Moments of 8 or 4 bits are always rounded at random: with beta2 = 0.999 a second moment moves by less than half a code
per step and would never leave the nearest one. All random bits come from a counter, so an update is a function of its
arguments alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hybridtrainer.kernels.formats import CODES, Codes, Format, elements_per_entry, weight_dtype
from hybridtrainer.kernels.rounding import (
    decode,
    encode,
    join,
    mix_key,
    pack,
    random_bits,
    round_randomly,
    split,
    unpack,
)

State = Mapping[str, Tensor]

# Updates go through a tensor in pieces, so that temporaries stay small; a multiple of every block of codes.
PIECE_ELEMENTS = 1 << 20
# Uses of random bits: never the same bits twice in one update.
FOR_WEIGHT, FOR_MOMENTS = 0, 1


@dataclass(frozen=True)
class Hyper:
    """What an update depends on besides its tensors.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment; a factored state has none.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, as in AdamW.
        step: 1 for the first update.
        seed: Of the run's random rounding.
        tensor: Number of the parameter, the same in every step and every run.
        first_element: Of the parameter, where only a part of it is updated; a multiple of every block of codes.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    seed: int
    tensor: int
    first_element: int = 0

    @property
    def decay(self) -> float:
        """What is left of a weight by weight decay alone."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """The learning rate over the first moment's bias."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def second_bias(self) -> float:
        """What part of a constant second moment has been gathered so far."""
        return 1 - self.beta2**self.step

    def key(self, use: int) -> int:
        """The key of the random bits for one use in this update of this tensor."""
        return mix_key(self.seed, self.step, self.tensor, use)


@torch.no_grad()
def update_(
    kind: Format,
    weight: Tensor,
    state: State,
    gradient: Tensor,
    hyper: Hyper,
    scale: Tensor,
    ok: Tensor,
) -> None:
    """One step of AdamW in place; of Adafactor without a first moment for a factored state.

    Args:
        kind: How weight and state are kept.
        weight: Flat, of `weight_dtype(kind)`.
        state: The tensors of `state_fields(kind, shape)`.
        gradient: As many elements as the weight, contiguous, in bf16 or fp32.
        hyper: Learning rate and the like.
        scale: 0-dim fp32, multiplied onto the gradient: the factor of gradient clipping.
        ok: 0-dim int32; where it is 0 nothing at all is changed.
    """
    if not bool(ok) or not len(weight):  # the means of no rows are no numbers
        return
    gradient = gradient.reshape(-1)
    if kind == "fp32":
        wide = gradient.float()
        adamw_(weight, state, wide if float(scale) == 1 else wide * scale, hyper)
    elif kind == "factored":
        _update_factored_(weight, state, gradient, hyper, scale, ok)
    else:
        for start in range(0, len(weight), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            _update_piece_(
                kind, weight[piece], state_piece(kind, state, piece), gradient[piece].float() * scale, hyper, start
            )


def adamw_(weight: Tensor, state: State, gradient: Tensor, hyper: Hyper) -> None:
    """torch's own AdamW on fp32 tensors, operation for operation."""
    steps_before = torch.tensor(float(hyper.step - 1))
    adamw(
        [weight], [gradient], [state["m"]], [state["v"]], [], [steps_before],
        foreach=False, fused=False, amsgrad=False, maximize=False,
        lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2, eps=hyper.eps, weight_decay=hyper.weight_decay,
    )  # fmt: skip


def read(kind: Format, weight: Tensor, state: State) -> Tensor:
    """The parameter in fp32, flat, with all bits that are kept of it."""
    if weight_dtype(kind) == torch.float32:
        return weight.detach().clone()
    return join(weight, state["low"]) if "low" in state else weight.float()


@torch.no_grad()
def write_(kind: Format, weight: Tensor, state: State, values: Tensor) -> None:
    """Stores flat fp32 values: exactly where the format keeps 32 bits, as the nearest bf16 where it keeps 16.

    The moments stay: they describe gradients, not weights.
    """
    if kind != "fp32" and "low" in state:
        high, low = split(values)
        weight.copy_(high)
        state["low"].copy_(low)
    else:
        weight.copy_(values)


def norms(gradient: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The norm of each row and of each column of a flat gradient, in fp32."""
    matrix = gradient.view(height, width)
    by_row = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
    return by_row, torch.linalg.vector_norm(matrix, dim=0, dtype=torch.float32)


def factors_(
    state: State, row_norms: Tensor, column_norms: Tensor, hyper: Hyper, scale: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """Moves a factored second moment on, where ok, and gives r and c with v[i, j] = r[i] * c[j], bias corrected.

    Adafactor's rank-one estimate (Shazeer and Stern, arXiv 1804.04235): row mean times column mean over the mean of
    all. Nothing here waits for a GPU.
    """
    rows, columns = state["rows"], state["columns"]
    for field, norm, count in ((rows, row_norms, len(columns)), (columns, column_norms, len(rows))):
        mean_square = (norm * scale).square() / count + 1e-30
        field.copy_(torch.where(ok != 0, torch.lerp(field, mean_square, 1 - hyper.beta2), field))
    return rows / (rows.mean() * hyper.second_bias), columns


def _update_piece_(kind: Format, weight: Tensor, state: State, gradient: Tensor, hyper: Hyper, start: int) -> None:
    index = torch.arange(start, start + len(weight), device=weight.device) + hyper.first_element
    m, v = read_moments(kind, state, len(weight))
    m = torch.lerp(m, gradient, 1 - hyper.beta1)
    v = torch.lerp(v, gradient.square(), 1 - hyper.beta2)
    values = read(kind, weight, state) * hyper.decay
    values -= hyper.step_size * (m / (v.sqrt() / hyper.second_bias**0.5 + hyper.eps))
    if "low" in state or weight.dtype == torch.float32:
        write_(kind, weight, state, values)
    else:
        weight.copy_(round_randomly(values, random_bits(hyper.key(FOR_WEIGHT), index)))
    if kind in CODES:
        _write_moments_(CODES[kind], state, m, v, random_bits(hyper.key(FOR_MOMENTS), index))
    else:
        state["m"].copy_(m)
        state["v"].copy_(v)


def _update_factored_(weight: Tensor, state: State, gradient: Tensor, hyper: Hyper, scale: Tensor, ok: Tensor) -> None:
    row_norms, column_norms = norms(gradient, len(state["rows"]), len(state["columns"]))
    rows, columns = factors_(state, row_norms, column_norms, hyper, scale, ok)
    width = len(columns)

    def pieces() -> Iterator[tuple[int, int, Tensor]]:
        step = max(1, PIECE_ELEMENTS // max(1, width))
        for first in range(0, len(rows), step):
            start, stop = first * width, min(first + step, len(rows)) * width
            root = (rows[first : first + step, None] * columns).sqrt().view(-1)
            yield start, stop, gradient[start:stop].float() * scale / (root + hyper.eps)

    mean_square = sum(float(update.square().sum()) for _, _, update in pieces()) / max(1, len(weight))
    rate = hyper.lr / max(1.0, mean_square**0.5)
    for start, stop, update in pieces():
        values = weight[start:stop].float() * hyper.decay - rate * update
        index = torch.arange(start, stop, device=weight.device)
        weight[start:stop] = round_randomly(values, random_bits(hyper.key(FOR_WEIGHT), index))


def read_moments(kind: Format, state: State, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` elements of both moments in fp32, flat."""
    m, v = state["m"], state["v"]
    if kind not in CODES:
        return m, v
    codes = CODES[kind]
    if codes.bits == 4:
        m, v = unpack(m, count, signed=True), unpack(v, count, signed=False)
    return (
        decode(m, state["m_scale"], codes.first_top, 2, codes.block),
        decode(v, state["v_scale"], codes.second_top, 4, codes.block),
    )


def _write_moments_(codes: Codes, state: State, m: Tensor, v: Tensor, bits: Tensor) -> None:
    for name, values, top, power, draws in (
        ("m", m, codes.first_top, 2, bits & 0xFFFF),
        ("v", v, codes.second_top, 4, bits >> 16),
    ):
        coded, scale = encode(values, top, power, codes.block, draws)
        state[name].copy_(pack(coded) if codes.bits == 4 else coded)
        state[f"{name}_scale"].copy_(scale)


def state_piece(kind: Format, state: State, piece: slice) -> State:
    """The state of a range of elements, which begins and ends with blocks of codes or with the tensor."""
    per_entry = elements_per_entry(kind)
    counts = {name: per_entry.get(name, 1) for name in state}
    return {name: tensor[piece.start // counts[name] : piece.stop // counts[name]] for name, tensor in state.items()}
