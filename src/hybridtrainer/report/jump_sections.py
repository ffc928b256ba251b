"""What a page says of jumps, run by run. Turns data into sections."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrainer.report.charts import Chart, Mark, draw
from hybridtrainer.report.detail import Detail
from hybridtrainer.report.downsample import spread
from hybridtrainer.report.figures import Figure, Key, Section, Table, capped
from hybridtrainer.report.jumps import VERDICTS, Attempt, counted_reasons, without_figures
from hybridtrainer.report.runs import Run
from hybridtrainer.report.values import count, listed, plain, show, signed

SHAPES = {"kept": ("dot", "kept"), "refused": ("cross", "refused"), "rolled back": ("triangle", "undone"),
          "accepted": ("diamond", "open")}  # fmt: skip


def jump_section(runs: Sequence[Run], detail: Detail) -> Section:
    """What was tried, what came of it, and why."""
    tried = [(at, run) for at, run in enumerate(runs) if run.jumps]
    parts = [_jumps_of(at, run, detail) for at, run in tried]
    idle = [run for run in runs if not run.jumps]
    texts = []
    if idle:
        who = listed([plain(run.name, 60) for run in idle]) if len(runs) > 1 else "This run"
        texts.append(f"{who} tried no jump.")
        texts += [
            f"{plain(run.name, 60)} declined: {plain(_with_figures(reason, run))} ({count(times)})"
            for run in idle
            for reason, times in list(run.declined.items())[:10]
        ]
    if len(runs) == 1 and parts:
        return Section("Jumps", parts[0].texts, parts[0].figures, parts[0].tables, folded=parts[0].folded)
    return Section("Jumps", texts, parts=parts)


def _with_figures(reason: str, run: Run) -> str:
    """A counted reason as a notice of the run says it, with its figures, where one does."""
    said = [text.partition(": ")[2] for _, kind, text in run.remarks if kind == "notice"]
    return next((text for text in said if without_figures(text) == reason), reason.replace("#", "..."))


def _jumps_of(at: int, run: Run, detail: Detail) -> Section:
    probed = [jump for jump in run.jumps if jump.probe_change is not None]
    shown = spread(probed, detail.jumps)
    counts = listed([f"{count(run.jumped(verdict))} {verdict}" for verdict in VERDICTS if run.jumped(verdict)])
    texts = [
        f"{count(len(run.jumps), 'jump')} tried: {counts}." if counts else f"{count(len(run.jumps), 'jump')} tried."
    ]
    figures = []
    if shown and not detail.brief:
        note = (
            f"{len(shown)} of {count(len(probed))} jumps are drawn, evenly spread." if len(shown) < len(probed) else ""
        )
        figures = [_probe_chart(at, shown, note, detail), _change_chart(at, shown, note, detail)]
    reasons = capped(
        ("verdict", "reason", "times"),
        [(verdict, reason, count(times)) for verdict, reason, times in counted_reasons(run.jumps)],
        limit=20, texts=frozenset({0, 1}), caption="Reasons, figures left out and counted", thing="reason",
    )  # fmt: skip
    return Section(plain(run.name, 80), texts, figures, [reasons], folded=[_jump_list(run.jumps, detail.rows)])


def _probe_chart(at: int, jumps: Sequence[Attempt], note: str, detail: Detail) -> Figure:
    title = "Probe loss before and after each jump"
    links, marks = [], []
    for jump in jumps:
        shape, style = SHAPES.get(jump.verdict, ("square", "open"))
        assert jump.probe_before is not None and jump.probe_after is not None  # noqa: PT018
        links.append((jump.step, jump.probe_before, jump.probe_after, style))
        marks.append(Mark(jump.step, jump.probe_after, _told(jump), shape, style))
    svg, cut = draw(Chart(f"probe-{at}", title, "step", "probe loss", "step", marks=marks, links=links))
    told = "Each line leads from the loss before the jump to the marker, the loss right after it."
    return Figure(
        title, svg, _verdict_keys(jumps), " ".join(filter(None, (told, note, cut))), _probe_table(jumps, detail.values)
    )


def _change_chart(at: int, jumps: Sequence[Attempt], note: str, detail: Detail) -> Figure:
    title = "By how much each jump changed the probe loss"
    marks = []
    for jump in jumps:
        shape, style = SHAPES.get(jump.verdict, ("square", "open"))
        marks.append(Mark(jump.step, jump.probe_change or 0.0, _told(jump), shape, style))
    chart = Chart(f"change-{at}", title, "step", "change of the probe loss", "step", marks=marks, zero=True,
                  rules=[(0.0, "no change")])  # fmt: skip
    svg, cut = draw(chart)
    told = "Below the line the jump made the loss smaller."
    return Figure(
        title, svg, _verdict_keys(jumps), " ".join(filter(None, (told, note, cut))), _probe_table(jumps, detail.values)
    )


def _verdict_keys(jumps: Sequence[Attempt]) -> list[Key]:
    seen = {jump.verdict for jump in jumps}
    return [Key(verdict, *SHAPES[verdict]) for verdict in VERDICTS if verdict in seen]  # type: ignore[arg-type]


def _told(jump: Attempt) -> str:
    return (
        f"step {count(jump.step)}, {jump.verdict}: {show(jump.probe_before)} to {show(jump.probe_after)} "
        f"({signed(jump.probe_change)})"
    )


def _probe_table(jumps: Sequence[Attempt], limit: int) -> Table:
    rows = [
        (count(jump.step), jump.verdict, show(jump.probe_before), show(jump.probe_after), signed(jump.probe_change))
        for jump in spread(jumps, limit)
    ]
    return capped(("step", "verdict", "before", "after", "change"), rows, texts=frozenset({1}))


def _jump_list(jumps: Sequence[Attempt], limit: int) -> Table:
    rows = [
        (count(jump.step), jump.verdict, jump.forecaster, show(jump.confidence, 2), count(jump.horizon_steps),
         count(jump.worth_steps), plain(jump.reason, 240))
        for jump in jumps
    ]  # fmt: skip
    columns = ("step", "verdict", "forecaster", "confidence", "looked ahead", "worth", "reason")
    return capped(columns, rows, limit=limit, texts=frozenset({1, 2, 6}), caption="Every jump", thing="jump")
