"""A plan in words and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.planner import Plan
from hybridtrainer.planning.ranking import Option
from hybridtrainer.planning.resident import WHOLE_BITS
from hybridtrainer.sizes import as_count, as_difference, as_size

MEANINGS = {
    "resident": "the whole model on the GPU",
    "split8": "exact fp32 weights in two halves, 8-bit moments",
    "sr8": "bf16 weights with random rounding, 8-bit moments",
    "sr4": "bf16 weights with random rounding, 4-bit moments",
    "factored": "bf16 weights, factored second moment, no first",
}
SHOWN_OTHERS = 2
KEPT = {"products": "results of products kept", "by_phase": "results of products kept in Correct steps"}


def as_data(found: Plan) -> dict[str, Any]:
    """For JSON."""
    return {
        "parameters": found.parameters,
        "tokens": found.tokens,
        "seq": found.context,
        "accumulate": found.accumulate,
        "readout": found.readout,
        "remarks": list(found.remarks),
        "hardware": None if found.hardware is None else asdict(found.hardware),
        "vram_bytes": found.vram_bytes,
        "ram_bytes": found.ram_bytes,
        "context_bytes": found.context_bytes,
        "best": _option_data(found.best),
        "others": [_option_data(option) for option in found.others],
        "too_large": [_option_data(option) for option in found.too_large],
    }


def as_text(found: Plan, can_measure: bool = True) -> str:
    """For people: what fits, what it takes, the settings to paste, and the next best.

    Args:
        found: The plan.
        can_measure: Whether there is a GPU here whose speeds could be measured.
    """
    best = found.best
    estimate = best.estimate
    lines = [
        f"{as_count(found.parameters)} parameters, {found.tokens:,} tokens a step in sequences of {found.context:,}: "
        "fits.",
        *found.remarks,
        "",
        f"GPU, {as_size(found.vram_bytes)}:",
        *(f"  {name:18}{as_size(nbytes):>12}" for name, nbytes in estimate.gpu.items()),
        f"  {'CUDA itself':18}{as_size(found.context_bytes):>12}",
        f"  {'in all':18}{as_size(estimate.gpu_bytes + found.context_bytes):>12}",
        f"Host memory, {as_size(found.ram_bytes)}:",
        *(f"  {name:18}{as_size(nbytes):>12}" for name, nbytes in estimate.host.items()),
        *([f"While a jump is tried: {as_size(estimate.predict_bytes)} of the GPU."] if estimate.predict_bytes else []),
        f"A checkpoint takes {as_size(estimate.disk_bytes)} on disk.",
        *_for_jumps(estimate),
        *_speed(found, can_measure),
        "",
        *readout_setting(found),
        *settings(found),
    ]
    lines += ["", *_too_large(found)]
    lines += ["Next best:", *(f"  {_price(option, best, found.context_bytes)}" for option in found.others)]
    if len(found.others) < SHOWN_OTHERS:
        lines.append(f"  nothing {'else' if found.others else 'at all'}: no other settings fit")
    return "\n".join(lines)


def _too_large(found: Plan) -> list[str]:
    """Why nothing plainer was chosen."""
    own = found.context_bytes
    lines = [
        f"  {name_of(each)}: GPU {as_size(each.estimate.gpu_bytes + own)}, host {as_size(each.estimate.host_bytes)}"
        for each in found.too_large
    ]
    is_streamed = found.best.memory.mode != "resident"
    if is_streamed and found.resident_bytes > found.vram_bytes - own:
        lines.insert(0, f"  resident: {as_size(found.resident_bytes)} of weights and gradients alone")
    return ["Would come first, and is too large (a plan fills 95% of the card at most):", *lines, ""] if lines else []


def _for_jumps(estimate: Estimate) -> list[str]:
    if not estimate.jump_host_bytes:
        return []
    return [
        "Jumps, made where the rate stays high and host memory has room, take "
        f"{as_size(estimate.jump_host_bytes)} more of it, and {as_size(estimate.jump_disk_bytes)} more of a checkpoint."
    ]


def settings(found: Plan) -> list[str]:
    """What to paste into a configuration, with the reason for each setting."""
    return ["[memory]", *_memory_settings(found.best), *_batch_settings(found)]


def readout_setting(found: Plan) -> list[str]:
    """What comes before all sections of a configuration: the read-out, where another than the default was asked for."""
    return [] if found.readout == "auto" else [f'readout = "{found.readout}"', ""]


def summary(found: Plan) -> str:
    """What was chosen and why, in one line."""
    estimate = found.best.estimate
    text = (
        f"{name_of(found.best)}: {as_size(estimate.gpu_bytes)} of GPU memory and {as_size(found.context_bytes)} of "
        f"CUDA's own in {as_size(found.vram_bytes)}, {as_size(estimate.host_bytes)} of host memory in "
        f"{as_size(found.ram_bytes)}"
    )
    if estimate.seconds is not None:
        text += f", {estimate.seconds:.2f} s a step"
    if found.too_large:
        plainer = found.too_large[0]
        text += f"; too large: {name_of(plainer)} with {as_size(plainer.estimate.gpu_bytes)} of GPU memory"
    return text + (f"; next best: {_price(found.others[0], found.best, found.context_bytes)}" if found.others else "")


def _speed(found: Plan, can_measure: bool) -> list[str]:
    estimate, hardware = found.best.estimate, found.hardware
    if estimate.seconds is None or hardware is None:
        measured = ", or measure it with `hybridtrainer doctor --calibrate`" if can_measure else ""
        return [f"Seconds are not known for this GPU: give --hardware{measured}."]
    text = f"{estimate.seconds:.2f} s a step, {found.tokens / estimate.seconds:,.0f} tokens/s"
    if found.best.memory.mode != "resident":
        text += f", {estimate.share_of_compute:.0%} of the computation without copies"
    lines = [f"{text}.", f"Speeds of {hardware.name}, {hardware.origin}."]
    if estimate.waits_for_host:
        lines.append("A step waits for the host, whose speed changes by the minute: its seconds are a rough figure.")
    return lines


def _memory_settings(option: Option) -> list[str]:
    memory = option.memory
    why = {f'mode = "{memory.mode}"': MEANINGS[memory.mode]}
    if memory.mode == "resident":
        every = "each block" if memory.checkpoint_every == 1 else f"every {memory.checkpoint_every} blocks"
        again = f"the input of {every} is kept, the rest is computed again"
        why |= {
            f'precision = "{memory.precision}"': "products in 16 bits, weights as they are",
            f"checkpoint_every = {memory.checkpoint_every}": again if memory.checkpoint_every else "all is kept",
        }
        if memory.checkpoint_keep != "inputs":
            why[f'checkpoint_keep = "{memory.checkpoint_keep}"'] = KEPT[memory.checkpoint_keep]
        if memory.offload_activations:
            why["offload_activations = true"] = "what blocks keep waits in host memory"
        if memory.optimizer_bits != WHOLE_BITS:
            why[f"optimizer_bits = {memory.optimizer_bits}"] = "of each of Adam's moments"
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
    return _commented(why)


def _batch_settings(found: Plan) -> list[str]:
    samples = found.tokens // found.context
    if found.accumulate == 1:
        return []
    if found.best.memory.mode == "resident":
        size, parts, why = samples // found.accumulate, found.accumulate, "as asked for"
    else:
        size, parts, why = samples, 1, "a streamed model divides a batch inside its blocks"
    return ["", "[train]", *_commented({f"batch_size = {size}": "sequences", f"accumulate = {parts}": why})]


def _commented(reasons: dict[str, str]) -> list[str]:
    return [f"{setting:32}# {reason}" for setting, reason in reasons.items()]


def name_of(option: Option) -> str:
    """An option in a few words."""
    memory = option.memory
    if memory.mode == "resident":
        words = [f"resident, checkpoint_every {memory.checkpoint_every}"]
        words += [KEPT[memory.checkpoint_keep]] if memory.checkpoint_keep != "inputs" else []
        words += ["activations in host memory"] if memory.offload_activations else []
        words += [f"{memory.optimizer_bits}-bit moments"] if memory.optimizer_bits != WHOLE_BITS else []
        return ", ".join(words)
    inputs = "inputs in host memory" if memory.offload_activations else "inputs on the GPU"
    slots = "1 slot" if memory.max_gpu_blocks == 1 else f"{memory.max_gpu_blocks} slots"
    return f"{memory.mode}, split {memory.split}, {inputs}, {slots}"


def _price(option: Option, best: Option, own_bytes: int) -> str:
    estimate = option.estimate
    more_gpu, more_host = (
        as_difference(estimate.gpu_bytes - best.estimate.gpu_bytes),
        as_difference(estimate.host_bytes - best.estimate.host_bytes),
    )
    text = (
        f"{name_of(option)}: GPU {as_size(estimate.gpu_bytes + own_bytes)} ({more_gpu}), "
        f"host {as_size(estimate.host_bytes)} ({more_host})"
    )
    if estimate.seconds is not None and best.estimate.seconds is not None:
        more = estimate.seconds / best.estimate.seconds - 1
        text += f", {estimate.seconds:.2f} s ({'same' if abs(more) < 0.005 else f'{more:+.0%}'} time)"
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
        "predict_bytes": estimate.predict_bytes,
        "jump_host_bytes": estimate.jump_host_bytes,
        "jump_disk_bytes": estimate.jump_disk_bytes,
        "seconds_per_step": estimate.seconds,
        "seconds_without_copies": estimate.compute_seconds,
        "waits_for_host": estimate.waits_for_host,
    }
