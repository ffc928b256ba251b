"""The head of a language model and its cross-entropy, a tile of tokens at a time, so that logits never exist whole.

At a vocabulary of 128k the logits of 8192 tokens are 4 GiB in fp32, and their gradient is 4 GiB more; here a few
tiles are the peak. Nothing is kept for backward but the inputs and one number for each token; logits are computed
again. This module knows no model: it takes the hidden states and the head's weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hybridtrainer.errors import DataError, ModelError
from hybridtrainer.sizes import as_size

VOCABULARY_ROWS = 8192  # of the weight's gradient at a time, which bounds the fp32 product before it is added
# A GPU's fast matrix kernels want whole tiles: for the 50257 tokens of GPT-2 the head gets rows of zeros.
ROW_MULTIPLE = 64
FEWEST_TOKENS = (
    32  # of a tile that is made smaller: its logits are 16 MiB at a vocabulary of 128k, and products are slow
)

T = TypeVar("T")


class _Settings(NamedTuple):
    ignore_index: int
    label_smoothing: float
    tile_tokens: int
    dtype: torch.dtype  # of the matrix products

    @property
    def wide(self) -> torch.dtype:
        """Of logits, losses and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
              label_smoothing: float = 0.0, tile_tokens: int = 1024) -> Tensor:  # fmt: skip
    """Cross-entropy in nats of each token under the logits z = hidden @ weight.T + bias.

    With smoothing s and target t the loss is logsumexp(z) - (1 - s) z[t] - s mean(z), as in `F.cross_entropy`, and
    its gradient with respect to z is softmax(z) - (1 - s) onehot(t) - s / vocabulary.

    Args:
        hidden: What the head reads, (..., width).
        weight: Of the head, (vocabulary, width). Its gradient is summed in fp32 whatever its type: a sum over
            tiles in bf16 would lose what each tile adds.
        targets: Token numbers, (...).
        bias: Of the head, (vocabulary,).
        ignore_index: Targets of this number have loss 0 and no gradient.
        label_smoothing: Share of the target that is spread over the whole vocabulary.
        tile_tokens: Tokens whose logits exist at one time. The default is enough to keep a GPU busy, and takes
            0.5 GiB at a vocabulary of 128k. Where GPU memory runs out it is halved, with a warning.

    Returns:
        A loss for each token in fp32 (fp64 for fp64 inputs), in the shape of `targets`.

    Raises:
        ModelError: if shapes or types do not fit together, or an option makes no sense.
        DataError: for a target outside the vocabulary. On a GPU torch itself finds it: a check would wait for the GPU.

    >>> hidden, weight, targets = torch.zeros(2, 3, 8), torch.zeros(4, 8), torch.zeros(2, 3, dtype=torch.long)
    >>> losses = head_loss(hidden, weight, targets)
    >>> losses.shape, round(float(losses.mean().exp()), 3)
    (torch.Size([2, 3]), 4.0)
    """
    _check_shapes(hidden, weight, targets, bias)
    if not 0 <= label_smoothing <= 1 or tile_tokens < 1:
        raise ModelError(
            f"head_loss cannot work with label_smoothing {label_smoothing} and tile_tokens {tile_tokens}.",
            "Give a label_smoothing from 0 to 1 and at least 1 token for each tile.",
        )
    if targets.device.type == "cpu":
        _check_targets(targets, len(weight), ignore_index)
    tile_tokens = min(tile_tokens, max(1, targets.numel()))
    settings = _Settings(ignore_index, label_smoothing, tile_tokens, product_dtype(hidden, weight, bias))
    losses: Tensor = _HeadLoss.apply(hidden, weight, bias, targets, settings)  # type: ignore[no-untyped-call]
    return losses


