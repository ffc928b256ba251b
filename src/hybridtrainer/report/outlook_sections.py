"""What a page says of forecasts and of memory, run by run. Turns data into sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridtrainer.report.charts import Chart, Interval, Mark, Series, draw
from hybridtrainer.report.detail import Detail, phase_bands
from hybridtrainer.report.downsample import Point, spread
from hybridtrainer.report.figures import Figure, Key, Section, Table, capped, values_table
from hybridtrainer.report.forecasts import Forecast, coverage
from hybridtrainer.report.run_sections import phase_keys
from hybridtrainer.report.runs import Run
from hybridtrainer.report.svg import colour, dash
from hybridtrainer.report.values import NOTHING, byte_unit, count, listed, memory, plain, show, time_unit


def forecast_section(runs: Sequence[Run], detail: Detail) -> Section:
    """What was forecast beside what happened."""
    texts: list[str] = []
    without = [run for run in runs if not (run.forecasts.short or run.forecasts.final)]
    if without:
        names = "" if len(runs) == 1 else f" of {listed([plain(run.name, 60) for run in without])}"
        logs = f"The log{names} holds" if len(without) == 1 else f"The logs{names} hold"
        texts.append(f"{logs} no forecasts of the loss, so there is nothing to compare with what happened.")
    if without and any(run.jumps for run in without):
        texts.append("How jumps fared is below: each was judged by its probe, not by a forecast of the loss.")
    parts = [_forecasts_of(at, run, detail) for at, run in enumerate(runs) if run not in without]
    if len(parts) == 1 and len(runs) == 1:
        return Section("Forecast and what happened", parts[0].texts, parts[0].figures)
    return Section("Forecast and what happened", texts, parts=parts)


def _forecasts_of(at: int, run: Run, detail: Detail) -> Section:
    texts, figures = [], []
    for what, found in (("shortly ahead", run.forecasts.short), ("of the final loss", run.forecasts.final)):
        inside, judged = coverage(found)
        if judged:
            texts.append(f"Forecasts {what}: in {inside} of {judged} what happened lay inside the 90% interval.")
        elif found:
            texts.append(f"Forecasts {what}: {count(len(found))}, and the run has not reached what they are about.")
    if run.forecasts.short and not detail.brief:
        figures.append(_short(at, run, detail))
    if run.forecasts.final and not detail.brief:
        figures.append(_final(at, run, detail))
    return Section(plain(run.name, 80), [" ".join(texts)] if texts else (), figures)


def _short(at: int, run: Run, detail: Detail) -> Figure:
    found = run.forecasts.short
    begin = min(known.target_step for known in found)
    happened = [(x, y) for x, y in run.smoothed if x >= begin]
    title = "Forecast shortly ahead, at the step it is about"
    svg, cut = draw(
        Chart(
            key=f"forecast-short-{at}", title=title, x_label="step", y_label="smoothed training loss", x_unit="step",
            series=[Series("what happened", happened, 0), Series("forecast", _means(found, "target_step"), 1, "thin")],
            intervals=[_interval(found, "target_step")],
            marks=_misses(found, "target_step", detail),
        ),
        detail.own_points,
    )  # fmt: skip
    return Figure(title, svg, _FORECAST_KEYS, cut, _forecast_table(found, detail.values))


def _final(at: int, run: Run, detail: Detail) -> Figure:
    found = run.forecasts.final
    actual = found[-1].actual
    title = "Forecast of the final loss, by when it was made"
    svg, cut = draw(
        Chart(
            key=f"forecast-final-{at}", title=title, x_label="step at which it was made",
            y_label="final smoothed training loss", x_unit="step",
            series=[Series("forecast", _means(found, "step"), 1)], intervals=[_interval(found, "step")],
            rules=[(actual, f"what it turned out to be: {show(actual)}")] if actual is not None else (),
        ),
        detail.own_points,
    )  # fmt: skip
    keys = [Key("forecast", "line", "line s1 d1"), Key("90% interval", "area", "area s1")]
    if actual is not None:
        keys.append(Key(f"what it turned out to be: {show(actual)}", "rule", "rule"))
    note = "" if actual is not None else "The run has not got there, so what it turned out to be is not known."
    return Figure(title, svg, keys, f"{note} {cut}".strip(), _forecast_table(found, detail.values))


_FORECAST_KEYS = (
    Key("what happened", "line", "line s0 d0"),
    Key("forecast", "line", "line thin s1 d1"),
    Key("90% interval", "area", "area s1"),
    Key("outside the interval", "triangle", "undone"),
)


def _means(found: Sequence[Forecast], x: str) -> list[tuple[float, float | None]]:
    return [(getattr(known, x), known.loss) for known in found]


def _interval(found: Sequence[Forecast], x: str) -> Interval:
    edges = [(getattr(known, x), known.low, known.high) for known in found]
    known = [(at, low, high) for at, low, high in edges if low is not None and high is not None]
    return Interval("90% interval", known, "s1")


def _misses(found: Sequence[Forecast], x: str, detail: Detail) -> list[Mark]:
    missed = [(getattr(known, x), known) for known in found if known.inside is False]
    return [
        Mark(at, known.actual, f"step {count(at)}: {show(known.actual)}, outside {show(known.low)} to "
             f"{show(known.high)}", "triangle", "undone")
        for at, known in spread(missed, detail.marks)
        if known.actual is not None
    ]  # fmt: skip


def _forecast_table(found: Sequence[Forecast], limit: int) -> Table:
    said = {True: "yes", False: "no", None: NOTHING}
    rows = [
        (count(known.step), count(known.target_step), show(known.loss), f"{show(known.low)} to {show(known.high)}",
         show(known.actual), said[known.inside])
        for known in spread(found, limit)
    ]  # fmt: skip
    table = capped(("made at step", "for step", "forecast", "90% interval", "what happened", "inside"), rows)
    note = f"{len(rows)} of {count(len(found))} forecasts, evenly spread." if len(rows) < len(found) else ""
    return Table(table.columns, table.rows, frozenset(), note=note)


def memory_section(runs: Sequence[Run], detail: Detail) -> Section:
    """Memory over training time, by phase."""
    parts = [_memory_of(at, run, detail) for at, run in enumerate(runs) if run.memory]
    texts = []
    if len(parts) < len(runs):
        who = listed([plain(run.name, 60) for run in runs if not run.memory]) if len(runs) > 1 else "this run"
        texts.append(f"Memory was not recorded in {who}.")
    if len(runs) == 1 and parts:
        return Section("Memory", parts[0].texts, parts[0].figures, parts[0].tables)
    return Section("Memory", texts, parts=parts)


def _memory_of(at: int, run: Run, detail: Detail) -> Section:
    kinds = [("host", "host"), ("device", "device"), ("device_peak", "device, highest so far")]
    used = {name: [(sample.seconds, getattr(sample, kind)) for sample in run.memory] for kind, name in kinds}
    used = {name: points for name, points in used.items() if any(y is not None for _, y in points)}
    rows = []
    for phase in dict.fromkeys(sample.phase for sample in run.memory):
        samples = [sample for sample in run.memory if sample.phase == phase]
        most = (
            max((y for sample in samples if (y := getattr(sample, kind)) is not None), default=None)
            for kind, name in kinds
            if name in used
        )
        rows.append([phase, *map(memory, most)])
    table = capped(("phase", *used), rows, caption="Most memory in use, by phase")
    figures = [] if detail.brief else [_memory_chart(at, run, used, detail)]
    return Section(plain(run.name, 80), (), figures, [table])


def _memory_chart(at: int, run: Run, used: Mapping[str, Sequence[Point]], detail: Detail) -> Figure:
    time, second = time_unit(run.step_seconds)
    unit, size = byte_unit(max((y for points in used.values() for _, y in points if y is not None), default=0.0))
    series = [
        Series(name, [(x / second, None if y is None else y / size) for x, y in points], index)
        for index, (name, points) in enumerate(used.items())
    ]
    bands, crowded = phase_bands(run.by_time.phases, detail.bands, second)
    chart = Chart(
        f"memory-{at}", "Memory over training time", f"time inside steps ({time})", f"memory ({unit})", time, series,
        bands=() if crowded else bands, strips=[(0, bands)] if crowded else (), zero=True,
    )  # fmt: skip
    svg, cut = draw(chart, detail.own_points)
    keys = [Key(known.name, "line", f"line {colour(known.style)} {dash(known.style)}") for known in series]
    values = [(known.name, known.points) for known in series]
    table = values_table(chart.x_label, chart.y_label, values, detail.values)
    return Figure(chart.title, svg, keys + phase_keys([run]), cut, table)
