"""What foresight costs on tasks that give nothing to foresee: plain and hybrid step by step in turns, same batches.

    python -m benchmarks.resist

Random labels, text that is noise alone, and images so noisy that they stay hard. `predict = "auto"` and jumps by name
must be at most 2% slower than plain training and end no worse. Images are Fashion-MNIST's, of the folder in variable
HYBRIDTRAINER_TEST_DATA, whose steps take as long as those of a real task, and scikit-learn's digits, whose steps take a
few milliseconds. Times are those of the processor, loading included: other programs do not count in them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import RESULTS, write_result
from hybridtrainer import HybridTrainer, HybridTrainerConfig
from hybridtrainer.data.images import LabelledImages, load_digits, load_idx
from hybridtrainer.data.loader import MapDataset, PositionedLoader
from hybridtrainer.losses import LossFunction
from hybridtrainer.models.cnn import build_cnn, image_loss
from hybridtrainer.models.gpt import build_gpt, gpt_loss

CONTEXT = 64
DATA = "HYBRIDTRAINER_TEST_DATA"
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"predict": "off"},
    "auto": {},
    "jumps": {"predict": ["jumps"], "confidence_threshold": 0.60, "max_predict_steps": 50},
}


@dataclass(frozen=True)
class Task:
    """Something to be trained.

    Attributes:
        build: The model.
        train: Samples to train on.
        held_out: Samples for probes and for the loss in the end.
        steps: Of a run; None for as many as are asked for.
    """

    build: Callable[[], nn.Module]
    loss: LossFunction
    train: MapDataset
    held_out: MapDataset
    rate: float
    batch: int = 64
    steps: int | None = None


def random_labels(seed: int) -> Task:
    """Images whose labels are drawn: nothing in them carries over to others."""
    train, held_out = _fashion()
    return Task(lambda: build_cnn("cnn-small"), image_loss, _relabelled(train, seed), held_out, 1e-3, batch=128)


def tiny_random_labels(seed: int) -> Task:
    """The same with digits of 8 x 8."""
    splits = load_digits(0.2, 0.1, seed)
    return Task(lambda: build_cnn("cnn"), image_loss, _relabelled(splits.train, seed), splits.validation, 1e-3)


def _fashion() -> tuple[LabelledImages, LabelledImages]:
    """8,192 images to train on, some twelve passes in a run, and others."""
    splits = load_idx(str(Path(os.environ[DATA]) / "fashion-mnist"), 0.02)
    whole = splits.train
    return LabelledImages(whole.images[:8192], whole.labels[:8192], whole.mean, whole.spread), splits.validation


def _relabelled(images: LabelledImages, seed: int) -> LabelledImages:
    labels = torch.randint(10, (len(images),), generator=torch.Generator().manual_seed(seed))
    return LabelledImages(images.images, labels, images.mean, images.spread)


def hard_images(seed: int) -> Task:
    """Images under noise of four times their own spread."""
    train, held_out = _fashion()
    return _noisy(train, held_out, seed, "cnn-small", 128)


def tiny_hard_images(seed: int) -> Task:
    """The same with digits of 8 x 8."""
    splits = load_digits(0.2, 0.1, seed)
    return _noisy(splits.train, splits.validation, seed, "cnn", 64)


def _noisy(train: LabelledImages, held_out: LabelledImages, seed: int, net: str, batch: int) -> Task:
    drawn = torch.Generator().manual_seed(seed)

    def noisy(images: LabelledImages) -> LabelledImages:
        noise = 4 * images.spread * torch.randn(images.images.shape, generator=drawn)
        return LabelledImages(images.images + noise, images.labels, images.mean, images.spread)

    return Task(lambda: build_cnn(net), image_loss, noisy(train), noisy(held_out), 1e-3, batch)


def noise_alone(seed: int) -> Task:
    """A GPT on tokens that are drawn: after the first steps there is nothing to be learned."""

    class Drawn:
        def __init__(self, first: int) -> None:
            self._first = first

        def __len__(self) -> int:
            return 1 << 15

        def __getitem__(self, index: int) -> Tensor:
            drawn = torch.Generator().manual_seed((seed << 20) + self._first + index)
            return torch.randint(256, (CONTEXT + 1,), generator=drawn)

    return Task(
        lambda: build_gpt("nano", context=CONTEXT), gpt_loss, Drawn(0), Drawn(1 << 16), 1e-3, batch=8, steps=240
    )


TASKS: dict[str, Callable[[int], Task]] = {
    "random labels": random_labels, "images that stay hard": hard_images, "noise alone": noise_alone,
    "random labels, 8 x 8": tiny_random_labels, "images that stay hard, 8 x 8": tiny_hard_images,
}  # fmt: skip


def race(task: Task, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """All arms, one step of each in turn; what each took and where it ended."""
    trainers: dict[str, HybridTrainer] = {}
    streams: dict[str, Iterator[Any]] = {}
    held_out = list(islice(PositionedLoader(task.held_out, task.batch), 4))
    for name, settings in ARMS.items():
        torch.manual_seed(seed)
        model = task.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
        config = HybridTrainerConfig.model_validate(settings | {"seed": seed})
        trainers[name] = HybridTrainer(model, optimizer, task.loss, config, clip_norm=1.0, probe_batches=held_out[:2])
        trainers[name].expect_end(steps)
        streams[name] = _forever(trainers[name].loader(task.train, task.batch))
    order, spent = list(trainers), dict.fromkeys(trainers, 0.0)
    while any(trainer.step_count < steps for trainer in trainers.values()):
        order = order[1:] + order[:1]
        for name in order:
            if trainers[name].step_count < steps:
                started = time.process_time()
                trainers[name].step(next(streams[name]))
                spent[name] += time.process_time() - started
    found: dict[str, dict[str, Any]] = {}
    for name, trainer in trainers.items():
        counted = trainer.statistics()
        found[name] = {
            "seconds": counted.seconds,
            "processor_seconds": spent[name],
            "loss": trainer.evaluate(held_out),
            "jumps": [counted.jumps_kept, counted.jumps_refused, counted.jumps_rolled_back],
            "foreseen_steps": counted.foreseen_steps,
            "skipped_updates": counted.skipped_updates,
            "worth_seconds": counted.worth_seconds,
        }
    return found


def _forever(loader: PositionedLoader) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if DATA not in os.environ:
        parser.error(f"the variable {DATA} does not say where the data are")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, make in TASKS.items():
        tasks = [make(seed) for seed in range(arguments.seeds)]
        steps = tasks[0].steps or arguments.steps
        seeds = [race(task, steps, seed) for seed, task in enumerate(tasks)]
        results[name] = {"steps": steps, "seeds": seeds}
        for arm in ARMS:
            ratios = [found[arm]["processor_seconds"] / found["plain"]["processor_seconds"] for found in seeds]
            losses = [found[arm]["loss"] for found in seeds]
            results[name][arm] = {"processor_time_over_plain": median(ratios), "loss": fmean(losses)}
            print(
                f"{name:24} {arm:6} {median(ratios):.3f} of plain's time ({min(ratios):.3f} to {max(ratios):.3f}), "
                f"held-out loss {fmean(losses):.4f}, jumps {[found[arm]['jumps'] for found in seeds]}",
                flush=True,
            )
        path = write_result("resist", {"tasks": results}, arguments.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
