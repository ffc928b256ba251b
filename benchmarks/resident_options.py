"""What each memory option of a resident model saves and costs, beside its plan.

python -m benchmarks.resident_options --device cuda --model gpt2-124m --context 512 --batch 8

The same decoder is trained with each option alone and with all of them, on the standard library's source. Said are:
what a forward pass keeps, the most GPU memory that torch reserves, the median seconds of a real step, each with what
the planner says, and the loss of held-out text afterwards. On a GPU each option may use what its plan says and no more,
and must get along with that. Rows with jumps tell what the GPU holds while one is tried. On a CPU there is no GPU
memory to tell of. Each option has a process of its own, in which the host's speed is read before and after.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import LinearLR

from benchmarks.record import RESULTS, write_result
from hybridtrainer import HybridTrainer, HybridTrainerConfig, MemoryConfig, language_loss
from hybridtrainer.bench.calibrate import launch_seconds
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, TextSplits, load_text, stdlib_documents
from hybridtrainer.errors import GpuMemoryError
from hybridtrainer.memory.low_bit import LowBitAdamW
from hybridtrainer.models.gpt import GPT, build_gpt, gpt_loss
from hybridtrainer.observe.own_host import own_host_bytes
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import H200, Hardware
from hybridtrainer.planning.nothing_fits import SAFE_SHARE
from hybridtrainer.planning.rehearsals import Rehearsals
from hybridtrainer.planning.resident import estimate_resident

GIB = 2**30
EVALUATED = 64  # batches of held-out text
UNTIL_JUMPS = 60  # steps, for some to be tried
EAGER: dict[str, Any] = {
    "predict": ["jumps"], "warmup_steps": 6, "full_steps": 6, "correct_steps": 2, "confidence_threshold": 0.0,
    "waste_limit": 1.0, "lasting_share": 1.0, "recovery_steps": 2, "max_failures": 1000, "history_windows": 4,
    "forecaster": "line_fit",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        memory: Settings of `MemoryConfig`.
        accumulate: Micro-batches of which a step is made.
        whole_logits: Whether the loss has all logits at once, as plain training does.
        jumps: Whether jumps are tried, as often as can be.
        unfused: Whether attention writes its scores down.
    """

    memory: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    whole_logits: bool = False
    jumps: bool = False
    unfused: bool = False


LEAN: dict[str, Any] = {"precision": "bf16", "checkpoint_every": 1, "optimizer_bits": 8}
PREDICT: dict[str, Any] = {"predict_int8": True, "predict_states": "leave"}
CASES: dict[str, Case] = {
    "plain": Case(whole_logits=True),
    "tiled head": Case(),
    "bf16": Case({"precision": "bf16"}),
    "checkpointing": Case({"checkpoint_every": 1}),
    "checkpointing, 4": Case({"checkpoint_every": 4}),
    "bf16, products kept": Case({"precision": "bf16", "checkpoint_every": 1, "checkpoint_keep": "products"}),
    "bf16, checkpointing": Case({"precision": "bf16", "checkpoint_every": 1}),
    "4 micro-batches": Case(accumulate=4),
    "bf16, 4 micro-batches": Case({"precision": "bf16"}, accumulate=4),
    "offload": Case({"precision": "bf16", "offload_activations": True}),
    "8-bit moments": Case({"precision": "bf16", "optimizer_bits": 8}),
    "4-bit moments": Case({"precision": "bf16", "optimizer_bits": 4}),
    "lean": Case(LEAN),
    "all": Case(LEAN, accumulate=4),
    "unfused attention": Case({"precision": "bf16"}, unfused=True),
    "jumps": Case({"precision": "bf16"}, jumps=True),
    "jumps, int8 probes": Case({"precision": "bf16", "predict_int8": True}, jumps=True),
    "jumps, states leave": Case({"precision": "bf16", "predict_states": "leave"}, jumps=True),
    "jumps, both": Case({"precision": "bf16"} | PREDICT, jumps=True),
    "lean, jumps": Case(LEAN | PREDICT, jumps=True),
    "all, jumps": Case(LEAN | PREDICT, accumulate=4, jumps=True),
}


class Meter:
    """What one option takes, step by step."""

    def __init__(self, device: str) -> None:
        self.is_gpu = device == "cuda"
        self.kept = 0
        self.peaks: dict[str, int] = {}
        self.seconds: list[float] = []
        self._before = self._reserved = 0
        self._is_first = True

    @contextmanager
    def real_step(self) -> Iterator[None]:
        """Around a step that may be a real one."""
        self._begin()
        self._is_first = True
        self._before = torch.cuda.memory_allocated() if self.is_gpu else 0
        began = time.perf_counter()
        yield
        self._end("real step")
        self.seconds.append(time.perf_counter() - began)

    @contextmanager
    def jump(self) -> Iterator[None]:
        """While a jump is tried, after what leaves has left."""
        self._begin()
        yield
        self._end("jump")

    def forward_done(self) -> None:
        """What the first forward pass of a step keeps."""
        if self.is_gpu and self._is_first and torch.is_grad_enabled():
            self.kept = max(self.kept, torch.cuda.memory_allocated() - self._before)
            self._is_first = False

    @property
    def reserved_bytes(self) -> int:
        """The most that torch has had of the card."""
        return self._reserved

    def _begin(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _end(self, kind: str) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()
            self.peaks[kind] = max(self.peaks.get(kind, 0), torch.cuda.max_memory_allocated())
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())


