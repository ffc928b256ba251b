"""The command line. Every verb prints for people, or one JSON object with `--json`.

Exit codes: 0 done; 1 an unexpected error; 2 configuration or setup; 3 data; 4 checkpoint; 5 run folder;
6 divergence; 7 a resumed run was not equal; 8 memory; 9 a rank was lost;
128 + n ended by signal n (130 Ctrl-C, 143 SIGTERM).

Nothing heavy is imported before a verb runs: `--help` needs no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hybridtrainer import __version__
from hybridtrainer.cli_answer import AsJson, ConfigPath, Overrides, Quiet, reported
from hybridtrainer.cli_bench import bench
from hybridtrainer.cli_doctor import doctor
from hybridtrainer.cli_plan import plan
from hybridtrainer.cli_profile import profile
from hybridtrainer.cli_ranks import command, joined, require_one_process
from hybridtrainer.errors import HybridTrainerError

if TYPE_CHECKING:
    from hybridtrainer.fit_result import FitResult
    from hybridtrainer.tasks import Task

EXIT_NOT_EQUAL = 7
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # the old name and the new one

app = typer.Typer(
    name="hybridtrainer",
    help="Trains PyTorch models in phases; what a forecast foresees is not computed.",
    epilog="Exit codes: 0 done, 1 unexpected, 2 configuration, 3 data, 4 checkpoint, 5 run folder, 6 divergence, "
    "7 a resumed run was not equal, 8 memory, 9 a rank was lost, 130 Ctrl-C, 143 SIGTERM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    with reported(as_json=False):
        require_one_process(context.invoked_subcommand)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("hybridtrainer.toml"),
    preset: Annotated[str, typer.Option(help="default, conservative or aggressive.")] = "default",
    task: Annotated[str | None, typer.Option(help="Start from a task by name, e.g. fashion-mnist.")] = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a configuration file with every setting explained."""
    from hybridtrainer.config_io import commented_toml, write_config

    with reported(as_json) as answer:
        told = write_config(path, commented_toml(preset, task), force)
        answer({"path": str(path)}, told)


@app.command()
def validate(config: ConfigPath = None, overrides: Overrides = [], as_json: AsJson = False) -> None:  # noqa: B006
    """List every error in a configuration, and touch nothing."""
    from hybridtrainer.config_io import load_config

    with reported(as_json) as answer:
        resolved = load_config(config, overrides)
        answer(
            {"valid": True, "config": resolved.model_dump(mode="json")}, f"{config or 'The configuration'} is valid."
        )


