"""A plan as a configuration that `hybridtrainer train` takes, with what it was planned for in its comments."""

from __future__ import annotations

from hybridtrainer.data.text import ByteTokenizer
from hybridtrainer.errors import ConfigError, Problem
from hybridtrainer.models.gpt import GPT_CONFIGS
from hybridtrainer.planning.describe import readout_setting, settings
from hybridtrainer.planning.planner import Plan
from hybridtrainer.sizes import GIB, as_size


def recipe(model: str, found: Plan) -> str:
    """The configuration of a plan, as TOML.

    Args:
        model: A decoder by name.
        found: Its plan.

    Raises:
        ConfigError: for a model that a configuration cannot name.

    >>> from hybridtrainer.planning.planner import plan
    >>> text = recipe("nano", plan("nano", "2GB", "4GB", tokens=1024, context=128))
    >>> text.splitlines()[0]
    '# nano on a card of 2 GB, with 4 GB of host memory free for it.'
    """
    if model not in GPT_CONFIGS:
        problem = Problem("model", f"{model} is no decoder that a configuration can name")
        raise ConfigError("the recipe", [problem], f"Give one of: {', '.join(GPT_CONFIGS)}.")
    vram, ram = f"{found.vram_bytes / GIB:g}", f"{found.ram_bytes / GIB:g}"
    estimate = found.best.estimate
    is_resident = found.best.memory.mode == "resident"
    accumulate = found.accumulate if is_resident else 1
    taken = [
        f"{as_size(estimate.gpu_bytes + found.context_bytes, digits=1)} of the card",
        f"{as_size(estimate.host_bytes, digits=1)} of host memory",
        f"{as_size(estimate.disk_bytes, digits=1)} of disk for a checkpoint",
    ]
    if estimate.seconds is not None and found.hardware is not None:
        taken.append(f"{estimate.seconds:.2f} s a step on {found.hardware.name} ({found.hardware.origin})")
    whole = settings(found)
    memory = whole[: whole.index("")] if "" in whole else whole
    lines = [
        f"# {model} on a card of {vram} GB, with {ram} GB of host memory free for it.",
        *_tokens(GPT_CONFIGS[model].vocabulary),
        f"# It takes {', '.join(taken)}.",
        f"# Made by: {_command(model, found)}",
        "",
        *readout_setting(found),
        "[model]",
        f'name = "{model}"',
        f"context = {found.context}",
        "",
        "[train]",
        f"batch_size = {found.tokens // found.context // accumulate}",
        f"accumulate = {accumulate}",
        "",
        *memory,
    ]
    return "\n".join(lines) + "\n"


def _command(model: str, found: Plan) -> str:
    """What was typed, or would have been."""
    speeds = "none" if found.hardware is None else f'"{found.hardware.name}"'
    vram, ram = f"{found.vram_bytes / GIB:g}GB", f"{found.ram_bytes / GIB:g}GB"
    batch = f"--seq {found.context} --tokens {found.tokens} --accumulate {found.accumulate}"
    asked = f"{batch} --hardware {speeds}" + ("" if found.readout == "auto" else f" --readout {found.readout}")
    return f"hybridtrainer plan --model {model} --vram {vram} --ram {ram} {asked} --write FILE"


def _tokens(vocabulary: int) -> list[str]:
    if vocabulary <= ByteTokenizer.vocabulary:
        return []
    return [f"# Planned for a vocabulary of {vocabulary:,}; the byte tokens that are the default take less."]
