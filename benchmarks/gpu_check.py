"""The foundation on a GPU: exactness, memory and cost of a jump, mixed precision. Exits with 1 if a check fails.

python -m benchmarks.gpu_check --model gpt2-124m --out benchmarks/results
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, TextSplits, load_text, stdlib_documents
from hybridtrainer.models.gpt import build_gpt, gpt_loss
from hybridtrainer.phases import horizon
from hybridtrainer.randomness import seed_everything
from hybridtrainer.records import JumpRecord, Phase
from hybridtrainer.trainer import HybridTrainer

DEVICE = "cuda"
EAGER: dict[str, Any] = {
    "predict": ["jumps"],
    "warmup_steps": 12, "full_steps": 6, "max_predict_steps": 8, "correction_interval": 4, "correct_steps": 3,
    "confidence_threshold": 0.0, "waste_limit": 1.0, "lasting_share": 1.0,
    "recovery_steps": 2, "max_failures": 1000, "history_windows": 4,
}  # fmt: skip


def strict(on: bool) -> None:
    """Deterministic algorithms only; the fused attention of fp32 has no deterministic backward pass."""
    torch.use_deterministic_algorithms(on)
    torch.backends.cuda.enable_flash_sdp(not on)
    torch.backends.cuda.enable_mem_efficient_sdp(not on)
    torch.backends.cuda.enable_cudnn_sdp(not on)
    torch.backends.cuda.matmul.allow_tf32 = not on


def on_gpu(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return gpt_loss(model, batch.to(DEVICE, non_blocking=True))


def build(
    name: str, splits: TextSplits, context: int, batch: int, **settings: Any
) -> tuple[HybridTrainer, PositionedLoader]:
    seed_everything(0)
    model = build_gpt(name, vocabulary=256, context=context, dropout=0.1).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    probes = [window for _, window in zip(range(2), PositionedLoader(splits.probe, batch), strict=False)]
    config = HybridTrainerConfig.model_validate(EAGER | settings)
    trainer = HybridTrainer(model, optimizer, on_gpu, config, scheduler=scheduler, clip_norm=1.0, probe_batches=probes)
    return trainer, trainer.loader(splits.train, batch)


def steps(trainer: HybridTrainer, loader: PositionedLoader, count: int) -> list[float]:
    losses = []
    for batch in loader:
        losses.append(trainer.step(batch).loss)
        if len(losses) == count:
            return losses
    raise AssertionError("too little data")


def plain_equality(make: Callable[..., Any]) -> bool:
    trainer, loader = make(predict="off")
    ours = steps(trainer, loader, 40)
    twin, loader = make(predict="off")
    model, optimizer, scheduler = twin.model, twin._training.optimizer, twin._training.scheduler
    theirs = []
    for batch in loader:
        loss = on_gpu(model, batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
        if len(theirs) == 40:
            break
    same = all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), model.parameters(), strict=True))
    return ours == theirs and same


def resume_equality(make: Callable[..., Any], **settings: Any) -> dict[str, bool]:
    """Saves in every phase, loads into a new trainer, compares the state and the next ten losses."""
    trainer, loader = make(**settings)
    batches = iter(loader)
    outcome: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(70):
            trainer.step(next(batches))
            phase = trainer.current_phase
            if phase in outcome:
                continue
            folder = Path(scratch) / str(index)
            trainer.save(folder)
            expected = trainer.fingerprint()
            position = trainer.state()["standing"]["data"]["position"]
            other, other_loader = make(**settings)
            other.load(folder)
            same = other.fingerprint() == expected
            future = steps(other, other_loader, 10)
            trainer.load(folder)
            loader.restore(position)
            outcome[phase] = same and steps(trainer, loader, 10) == future
            trainer.load(folder)
            batches = iter(loader)
    return outcome


def rollback_equality(make: Callable[..., Any]) -> bool:
    """A jump that passes its probe and is then followed by a disaster."""
    original = horizon.probed_worth
    trainer, loader = make()
    batches = iter(loader)
    try:
        horizon.probed_worth = lambda *given: horizon.Worth(given[3], "made to pass")
        while True:
            before, phase = trainer.fingerprint(), trainer.current_phase
            if trainer.step(next(batches)).predicted:
                break
        honest = trainer._loss._loss_fn
        trainer._loss._loss_fn = lambda model, batch: honest(model, batch) + 100
        result = trainer.step(next(batches))
    finally:
        horizon.probed_worth = original
    after = trainer.fingerprint()
    parts = [part for part in before if part not in ("standing", "all")]
    return (
        phase is Phase.PREDICT and "rolled back" in result.reason and all(after[part] == before[part] for part in parts)
    )


def jump_figures(make: Callable[..., Any]) -> dict[str, float]:
    """Peak GPU memory of real steps and of jumps, and what a jump takes beside a real step."""
    trainer, loader = make(correction_interval=15, max_predict_steps=15)
    records: list[JumpRecord] = []
    trainer.listeners.append(lambda record: records.append(record) if isinstance(record, JumpRecord) else None)
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {"real": [], "jump": []}
    before = 0
    for index, batch in enumerate(loader):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        phase, began = trainer.current_phase, time.perf_counter()
        before = torch.cuda.memory_allocated()
        result = trainer.step(batch)
        torch.cuda.synchronize()
        kind = "jump" if result.predicted else "real"
        if index > 5 and (kind == "jump" or phase is not Phase.PREDICT):
            seconds[kind].append(time.perf_counter() - began)
            peaks[kind] = max(peaks.get(kind, 0), torch.cuda.max_memory_allocated())
        if index >= 90:
            break
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    middle = {kind: sorted(values)[len(values) // 2] if values else float("nan") for kind, values in seconds.items()}
    return {
        "weights_gib": weights / 2**30,
        "at_rest_gib": before / 2**30,
        "peak_real_gib": peaks["real"] / 2**30,
        "peak_jump_gib": peaks.get("jump", 0) / 2**30,
        "ms_real": 1000 * middle["real"],
        "ms_jump": 1000 * middle["jump"],
        "jumps_tried": len([record for record in records if record.verdict != "kept"]),
        "host_snapshot_gib": trainer._undo.nbytes() / 2**30,
        "host_windows_gib": trainer.jumps.history.nbytes() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    strict(True)

    small_splits = load_text(stdlib_documents()[:200], ByteTokenizer(), 64, 0.05, 0.05, "stdlib")
    large_splits = load_text(stdlib_documents(), ByteTokenizer(), arguments.context, 0.05, 0.05, "stdlib")

    def small(**settings: Any) -> Any:
        return build("nano", small_splits, 64, 8, **settings)

    def large(**settings: Any) -> Any:
        return build(arguments.model, large_splits, arguments.context, arguments.batch, **settings)

    checks: dict[str, Any] = {
        "prediction off equals a plain loop": plain_equality(small),
        "rolled back exactly": rollback_equality(small),
        "resume": resume_equality(small),
        "resume, fp16 with scaler": resume_equality(small, memory={"precision": "fp16"}),
        "resume, bf16": resume_equality(small, memory={"precision": "bf16"}),
    }
    strict(False)
    figures = jump_figures(lambda **settings: large(memory={"precision": "bf16"}, **settings))
    path = write_result("gpu_check", {"checks": checks, arguments.model: figures}, arguments.out)
    for name, value in {**checks, **{f"{arguments.model} {key}": round(v, 3) for key, v in figures.items()}}.items():
        print(f"{name:42} {value}")
    print(f"written to {path}")
    flat = [each for value in checks.values() for each in (value.values() if isinstance(value, dict) else [value])]
    sys.exit(0 if all(flat) else 1)


if __name__ == "__main__":
    main()
