"""What a page says of runs: verdicts, losses, forecasts, time, memory, remarks. Turns data into sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridtrainer.report.charts import Chart, Mark, Series, draw
from hybridtrainer.report.detail import Detail, phase_bands, phase_style
from hybridtrainer.report.downsample import Point, spread
from hybridtrainer.report.figures import Figure, Key, Section, Verdict, capped, values_table
from hybridtrainer.report.runs import Run
from hybridtrainer.report.story import PHASES, Curves
from hybridtrainer.report.svg import colour, dash
from hybridtrainer.report.values import count, listed, plain, seconds, show, time_unit, worth_in_words

STATUS = {
    "finished": "finished",
    "paused": "was paused",
    "interrupted": "was interrupted by a signal",
    "error": "ended with an error",
    "unfinished": "has no end in its log (it still runs, or was killed)",
}
FORESIGHT = ("grown from", "sample forecasts: in", "read-out: ")
"""How the notices begin that say what was foreseen beside jumps."""
NO_PROOF = (
    "These are records of single runs. They prove no gain in speed: that takes a comparison over several seeds, "
    "with tuned plain training, at equal quality."
)


def verdict(run: Run) -> Verdict:
    """A run in a few sentences that claim nothing it does not show."""
    status = STATUS.get(run.status, f"ended with the status {run.status!r}")
    parts = [f"{run.name} {status} at step {count(run.steps)}: {count(run.real_steps, 'real step')}"]
    if run.jumps:
        fates = [f"{count(run.jumped('kept'), 'jump')} kept", f"{count(run.jumped('refused'))} refused",
                 f"{count(run.jumped('rolled back'))} rolled back"]  # fmt: skip
        if pending := run.jumped("accepted"):
            fates.append(f"{count(pending)} not yet decided")
        parts[0] += f" and {count(run.foreseen_steps)} foreseen ({', '.join(fates)})"
    else:
        parts[0] += ", none foreseen, no jump tried"
    if run.training_seconds is None:
        parts[0] += f", in {seconds(run.step_seconds)} inside steps."
    else:
        parts[0] += f", in {seconds(run.training_seconds)} of training."
    notices = [(step, text) for step, kind, text in run.remarks if kind == "notice"]
    for begin in FORESIGHT:
        if said := [(step, text) for step, text in notices if text.startswith(begin)]:
            step, text = said[-1]
            parts.append(f"{text[0].upper()}{text[1:]}" + ("." if step is None else f" (step {count(step)})."))
    if run.worth:
        parts.append(f"By estimate, {worth_in_words(run.worth)}: a comparison would have to confirm it.")
    if run.last_evaluation and run.last_evaluation[1]:
        step, metrics = run.last_evaluation
        shown = listed([f"{name} {show(value)}" for name, value in list(metrics.items())[:4]])
        parts.append(f"Validation at step {count(step)}: {shown}.")
    else:
        parts.append("It was never validated.")
    if errors := [text for _, kind, text in run.remarks if kind == "error"]:
        parts.append(f"Error: {plain(errors[-1], 200)}")
    bad = run.status == "error"
    return Verdict(plain(run.name, 80), plain(" ".join(parts), 1000), "bad" if bad else "neutral")


def losses(runs: Sequence[Run], detail: Detail) -> Section:
    """Loss over training time and over steps; every further metric in charts of its own."""
    figures = [_loss_chart(runs, detail, by_time=True), _loss_chart(runs, detail, by_time=False)]
    metrics = dict.fromkeys(name for run in runs for name in run.by_step.evaluations if name != "loss")
    for at, metric in enumerate(list(metrics)[:4]):
        figures += [_metric_chart(runs, detail, metric, at, by_time=by_time) for by_time in (True, False)]
    return Section("Loss", (), figures)


def _axis(runs: Sequence[Run], by_time: bool) -> tuple[Callable[[Run], Curves], str, float, str]:
    if not by_time:
        return (lambda run: run.by_step), "step", 1.0, "step"
    unit, size = time_unit(max(run.step_seconds for run in runs))
    return (lambda run: run.by_time), f"time inside steps ({unit})", size, unit


def _loss_chart(runs: Sequence[Run], detail: Detail, *, by_time: bool) -> Figure:
    curves, x_label, unit, x_unit = _axis(runs, by_time)
    series = [
        Series(plain(run.name, 80), scaled(curves(run).loss, unit), at)
        for at, run in enumerate(runs)
        if any(y is not None for _, y in curves(run).loss)
    ]
    measured = [(at, run, scaled(curves(run).evaluations.get("loss", []), unit)) for at, run in enumerate(runs)]
    marks = [mark for at, run, points in measured for mark in _evaluation_marks(at, run, points, detail, x_unit)]
    gathered = [phase_bands(curves(run).phases, detail.bands, unit) for run in runs]
    crowded = any(crowd for _, crowd in gathered)
    alone = len(runs) == 1 and not crowded
    title = "Loss over training time" if by_time else "Loss over steps"
    svg, cut = draw(
        Chart(
            key="loss-time" if by_time else "loss-step",
            title=title,
            x_label=x_label,
            y_label="loss",
            x_unit=x_unit,
            series=series,
            marks=marks,
            bands=gathered[0][0] if alone else (),
            strips=() if alone else [(at, bands) for at, (bands, _) in enumerate(gathered)],
        ),
        detail.points,
    )
    notes = ["Lines: training loss, a mean over about ten steps or 1% of the run; dots: validation loss."]
    notes += ["Phases as bands behind the line."] if alone else ["Below the plot: the phases of each run."]
    notes += ["Where phases are too many to draw, a column shows their shares by height."] if crowded else []
    if len(marks) < (total := sum(y is not None for _, _, points in measured for _, y in points)):
        notes.append(f"{len(marks)} of {count(total)} validations are drawn, evenly spread.")
    notes += ["All that happened, roll-backs included." if by_time else "Without what was rolled back."]
    table = values_table(x_label, "loss", [
        *((f"{known.name}, training", known.points) for known in series),
        *((f"{run.name}, validation", points) for _, run, points in measured if points),
    ])  # fmt: skip
    return Figure(title, svg, run_keys(runs) + phase_keys(runs), " ".join([*notes, cut]).strip(), table)


def _metric_chart(runs: Sequence[Run], detail: Detail, metric: str, index: int, *, by_time: bool) -> Figure:
    curves, x_label, unit, x_unit = _axis(runs, by_time)
    name = plain(metric, 40)
    series = [
        Series(plain(run.name, 80), scaled(curves(run).evaluations.get(metric, []), unit), at)
        for at, run in enumerate(runs)
    ]
    marks = [
        mark
        for at, run in enumerate(runs)
        for mark in _evaluation_marks(at, run, series[at].points, detail, x_unit, name)
    ]
    title = f"Validation {name} over {'training time' if by_time else 'steps'}"
    chart = Chart(f"metric-{index}-{'time' if by_time else 'step'}", title, x_label, name, x_unit, series, marks)
    svg, cut = draw(chart, detail.points)
    return Figure(title, svg, run_keys(runs), cut, values_table(x_label, name, [(s.name, s.points) for s in series]))


def _evaluation_marks(
    at: int, run: Run, points: Sequence[Point], detail: Detail, x_unit: str, metric: str = "loss"
) -> list[Mark]:
    name = plain(run.name, 60)
    return [
        Mark(x, y, f"{name}, validation {metric}: {show(y)} at {at_x(x, x_unit)}", "dot", colour(at))
        for x, y in spread([point for point in points if point[1] is not None], detail.marks)
        if y is not None
    ]


def time_by_phase(runs: Sequence[Run]) -> Section:
    """Where the training time went."""
    from hybridtrainer.report.bars import Part, stacked

    unit, size = time_unit(max(run.step_seconds for run in runs))
    phases = [phase for phase in (*PHASES, "other") if any(run.seconds_by_phase.get(phase) for run in runs)]
    rows, cells = [], []
    for run in runs:
        spent = {phase: run.seconds_by_phase.get(phase, 0.0) for phase in phases}
        total = sum(spent.values())
        parts = [
            Part(phase, took / size, phase_style(phase), f"{seconds(took)} ({took / total:.0%})")
            for phase, took in spent.items()
            if took
        ]
        rows.append((run.name, parts, seconds(total)))
        shown = [f"{seconds(took)} ({took / total:.0%})" if took else "0" for took in spent.values()]
        cells.append([run.name, *shown, seconds(total), seconds(run.training_seconds)])
    svg = stacked("time-phase", "Training time by phase", f"time inside steps ({unit})", rows)
    keys = [Key(phase, "area", phase_style(phase)) for phase in phases]
    note = (
        "Time inside steps: fetching batches, evaluations and checkpoints are not in it. Probes and refused jumps "
        "count as predict. Training in all: steps and fetching."
    )
    table = capped(["run", *phases, "inside steps", "training in all"], cells)
    return Section("Time by phase", (), [Figure("Training time by phase", svg, keys, note)], [table])


def remarks(runs: Sequence[Run], detail: Detail) -> Section:
    """Notices and errors of the logs."""
    rows = [
        (run.name, count(step) if step is not None else "", kind, text)
        for run in runs
        for step, kind, text in run.remarks
    ]
    texts = () if rows else ("The logs hold no notices and no errors.",)
    columns = ("run", "step", "kind", "text")
    limit = detail.rows * len(runs)
    tables = [capped(columns, rows, limit=limit, texts=frozenset({0, 2, 3}), thing="remark")] if rows else []
    return Section("Notices and errors", texts, (), tables)


def run_keys(runs: Sequence[Run]) -> list[Key]:
    """The legend of the runs."""
    return [Key(plain(run.name, 80), "line", f"line {colour(at)} {dash(at)}") for at, run in enumerate(runs)]


def phase_keys(runs: Sequence[Run]) -> list[Key]:
    """The legend of the phases that occur."""
    seen = {stretch.phase for run in runs for stretch in run.by_time.phases}
    return [Key(phase, "area", phase_style(phase)) for phase in (*PHASES, "other") if phase in seen]


def scaled(points: Sequence[Point], unit: float) -> list[Point]:
    """Points whose x is in another unit."""
    return [(x / unit, y) for x, y in points]


def at_x(x: float, unit: str) -> str:
    """A place on the x axis in words."""
    return f"step {count(x)}" if unit == "step" else f"{show(x)} {unit}"