def token_mean(losses: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean of the losses of `head_loss` over the tokens that count; NaN where none does, as `F.cross_entropy` has it.

    >>> token_mean(torch.tensor([3.0, 0.0]), torch.tensor([7, -100]))
    tensor(3.)
    """
    return losses.sum() / (targets != ignore_index).sum()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings,
                ) -> Tensor:  # fmt: skip
        (losses, log_sums), ctx.settings = _in_tiles_that_fit(
            settings, weight, lambda fitting: _losses(hidden, weight, bias, targets, fitting)
        )
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums)
        return losses.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch's own guard would let a second derivative be zero
            raise ModelError("head_loss has no second derivative.", "Use `F.cross_entropy` with `create_graph=True`.")
        hidden, weight, bias, targets, log_sums = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found, _ = _in_tiles_that_fit(
            ctx.settings,
            weight,
            lambda fitting: _gradients(upstream, hidden, weight, bias, targets, log_sums, needs, fitting),
        )
        return (*found, None, None)


def _losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor]:
    """The loss of each token and the logarithm of the sum under its softmax, both flat."""
    flat, ids, ignored = _flat(hidden, targets, settings)
    head, shift = _padded(weight.to(settings.dtype)), None if bias is None else _padded(bias.to(settings.dtype))
    losses = torch.empty(len(flat), dtype=settings.wide, device=hidden.device)
    log_sums = torch.empty_like(losses)
    with _no_autocast(hidden.device):
        for tile in _tiles(len(flat), settings.tile_tokens):
            logits = _logits(flat[tile], head, shift, len(weight), settings)
            inside = logits[:, : len(weight)]
            expected = inside.gather(1, ids[tile, None])[:, 0]
            if settings.label_smoothing:
                expected = expected.lerp(inside.mean(dim=1), settings.label_smoothing)
            log_sums[tile] = _log_sum_exp_(logits)
            losses[tile] = log_sums[tile] - expected
            del logits, inside  # before the next tile's exist
    return losses.masked_fill_(ignored, 0), log_sums


def _gradients(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, log_sums: Tensor,
    needs: tuple[bool, bool, bool], settings: _Settings,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Those of hidden states, weight and bias, as far as they are needed."""
    need_hidden, need_weight, need_bias = needs
    flat, ids, ignored = _flat(hidden, targets, settings)
    head, shift = _padded(weight.to(settings.dtype)), None if bias is None else _padded(bias.to(settings.dtype))
    scale = upstream.reshape(-1).to(settings.wide).masked_fill(ignored, 0)
    hidden_sum = torch.empty_like(flat) if need_hidden else None
    weight_sum = torch.zeros_like(head, dtype=settings.wide) if need_weight else None
    bias_sum = torch.zeros_like(shift, dtype=settings.wide) if need_bias and shift is not None else None
    with _no_autocast(hidden.device):
        for tile in _tiles(len(flat), settings.tile_tokens):
            logits = _logits(flat[tile], head, shift, len(weight), settings)
            _slope_(logits, len(weight), ids[tile, None], log_sums[tile, None], settings).mul_(scale[tile, None])
            if bias_sum is not None:
                bias_sum += logits.sum(dim=0)
            if weight_sum is not None and not hidden.is_cuda:
                weight_sum.addmm_(logits.t(), flat[tile].to(settings.wide))
            slope = logits.to(settings.dtype)
            del logits  # the wide slope lived in them
            if hidden_sum is not None:
                hidden_sum[tile] = slope @ head
            if weight_sum is not None and hidden.is_cuda:
                _add_product_(weight_sum, slope, flat[tile].to(settings.dtype))
            del slope
    return (
        None if hidden_sum is None else hidden_sum.view(hidden.shape),
        None if weight_sum is None else weight_sum[: len(weight)].to(weight.dtype),
        None if bias_sum is None or bias is None else bias_sum[: len(weight)].to(bias.dtype),
    )


def _in_tiles_that_fit(settings: _Settings, weight: Tensor, work: Callable[[_Settings], T]) -> tuple[T, _Settings]:
    """Does the work; where GPU memory runs out, again from the beginning with half the tile.

    Returns with which settings that was.
    """
    while True:
        try:
            return work(settings), settings
        except torch.OutOfMemoryError as error:
            fewer = settings.tile_tokens // 2
            if fewer < FEWEST_TOKENS:
                gradient = as_size(weight.numel() * settings.wide.itemsize)
                error.add_note(
                    f"The head's logits were computed for {settings.tile_tokens} tokens at a time; a smaller "
                    f"`tile_tokens` would hardly take less. The gradient of the head takes {gradient}: a "
                    "frozen head (it stays as it is) does without. Hidden states take less in a smaller batch (more "
                    "steps for the same tokens)."
                )
                raise
        settings = settings._replace(tile_tokens=fewer)
        if weight.is_cuda:
            torch.cuda.empty_cache()
        warnings.warn(
            f"GPU memory ran out in the head's loss: it is computed again, {fewer} tokens at a time. Pass "
            f"`tile_tokens={fewer}`, so that time is not lost in each step.",
            stacklevel=2,
        )


def _flat(hidden: Tensor, targets: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and targets in one row, ignored targets as token 0, and which those are."""
    ids = targets.reshape(-1)
    ignored = ids == settings.ignore_index
    return hidden.reshape(-1, hidden.shape[-1]), ids.masked_fill(ignored, 0), ignored


def _tiles(tokens: int, tile_tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + tile_tokens, tokens)) for start in range(0, tokens, tile_tokens))


def _padded(rows: Tensor) -> Tensor:
    """With zeros up to the next multiple of rows."""
    missing = -len(rows) % ROW_MULTIPLE
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _logits(hidden: Tensor, head: Tensor, shift: Tensor | None, vocabulary: int, settings: _Settings) -> Tensor:
    """Beyond the vocabulary -inf, which neither a maximum nor a sum of exp notices."""
    hidden = hidden.to(settings.dtype)
    logits = (hidden @ head.t() if shift is None else torch.addmm(shift, hidden, head.t())).to(settings.wide)
    logits[:, vocabulary:].fill_(-torch.inf)
    return logits


def _log_sum_exp_(logits: Tensor) -> Tensor:
    """As torch's, in the logits' own memory."""
    highest = logits.amax(dim=1, keepdim=True)
    return logits.sub_(highest).exp_().sum(dim=1).log_().add_(highest[:, 0])


def _slope_(logits: Tensor, vocabulary: int, ids: Tensor, log_sums: Tensor, settings: _Settings) -> Tensor:
    """Gradient of each token's loss with respect to its logits, in their own memory."""
    slope = logits.sub_(log_sums).exp_()
    if settings.label_smoothing:
        slope.sub_(settings.label_smoothing / vocabulary)
    return slope.scatter_(1, ids, slope.gather(1, ids) - (1 - settings.label_smoothing))


def _add_product_(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """Adds slope.T @ hidden; a product of 16-bit matrices leaves the GPU's matrix units in fp32, unrounded."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.t(), hidden)
        return
    for rows in _tiles(len(total), VOCABULARY_ROWS):
        total[rows] += torch.mm(slope[:, rows].t(), hidden, out_dtype=total.dtype)


def product_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """What the head would compute in: the type of its inputs, or that of an autocast around it."""
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(kind)
    if len(dtypes) > 1:
        raise ModelError(
            f"The hidden states are of {hidden.dtype} and the head has {', '.join(sorted(map(str, dtypes)))}.",
            "Convert one of them, or compute the loss under `torch.autocast`.",
        )
    return hidden.dtype


def _no_autocast(device: torch.device) -> torch.autocast:
    # Types are chosen already; backward must use those of forward whatever surrounds it.
    return torch.autocast(device.type if torch.amp.is_autocast_available(device.type) else "cpu", enabled=False)


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    fits = (
        weight.dim() == 2
        and hidden.shape == (*targets.shape, weight.shape[1])
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        raise ModelError(
            f"head_loss was given hidden states of shape {tuple(hidden.shape)}, a weight of {tuple(weight.shape)}, "
            f"{'no bias' if bias is None else f'a bias of {tuple(bias.shape)}'} and targets of {tuple(targets.shape)}.",
            "Give hidden states (..., width), a weight (vocabulary, width), a bias (vocabulary,) and targets (...).",
        )


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    counted = targets[targets != ignore_index]
    if counted.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in counted.aminmax())
    if lowest < 0 or highest >= vocabulary:
        raise DataError(
            f"Token {lowest if lowest < 0 else highest} is not in the vocabulary of {vocabulary}.",
            f"Give the head a row for each token, or mark what is not to be learned with {ignore_index}.",
        )
