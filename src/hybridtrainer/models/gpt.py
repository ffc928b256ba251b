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
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each of `tokens`, (batch, time) to (batch, time, vocabulary)."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialize(self) -> None:
        # GPT-2 initialization: what writes into the residual stream starts smaller the deeper the model.
        residual_std = 0.02 / math.sqrt(2 * self.config.blocks)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=residual_std if name.endswith(("out.weight", "down.weight")) else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


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
        qkv = self.qkv(x).view(batch, time, sum(split), self.head_width).transpose(1, 2)
        q, k, v = qkv.split(split, dim=1)  # (batch, heads, time, head_width) each
        if self.rotary:
            q, k = rotate(q), rotate(k)
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
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        out: Tensor = self.down(hidden)
        return out


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions (arXiv 2104.09864): pairs of channels turn by an angle that grows with the position."""
    time, width = x.shape[-2:]
    frequency = base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angle = torch.arange(time, device=x.device, dtype=torch.float32)[:, None] * frequency  # (time, width / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def build_gpt(name: str, *, vocabulary: int | None = None, context: int | None = None, dropout: float = 0.0,
              device: str | torch.device | None = None) -> GPT:  # fmt: skip
    """A decoder by name; `device="meta"` builds it without memory.

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