def planned(case: Case, rehearsals: Rehearsals, hardware: Hardware) -> Estimate:
    """What the planner says of it."""
    memory = MemoryConfig.model_validate(case.memory)
    step = rehearsals.resident(
        memory.precision, memory.checkpoint_every, memory.checkpoint_keep, memory.offload_activations
    )
    return estimate_resident(step, hardware, memory=memory)


def train(case: Case, splits: TextSplits, arguments: argparse.Namespace, limit: int | None) -> dict[str, Any]:
    """Trains once; fails where more GPU memory than `limit` is needed."""
    torch.manual_seed(arguments.seed)
    device = arguments.device
    if device == "cuda":
        gc.collect()  # what an attempt within the limit has left
        torch.cuda.empty_cache()
        share = 1.0 if limit is None else min(1.0, limit / torch.cuda.get_device_properties(0).total_memory)
        torch.cuda.set_per_process_memory_fraction(share)
    model = build_gpt(arguments.model, context=arguments.context, device=device)
    bits = case.memory.get("optimizer_bits", 32)
    rate = {"lr": arguments.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = (
        torch.optim.AdamW(model.parameters(), **rate)
        if bits == 32
        else LowBitAdamW(model.parameters(), bits=bits, **rate)
    )
    settings = (EAGER if case.jumps else {"predict": "off"}) | {"memory": case.memory}
    loss_of = gpt_loss if case.whole_logits else language_loss
    meter = Meter(device)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        losses = loss_of(model, batch.to(device))
        meter.forward_done()
        return losses

    micro = arguments.batch // case.accumulate
    batches = iter(PositionedLoader(splits.train, micro, seed=arguments.seed))
    trainer = HybridTrainer(
        model,
        optimizer,
        loss_fn,
        HybridTrainerConfig.model_validate(settings),
        scheduler=LinearLR(optimizer, 1.0, 0.0, arguments.steps) if arguments.decay else None,
        clip_norm=1.0,
        accumulate=case.accumulate,
        probe_batches=list(islice(iter(PositionedLoader(splits.probe, micro, seed=0)), 2)),
    )
    try_out = trainer.jumps.try_out

    def measured_jump(*given: Any) -> Any:
        with meter.jump():
            return try_out(*given)

    trainer.jumps.try_out = measured_jump  # type: ignore[assignment,method-assign]
    for _ in range(max(arguments.steps, UNTIL_JUMPS) if case.jumps else arguments.steps):
        batch = list(islice(batches, case.accumulate)) if case.accumulate > 1 else next(batches)
        with meter.real_step(), _attention(case):
            trainer.step(batch)
    told = trainer.statistics()
    return {
        "kept_bytes": meter.kept,
        "peak_bytes": meter.peaks,
        "reserved_peak_bytes": meter.reserved_bytes,
        "host_bytes": own_host_bytes(),
        "seconds": median(meter.seconds[len(meter.seconds) // 3 :]),
        "held_out_loss": _evaluate(model, splits, arguments),
        "jumps": [told.jumps_accepted, told.jumps_refused],
    }


def measure(case: Case, arguments: argparse.Namespace, limit: int | None) -> dict[str, Any]:
    """The row of an option; where the limit does not suffice, `fits` is false and it has all the memory there is."""
    launches = [launch_seconds(torch.device("cuda", 0))] if arguments.device == "cuda" else []
    splits = _splits(arguments)
    try:
        found: dict[str, Any] | None = train(case, splits, arguments, limit)
    except GpuMemoryError:
        found = None
    fits = found is not None
    found = found or train(case, splits, arguments, None)
    if launches:
        torch.cuda.set_per_process_memory_fraction(1.0)
        launches.append(launch_seconds(torch.device("cuda", 0)))  # the host's speed changes
    launch = min(launches, default=None)
    return {"alone": True, "launch_seconds": launch, "launch_readings": launches, "fits": fits} | found


def _splits(arguments: argparse.Namespace) -> TextSplits:
    return load_text(stdlib_documents(), ByteTokenizer(), arguments.context, 0.02, 0.01, "the standard library")


@torch.no_grad()
def _evaluate(model: GPT, splits: TextSplits, arguments: argparse.Namespace) -> float:
    batches = islice(iter(PositionedLoader(splits.validation, arguments.batch, seed=0)), EVALUATED)
    return fmean(float(language_loss(model, batch.to(arguments.device)).mean()) for batch in batches)


def attention_bytes(heads: int, width: int, batch: int, context: int) -> dict[str, int]:
    """GPU memory that attention alone takes in one block, forward and backward, beyond its inputs."""
    shape = batch, heads, context, width // heads
    taken = {}
    for name, backend in (("fused", SDPBackend.FLASH_ATTENTION), ("unfused", SDPBackend.MATH)):
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        gradient = torch.randn_like(q)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]
        taken[name] = torch.cuda.max_memory_allocated() - before
        del q, k, v, gradient
    return taken


def show(name: str, row: dict[str, Any]) -> str:
    """One line of the table."""
    plan = row["planned"]
    reserved, told = row["reserved_peak_bytes"] / GIB, plan["gpu_bytes"] / GIB
    jump = row["peak_bytes"].get("jump")
    seconds = f"{1000 * plan['seconds']:8.0f}" if plan["seconds"] else f"{'':8}"
    return (
        f"{name:22} kept {row['kept_bytes'] / GIB:6.2f}  reserved {reserved:6.2f}, planned {told:6.2f} "
        f"({told / max(reserved, 0.001) - 1:+6.1%})  {1000 * row['seconds']:7.1f} ms, planned {seconds}  "
        f"host {row['host_bytes'] / GIB:5.2f} at {1e6 * (row['launch_seconds'] or 0):.0f} us a kernel  "
        f"loss {row['held_out_loss']:.4f}"
        + ("" if row["fits"] else "  DOES NOT FIT")
        + (f"  jump {jump / GIB:.2f}, planned {plan['predict_bytes'] / GIB:.2f}, {row['jumps']}" if jump else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall to 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--name", default="resident_options", help="name of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as the commands have it
    bare = build_gpt(arguments.model, context=arguments.context, device="meta")
    rehearsals: dict[tuple[int, bool], Rehearsals] = {}
    rows: dict[str, Any] = {}
    content: dict[str, Any] = {
        "model": arguments.model, "batch": arguments.batch, "context": arguments.context, "steps": arguments.steps,
        "seed": arguments.seed, "rows": rows,
    }  # fmt: skip
    for name in arguments.cases:
        case = CASES[name]
        if case.accumulate > arguments.batch:
            case = replace(case, accumulate=1)
        key = case.accumulate, case.whole_logits
        if key not in rehearsals:
            loss = gpt_loss if case.whole_logits else language_loss
            rehearsals[key] = Rehearsals(
                bare, arguments.batch * arguments.context, arguments.context, case.accumulate, loss
            )
        limit = None if case.unfused else int(planned(case, rehearsals[key], H200).gpu_bytes / SAFE_SHARE)
        row = alone(measure, case, arguments, limit)
        plan = planned(case, rehearsals[key], replace(H200, launch=row["launch_seconds"] or H200.launch))
        rows[name] = {"accumulate": case.accumulate, "planned": _as_data(plan), "limit_bytes": limit} | row
        print(show(name, rows[name]), flush=True)
        write_result(arguments.name, content, arguments.out)
    if arguments.device == "cuda":
        shape = bare.config.heads, bare.config.width, arguments.batch, arguments.context
        content["attention_bytes"] = alone(attention_bytes, *shape)
        fused, unfused = (content["attention_bytes"][key] / GIB for key in ("fused", "unfused"))
        print(f"attention of one block: {fused:.3f} GiB fused, {unfused:.3f} unfused ({fused / unfused - 1:+.1%})")
    print(f"written to {write_result(arguments.name, content, arguments.out)}")


def alone(work: Callable[..., Any], *given: Any) -> Any:
    """What the work returns in a process of its own, in which nothing has asked for a GPU yet."""
    begin = multiprocessing.get_context("forkserver")
    begin.set_forkserver_preload(["hybridtrainer"])
    answer, sender = begin.Pipe(duplex=False)
    child = begin.Process(target=_send, args=(sender, work, *given))
    child.start()
    sender.close()  # the child's alone, so that its end is seen here
    try:
        return answer.recv()
    except EOFError:
        child.join()
        raise SystemExit(f"{work.__name__} ended with {child.exitcode}") from None
    finally:
        child.join()


def _send(sender: Any, work: Callable[..., Any], *given: Any) -> None:
    sender.send(work(*given))


def _as_data(plan: Estimate) -> dict[str, Any]:
    return {
        "gpu": dict(plan.gpu), "gpu_bytes": plan.gpu_bytes, "host_bytes": plan.host_bytes, "seconds": plan.seconds,
        "predict_bytes": plan.predict_bytes,
    }  # fmt: skip


def _attention(case: Case) -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH) if case.unfused else nullcontext()


if __name__ == "__main__":
    main()
