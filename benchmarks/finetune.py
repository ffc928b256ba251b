"""Tasks that tune a model which was trained before: the base, the part of a text to tune on, and the trainer.

A byte GPT is trained on the standard library once, plainly, from a fixed seed, and kept. It is then tuned on a small
part of another text over several passes, with all of its weights or with adapters of PEFT. `benchmarks.foresight`
compares arms on it.
"""

from __future__ import annotations

import os
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import parse_config
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, file_documents, load_text
from hybridtrainer.models.gpt import build_gpt, gpt_loss
from hybridtrainer.named_tasks import NAMED_TASKS
from hybridtrainer.randomness import seed_everything
from hybridtrainer.tasks import SPLIT_SEED, Task, build_optimizer, build_schedule, build_task
from hybridtrainer.trainer import HybridTrainer

Trained = Literal["full", "lora"]
BASE_STEPS = 2500
PART_BYTES = 64 * 1024  # of the text: half of it is trained on
TEXTS = {"tinyshakespeare": "input.txt", "wikitext-2": "wiki.train.tokens.xz"}
SETTINGS: dict[str, Any] = {
    "model": {"name": "nano", "context": 64},
    "data": {"source": "text", "validation_share": 0.42, "probe_share": 0.08, "probe_batches": 8},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "schedule": {"name": "cosine", "warmup_steps": 20},
    "train": {"steps": 384, "batch_size": 8, "eval_batches": 12, "eval_interval": 7},
}


def base_weights(folder: Path) -> dict[str, Any]:
    """The weights of the base; made where they are not there yet."""
    path = folder / f"base-{BASE_STEPS}.pt"
    if not path.exists():
        settings = deepcopy(NAMED_TASKS["stdlib-gpt"].settings) | {"predict": "off", "model": SETTINGS["model"]}
        settings["train"] |= {"steps": BASE_STEPS, "eval_interval": BASE_STEPS, "device": "cpu"}
        task = build_task(parse_config(settings))
        task.fit(None, "off")
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        torch.save({"loss": task.trainer.evaluate(task.validation), "weights": task.trainer.model.state_dict()}, part)
        part.rename(path)
    kept: dict[str, Any] = torch.load(path)
    return kept


def part_of_text(data: Path, name: str, folder: Path) -> Path:
    """The beginning of a text, as a file."""
    path = folder / f"{name}-{PART_BYTES}.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file_documents(data / name / TEXTS[name])[0][:PART_BYTES])
    return path


def build_tuning(config: RunConfig, folder: Path, trained: Trained) -> Task:
    """A run that tunes the base; with adapters the seed draws them."""
    data, size = config.data, config.train.batch_size
    context, seed = config.model.context, config.seed
    splits = load_text(
        file_documents(data.path or ""), ByteTokenizer(), context, data.validation_share, data.probe_share, "The text"
    )
    base = build_gpt(config.model.name, vocabulary=splits.vocabulary, context=context, dropout=config.model.dropout)
    base.load_state_dict(base_weights(folder)["weights"])
    seed_everything(seed)
    model: nn.Module = base
    if trained == "lora":
        base.config = {"model_type": "custom"}  # type: ignore[assignment]  # or PEFT takes it for one of its own kind
        adapters: Any = LoraConfig(r=8, lora_alpha=16, target_modules=["qkv", "out", "up", "down"])
        model = get_peft_model(base, adapters)
    optimizer = build_optimizer(model, config.optimizer)
    trainer = HybridTrainer(
        model,
        optimizer,
        gpt_loss,
        config,
        scheduler=build_schedule(optimizer, config.schedule, config.train.steps),
        clip_norm=config.train.clip_norm,
        probe_batches=list(islice(PositionedLoader(splits.probe, size, seed=seed), data.probe_batches)),
    )
    validation = list(islice(PositionedLoader(splits.validation, size, seed=SPLIT_SEED), config.train.eval_batches))
    return Task(config, trainer, trainer.loader(splits.train, size), validation, {})
