"""A run that is saved after every step, and its continuation from each of these checkpoints in another process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.support import EAGER, digit_splits, take, text_splits, tiny_gpt

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.models.cnn import CNN, CNNConfig, image_loss
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.randomness import seed_everything
from hybridtrainer.trainer import HybridTrainer

STEPS, AHEAD = 60, 20


def gpt_run() -> tuple[HybridTrainer, PositionedLoader]:
    """AdamW, one-cycle schedule, clipping, dropout, scalar probes, a model of the loss."""
    seed_everything(3)
    model, splits = tiny_gpt(dropout=0.1), text_splits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = HybridTrainer(
        model,
        optimizer,
        gpt_loss,
        HybridTrainerConfig(**EAGER, dynamics="mlp"),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=2000),
        clip_norm=1.0,
        probe_batches=take(PositionedLoader(splits.probe, 8), 2),
    )
    return trainer, trainer.loader(splits.train, 8)


def cnn_run() -> tuple[HybridTrainer, PositionedLoader]:
    """SGD with momentum in two groups, fp16 with a scaler, batch norm, dropout, accumulation, no probe batches.

    All that learns: a recurrent model of the loss, horizons, coefficients of jumps.
    """
    seed_everything(4)
    model, splits = CNN(CNNConfig((8, 16, 16), batch_norm=True, dropout=0.2)), digit_splits()
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == big]} for big in (True, False)]
    optimizer = torch.optim.SGD(groups, lr=0.005, momentum=0.9)
    trainer = HybridTrainer(
        model,
        optimizer,
        image_loss,
        HybridTrainerConfig(
            **EAGER, dynamics="rssm", horizon="linucb", forecaster="learned", memory=MemoryConfig(precision="fp16")
        ),
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 45], gamma=0.7),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7),
        accumulate=2,
    )
    return trainer, trainer.loader(splits.train, 16)


RUNS = {"gpt": gpt_run, "cnn": cnn_run}


def stepping(trainer: HybridTrainer, loader: PositionedLoader) -> Iterator[list[Any]]:
    """Steps for ever; yields what is to be equal: loss, phase, clock."""

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()
    while True:
        batch = next(batches) if trainer.accumulate == 1 else [next(batches) for _ in range(trainer.accumulate)]
        result = trainer.step(batch)
        yield [result.loss, result.phase, result.step]


def record(kind: str, folder: Path) -> list[Any]:
    """Runs 60 steps with a checkpoint after each, and 20 more. Returns fingerprints and results of all."""
    trainer, loader = RUNS[kind]()
    steps = stepping(trainer, loader)
    made = []
    for index in range(STEPS + AHEAD):
        result = next(steps)
        if index < STEPS:
            trainer.save(folder / str(index))
        made.append([trainer.fingerprint(), trainer.current_phase, result])
    return made


def replay(kind: str, folder: Path) -> list[Any]:
    """From each checkpoint: its fingerprint once loaded, and the 20 steps that follow."""
    replayed = []
    for index in range(STEPS):
        trainer, loader = RUNS[kind]()
        trainer.load(folder / str(index))
        fingerprint = trainer.fingerprint()
        steps = stepping(trainer, loader)
        replayed.append([fingerprint, [next(steps) for _ in range(AHEAD)], trainer.fingerprint()])
    return replayed


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(replay(sys.argv[1], Path(sys.argv[2])), sys.stdout)
