"""A training loop with Accelerate. `accelerate_hybrid.py` is the same with three lines changed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
windows: Any = list(source[: len(source) // 64 * 64].view(-1, 64))
loader: Any = DataLoader(windows, batch_size=16, shuffle=True, drop_last=True)

accelerator = Accelerator(cpu=True)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).loss
    return loss


model.train()
for epoch in range(2):
    for batch in loader:
        loss = loss_fn(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
