"""The measured numbers of docs/PREDICTION.md."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from benchmarks.figures.ablations import ablation_rows, credit_rows, window_errors
from benchmarks.figures.tuning import jumps_kept_where_images_stay_hard, resist_table, tuning_table
from benchmarks.figures.values import (
    FORECAST_RUNS,
    IMAGES,
    OTHERS,
    WORDS,
    Figures,
    fewer_backward,
    final,
    held,
    interval,
    missed,
    span,
    speed,
    steps_saved,
    times,
    uncertain,
)
from benchmarks.record import result
from benchmarks.validation.results import against_plain, group, validated_speed
from hybridtrainer.compare.average import average_moment
from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.sizes import rounded_down

BASELINES = {"averaged": "averaged read-out, constant", "cosine": "cosine"}


def prediction() -> Figures:
    auto = [speed(study, "auto", "averaged")["mean"] for study in IMAGES]
    decayed = {f"{speed(study, 'auto', 'cosine')['mean']:.1f}" for study in IMAGES[:2]}
    coverage = {i: span((run["coverage"][i] for run in FORECAST_RUNS.values()), ".2f") for i in range(3)}
    variants = result("forecasts")["variants"]
    random_labels = [row for row in result("samples")["rows"] if row["arm"] == "samples" and row["wrong"] == 1]
    grown = group("124m")["124m auto"]
    overhead = result("overhead_h200_batch8")["rows"]

    def more(arm: str) -> str:
        return f"{overhead[arm]['ratio'] - 1:.1%}"

    return {
        "| a model of repeated blocks, from scratch": [f"{times('wikitext_2', 'auto', 'cosine')} times as fast"],
        "| a classifier on data that are soon known": [
            f"{span(auto, '.1f')} times as fast as plain training with averaged read-out",
            f"{' to '.join(sorted(decayed))} times as fast as a cosine",
        ],
        "| the same, and every step counts": [
            f"{span((speed(study, 'samples', 'averaged')['mean'] for study in IMAGES), '.1f')} times as fast"
        ],
        "| task | target | arm |": foresight_table(),
        "GPT-2 124M on wikitext-2": [
            f"plain's last loss {validated_speed():.2f} times as fast",
            f"a perplexity {-(against_plain('124m auto', grown) or 0.0):.1%} lower in the end",
        ],
        "The 124M's rate is the best of three": [
            "at {:.3f} after 640 of the 1,000 steps, with half and twice of the rate at {:.3f} and {:.3f}".format(
                *(part(trial, 640) for trial in ("cosine-seed0", "rate-0.5-seed0", "rate-2-seed0"))
            ),
            f"{result('foresight_gpt2_124m')['comparisons'][0]['compute']['mean']:.2f} times less compute",
        ],
        "The nano GPT on the standard library": [
            f"is {times('stdlib_gpt_cpu', 'auto', 'cosine')} ({interval('stdlib_gpt_cpu', 'auto', 'cosine')}) times as",
            f"final loss {final('stdlib_gpt_cpu', 'auto'):.3f} against {final('stdlib_gpt_cpu', 'cosine'):.3f}",
            f"as many samples as auto computes ends at {final('stdlib_gpt_cpu', 'cosine-short'):.3f}",
            *grown_later(),
            f"{times('stdlib_gpt', 'auto', 'cosine')} ({interval('stdlib_gpt', 'auto', 'cosine')}) times as fast",
            f"it was {times('moments_stdlib', 'stack-0.5-0.55', 'cosine')} times as fast there (below)",
        ],
        "A constant rate without averaging": [
            f"(MNIST in {WORDS[5 - missed('mnist', 'constant')]} of five seeds, "
            f"Fashion-MNIST in {WORDS[5 - missed('fashion_mnist', 'constant')]})",
            f"samples are at least {at_least('mnist', 'samples', 'constant')} times as fast on MNIST",
            f"at least {at_least('fashion_mnist', 'samples', 'constant')} times on Fashion-MNIST",
            f"samples are {span((steps_saved(study) for study in IMAGES), '.2f')} times as fast",
        ],
        "With the sample rule of today": fashion_part(),
        "With the sample rule and the read-out of today": fashion_on_a_cpu(),
        "| tuned | target | arm |": tuning_table(),
        "| nothing to foresee |": resist_table(),
        "At most 2% was the aim": [jumps_kept_where_images_stay_hard()],
        "| blocks at first, of | grows at |": moments_table(),
        "`python -m benchmarks.forecasts`": [
            "(persistence of {persistence} steps, a line through {linear trend}, ".format(**variants)
            + f"a power law fitted to the newest {variants['power law']:.0%} of the losses)"
        ],
        "| run | 5, 20, 50 steps, of persistence |": forecast_table(),
        "- Many single cells against the best power law": [
            "contains 1 in {}, {} and {} of the 8 runs".format(*uncertain("power law")),
            "(against the line in {}, {} and {}".format(*uncertain("linear trend")),
            "against persistence in {}, {} and {})".format(*uncertain("persistence")),
        ],
        "- Intervals: over the three horizons together": [
            f"{held()} of them hold on each run",
            f"({coverage[2]} fifty steps ahead",
            f"{span((run['calibration_error'] for run in FORECAST_RUNS.values()), '.2f')}.",
        ],
        "| model | 5 steps | 20 steps |": ablation_table(),
        "| arm | digits | spared |": ablation_rows(),
        "| task, rate | worth |": credit_rows(),
        "- **Learned against constant coefficients.**": ["{} and {} of the next window's".format(*window_errors())],
        "On an H200 (`python -m benchmarks.kernels": [
            f"the 64 features take {kernel('features')}",
            f"a rollout of the largest model {kernel('rollout')}",
        ],
        "All bookkeeping was to take": [f"a plain loop of {overhead['plain loop']['ms_per_step']:.1f} ms"],
        '`predict = "off"` takes': [
            f'takes {more("prediction off")} more, `"auto"` {more("Full bookkeeping")}, with '
            f'`dynamics = "blend"` {more("with blend")} and with `"rssm"` {more("with rssm")};',
            f"up to {max(row['quartiles'][1] for row in overhead.values()) - 1:.0%} more",
            "it is {}, {} and {}".format(
                *(f"{overhead[arm]['first_ratio'] - 1:.1%}" for arm in ("Full bookkeeping", "with blend", "with rssm"))
            ),
        ],
        "- **Jumps are not faster yet.**": [f"save {fewer_backward('gpt, constant rate'):.0%} of the backward passes"],
        "- With random labels": [f"{max(row['skipped'] for row in random_labels):.0%} of the samples"],
    }


def kernel(name: str) -> str:
    """How long a kernel takes, and how many times as long a CPU."""
    found = next(row for row in result("kernels")["kernels"] if row["kernel"] == name)
    taken = found["microseconds"]
    return f"{taken:.1f} us, {found['cpu_microseconds'] / taken:.1f} times as fast"


def part(trial: str, step: int) -> float:
    """Validation loss of the 124M at a step, in a comparison that was broken off."""
    curve = result("foresight_gpt2_124m_part")["curves"][trial]
    return next(float(loss) for at, _, loss in curve if at == step)


def at_least(study: str, arm: str, baseline: str) -> float:
    """The whole run of a baseline that misses the target over what an arm takes to get there."""
    arms = result(f"foresight_{study}")["arms"]
    whole = fmean(trial["training_seconds"] for trial in arms[baseline]["trials"])
    return rounded_down(whole / arms[arm]["average"]["seconds"], 2)


def fashion_part() -> list[str]:
    """How fast arms were to the target in a comparison that was broken off."""
    found = result("foresight_fashion_mnist_part")
    moments = {}
    for arm in ("averaged", "samples", "auto"):
        runs = (points for trial, points in found["curves"].items() if trial.startswith(f"{arm}-"))
        curves = [Curve(tuple(Point(*point) for point in points), higher_is_better=True) for points in runs]
        moment = average_moment(curves, found["target"])
        assert moment is not None
        moments[arm] = moment
    plain, samples, auto = moments.values()
    return [
        f"samples are {plain.seconds / samples.seconds:.2f} times as fast as averaged read-out",
        f"{plain.step / samples.step:.2f} times in steps",
        f'`"auto"` {plain.seconds / auto.seconds:.2f} times',
        f"{samples.seconds / samples.step * 1000:.1f} ms beside {plain.seconds / plain.step * 1000:.1f}",
    ]


def grown_later() -> list[str]:
    """What the small GPT gains by growing at each of three moments."""
    speeds = {until: times("later_stdlib", f"auto-{until}", "cosine") for until in (0.55, 0.65, 0.75)}
    finals = (final("later_stdlib", arm) for arm in ("auto-0.65", "auto-0.55", "auto-0.75", "cosine"))
    return [
        f"it is {speeds[0.65]} ({interval('later_stdlib', 'auto-0.65', 'cosine')}) times as fast",
        f"at 0.55 and 0.75 {speeds[0.55]} and {speeds[0.75]} times",
        "ends at {:.3f}, {:.3f} and {:.3f} against {:.3f}".format(*finals),
    ]


def foresight_table() -> list[str]:
    """What arms came to against tuned plain ones, with final losses or accuracies."""
    wiki, short = result("foresight_wikitext_2"), result("foresight_wikitext_2")["arms"]["cosine-short"]
    grown, large = final("wikitext_2", "auto"), result("foresight_gpt2_124m")["target"]["value"]
    rows = [
        f"| loss {large:.3f} (plain's at 90%) | auto (depth) | cosine | {told('gpt2_124m', 'auto', 'cosine', loss)} |",
        f"| loss {wiki['target']['value']:.3f} (plain's at 90%) | auto (depth) | cosine | "
        f"{told('wikitext_2', 'auto', 'cosine', loss)} |",
        f"| cosine of as much compute as auto ({short['trials'][0]['steps']} steps) | it never gets there | "
        f"{loss(final('wikitext_2', 'cosine-short'))}, {loss(grown)} |",
    ]
    for study in IMAGES:
        target = f"{result(f'foresight_{study}')['target']['value']:.1%} | samples |"
        rows.append(f"{target} {BASELINES['averaged']} | {told(study, 'samples', 'averaged', share)} |")
        if study != "mnist":
            named = f"cosine, which misses the target in {WORDS[missed(study, 'cosine')]} seeds"
            shown = named if missed(study, "cosine") else "cosine"
            rows.append(f"| | | samples | {shown} | {told(study, 'samples', 'cosine', share)} |")
        rows.append(f"| | | auto | {BASELINES['averaged']} | {told(study, 'auto', 'averaged', share)} |")
    return rows


def fashion_on_a_cpu() -> list[str]:
    """Samples and "auto" on one core, against averaged read-out."""
    study = "fashion_mnist_cpu"
    rows = {row["arm"]: row for row in result(f"foresight_{study}")["comparisons"] if row["baseline"] == "averaged"}
    ends = [share(final(study, arm)) for arm in ("samples", "auto", "averaged")]
    return [
        f"samples are {times(study, 'samples', 'averaged')} ({interval(study, 'samples', 'averaged')}) times",
        f"to {result(f'foresight_{study}')['target']['value']:.1%}",
        f"with {rows['samples']['compute']['mean']:.2f} times less compute",
        f"{times(study, 'auto', 'averaged')} ({interval(study, 'auto', 'averaged')}) times",
        f"they end at {ends[0]} and {ends[1]}, averaged read-out at {ends[2]}",
        f"reaches the target in {WORDS[4 - missed(study, 'cosine')]} of the seeds",
    ]


def told(study: str, arm: str, baseline: str, show: Callable[[float], str]) -> str:
    return (
        f"{times(study, arm, baseline)} ({interval(study, arm, baseline)}) | "
        f"{show(final(study, baseline))}, {show(final(study, arm))}"
    )


def loss(value: float) -> str:
    return f"{value:.4f}"


def share(value: float) -> str:
    return f"{value:.2%}"


def moments_table() -> list[str]:
    """Final losses and speeds by when a model grows, and from how much of itself."""
    studies = ("moments_stdlib", "moments_wikitext")
    plain = [f"{final(study, 'cosine'):.3f}" for study in studies]
    rows = [f"| all (plain) | | {' | '.join(plain)} |"]
    for name, blocks in (("a quarter", 0.25), ("half", 0.5)):
        for until in (0.25, 0.4, 0.55, 0.7):
            arm = f"stack-{blocks:g}-{until:g}"
            cells = [f"{final(study, arm):.3f}, {times(study, arm, 'cosine')}" for study in studies]
            rows.append(f"|{f' {name} ' if until == 0.25 else ' '}| {until:g} | {' | '.join(cells)} |")
    return rows


def forecast_table() -> list[str]:
    """Errors over those of simple forecasters, and the share of intervals that held; above 1 with more digits."""
    rows = []
    for name, run in FORECAST_RUNS.items():
        task, rate = name.rsplit("-", 1)
        cells = [
            " ".join(f"{x:.2f}" if x < 1 else f"**{x:.3f}**" for x in run[f"ratio to {other}"]) for other in OTHERS
        ]
        cells.append(" ".join(f"{x:.2f}" for x in run["coverage"]))
        rows.append(f"| {task}, {rate} | {' | '.join(cells)} |")
    return rows


def ablation_table() -> list[str]:
    """What learning adds to the blend of simple forecasts, and what it takes."""
    names = {
        "linear": "linear",
        "mlp": "mlp",
        "mlp residuals": "mlp, residuals",
        "rssm small": "rssm, small",
        "rssm full": "rssm, full size",
    }
    found = result("forecasts")["ablation"]
    rows = [f"| blend | 1 | 1 | 1 | {found['blend']['milliseconds_per_step']:.1f} |"]
    for key, name in names.items():
        pairs = zip(found[key]["error_relative_to_blend"], found[key]["worst_run"], strict=True)
        cells = " | ".join(f"{mean:.3f} ({worst:.3f})" for mean, worst in pairs)
        rows.append(f"| {name} | {cells} | {found[key]['milliseconds_per_step']:.1f} |")
    return rows
