"""`hybridtrainer plan`: does it fit, what does it take, and with which settings."""

from __future__ import annotations

from typing import Annotated

import typer

from hybridtrainer.cli_answer import AsJson, reported
from hybridtrainer.errors import ConfigError, Problem


def plan(
    model: Annotated[
        str, typer.Option(help="A decoder by name, or a config.json of Hugging Face or its folder.")
    ] = "llama-7b",
    vram: Annotated[str | None, typer.Option(help="GPU memory, such as 8GB; this machine's where left out.")] = None,
    ram: Annotated[str | None, typer.Option(help="Host memory, such as 64GB; what is free where left out.")] = None,
    seq: Annotated[int, typer.Option(help="Tokens in one sequence.")] = 2048,
    tokens: Annotated[int, typer.Option(help="Tokens in one step, over all sequences.")] = 16384,
    hardware: Annotated[str | None, typer.Option(help="A GPU whose speeds are known: h200.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find settings with which a model trains in so much memory, without allocating it."""
    with reported(as_json) as answer:
        from hybridtrainer.planning.describe import as_data, as_text
        from hybridtrainer.planning.hardware import known
        from hybridtrainer.planning.planner import plan as find

        found = find(
            model,
            _gpu_bytes() if vram is None else vram,
            _free_host_bytes() if ram is None else ram,
            tokens=tokens,
            context=seq,
            hardware=None if hardware is None else known(hardware),
        )
        answer(as_data(found), as_text(found))


def _gpu_bytes() -> int:
    import torch

    if not torch.cuda.is_available():
        problem = Problem("vram", "there is no GPU here whose memory could be taken")
        raise ConfigError("the budget", [problem], "Give it: --vram 16GB.")
    return int(torch.cuda.get_device_properties(0).total_memory)


def _free_host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
