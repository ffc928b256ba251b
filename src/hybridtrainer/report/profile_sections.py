"""What a page says of memory profiles: how much at each step, what it is made of, where it rises."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrainer.observe.profile_summary import ProfileReport, summarize
from hybridtrainer.observe.snapshots import COMPONENTS, Snapshot
from hybridtrainer.report.charts import Chart, Mark, Series, draw
from hybridtrainer.report.detail import Detail, phase_bands
from hybridtrainer.report.downsample import spread
from hybridtrainer.report.figures import Figure, Key, Section, Table, capped, values_table
from hybridtrainer.report.run_sections import phase_keys
from hybridtrainer.report.runs import Run
from hybridtrainer.report.story import PHASES, Stretch
from hybridtrainer.report.svg import colour, dash
from hybridtrainer.report.values import byte_unit, count, memory, plain, seconds, show

LINES = {
    "peak_bytes": "peak of the step",
    "reserved_bytes": "taken from the GPU by torch",
    "weights_bytes": "weights",
    "states_bytes": "optimizer states",
    "gradients_bytes": "gradients",
}


def profile_section(runs: Sequence[Run], detail: Detail) -> Section | None:
    """Memory step by step, for the runs that kept a profile; None where none did."""
    parts = [_profile_of(at, run, detail) for at, run in enumerate(runs) if run.profile]
    if not parts:
        return None
    if len(runs) == 1:
        return Section("Memory profile", parts[0].texts, parts[0].figures, parts[0].tables)
    return Section("Memory profile", parts=parts)


def _profile_of(at: int, run: Run, detail: Detail) -> Section:
    report = summarize(run.profile)
    tables = [_by_phase(report)]
    if report.spikes:
        tables.append(_spikes(report, detail))
    figures = [] if detail.brief else [_chart(at, run, report, detail)]
    text = f"Highest at step {count(report.peak_step)}: {memory(report.peak_bytes)}. " if report.peak_bytes else ""
    text += f"{count(report.steps, 'step')} in {seconds(report.seconds)}"
    text += f", {show(report.steps_per_second, 3)} a second." if report.steps_per_second else "."
    return Section(plain(run.name, 80), (text,), figures, tables)


def _by_phase(report: ProfileReport) -> Table:
    names = list(COMPONENTS.values())
    rows = [
        [
            phase,
            count(use.steps),
            *(memory(figure) for figure in (use.mean_bytes, use.max_bytes, use.min_bytes)),
            *(memory(use.components.get(name)) for name in names),
        ]
        for phase, use in report.phases.items()
    ]
    caption = "Peaks of steps by phase, and what the highest was made of"
    return capped(("phase", "steps", "mean", "max", "min", *names), rows, caption=caption)


def _spikes(report: ProfileReport, detail: Detail) -> Table:
    rows = [
        [count(spike.step), spike.phase, f"+{memory(spike.delta_bytes)}", memory(spike.peak_bytes)]
        for spike in report.spikes
    ]
    caption = f"Steps that were {memory(report.spike_bytes)} or more above the one before"
    columns = ("step", "phase", "by", "up to")
    return capped(columns, rows, limit=detail.rows, texts=frozenset({1}), caption=caption, thing="step")


def _chart(at: int, run: Run, report: ProfileReport, detail: Detail) -> Figure:
    """Over the steps made, because a roll-back sets the clock back."""
    found = run.profile
    unit, size = byte_unit(max((report.peak_bytes or 0, report.reserved_peak_bytes or 0)))
    series: list[Series] = []
    for column, name in LINES.items():
        values = [getattr(snapshot, column) for snapshot in found]
        if any(value is not None for value in values):
            points = [(made, None if value is None else value / size) for made, value in enumerate(values, 1)]
            series.append(Series(name, points, len(series)))
    bands, crowded = phase_bands(_stretches(found), detail.bands, 1.0)
    risen = [
        Mark(spike.made, spike.peak_bytes / size, f"step {count(spike.step)}: +{memory(spike.delta_bytes)}", "triangle",
             "undone")
        for spike in report.spikes
    ]  # fmt: skip
    chart = Chart(
        f"profile-{at}", "Memory at each step", "steps made", f"memory ({unit})", "step", series,
        marks=spread(risen, detail.marks), bands=() if crowded else bands, strips=[(0, bands)] if crowded else (),
        zero=True,
    )  # fmt: skip
    svg, cut = draw(chart, detail.own_points)
    keys = [Key(known.name, "line", f"line {colour(known.style)} {dash(known.style)}") for known in series]
    keys += [Key("spike", "triangle", "undone")] if risen else []
    keys += phase_keys([run])
    table = values_table(chart.x_label, chart.y_label, [(known.name, known.points) for known in series], detail.values)
    return Figure(chart.title, svg, keys, cut, table)


def _stretches(found: Sequence[Snapshot]) -> list[Stretch]:
    """Phases along the steps made."""
    stretches: list[Stretch] = []
    for made, snapshot in enumerate(found, 1):
        phase = snapshot.phase if snapshot.phase in PHASES else "other"
        begin = float(made - 1)
        if stretches and stretches[-1].phase == phase:
            begin = stretches.pop().begin
        stretches.append(Stretch(begin, float(made), phase))
    return stretches
