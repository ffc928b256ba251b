"""`hybridtrainer bench`: speed of the engines on the machine at hand."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hybridtrainer.cli_answer import AsJson, reported
from hybridtrainer.errors import ConfigError, Problem

MODES = ("fp32", "split8", "sr8", "sr4", "factored")
REMEDY = "Choose one of them."
NO_GPU = "see `hybridtrainer doctor`."

bench = typer.Typer(help="Measure the speed of the engines on this machine.", no_args_is_help=True)


@bench.callback()
def _root() -> None:
    """More than one engine will be measured, so the verb keeps its own name."""


@bench.command()
def stream(
    model: Annotated[str, typer.Option(help="A decoder by name, such as gpt2-1.5b or llama-7b.")] = "llama-7b",
    vram_cap: Annotated[str | None, typer.Option(help="GPU memory that may be used, such as 8GB.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in one step.")] = 16384,
    context: Annotated[int, typer.Option(min=1, help="Tokens in one sequence.")] = 2048,
    mode: Annotated[str, typer.Option(help="fp32, split8, sr8, sr4 or factored.")] = "split8",
    split: Annotated[int, typer.Option(help="Parts of a batch inside each block.")] = 1,
    offload_activations: Annotated[bool, typer.Option(help="Let block inputs wait in host RAM.")] = False,
    pack_weights: Annotated[bool, typer.Option(help="Let weights travel packed where that is faster.")] = True,
    max_gpu_blocks: Annotated[int, typer.Option(help="Blocks on the GPU at a time.")] = 3,
    blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of the model, where fewer than it has.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 4,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    as_json: AsJson = False,
) -> None:
    """Train a streamed model for a few steps: tokens per second, memory, and the same without copies."""
    with reported(as_json) as answer:
        from hybridtrainer.bench.stream import StreamCase, describe, measure_stream
        from hybridtrainer.config_io import parse_config
        from hybridtrainer.tasks import choose_device

        if mode not in MODES:
            why = ": there is nothing to stream" if mode in ("resident", "auto") else ""
            what = f"memory.mode is {mode!r}, not one of {', '.join(MODES)}{why}."
            raise ConfigError("the command line", [Problem("--mode", what)], REMEDY)
        settings: dict[str, Any] = {
            "mode": mode, "vram": vram_cap, "split": split, "offload_activations": offload_activations,
            "max_gpu_blocks": max_gpu_blocks, "pack_weights": pack_weights,
        }  # fmt: skip
        config = parse_config({"memory": settings, "train": {"device": device}}, "the command line")
        case = StreamCase(
            model,
            config.memory,
            tokens=tokens,
            context=context,
            blocks=blocks,
            steps=steps,
        )
        place = choose_device(config.train.device, f"--device cpu measures on the CPU; {NO_GPU}").type
        if vram_cap is not None and place == "cpu":
            typer.echo("--vram-cap limits nothing here: there is no memory of a GPU with --device cpu.", err=True)
        found = measure_stream(case, place, say=lambda line: typer.echo(line, err=True))
        answer(found, describe(found))


@bench.command()
def kernels(
    calls: Annotated[int, typer.Option(min=1, help="Calls in each of five rounds.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Time every Triton kernel against its reference on this GPU, and say how far apart their results are."""
    with reported(as_json) as answer:
        from hybridtrainer.bench.kernels import describe, measure_kernels
        from hybridtrainer.tasks import choose_device

        rows = measure_kernels(choose_device("cuda", f"Triton needs one: {NO_GPU}"), calls)
        answer({"kernels": rows}, describe(rows))
