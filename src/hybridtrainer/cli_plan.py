"""`hybridtrainer plan`: does it fit, what does it take, and with which settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridtrainer.cli_answer import AsJson, reported
from hybridtrainer.errors import ConfigError, Problem


def plan(
    model: Annotated[
        str, typer.Option(help="A decoder by name, or a config.json of Hugging Face or its folder.")
    ] = "llama-7b",
    vram: Annotated[str | None, typer.Option(help="GPU memory, such as 8GB; the card's where left out.")] = None,
    ram: Annotated[str | None, typer.Option(help="Host memory, such as 64GB; what is free where left out.")] = None,
    seq: Annotated[int, typer.Option(help="Tokens in one sequence.")] = 2048,
    tokens: Annotated[int, typer.Option(help="Tokens in one step, over all sequences.")] = 16384,
    accumulate: Annotated[
        int, typer.Option(help="Micro-batches in one step of a resident model; a streamed one needs none.")
    ] = 1,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Whose speeds: a card such as rtx-4070 or h200, a GPU that was measured, a file of measurements, or "
            "none; this machine's GPU where left out."
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write a configuration for `hybridtrainer train` into this file too.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite that file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find settings with which a model trains in so much memory, without allocating it."""
    with reported(as_json) as answer:
        from hybridtrainer.config_io import write_config
        from hybridtrainer.planning.describe import as_data, as_text
        from hybridtrainer.planning.machine import free_host_bytes, gpu_at_hand
        from hybridtrainer.planning.planner import plan as find
        from hybridtrainer.planning.recipe import recipe
        from hybridtrainer.planning.speeds import speeds_at_hand, speeds_for

        gpu = gpu_at_hand()
        name = None if gpu is None else gpu.name
        known = speeds_at_hand(name) if hardware is None else None
        if hardware is not None and hardware.lower() != "none":
            known = speeds_for(hardware, name)
        card_bytes = known.vram_bytes if hardware is not None and known is not None else gpu and gpu.vram_bytes
        if vram is None and card_bytes is None:
            problem = Problem("vram", "there is no GPU here whose memory could be taken")
            raise ConfigError("the budget", [problem], "Give it: --vram 16GB, or name a card: --hardware rtx-4070.")
        found = find(
            model,
            vram if vram is not None else card_bytes or 0,
            free_host_bytes() if ram is None else ram,
            tokens=tokens,
            context=seq,
            accumulate=accumulate,
            hardware=known,
        )
        told = "" if write is None else f"\n\n{write_config(write, recipe(model, found), force)}"
        answer(as_data(found), as_text(found) + told)
