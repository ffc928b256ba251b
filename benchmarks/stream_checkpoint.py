"""A checkpoint of a streamed model: how much memory saving and loading take, and whether the resumed run is equal.

What counts is anonymous memory, sampled from /proc while a call runs: pages of the file itself can be dropped by the
kernel at any time.

python -m benchmarks.stream_checkpoint --model llama-7b --device cuda --mode split8
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, build_gpt
from hybridtrainer.models.language import language_loss
from hybridtrainer.observe.own_host import own_host_bytes
from hybridtrainer.trainer import HybridTrainer


def watched(work: Callable[[], None]) -> dict[str, float]:
    """Seconds of a call, and the most memory it has taken on top of what was there before."""
    before, peak, done = own_host_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, own_host_bytes())
            time.sleep(0.02)

    thread = threading.Thread(target=sample)
    thread.start()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    done.set()
    thread.join()
    return {"seconds": seconds, "extra_bytes": max(0, peak - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-350m")
    parser.add_argument("--mode", default="split8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = build_gpt(arguments.model, context=arguments.context, device="meta")
    memory = MemoryConfig.model_validate({"mode": arguments.mode})
    streamed = stream(model, memory, arguments.device, lr=1e-4)
    assert isinstance(streamed, GPT)
    optimizer: Any = streamed.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    streamed.initialize_(arguments.device)
    trainer = HybridTrainer(streamed, None, language_loss, HybridTrainerConfig(predict="off"), clip_norm=1.0)
    shape = (arguments.samples, arguments.context + 1)
    batches = [torch.randint(0, model.config.vocabulary, shape, device=arguments.device) for _ in range(4)]
    for batch in batches[:2]:
        trainer.step(batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        saving = watched(lambda: trainer.save(path))
        size = sum(file.stat().st_size for file in path.iterdir())
        expected = [trainer.step(batch).loss for batch in batches[2:]]
        after = trainer.fingerprint()["all"]
        loading = watched(lambda: trainer.load(path))
        losses = [trainer.step(batch).loss for batch in batches[2:]]
        equal = losses == expected and trainer.fingerprint()["all"] == after
    content = {
        "model": arguments.model,
        "mode": arguments.mode,
        "parameters": sum(parameter.numel() for parameter in streamed.parameters()),
        "host_bytes": optimizer.host_bytes,
        "checkpoint_bytes": size,
        "saving": saving,
        "loading": loading,
        "resumed_equal": equal,
    }
    for name, value in content.items():
        print(f"{name:18} {value}")
    print(f"written to {write_result('stream_checkpoint', content, arguments.out)}")


if __name__ == "__main__":
    main()
