"""`hybridtrainer plan`: does it fit, what does it take, and with which settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridtrainer.cli_answer import AsJson, reported
from hybridtrainer.errors import ConfigError, ModelError, Problem

if TYPE_CHECKING:
    from hybridtrainer.planning.hardware import Hardware


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
    readout: Annotated[
        str,
        typer.Option(
            help="Averages of the weights to count: auto, what predict = auto keeps; averaged, one; last, none."
        ),
    ] = "auto",
    write: Annotated[
        Path | None, typer.Option(help="Write a configuration for `hybridtrainer train` into this file too.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite that file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find settings with which a model trains in so much memory, without allocating it."""
    with reported(as_json) as answer:
        from hybridtrainer.config_io import require_free, write_config
        from hybridtrainer.planning.asked import mistakes
        from hybridtrainer.planning.describe import as_data, as_text
        from hybridtrainer.planning.machine import free_host_bytes, gpu_at_hand
        from hybridtrainer.planning.planner import REMEDY
        from hybridtrainer.planning.planner import plan as find
        from hybridtrainer.planning.recipe import recipe

        if write is not None:
            require_free(write, force)
        gpu = gpu_at_hand()
        problems: list[Problem] = []
        known = None
        try:
            known = _speeds(hardware, None if gpu is None else gpu.name)
        except ModelError as error:
            problems.append(Problem("hardware", error.what, f"{error.remedy} Without seconds: --hardware none."))
        card_bytes = known.vram_bytes if hardware is not None and known is not None else gpu and gpu.vram_bytes
        budget = vram if vram is not None else card_bytes
        budgets: dict[str, str | int] = {"ram": free_host_bytes() if ram is None else ram}
        if budget is not None:
            budgets["vram"] = budget
        elif not problems:
            hint = "Give it: --vram 16GB, or name a card: --hardware rtx-4070."
            problems.append(Problem("vram", "there is no GPU here whose memory could be taken.", hint))
        if problems:
            raise ConfigError(
                "the plan", [*problems, *mistakes(model, budgets, tokens, seq, accumulate, readout)], REMEDY
            )
        found = find(
            model,
            budgets["vram"],
            budgets["ram"],
            tokens=tokens,
            context=seq,
            accumulate=accumulate,
            hardware=known,
            readout=readout,
        )
        told = "" if write is None else f"\n\n{write_config(write, recipe(model, found), force)}"
        answer(as_data(found), as_text(found, can_measure=gpu is not None) + told)


def _speeds(asked: str | None, gpu: str | None) -> Hardware | None:
    """Those asked for, or those of the GPU at hand; None where none are known."""
    from hybridtrainer.planning.speeds import speeds_at_hand, speeds_for

    if asked is None:
        return speeds_at_hand(gpu)
    return None if asked.lower() == "none" else speeds_for(asked, gpu)
