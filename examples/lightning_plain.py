"""Training with Lightning. `lightning_hybrid.py` is the same with three lines changed."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss

torch.manual_seed(0)
source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
windows: Any = list(source[: len(source) // 65 * 65].view(-1, 65))


class TextModel(pl.LightningModule):
    """A small GPT on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig("gpt2", 2, 32, 2, vocabulary=256, context=64))

    def training_step(self, batch: Tensor, _batch_idx: int) -> Tensor:
        return gpt_loss(self.gpt, batch).mean()

    def validation_step(self, batch: Tensor, _batch_idx: int) -> None:
        self.log("val_loss", gpt_loss(self.gpt, batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


with TemporaryDirectory() as folder:
    trainer = pl.Trainer(
        max_epochs=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    training: Any = DataLoader(windows[:-40], batch_size=16, shuffle=True, drop_last=True)
    trainer.fit(TextModel(), training, DataLoader(windows[-40:], batch_size=40))
    print(f"held-out loss {trainer.callback_metrics['val_loss']:.4f}")
