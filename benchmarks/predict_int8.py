"""What probing in 8 bits costs and saves: `python -m benchmarks.predict_int8 [--model gpt2-124m] [--device cuda]`

A decoder is trained on the standard library's source. Then held-out batches are measured with its own weights and with
8-bit copies of its matrices, once in fp32 weights and once in bf16 ones, as a jump's probe does. Said are the two
losses, what is left of the weights' memory while measuring, whether every bit is the same afterwards, and how well the
change of the loss over the last steps, which is what a probe judges, is seen in 8 bits.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import RESULTS, write_result
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, load_text, stdlib_documents
from hybridtrainer.memory.int8 import int8_matrices
from hybridtrainer.memory.parking import Parking
from hybridtrainer.models.gpt import GPT, build_gpt, gpt_loss
from hybridtrainer.weights import HostCopy

JUMP_STEPS = 15  # as many as a jump of the default settings foresees


def train(model: GPT, batches: list[Tensor], lr: float, device: str) -> dict[str, Tensor]:
    """Trains in place. Returns the weights as they were `JUMP_STEPS` before the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    before: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        if step == len(batches) - JUMP_STEPS:
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 50)
        loss = gpt_loss(model, batch.to(device)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before


@torch.no_grad()
def measure(model: GPT, held_out: list[Tensor], device: str) -> float:
    return fmean(float(gpt_loss(model, batch.to(device)).mean()) for batch in held_out)


def probe(model: GPT, held_out: list[Tensor], device: str) -> dict[str, Any]:
    """Loss and memory in 8 bits."""
    home, parking = HostCopy(), Parking(hollow=True)
    kept = [parameter.detach().clone().cpu() for parameter in model.parameters()]
    full_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with int8_matrices(model, home, parking):  # the first time allocates host memory
        pass
    before = _allocated(device)
    began = time.perf_counter()
    with int8_matrices(model, home, parking) as coded_bytes:
        _wait(device)
        entered = time.perf_counter()
        loss = measure(model, held_out, device)
        small = sum(parameter.nbytes for parameter in model.parameters() if not _is_coded(parameter))
        freed = before - _allocated(device)
        left = time.perf_counter()
    _wait(device)
    seconds = entered - began + time.perf_counter() - left
    same = all(torch.equal(one.cpu(), other) for one, other in zip(model.parameters(), kept, strict=True))
    return {
        "loss": loss,
        "weight_bytes": full_bytes,
        "weight_bytes_in_probe": coded_bytes + small,
        "device_bytes_freed": freed if device == "cuda" else None,
        "seconds_to_enter_and_leave": seconds,
        "bit_equal_afterwards": same,
    }


def _is_coded(parameter: Tensor) -> bool:
    return parameter.dim() == 2 and parameter.numel() >= 4096


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = arguments.device
    splits = load_text(stdlib_documents(), ByteTokenizer(), arguments.context, 0.02, 0.01, "the standard library")
    loader = PositionedLoader(splits.train, arguments.batch, seed=0)
    held_out = list(islice(iter(PositionedLoader(splits.validation, arguments.batch, seed=0)), 8))
    torch.manual_seed(0)
    model = build_gpt(arguments.model, context=arguments.context).to(device)
    earlier = train(model, list(islice(iter(loader), arguments.steps)), arguments.lr, device)
    model.eval()
    rows: dict[str, Any] = {}
    final = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model.to(dtype)
        found: dict[str, Any] = {}
        for moment, weights in (("earlier", earlier), ("final", final)):
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    parameter.copy_(weights[key])
            found[moment] = {"full": measure(model, held_out, device), "int8": probe(model, held_out, device)}
        rows[name] = summary(found)
        print(name, {key: value for key, value in rows[name].items() if key != "moments"}, flush=True)
    content = {"model": arguments.model, "steps": arguments.steps, "device": device, "weights": rows}
    print(f"written to {write_result(f'predict_int8_{device}', content, arguments.out)}")


def summary(found: dict[str, Any]) -> dict[str, Any]:
    final = found["final"]
    gains = {kind: value(found["earlier"], kind) - value(final, kind) for kind in ("full", "int8")}
    coded = final["int8"]
    return {
        "loss": final["full"],
        "loss_int8": coded["loss"],
        "relative_difference": coded["loss"] / final["full"] - 1,
        "weight_memory_saved": 1 - coded["weight_bytes_in_probe"] / coded["weight_bytes"],
        "bit_equal_afterwards": coded["bit_equal_afterwards"] and found["earlier"]["int8"]["bit_equal_afterwards"],
        f"gain_of_the_last_{JUMP_STEPS}_steps": gains["full"],
        "the_same_gain_in_int8": gains["int8"],
        "moments": found,
    }


def value(moment: dict[str, Any], kind: str) -> float:
    found = moment[kind]
    return float(found["loss"] if isinstance(found, dict) else found)


if __name__ == "__main__":
    main()
