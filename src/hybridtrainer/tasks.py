"""From a configuration to everything a run needs: model, data, optimizer, schedule, trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridtrainer import ranks
from hybridtrainer.config import OPTIMIZERS_WITH_BETAS, OptimizerConfig, RunConfig, ScheduleConfig
from hybridtrainer.data import images, text
from hybridtrainer.data.loader import MapDataset, PositionedLoader, mix
from hybridtrainer.errors import ModelError
from hybridtrainer.fit import Loop, ProgressMode
from hybridtrainer.fit_result import FitResult
from hybridtrainer.losses import LossFunction
from hybridtrainer.memory.low_bit import LowBitAdamW
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.cnn import build_cnn, image_accuracy, image_loss
from hybridtrainer.models.gpt import GPT, build_gpt, gpt_loss
from hybridtrainer.models.language import language_loss
from hybridtrainer.observe.progress import Progress
from hybridtrainer.planning.host_room import require_host_room
from hybridtrainer.planning.settle import settle_memory
from hybridtrainer.randomness import seed_everything
from hybridtrainer.records import Planned
from hybridtrainer.replicas import unwrapped
from hybridtrainer.trainer import HybridTrainer
from hybridtrainer.tree import fingerprint

WHOLE_LOGITS = 4096  # tokens of a vocabulary up to which logits may exist whole; of larger ones they fill the memory
SPLIT_SEED = 0  # runs with different seeds are evaluated on the same samples, or their metrics could not be compared


@dataclass(frozen=True)
class Task:
    """A trainer ready to fit, the loader to fit it on, and batches to evaluate it with.

    Attributes:
        config: With nothing left to be planned.
        planned: What its memory settings are planned to take, where they were planned while it was built.
    """

    config: RunConfig
    trainer: HybridTrainer
    loader: PositionedLoader
    validation: list[Any]
    metrics: dict[str, LossFunction]
    planned: Planned | None = None

    def loop(self, progress: Progress) -> Loop:
        """The run as a loop that its owner drives."""
        train = self.config.train
        return Loop(
            self.trainer, self.loader, train.steps, progress, self.validation, self.metrics, train.eval_interval
        )

    def data_digest(self) -> str:
        """SHA-256 of what is trained and evaluated on."""
        train = {name: value for name, value in vars(self.loader.dataset).items() if isinstance(value, Tensor)}
        validation = [batch if isinstance(batch, Tensor) else list(batch) for batch in self.validation]
        return fingerprint({"train": train, "validation": validation})["all"]

    def fit(self, run_dir: str | Path | None, progress: Progress | ProgressMode, **options: Any) -> FitResult:
        """Trains as configured; `options` are those of `hybridtrainer.fit.fit`."""
        options.setdefault("trackers", self.config.run.trackers if run_dir is not None else ())
        return self.trainer.fit(
            self.loader,
            self.config.train.steps,
            run_dir=run_dir,
            validation=self.validation,
            metrics=self.metrics,
            eval_interval=self.config.train.eval_interval,
            progress=progress,
            planned=self.planned,
            **options,
        )


def loss_of_text(vocabulary: int) -> LossFunction:
    """What a resident text model is trained with: in tiles where whole logits would be the largest thing in memory."""
    return language_loss if vocabulary > WHOLE_LOGITS else gpt_loss


def build_task(config: RunConfig) -> Task:
    """Builds a run. Weights depend on the seed and the configuration alone.

    Where memory settings are left to be planned, they are planned here: `Task.config` has what was chosen.

    Raises:
        DataError: if the data cannot be read or is too small.
        MemoryBudgetError: if nothing fits that may be chosen, or a streamed model not into host memory.
        ModelError: if the device is not there.
    """
    device = choose_device(config.train.device)
    splits: text.TextSplits | images.ImageSplits
    metrics: dict[str, LossFunction] = {}
    if config.model.name.startswith("cnn"):
        splits, build = _images(config)
        loss_fn: LossFunction = image_loss
        metrics["accuracy"] = image_accuracy
    else:
        splits, build = _text(config)
        loss_fn = loss_of_text(splits.vocabulary)
    planned = None
    if config.memory.mode == "auto" and ranks.count() > 1:
        raise ModelError(
            'memory.mode is "auto" (or memory.vram is given alone), and a plan is made for one process.',
            "Plan first with `hybridtrainer plan --write`, then train on several ranks.",
        )
    if config.memory.mode == "auto":
        config, planned = settle_memory(config, build("meta"), loss_fn, device)
    seed_everything(config.seed)
    if config.memory.mode == "resident":
        model = build("cpu")
        optimizer = build_optimizer(model.to(device), config.optimizer, config.memory.optimizer_bits, config.seed)
    else:
        model = build("meta")
        require_host_room(model, config, device)
        optimizer = _streamed(model, config, device)
        loss_fn = language_loss
    if ranks.count() > 1 and config.memory.mode == "resident":
        model = DistributedDataParallel(model)
    if not ranks.is_first():  # weights are drawn alike on all ranks, and what is drawn in training is not
        seed_everything(mix(config.seed, ranks.rank()))
    size = config.train.batch_size
    probes = list(islice(_in_order(splits.probe, size, config.seed), config.data.probe_batches))
    trainer = HybridTrainer(
        model,
        optimizer,
        _on_device(loss_fn, device),
        config,
        scheduler=build_schedule(optimizer, config.schedule, config.train.steps),
        clip_norm=config.train.clip_norm,
        accumulate=config.train.accumulate,
        probe_batches=probes,
    )
    return Task(
        config,
        trainer,
        trainer.loader(splits.train, size, workers=config.data.workers),
        _own_part(list(islice(_in_order(splits.validation, size, SPLIT_SEED), config.train.eval_batches))),
        {name: _on_device(metric, device) for name, metric in metrics.items()},
        planned,
    )


TAKE_WHAT_THERE_IS = 'train.device = "auto" takes what there is; see `hybridtrainer doctor`.'


def choose_device(name: str, remedy: str = TAKE_WHAT_THERE_IS) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Args:
        name: One of them.
        remedy: What to do where a GPU is asked for and there is none.

    Raises:
        ModelError: if a GPU is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("A GPU is asked for, and torch finds none here.", remedy)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, bits: Literal[32, 8, 4] = 32, seed: int = 0
) -> Optimizer:
    """The configured optimizer; weight decay acts on matrices, not on norms and biases.

    Args:
        model: On its device.
        config: Which optimizer, and its settings.
        bits: Of each moment; other than 32 for adam and adamw only.
        seed: Of the random rounding of moments with fewer bits.
    """
    groups = _decay_groups(model, config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr}
    if config.name in OPTIMIZERS_WITH_BETAS:
        options["betas"] = config.betas
    if config.name == "sgd":
        options["momentum"] = config.momentum
    if bits != 32:
        return LowBitAdamW(groups, **options, bits=bits, decoupled=config.name == "adamw", seed=seed)
    kinds: dict[str, Callable[..., Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }
    return kinds[config.name](groups, **options)


def _streamed(model: nn.Module, config: RunConfig, device: torch.device) -> Optimizer:
    """Streams a model from the meta device, so that it is never there twice; returns its own optimizer."""
    assert isinstance(model, GPT)
    settings = config.optimizer
    optimizer = stream(
        model,
        config.memory,
        device,
        lr=settings.lr,
        betas=settings.betas,
        param_groups=_decay_groups(model, settings.weight_decay),
        seed=config.seed,
    ).optimizer
    assert isinstance(optimizer, Optimizer)
    model.initialize_(device)
    return optimizer


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay acts on matrices, not on norms and biases."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, steps: int) -> LambdaLR:
    """The learning rate as a share of its peak, by step: a linear rise, then the configured decay."""

    def share(step: int) -> float:
        rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        done = min(1.0, max(0.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps)))
        if config.name == "cosine":
            fall = 0.5 * (1 + math.cos(math.pi * done))
        else:
            fall = 1 - done if config.name == "linear" else 1.0
        return rise * (config.final_ratio + (1 - config.final_ratio) * fall)

    return LambdaLR(optimizer, share)


def _text(config: RunConfig) -> tuple[text.TextSplits, Callable[[str], nn.Module]]:
    data, model = config.data, config.model
    tokenizer = text.ByteTokenizer() if data.tokenizer == "bytes" else text.BPETokenizer(data.tokenizer)
    documents = text.stdlib_documents() if data.source == "stdlib" else text.file_documents(data.path or "")
    name = "The standard library" if data.source == "stdlib" else str(data.path)
    splits = text.load_text(documents, tokenizer, model.context, data.validation_share, data.probe_share, name)
    return splits, lambda device: build_gpt(
        model.name, vocabulary=splits.vocabulary, context=model.context, dropout=model.dropout, device=device
    )


def _images(config: RunConfig) -> tuple[images.ImageSplits, Callable[[str], nn.Module]]:
    data, model = config.data, config.model
    if data.source == "digits":
        splits = images.load_digits(data.validation_share, data.probe_share, SPLIT_SEED)
    else:
        splits = images.load_idx(data.path or "", data.probe_share)
    return splits, lambda device: build_cnn(
        model.name, classes=splits.classes, batch_norm=model.batch_norm, dropout=model.dropout
    ).to(device)


def _in_order(dataset: MapDataset, batch_size: int, seed: int) -> Iterable[Any]:
    """Batches for measuring on, the last one too if it is not full."""
    return PositionedLoader(dataset, min(batch_size, len(dataset)), seed=seed, keep_partial=True)


def _own_part(batches: list[Any]) -> list[Any]:
    """What this rank evaluates: its part where all can have as many, or else all of them; the mean is the same."""
    return batches if len(batches) % ranks.count() else batches[ranks.rank() :: ranks.count()]


def _on_device(function: LossFunction, device: torch.device) -> LossFunction:
    def moved(model: nn.Module, batch: Any, /) -> Tensor:
        inner = unwrapped(model)
        if isinstance(batch, Tensor):
            return function(inner, batch.to(device, non_blocking=True))
        return function(inner, tuple(part.to(device, non_blocking=True) for part in batch))

    return moved
