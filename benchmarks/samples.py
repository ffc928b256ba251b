"""What sample forecasts are worth where labels are right, where some are wrong, and where they all are.

    python -m benchmarks.samples --set fashion-mnist --steps 1500 --wrong 0 0.2 1.0 --seeds 2

The folder in the variable HYBRIDTRAINER_TEST_DATA has a folder of that name with MNIST-like idx files. For each share
of training labels that are replaced at random: plain training and training with `predict = ["samples"]`, and with
`sample_weights` besides where `--arms` says so, all read out from averaged weights, on the same seeds; the accuracy on
the true labels of the test images as training goes on, the steps until it is at plain training's last, seconds, and how
much of the data was not computed. For speed against tuned baselines with intervals use `hybridtrainer compare`.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.record import RESULTS, write_result
from hybridtrainer import HybridTrainer, HybridTrainerConfig
from hybridtrainer.data.chosen import ChosenLoader
from hybridtrainer.data.endless import endless
from hybridtrainer.data.images import ImageSplits, LabelledImages, load_idx
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.models.cnn import build_cnn, image_accuracy, image_loss

ARMS: dict[str, dict[str, Any]] = {
    "plain": {"predict": "off"},
    "samples": {"predict": ["samples"]},
    "weighed": {"predict": ["samples"], "sample_weights": True},
}
DATA = "HYBRIDTRAINER_TEST_DATA"
LAST = 5  # evaluations whose mean is the accuracy at the end


def with_wrong_labels(images: LabelledImages, share: float, classes: int) -> LabelledImages:
    """The same images, of which so many have a label that was drawn at random."""
    generator = torch.Generator().manual_seed(99)
    is_wrong = torch.rand(len(images), generator=generator) < share
    drawn = torch.randint(0, classes, (len(images),), generator=generator)
    return LabelledImages(images.images, torch.where(is_wrong, drawn, images.labels), images.mean, images.spread)


def run(
    arm: str, splits: ImageSplits, train: LabelledImages, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One run: accuracy by step, and what it took."""
    torch.manual_seed(seed)
    model = build_cnn(arguments.model, classes=splits.classes).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    config = HybridTrainerConfig(**ARMS[arm], readout="averaged", seed=seed)
    trainer = HybridTrainer(model, optimizer, image_loss, config)
    loader = trainer.loader(train, arguments.batch)
    held_out = list(islice(PositionedLoader(splits.validation, 500, shuffle=False), arguments.test_images // 500))
    batches = endless(loader, 1)
    accuracy: list[float] = []
    seconds = 0.0
    for step in range(1, arguments.steps + 1):
        began = time.perf_counter()
        trainer.step(_to(next(batches), arguments.device))
        seconds += time.perf_counter() - began
        if step % arguments.every == 0:
            accuracy.append(trainer.evaluate((_to(batch, arguments.device) for batch in held_out), image_accuracy))
    skipped = 1 - loader.taken / loader.passed if isinstance(loader, ChosenLoader) else 0.0
    return {"accuracy": accuracy, "last": fmean(accuracy[-LAST:]), "seconds": seconds, "skipped": skipped}


def _to(batch: Any, device: str) -> Any:
    return tuple(part.to(device) for part in batch)


def steps_to(target: float, accuracy: list[float], every: int) -> int | None:
    """When the mean of three evaluations first is at the target."""
    means = [fmean(accuracy[at : at + 3]) for at in range(len(accuracy) - 2)]
    return next(((at + 3) * every for at, mean in enumerate(means) if mean >= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="fashion-mnist", choices=["fashion-mnist", "mnist"])
    parser.add_argument("--model", default="cnn-small", choices=["cnn", "cnn-small"])
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--test-images", type=int, default=5000)
    parser.add_argument("--train-images", type=int, default=0, help="train on so many of them; 0 for all")
    parser.add_argument("--arms", nargs="+", default=["samples"], choices=list(ARMS)[1:], help="beside plain training")
    parser.add_argument("--wrong", type=float, nargs="+", default=[0.0, 0.2, 1.0], help="shares of labels replaced")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="samples", help="name of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if DATA not in os.environ:
        parser.error(f"the variable {DATA} does not say where the data are")
    splits = load_idx(Path(os.environ[DATA]) / arguments.set, 0.02)
    rows = []
    for share in arguments.wrong:
        train = with_wrong_labels(splits.train, share, splits.classes)
        if arguments.train_images:
            first = slice(arguments.train_images)
            train = LabelledImages(train.images[first], train.labels[first], train.mean, train.spread)
        for seed in range(arguments.seeds):
            found = {arm: run(arm, splits, train, seed, arguments) for arm in ["plain", *arguments.arms]}
            target = found["plain"]["last"]
            for arm, row in found.items():
                row["steps_to_plain"] = steps_to(target, row["accuracy"], arguments.every)
                print(
                    f"wrong {share:4.0%}  seed {seed}  {arm:8} accuracy {row['last']:.4f}  "
                    f"{row['steps_to_plain']} steps to plain's  {row['seconds']:.0f} s  {row['skipped']:.0%} left out",
                    flush=True,
                )
                rows.append({"wrong": share, "seed": seed, "arm": arm, **row})
            settings = {key: str(value) for key, value in vars(arguments).items() if key != "out"}
            write_result(arguments.name, {"settings": settings, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