@app.command()
def train(
    config: ConfigPath = None,
    overrides: Overrides = [],  # noqa: B006
    name: Annotated[str | None, typer.Option("--run", help="Name of the run; overrides run.name.")] = None,
    pause_at: Annotated[
        int | None, typer.Option(min=1, help="Stop with a checkpoint at this step, to be resumed.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train, with the resolved configuration, a log and checkpoints in the run folder."""
    with reported(as_json) as answer:
        from hybridtrainer.config_io import load_config, to_toml
        from hybridtrainer.run_folder import run_path

        settings = [*overrides, f"run.name={json.dumps(name)}"] if name is not None else overrides
        resolved = load_config(config, settings)
        folder = run_path(resolved.run.folder, resolved.run.name)
        from hybridtrainer.tasks import build_task

        with joined(resolved.train.device):
            task = build_task(resolved)
            result = task.fit(folder, _progress(quiet, as_json), pause_at=pause_at, config_text=to_toml(task.config))
        _answer_run(answer, folder, task, result)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/run.")],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its newest sound checkpoint."""
    with reported(as_json) as answer:
        from hybridtrainer.config_io import load_config
        from hybridtrainer.errors import RunFolderError
        from hybridtrainer.run_folder import was_made_by_command

        if not (run / "config.toml").is_file():
            raise RunFolderError(
                f"{run} is not the folder of a run: it has no config.toml.", "Name one, e.g. runs/run."
            )
        resolved = load_config(run / "config.toml")
        if not was_made_by_command(run):
            raise RunFolderError(
                f"{run} was made from Python: it does not say which model was trained on which data.",
                "Start that program again with resume=True (`fit`, `own_loop`), resume_from_checkpoint=True (Hugging "
                "Face) or ckpt_path=... (Lightning).",
            )
        from hybridtrainer.tasks import build_task

        with joined(resolved.train.device):
            task = build_task(resolved)
            result = task.fit(run, _progress(quiet, as_json), resume=True)
        _answer_run(answer, run, task, result)


@app.command()
def verify_resume(
    config: ConfigPath = None,
    overrides: Overrides = [],  # noqa: B006
    at: Annotated[
        int | None, typer.Option(min=1, help="Step at which to interrupt; the middle where left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a run interrupted and resumed in a new process equals an uninterrupted one, bit for bit."""
    with reported(as_json) as answer:
        from hybridtrainer.config_io import load_config
        from hybridtrainer.resume_proof import prove_resume

        say = str if as_json else partial(typer.echo, err=True)
        proof = prove_resume(load_config(config, overrides), at, say)
        lines = [f"{part:18} {'equal' if same else 'DIFFERENT'}" for part, same in proof.parts.items()]
        lines += [f"losses             {proof.equal_losses} of {proof.compared_losses} equal"]
        verdict = "equal, bit for bit" if proof.equal else "NOT equal"
        lines += [
            f"{proof.steps} steps, and {proof.at} + {proof.steps - proof.at} with a resume in between: {verdict}."
        ]
        answer(proof.to_dict(), "\n".join(lines))
        if not proof.equal:
            raise typer.Exit(EXIT_NOT_EQUAL)


@app.command()
def compare(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CONFIG...",
            help="One configuration or task by name: it is compared with plain training. Several: with the first.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, 2, ...; 5 or more for a verdict to trust.")] = 5,
    target: Annotated[
        str | None,
        typer.Option(help='Metric to reach: a number, or "median" for what the first arm\'s median run reaches.'),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="accuracy or loss; accuracy where there is one.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Search rate, schedule and length first.")] = False,
    tune_lr: Annotated[str | None, typer.Option(help="Factors of optimizer.lr to try; 0.5,1,2.")] = None,
    tune_schedule: Annotated[str | None, typer.Option(help="Schedules to try; constant,cosine.")] = None,
    tune_length: Annotated[str | None, typer.Option(help="Factors of train.steps to try; 1,0.6.")] = None,
    tolerance: Annotated[float, typer.Option(help="Share of the metric that is no loss of quality.")] = 0.002,
    whole_runs: Annotated[
        bool, typer.Option("--whole-runs", help="One run after the other, where memory holds only one model.")
    ] = False,
    name: Annotated[str | None, typer.Option("--run", help="Name of the comparison's folder in run.folder.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train plain and hybrid in turns, with paired seeds, and say with intervals which reached the target sooner.

    Started again in the same folder it goes on where it was interrupted; more seeds or another target can be asked for.
    """
    with reported(as_json) as answer:
        from hybridtrainer.compare.request import read_request

        request = read_request(configs or [], overrides, seeds, target, metric, tolerance, whole_runs, name)
        if tune or tune_lr or tune_schedule or tune_length:
            request = request.tuned(tune_lr, tune_schedule, tune_length)
        from hybridtrainer.compare.audit import StoppedError, compare
        from hybridtrainer.compare.summary import summary
        from hybridtrainer.observe.progress import Unbreakable, make_progress
        from hybridtrainer.report import write_report

        shown = Unbreakable(make_progress(_progress(quiet, as_json), "comparing"))
        shown.message(request.plan())
        try:
            result = compare(request.arms, request.folder, request.options, shown)
        except StoppedError as error:
            said = f"Stopped; everything is kept. Go on with the same command ({request.folder})."
            answer({"status": "interrupted", "signal": error.signal, "run": str(request.folder)}, said)
            raise typer.Exit(128 + error.signal) from error
        try:
            page = str(write_report([request.folder], request.folder / "report.html"))
        except HybridTrainerError as error:  # a page that cannot be written is no reason to withhold the result
            page = f"none, {error.what}"
        answer(result | {"report": page}, f"{summary(result, request.folder)} As a picture: {page}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of comparisons.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; report.html in the one folder named, or here for several.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is no report.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that shows what runs did, or what a comparison found."""
    with reported(as_json) as answer:
        from hybridtrainer.report import write_report

        path = write_report(folders, out, force)
        size = path.stat().st_size
        answer({"path": str(path), "bytes": size}, f"Wrote {path} ({size / 1000:,.0f} kB). Open it in a browser.")


def _answer_run(answer: Callable[[dict[str, Any], str], None], folder: Path, task: Task, result: FitResult) -> None:
    from hybridtrainer.observe.against_plan import result_text
    from hybridtrainer.report.values import worth_in_words

    statistics = task.trainer.statistics()
    evaluation = result.evaluations[-1] if result.evaluations else {}
    content = {
        "run": str(folder),
        "status": result.status,
        "steps": result.steps,
        "seconds": result.seconds,
        "training_seconds": result.training_seconds,
        "evaluation": evaluation,
        "statistics": statistics.to_dict(),
        "against_plan": None if result.against_plan is None else asdict(result.against_plan),
        "fingerprint": task.trainer.fingerprint(),
    }
    lines = [f"{result.status.capitalize()} at step {result.steps}: {folder}"]
    lines += (
        ["  ".join(f"{name} {value:.4f}" for name, value in evaluation.items() if name != "step")] if evaluation else []
    )
    lines += [
        f"{statistics.real_steps} real steps, {statistics.foreseen_steps} foreseen "
        f"({statistics.jumps_kept} jumps kept, {statistics.jumps_refused} refused, "
        f"{statistics.jumps_rolled_back} rolled back), {result.training_seconds:.1f} s of training"
    ]
    if statistics.worth_seconds:
        lines += [f"by estimate, {worth_in_words(statistics.worth_seconds)}"]
    if result.against_plan is not None:
        lines += [result_text(result.against_plan)]
    if result.status != "finished":
        lines += [f"Continue with: {command()} resume {folder}"]
    answer(content, "\n".join(lines))
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


def _progress(quiet: bool, as_json: bool) -> Literal["off", "auto"]:
    return "off" if quiet or as_json else "auto"


app.command()(doctor)
app.command()(plan)
app.command()(profile)


def main() -> None:
    """Entry point of the `hybridtrainer` command.

    Segments of GPU memory that grow leave fewer gaps than whole ones, and plans of streamed models count on it; torch
    reads this when it is first asked for memory. Whoever has said something of the allocator has the last word.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
