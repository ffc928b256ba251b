"""Decoder-only transformers: GPT-2 and Llama flavours from one configuration.

Attention is torch's fused one. The model knows nothing of training; `gpt_loss` is the usual next-token loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.rotary import split_rotated
from hybridtrainer.kernels.swiglu import swiglu


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a decoder.

    Attributes:
        flavour: "gpt2" has learned positions, LayerNorm, GELU and biases; "llama" has rotary positions,
            RMSNorm, SwiGLU and no biases.
        kv_heads: Key and value heads, where fewer than `heads`; None for as many.
        hidden: Width inside the MLP; None for 4 x width (gpt2) or the usual 8/3 x width (llama).
        tied: Whether the head shares the embedding's weights.
    """

    flavour: Literal["gpt2", "llama"]
    blocks: int
    width: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024
    kv_heads: int | None = None
    hidden: int | None = None
    tied: bool = True
    dropout: float = 0.0

    @property
    def hidden_width(self) -> int:
        """Width inside the MLP."""
        if self.hidden is not None:
            return self.hidden
        return 4 * self.width if self.flavour == "gpt2" else 128 * math.ceil(self.width * 8 / 3 / 128)


def _llama(blocks: int, width: int, heads: int, hidden: int | None = None) -> GPTConfig:
    return GPTConfig("llama", blocks, width, heads, 32000, 2048, hidden=hidden, tied=False)


GPT_CONFIGS: dict[str, GPTConfig] = {
    "nano": GPTConfig("gpt2", 4, 128, 4, vocabulary=256, context=128),
    "nano-llama": GPTConfig("llama", 4, 128, 4, vocabulary=256, context=128),
    "mini": GPTConfig("gpt2", 8, 256, 8, vocabulary=256, context=128),
    "gpt2-124m": GPTConfig("gpt2", 12, 768, 12),
    "gpt2-350m": GPTConfig("gpt2", 24, 1024, 16),
    "gpt2-774m": GPTConfig("gpt2", 36, 1280, 20),
    "gpt2-1.5b": GPTConfig("gpt2", 48, 1600, 25),
    "llama-1b": _llama(40, 1408, 11),
    "llama-7b": _llama(32, 4096, 32, hidden=11008),
    "llama-13b": _llama(40, 5120, 40, hidden=13824),
    "llama-50b": _llama(62, 8192, 64, hidden=22016),
}
"""Every decoder that can be asked for by name."""


class GPT(nn.Module):
    """A decoder.

    >>> model = GPT(GPT_CONFIGS["nano"])
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ModelError(f"Width {config.width} does not divide into {config.heads} heads.", "Choose others.")
        if config.heads % (config.kv_heads or config.heads):
            raise ModelError(f"{config.heads} heads cannot share {config.kv_heads} kv_heads.", "Choose others.")
        if config.flavour == "llama" and config.width // config.heads % 2:
            raise ModelError(f"Rotary heads of width {config.width // config.heads} are odd.", "Choose an even width.")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.flavour == "gpt2" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.initialize_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each of `tokens`, (batch, time) to (batch, time, vocabulary)."""
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads, (batch, time) to (batch, time, width): a loss can then do without whole logits."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    @torch.no_grad()
    def initialize_(self, device: str | torch.device | None = None) -> None:
        """Draws new weights: GPT-2's way, what writes into the residual stream starts smaller the deeper the model.

        Args:
            device: Where the numbers are drawn; where the weights are if left out. A GPU fills weights in host memory
                many times faster than a CPU.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.blocks)
        for name, parameter in self.named_parameters():
            std = residual_std if name.endswith(("out.weight", "down.weight")) else 0.02
            if parameter.dim() > 1:
                drawn = parameter if device is None else torch.empty_like(parameter, device=device)
                parameter.copy_(drawn.normal_(std=std))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class Attention(nn.Module):
    """Causal self-attention; fewer key and value heads than query heads where the configuration says so."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        bias = config.flavour == "gpt2"
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_width = config.width // config.heads
        self.rotary = config.flavour == "llama"
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_width, bias=bias)
        self.out = nn.Linear(config.width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        split = [self.heads, self.kv_heads, self.kv_heads]
        qkv = self.qkv(x).view(batch, time, sum(split), self.head_width)
        if self.rotary:
            q, k, v = split_rotated(qkv, self.heads, self.kv_heads)
        else:
            q, k, v = qkv.transpose(1, 2).split(split, dim=1)  # (batch, heads, time, head_width) each
        y = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )  # fmt: skip
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return out


class MLP(nn.Module):
    """GELU (gpt2) or SwiGLU (llama)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        bias = config.flavour == "gpt2"
        self.gated = config.flavour == "llama"
        self.up = nn.Linear(config.width, config.hidden_width * (2 if self.gated else 1), bias=bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        hidden = self.up(x)
        out: Tensor = self.down(swiglu(hidden) if self.gated else F.gelu(hidden))
        return out


def build_gpt(name: str, *, vocabulary: int | None = None, context: int | None = None, blocks: int | None = None,
              dropout: float = 0.0, device: str | torch.device | None = None) -> GPT:  # fmt: skip
    """A decoder by name, parts of its shape replaced where given; `device="meta"` builds it without memory.

    >>> model = build_gpt("llama-50b", device="meta")
    >>> round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1)
    50.7

    Raises:
        ModelError: for an unknown name.
    """
    if name not in GPT_CONFIGS:
        raise ModelError(f"There is no model named {name!r}.", f"Choose one of: {', '.join(GPT_CONFIGS)}.")
    config = GPT_CONFIGS[name]
    config = replace(
        config,
        vocabulary=vocabulary or config.vocabulary,
        context=context or config.context,
        blocks=blocks or config.blocks,
        dropout=dropout,
    )
    with torch.device(device or "cpu"):
        return GPT(config)


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy in nats of each sequence of `tokens`, (batch, time + 1) to (batch,)."""
    logits = model(tokens[:, :-1]).float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1), reduction="none")
    return losses.view(len(tokens), -1).mean(dim=1)


def _norm(config: GPTConfig) -> nn.Module:
    return nn.LayerNorm(config.width) if config.flavour == "gpt2" else nn.RMSNorm(config.width)
