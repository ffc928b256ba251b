"""Runs on two ranks: each case is two processes, forked from this one, which has imported everything already.

`python -m tests.ranks_driver FOLDER CASE...` writes for each case and rank what it found into FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support import EAGER, take, text_splits, tiny_gpt
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.models.language import language_loss
from hybridtrainer.randomness import seed_everything
from hybridtrainer.rank_checks import require_same_on_all_ranks
from hybridtrainer.trainer import HybridTrainer

RANKS, BATCH, STEPS = 2, 8, 44
TIMEOUT_SECONDS = 8.0
PATIENCE_SECONDS = 60.0

Case = Callable[[int, Path], dict[str, Any]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def build(kind: str, rank: int, settings: dict[str, Any] | None = None, **options: Any) -> HybridTrainer:
    """A small GPT in copies ("ddp"), in shards ("fsdp"), streamed ("stream") or alone ("plain")."""
    seed_everything(3)
    gpt = tiny_gpt(dropout=0.1)
    model: nn.Module = gpt
    splits = text_splits()
    optimizer: torch.optim.Optimizer | None = None
    chosen: dict[str, Any] = EAGER if settings is None else settings
    loss: Any = gpt_loss
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(model)
    elif kind == "stream":
        memory = MemoryConfig(mode="split8", clipping=options.pop("clipping", "fused"))
        model, chosen, loss = stream(model, memory, "cpu", lr=3e-3), {**chosen, "memory": memory}, language_loss
    if kind != "stream":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options.setdefault("probe_batches", take(PositionedLoader(splits.probe, BATCH), 2))
    seed_everything(100 + rank)
    options = {"clip_norm": 1.0, "loss_fn": loss, **options}
    return HybridTrainer(model, optimizer, options.pop("loss_fn"), HybridTrainerConfig(**chosen), **options)


def batches_of(trainer: HybridTrainer) -> Any:
    loader = trainer.loader(text_splits().train, BATCH)
    while True:
        yield from loader


def weights_of(trainer: HybridTrainer) -> dict[str, list[float]]:
    """Every weight, put together where it is sharded."""
    whole = {}
    for name, parameter in trainer._training.model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        whole[name] = value.detach().float().reshape(-1).tolist()
    return whole


def digest(trainer: HybridTrainer) -> str:
    return trainer.fingerprint()["all"]


def train(trainer: HybridTrainer, steps: int, each: Callable[[Any], None] = lambda _: None) -> list[list[Any]]:
    """Steps; what every step was, up to the clock `steps`."""
    told = []
    stream_of_batches = batches_of(trainer)
    while trainer.step_count < steps:
        result = trainer.step(next(stream_of_batches))
        told.append([result.step, result.phase.value, result.loss, result.reason])
        each(result)
    return told


def _plain_equals(rank: int, _folder: Path) -> dict[str, Any]:
    """Prediction off beside a plain DDP loop with accumulation and clipping."""
    found = {}
    for accumulate in (1, 2):
        trainer = build("ddp", rank, {"predict": "off"}, accumulate=accumulate)
        own = [next(batches) for batches in [batches_of(trainer)] for _ in range(8)]
        seed_everything(3)
        model = DistributedDataParallel(tiny_gpt(dropout=0.1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seed_everything(100 + rank)
        for start in range(0, len(own), accumulate):
            for number, batch in enumerate(own[start : start + accumulate]):
                model.require_backward_grad_sync = number == accumulate - 1
                (gpt_loss(model, batch).mean() / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        expected = {name: value.clone() for name, value in model.module.state_dict().items()}
        seed_everything(100 + rank)
        for start in range(0, len(own), accumulate):
            group = own[start : start + accumulate]
            trainer.step(group if accumulate > 1 else group[0])
        state = trainer._training.model.state_dict()
        found[str(accumulate)] = all(torch.equal(state[name], value) for name, value in expected.items())
    return found


CASES["plain_equals"] = _plain_equals


def whole_run(kind: str, rank: int, folder: Path) -> dict[str, Any]:
    """A run through all phases: compared across ranks after every step, saved in each phase, resumed from each."""
    trainer = build(kind, rank, {**EAGER, "readout": "averaged"} if kind != "stream" else None)
    phases: dict[str, int] = {}
    digests: dict[int, str] = {}

    def look(result: Any) -> None:
        require_same_on_all_ranks(trainer)
        phase = trainer.current_phase.value
        digests[len(digests)] = digest(trainer)
        if phase not in phases:
            trainer.save(folder / f"{kind}-{phase}")
            phases[phase] = len(digests)

    told = train(trainer, STEPS, look)
    resumed = {}
    for phase, made in phases.items():
        again = build(kind, rank, {**EAGER, "readout": "averaged"} if kind != "stream" else None)
        again.load(folder / f"{kind}-{phase}")
        rest = train(again, STEPS)
        resumed[phase] = rest == told[made:] and digest(again) == digest(trainer)
    result = {"told": told, "phases": sorted(phases), "resumed": resumed, "jumps": _jumps(trainer)}
    weights = weights_of(trainer)
    return {**result, "weights": weights} if rank == 0 else result


def _jumps(trainer: HybridTrainer) -> dict[str, int]:
    counted = trainer.statistics()
    return {"kept": counted.jumps_kept, "refused": counted.jumps_refused, "undone": counted.jumps_rolled_back}


for _kind in ("ddp", "fsdp", "stream"):
    CASES[f"run_{_kind}"] = lambda rank, folder, kind=_kind: whole_run(kind, rank, folder)  # type: ignore[misc]


def run_case(name: str, rank: int, folder: Path) -> None:
    """One rank of one case, in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}-store", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_SECONDS if name.startswith("kill") else PATIENCE_SECONDS),
    )  # fmt: skip
    began = time.monotonic()
    try:
        found = CASES[name](rank, folder)
    except BaseException as error:
        found = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    found["seconds"] = time.monotonic() - began
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))


def launch(name: str, folder: Path) -> list[int]:
    """Both ranks of a case; how each of them ended."""
    children = []
    for rank in range(RANKS):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            status = 1
            try:
                run_case(name, rank, folder)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    text_splits()
    for name in names:
        began = time.monotonic()
        ended = launch(name, folder)
        print(name, ended, f"{time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
