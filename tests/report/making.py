"""Run folders and comparison folders for the tests of the report, with everything in them that a report shows."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CONFIG = """seed = 0
predict = "auto"
[model]
name = "nano"
[optimizer]
lr = 0.002
betas = [0.9, 0.95]
[train]
steps = {steps}
batch_size = 16
"""
ENVIRONMENT = {"hybridtrainer": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "gpus": [], "packages": {"numpy": None}}


def loss_at(step: float, noise: random.Random) -> float:
    return 1.9 + 3.2 * math.exp(-step / 90) + noise.gauss(0, 0.05)


def records(steps: int = 300, *, seed: int = 0, cycle: int = 40, new_kinds: bool = True) -> list[dict[str, Any]]:
    """A hybrid run: warmup, then Full, a jump that is kept, refused or rolled back, Correct, and again."""
    noise, found, step, turn = random.Random(seed), [], 0, 0
    rolled_back: set[int] = set()

    def write(kind: str, **fields: Any) -> None:
        found.append({"v": 1, "kind": kind, **fields})

    def real(phase: str) -> None:
        nonlocal step
        step += 1
        write("step", step=step, phase=phase, loss=loss_at(step, noise), predicted=0, confidence=None,
              seconds=0.1 + noise.random() * 0.02, reason="", grad_norm=1.0, skipped=False)  # fmt: skip
        if new_kinds and step % 25 == 0:
            for target in (min(steps, step + 30), steps):
                center, wide = loss_at(target, noise), 0.08 + 0.4 * (target - step) / steps
                write("forecast", step=step, target_step=target, loss=center, low=center - wide, high=center + wide)
            write("memory", step=step, phase=phase, host_bytes=int(1.5e9 + step * 1e5), device_bytes=int(9e8 + step),
                  device_peak_bytes=int(1.1e9 + step))  # fmt: skip
        if step % 50 == 0:
            write(
                "evaluation", step=step, seconds=0.4, loss=loss_at(step, noise) + 0.05, accuracy=1 - 1 / (1 + step / 60)
            )

    write("notice", step=0, text="a notice of this run")
    while step < min(steps, 60):
        real("warmup")
    write("phase", step=step, before="warmup", after="full", reason="60 warmup steps are done")
    while step < steps:
        for _ in range(min(cycle // 2, steps - step)):
            real("full")
        if step + 12 >= steps:
            continue
        turn += 1
        jump = {"step": step, "horizon_steps": 10, "forecaster": "line_fit", "confidence": 0.8, "norm_ratio": 0.5}
        before = loss_at(step, noise)
        if turn % 3 == 0:
            write("jump", **jump, verdict="refused", reason=f"probe loss {before:.4f}, worth 0 of 10 steps",
                  worth_steps=0, probe_before=before, probe_after=before + 0.01, seconds=0.05)  # fmt: skip
            continue
        write("jump", **jump, verdict="accepted", reason=f"probe loss {before:.4f}, worth 4 of 10 steps", worth_steps=4,
              probe_before=before, probe_after=before - 0.03, seconds=0.05)  # fmt: skip
        start, step = step, step + 4
        write("step", step=step, phase="predict", loss=before - 0.03, predicted=4, confidence=0.8, seconds=0.06,
              reason="", grad_norm=None, skipped=False)  # fmt: skip
        for _ in range(min(5, steps - step)):
            real("correct")
        undone = turn % 4 == 0 and start not in rolled_back
        verdict, reason = ("rolled back", "the loss rose") if undone else ("kept", "the loss recovered")
        write("jump", **jump, verdict=verdict, reason=reason, worth_steps=4, probe_before=before,
              probe_after=before - 0.1, seconds=0.0)  # fmt: skip
        if undone:
            rolled_back.add(start)
            step = start
    write("end", step=step, status="finished", seconds=1.2 * steps / 10)
    return found


def write_log(folder: Path, content: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in content))
    return folder


def make_run(folder: Path, steps: int = 300, **options: Any) -> Path:
    """A folder of a run with all its files."""
    write_log(folder, records(steps, **options))
    (folder / "config.toml").write_text(CONFIG.format(steps=steps))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "statistics.json").write_text(json.dumps({"declined": {"confidence # is below #": 3}}))
    return folder


def estimate(mean: float, wide: float, seeds: int, **more: Any) -> dict[str, Any]:
    values = [mean + wide * (at - seeds / 2 + 0.5) / seeds for at in range(seeds)]
    return {"mean": mean, "low": mean - wide, "high": mean + wide, "per_seed": values, **more}


def trial(arm: str, seed: int, speed: float) -> dict[str, Any]:
    noise = random.Random(f"{arm}{seed}")
    curve: list[dict[str, Any]] = []
    for step in range(20, 601, 20):
        value = 0.95 - 0.85 * math.exp(-step / 150 * speed) + noise.gauss(0, 0.008)
        seconds = step * 0.05 * (1 + 0.03 * seed)
        curve.append({"step": step, "seconds": seconds, "value": value, "smoothed": value if step > 80 else None,
                      "forward_samples": step * 16, "backward_samples": step * 16})  # fmt: skip
    hit = next((known for known in curve if known["value"] >= 0.895), None)
    names = ("step", "seconds", "forward_samples", "backward_samples")
    return {
        "seed": seed, "folder": f"trials/{arm}-seed{seed}", "status": "finished", "reason": "", "steps": 600,
        "training_seconds": curve[-1]["seconds"], "evaluation_seconds": 2.0, "forward_samples": 9600 + seed,
        "backward_samples": 9600, "final": curve[-1]["value"],
        "reached": None if hit is None else {name: hit[name] for name in names}, "curve": curve,
    }  # fmt: skip


def result(seeds: int = 5, **changes: Any) -> dict[str, Any]:
    """A result.json as `hybridtrainer compare` writes it."""
    config = {"seed": 0, "predict": "off", "optimizer": {"lr": 0.002}, "train": {"steps": 600}}
    arms = {"plain": ("baseline", 1.0, "off"), "plain, averaged": ("baseline", 1.1, "off"),
            "hybrid": ("challenger", 1.35, "auto")}  # fmt: skip
    candidates: list[dict[str, Any]] = [
        {"settings": {"optimizer.lr": lr, "schedule.name": "cosine"}, "final": 0.9 + lr,
         "seconds_to_target": None if lr > 0.003 else 12.3, "status": "finished"}
        for lr in (0.001, 0.002, 0.004)
    ]  # fmt: skip
    speedup = estimate(1.32, 0.12, seeds)
    if seeds > 2:
        speedup["per_seed"][1] = None
    return {
        "v": 1, "kind": "comparison", "name": "my-compare", "date": "2026-11-15",
        "headline": "hybrid is faster than plain: 1.32 times as fast to accuracy 0.8950 (95% interval 1.20 to 1.44).",
        "warnings": ["The best learning rate of plain is at the edge of the grid."],
        "metric": {"name": "accuracy", "higher_is_better": True},
        "target": {"value": 0.895, "origin": "median of plain at 90% of its run"},
        "smoothing": {"window": 5, "hold": 5}, "seeds": list(range(seeds)), "tuned": True,
        "tuning": {"budget": 12, "arms": {name: {"chosen": candidates[1]["settings"], "candidates": candidates}
                                          for name in ("plain", "hybrid")}},
        "arms": {name: {"role": role, "config": {**config, "predict": predict},
                        "trials": [trial(name, seed, speed) for seed in range(seeds)]}
                 for name, (role, speed, predict) in arms.items()},
        "comparisons": [
            {"arm": "hybrid", "baseline": "plain", "verdict": "faster", "sentence": "hybrid reaches the target sooner.",
             "speedup": speedup, "compute": estimate(1.25, 0.1, seeds), "final_quality": estimate(0.004, 0.006, seeds),
             "equal_time": estimate(0.012, 0.005, seeds, seconds=25.0),
             "equal_steps": estimate(0.01, 0.004, seeds, steps=600)},
            {"arm": "hybrid", "baseline": "plain, averaged", "verdict": "not distinguishable", "sentence": "",
             "speedup": estimate(1.05, 0.1, seeds), "compute": None, "final_quality": None, "equal_time": None,
             "equal_steps": None},
        ],
        "environment": ENVIRONMENT, **changes,
    }  # fmt: skip


def make_comparison(folder: Path, content: dict[str, Any] | None = None) -> Path:
    """A folder of a comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(content or result()))
    return folder
