"""A plan in words and as plain data."""

from __future__ import annotations

from typing import Any

from hybridtrainer.planning.planner import GIB, Option, Plan

MEANINGS = {
    "resident": "the whole model on the GPU, torch's AdamW",
    "split8": "exact fp32 weights in two halves, 8-bit moments",
    "sr8": "bf16 weights with random rounding, 8-bit moments",
    "sr4": "bf16 weights with random rounding, 4-bit moments",
    "factored": "bf16 weights, factored second moment, no first",
}


def as_data(found: Plan) -> dict[str, Any]:
    """For JSON."""
    return {
        "parameters": found.parameters,
        "tokens": found.tokens,
        "seq": found.context,
        "vram_bytes": found.vram_bytes,
        "ram_bytes": found.ram_bytes,
        "context_bytes": found.context_bytes,
        "best": _option_data(found.best),
        "others": [_option_data(option) for option in found.others],
    }


def as_text(found: Plan) -> str:
    """For people: what fits, what it takes, the settings to paste, and the next best."""
    best = found.best
    estimate = best.estimate
    lines = [
        f"{found.parameters / 1e9:.2f}B parameters, {found.tokens:,} tokens a step in sequences of {found.context:,}: "
        "fits.",
        "",
        f"GPU, {_gib(found.vram_bytes)}:",
        *(f"  {name:18}{_gib(nbytes):>12}" for name, nbytes in estimate.gpu.items()),
        f"  {'CUDA itself':18}{_gib(found.context_bytes):>12}",
        f"  {'in all':18}{_gib(estimate.gpu_bytes + found.context_bytes):>12}",
        f"Host memory, {_gib(found.ram_bytes)}:",
        *(f"  {name:18}{_gib(nbytes):>12}" for name, nbytes in estimate.host.items()),
        f"A checkpoint takes {_gib(estimate.disk_bytes)} on disk.",
        _speed(best, found.tokens),
        "",
        "[memory]",
        *_settings(best),
    ]
    if found.others:
        lines += ["", "Next best:", *(f"  {_price(option, best)}" for option in found.others)]
    return "\n".join(lines)


def _speed(option: Option, tokens: int) -> str:
    seconds = option.estimate.seconds
    if option.memory.mode == "resident":
        return "Seconds are estimated for streamed training only."
    if seconds is None:
        return "Seconds are not known for this GPU: give --hardware, or measure with `hybridtrainer bench stream`."
    share = option.estimate.share_of_compute
    return f"{seconds:.2f} s a step, {tokens / seconds:,.0f} tokens/s, {share:.0%} of the computation without copies."


def _settings(option: Option) -> list[str]:
    memory = option.memory
    why = {f'mode = "{memory.mode}"': MEANINGS[memory.mode]}
    if memory.mode == "resident":
        again = f"the input of one in {memory.checkpoint_every} is kept, the rest is computed again"
        why |= {
            f'precision = "{memory.precision}"': "products in 16 bits, weights as they are",
            f"checkpoint_every = {memory.checkpoint_every}": again if memory.checkpoint_every else "all is kept",
        }
    else:
        offloaded = "inputs of blocks wait in host memory"
        why |= {
            f'vram = "{memory.vram}"': "the card, less what CUDA takes",
            f"split = {memory.split}": "parts of a batch, one after the other inside a block",
            f"offload_activations = {str(memory.offload_activations).lower()}": offloaded
            if memory.offload_activations
            else "inputs of blocks stay on the GPU",
            f"max_gpu_blocks = {memory.max_gpu_blocks}": "blocks on the GPU at a time",
        }
    return [f"{setting:32}# {reason}" for setting, reason in why.items()]


def _name(option: Option) -> str:
    memory = option.memory
    if memory.mode == "resident":
        return f"resident, checkpoint_every {memory.checkpoint_every}"
    inputs = "inputs in host memory" if memory.offload_activations else "inputs on the GPU"
    return f"{memory.mode}, split {memory.split}, {inputs}, {memory.max_gpu_blocks} slots"


def _price(option: Option, best: Option) -> str:
    estimate = option.estimate
    more_gpu, more_host = (
        _signed(estimate.gpu_bytes - best.estimate.gpu_bytes),
        _signed(estimate.host_bytes - best.estimate.host_bytes),
    )
    text = (
        f"{_name(option)}: GPU {_gib(estimate.gpu_bytes)} ({more_gpu}), host {_gib(estimate.host_bytes)} ({more_host})"
    )
    if estimate.seconds is not None and best.estimate.seconds is not None:
        text += f", {estimate.seconds:.2f} s ({estimate.seconds / best.estimate.seconds - 1:+.0%})"
    return text


def _option_data(option: Option) -> dict[str, Any]:
    estimate = option.estimate
    return {
        "memory": option.memory.model_dump(),
        "gpu": dict(estimate.gpu),
        "gpu_bytes": estimate.gpu_bytes,
        "host": dict(estimate.host),
        "host_bytes": estimate.host_bytes,
        "disk_bytes": estimate.disk_bytes,
        "seconds_per_step": estimate.seconds,
        "seconds_without_copies": estimate.compute_seconds,
    }


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _signed(nbytes: int) -> str:
    return f"{nbytes / GIB:+.2f}"
