"""What a page says of a comparison. The verdicts are those of the result; nothing is judged here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from hybridtrainer.report.bars import Words, forest
from hybridtrainer.report.charts import Chart, Series, draw
from hybridtrainer.report.comparison import Comparison, Estimate, Trial, Versus, mean_curve, trial_curve
from hybridtrainer.report.detail import Detail
from hybridtrainer.report.figures import Figure, Key, Section, Table, Verdict, capped, values_table
from hybridtrainer.report.run_sections import scaled
from hybridtrainer.report.settings import flat
from hybridtrainer.report.settings_sections import settings_section
from hybridtrainer.report.svg import colour, dash
from hybridtrainer.report.values import NOTHING, count, number, plain, seconds, show, time_unit
from hybridtrainer.sizes import rounded_down

MOST_SEED_COLUMNS = 12
BAD = ("slower", "quality lost")
RATIO = Words("average run", "target not reached", "never")
RATIO_NOTE = "the ratio on the curves averaged over the seeds"


def comparison_verdict(found: Comparison) -> Verdict:
    """The headline and the warnings, as they are in the result."""
    verdicts = [versus.verdict for versus in found.comparisons]
    mood = "good" if verdicts and all(known == "faster" for known in verdicts) else "neutral"
    if any(known in BAD for known in verdicts):
        mood = "bad"
    warnings = [plain(warning) for warning in found.warnings]
    return Verdict(plain(found.name, 80), plain(found.headline, 1000), mood, warnings)  # type: ignore[arg-type]


def comparison_sections(at: int, found: Comparison, detail: Detail) -> list[Section]:
    """Every part of a comparison; `at` tells the charts of several comparisons apart."""
    several = len(found.comparisons) > 1
    verdicts = [_versus(f"{at}-{index}", found, versus) for index, versus in enumerate(found.comparisons)]
    sections = [Section("Speed and quality", _terms(found), parts=verdicts) if several or verdicts else None]
    sections += [_quality(at, found, detail), _compute(found), _tuning(found, detail)]
    settings = {name: flat(arm.config) for name, arm in found.arms.items()}
    sections += [settings_section(settings, things="arms")]
    sections += [settings_section({found.name: flat(found.environment)}, "Environment")]
    folders = [plain(trial.folder) for arm in found.arms.values() for trial in arm.trials if trial.folder]
    if folders:
        single = "Each trial is a run folder of its own; its report shows phases, jumps and forecasts. In this folder: "
        sections += [Section("Single runs", (f"{single} hybridtrainer report {folders[-1]}",))]
    return [section for section in sections if section is not None]


def _terms(found: Comparison) -> list[str]:
    """What target, quality and interval mean here."""
    better = "higher" if found.metric.higher_is_better else "lower"
    texts = [f"Quality is {plain(found.metric.name, 60)} on validation data; {better} is better."]
    if found.target.value is None:
        texts.append("There is no target, so there is no time to reach it.")
    else:
        origin = f" ({plain(found.target.origin, 200)})" if found.target.origin else ""
        texts.append(f"The target is {show(found.target.value)}{origin}.")
    if found.smoothing.window:
        hold = f" and has to hold for {count(found.smoothing.hold)}" if found.smoothing.hold else ""
        texts.append(f"Quality is a mean over {count(found.smoothing.window, 'evaluation')}{hold}.")
    texts.append(f"{count(len(found.seeds), 'seed')}, the same in every arm.")
    return [" ".join(texts)]


def _versus(key: str, found: Comparison, versus: Versus) -> Section:
    arm, baseline = plain(versus.arm, 60), plain(versus.baseline, 60)
    metric = plain(found.metric.name, 40)
    equal_time = f" ({seconds(versus.equal_time.seconds)})" if versus.equal_time and versus.equal_time.seconds else ""
    equal_steps = f" ({count(versus.equal_steps.steps)})" if versus.equal_steps and versus.equal_steps.steps else ""
    speed_label, speed = _ratio("times as fast to the target", versus.speedup, versus.at_least)
    compute_label, compute = _ratio("times less compute to the target", versus.compute, versus.compute_at_least)
    rows = [
        _row(speed_label, speed, found.seeds, ratio=True),
        _row(compute_label, compute, found.seeds, ratio=True),
        _row(f"final {metric}, difference", versus.final_quality, found.seeds),
        _row(f"{metric} at equal time{equal_time}, difference", versus.equal_time, found.seeds),
        _row(f"{metric} at equal steps{equal_steps}, difference", versus.equal_steps, found.seeds),
    ]
    table = capped(["measure", "all seeds", "95% interval", *_seed_names(found.seeds)], rows)
    style = colour(list(found.arms).index(versus.arm)) if versus.arm in found.arms else "s1"
    drawn = (
        ("speed", f"Speed of {arm} against {baseline}", speed_label, speed, 1.0),
        ("final", f"Final {metric} of {arm} against {baseline}", f"difference in {metric}, above 0 is better",
         versus.final_quality, 0.0),
    )  # fmt: skip
    figures = [
        _forest(f"{what}-{key}", title, label, estimate, found.seeds, style, neutral)
        for what, title, label, estimate, neutral in drawn
        if estimate is not None
    ]
    verdict, sentence = plain(versus.verdict, 60), plain(versus.sentence)
    texts = [sentence if sentence.lower().startswith(verdict) else f"Verdict: {verdict}. {sentence}".strip()]
    note = _note(arm, baseline, bounded=speed is not versus.speedup)
    table = Table(table.columns, table.rows, table.texts, note=note)
    return Section(f"{arm} against {baseline}", texts, figures, [table])


def _note(arm: str, baseline: str, bounded: bool) -> str:
    note = (
        f"Above 1, and for differences above 0, {arm} is better than {baseline}. All seeds: of speed and compute the "
        "ratio on the curves averaged over the seeds, of differences the mean. One column for each seed. An "
        "interval that begins with never: there are samples of the seeds whose mean does not reach the target."
    )
    if not bounded:
        return note
    return (
        f"{note} At least: {baseline} does not reach the target, and its whole run stands for the time that it would "
        "need. The upper end is that of the bound, not of the truth, and below 1 it says nothing. A seed in which "
        f"{baseline} does reach it has the ratio itself."
    )


def _ratio(name: str, seen: Estimate | None, bound: Estimate | None) -> tuple[str, Estimate | None]:
    """A ratio and what it is called; where there is only a lower bound, that one, rounded down."""
    if seen is not None or bound is None:
        return name, seen

    def down(value: float | None) -> float | None:
        return None if value is None else rounded_down(value, 2)

    known = {"mean": down(bound.mean), "low": down(bound.low), "per_seed": [down(value) for value in bound.per_seed]}
    return f"{name}, at least", bound.model_copy(update=known)


def _forest(
    key: str, title: str, label: str, estimate: Estimate, seeds: Sequence[int], style: str, neutral: float
) -> Figure:
    values = [*estimate.per_seed, *[None] * len(seeds)][: len(seeds)]
    rows = [(f"seed {seed}", value) for seed, value in zip(seeds, values, strict=True)]
    words, diamond = (RATIO, RATIO_NOTE) if neutral == 1.0 else (Words(), "their mean")
    svg = forest(key, title, label, rows, (estimate.mean, estimate.low, estimate.high), style, neutral, words)
    note = f"Squares: single seeds; diamond: {diamond}, with its 95% interval; dashed line: no difference."
    behind = [(name, words.missing if value is None else show(value)) for name, value in rows]
    ends = [words.zero if end == 0 else show(end) for end in (estimate.low, estimate.high)]
    behind += [(words.overall, show(estimate.mean)), ("95% interval", " to ".join(ends))]
    return Figure(title, svg, (), note, capped(("seed", label), behind))


def _seed_names(seeds: Sequence[int]) -> list[str]:
    return [f"seed {seed}" for seed in seeds] if len(seeds) <= MOST_SEED_COLUMNS else ["seeds"]


def _row(name: str, estimate: Estimate | None, seeds: Sequence[int], ratio: bool = False) -> list[str]:
    if estimate is None:
        return [name, NOTHING, NOTHING, *[NOTHING] * len(_seed_names(seeds))]
    most = max((abs(value) for value in [estimate.mean, *estimate.per_seed] if value is not None), default=0.0)
    decimals = 2 if ratio else min(6, max(0, 1 - math.floor(math.log10(most)))) if most else 2

    def shown(value: float | None) -> str:
        return NOTHING if value is None else f"{value:{'' if ratio else '+'},.{decimals}f}".replace("-", "−")  # noqa: RUF001

    ends = [RATIO.zero if ratio and end == 0 else shown(end) for end in (estimate.low, estimate.high)]
    interval = NOTHING if NOTHING in ends else " to ".join(ends)
    values = [shown(value) for value in [*estimate.per_seed, *[None] * len(seeds)][: len(seeds)]]
    if len(seeds) > MOST_SEED_COLUMNS:
        values = [", ".join(values)]
    return [name, shown(estimate.mean), interval, *values]


def _quality(at: int, found: Comparison, detail: Detail) -> Section:
    """Quality over training time and over steps."""
    longest = max((t.training_seconds or 0.0 for arm in found.arms.values() for t in arm.trials), default=0.0)
    unit, size = time_unit(longest)
    figures = [
        _quality_chart(at, found, detail, "seconds", f"training time ({unit})", size, unit),
        _quality_chart(at, found, detail, "step", "step", 1.0, "step"),
    ]
    return Section("Quality", (), figures)


def _quality_chart(at: int, found: Comparison, detail: Detail, by: str, x_label: str, size: float, unit: str) -> Figure:
    metric = plain(found.metric.name, 40)
    title = f"Quality ({metric}) over {'training time' if by == 'seconds' else 'steps'}"
    thin, bold = [], []
    for index, (name, arm) in enumerate(found.arms.items()):
        for trial in arm.trials:
            points = scaled(trial_curve(trial, by, smoothed=False), size)
            thin.append(Series(f"{plain(name, 60)}, seed {trial.seed}", points, index, "thin"))
        mean = scaled(mean_curve(arm.trials, by), size)
        if mean:
            bold.append(Series(f"{plain(name, 60)}, mean", mean, index, "bold"))
    target = found.target.value
    rules = [(target, f"target {show(target)}")] if target is not None else []
    chart = Chart(f"quality-{at}-{by}", title, x_label, metric, unit, [*thin, *bold], rules=rules)
    each = max(12, min(detail.points, 6000 // max(1, len(thin))))
    svg, cut = draw(chart, each)
    keys = [Key(plain(name, 80), "line", f"line bold {colour(i)} {dash(i)}") for i, name in enumerate(found.arms)]
    keys += [Key(f"target {show(target)}", "rule", "rule")] if target is not None else []
    note = "Thin: single seeds as measured; bold: mean of the smoothed quality, where every seed has one."
    table = values_table(x_label, metric, [(series.name, series.points) for series in bold or thin])
    return Figure(title, svg, keys, f"{note} {cut}".strip(), table)


def _compute(found: Comparison) -> Section:
    """What each arm computed."""
    rows = []
    for name, arm in found.arms.items():
        reached = [trial.reached for trial in arm.trials if trial.reached]
        rows.append([
            name, arm.role,
            _mean(trial.forward_samples for trial in arm.trials), _mean(trial.backward_samples for trial in arm.trials),
            count(arm.average.forward_samples) if arm.average else NOTHING,
            count(arm.average.backward_samples) if arm.average else NOTHING,
            seconds(arm.average.seconds) if arm.average else NOTHING, f"{len(reached)} of {len(arm.trials)}",
        ])  # fmt: skip
    columns = ("arm", "role", "forward samples", "backward samples", "forward, average run to target",
               "backward, average run to target", "time, average run to target", "seeds that reached it")  # fmt: skip
    trials = [_trial_row(name, trial) for name, arm in found.arms.items() for trial in arm.trials]
    folded = capped(
        ("arm", "seed", "status", "steps", "training", "evaluation", "final", "target at step", "target after"),
        trials, texts=frozenset({0, 2}), caption="Every trial", thing="trial",
    )  # fmt: skip
    table = capped(columns, rows, texts=frozenset({0, 1}), caption="Samples, mean over the seeds")
    told = "The average run is the curve averaged over all seeds, those that missed the target included."
    return Section("Compute", (told,), tables=[table], folded=[folded])


def _trial_row(name: str, trial: Trial) -> list[str]:
    reached = trial.reached
    status = f"{trial.status}: {trial.reason}" if trial.reason else trial.status
    return [
        name, str(trial.seed), plain(status, 160), count(trial.steps), seconds(trial.training_seconds),
        seconds(trial.evaluation_seconds), show(trial.final), count(reached.step) if reached else NOTHING,
        seconds(reached.seconds) if reached else NOTHING,
    ]  # fmt: skip


def _mean(values: object) -> str:
    known = [value for value in values if value is not None]  # type: ignore[attr-defined]
    return count(fmean(known)) if known else NOTHING


def _tuning(found: Comparison, detail: Detail) -> Section | None:
    """What tuning tried and chose."""
    if found.tuning is None:
        return Section("Tuning", ("Nothing was tuned: every arm ran with the settings it was given.",))
    folded = []
    for name, arm in found.tuning.arms.items():
        keys = list(dict.fromkeys(key for candidate in arm.candidates for key in candidate.settings))
        rows = [
            ["chosen" if candidate.settings == arm.chosen else "", *(_setting(candidate.settings.get(k)) for k in keys),
             show(candidate.final), seconds(candidate.seconds_to_target), candidate.status]
            for candidate in arm.candidates
        ]  # fmt: skip
        folded.append(capped(
            ["", *keys, "final", "time to the target", "status"], rows, limit=4 * detail.rows,
            texts=frozenset({0, len(keys) + 3}), caption=f"Tried for {plain(name, 60)}", thing="candidate",
        ))  # fmt: skip
    chosen = [
        [name, ", ".join(f"{key} = {_setting(value)}" for key, value in arm.chosen.items()), count(len(arm.candidates))]
        for name, arm in found.tuning.arms.items()
    ]
    table = capped(("arm", "chosen", "tried"), chosen, texts=frozenset({0, 1}))
    budget = f"Each arm had the same budget of {count(found.tuning.budget, 'trial')}." if found.tuning.budget else ""
    return Section("Tuning", (budget,) if budget else (), tables=[table], folded=folded)


def _setting(value: object) -> str:
    known = number(value)
    return f"{known:g}" if known is not None else NOTHING if value is None else str(value)
