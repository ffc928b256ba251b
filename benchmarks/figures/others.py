"""The measured numbers of the pages on memory, integrations, several GPUs, getting started and the validation."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.figures.values import Figures, gb, span
from benchmarks.record import gib, result
from benchmarks.stream import newest_rows
from benchmarks.stream_chart import sweep, table
from benchmarks.validation.results import by_seed, differences, everything, net_cost, plan_error, plans_now

BF16_STEPS = ("bf16", "jumps", "jumps, int8 probes", "jumps, states leave", "jumps, both")
SHAPES = ("124m_512", "124m_4k", "350m_4k")
OPTIONS = {
    "plain: fp32, whole logits": ("plain",),
    "tiled head (`language_loss`)": ("tiled head",),
    "+ bf16": ("bf16",),
    "+ products kept": ("bf16, products kept",),
    "+ checkpointing": ("bf16, checkpointing",),
    '+ checkpointing and 8-bit moments ("lean")': ("lean",),
    "+ offload, nothing computed again": ("offload",),
    "+ 4 micro-batches": ("bf16, 4 micro-batches",),
    "+ 8-bit moments; 4-bit": ("8-bit moments", "4-bit moments"),
    "all: bf16, checkpointing, 8-bit moments, 4 micro-batches": ("all",),
}
"""Rows of the table of options: as the page and as the result files call them."""


def distributed() -> Figures:
    ratios = result("ranks")["ratio_to_plain_ddp"]
    return {
        "The price is that gradients do not travel": [
            f"took {ratios['off']:.2f} times that of a plain DDP loop",
            f"{ratios['off, DDP averages']:.2f} times where DDP averages",
        ]
    }


def integrations() -> Figures:
    folder = result("hf_folder")
    return {
        "Measured with a Llama": [
            f"{folder['parameters'] / 1e6:.0f}M parameters",
            f"beside the {gb(folder['host_bytes']):.2f} GB of the streamed model",
            f"loading takes {gb(folder['loading_ours']['beside_bytes']):.2f} GB",
            f"`from_pretrained` {gb(folder['loading_by_hand']['beside_bytes']):.2f} GB",
            f"saving takes {folder['saving_ours']['extra_bytes'] / 1e6:.1f} MB",
        ]
    }


def start() -> Figures:
    covered = result("intervals")["seeds"]["5"]["percentile"]
    return {"| how sure is it? |": [f"five values covers the truth in only {covered:.0%} of cases"]}


def validation() -> Figures:
    rows, now, faults = everything(), plans_now(), result("faults_gpu")
    streamed, alone = rows["1.5b 8 GB"], result("gpu_check")["gpt2-124m"]
    attempt = streamed["statistics"]["seconds_by_phase"]["predict"] / sum(
        streamed["jumps"].get(verdict, 0) for verdict in ("accepted", "refused")
    )
    jumps = {name: by_seed(f"124m {name}") for name in ("conservative", "aggressive", "all")}
    costs = {name: [net_cost(row) for row in found] for name, found in jumps.items()}
    worse = {name: differences(f"124m {name}") for name in jumps}
    means = [fmean(found) for found in worse.values()]
    single = [each for found in worse.values() for each in found]
    foreseen = [row["statistics"]["foreseen_steps"] for found in jumps.values() for row in found]
    return {
        "On average they end": [
            f"{span(means, '.1%')} above plain",
            f"from {-min(single):.1%} below to {max(single):.1%} above",
            f"end {rows['124m checkpointing']['perplexity'] / rows['124m 4 GB']['perplexity'] - 1:.1%} apart",
            f"by {span(costs['conservative'] + costs['aggressive'], '.1%')} of the run",
            f"by {span(costs['all'], '.1%')} (",
            f"An attempt takes as long as {alone['ms_jump'] / alone['ms_real']:.1f} real steps",
            f"{span(foreseen, 'd')} steps of 1,000 are credited",
            f"took {attempt:.0f} s beside steps of {streamed['seconds_per_real_step']:.1f} s",
        ],
        "On the GPU (124M with jumps": [
            f"`{faults['command'].removeprefix('python -m benchmarks.validation.faults ')}`",
            "killed at steps {}, {} and {}".format(*faults["killed"]["killed_at"]),
            f"from step {_level_from(faults['quiet']['memory'])} on",
        ],
        "* Jumps alone at a constant rate": [
            f"up to {max(each for found in costs.values() for each in found):.1%} of the time of the 124M",
            f"of the 350M: {net_cost(rows['350m aggressive']):.1%})",
            f"up to {max(means):.1%} of perplexity",
        ],
        "* One plan was off": [
            f"`124m auto` by {-plan_error(rows['124m auto']):.1%}",
            f"it is {now['124m auto']:.1%} off",
            f"all {len(now)} rows are within {max(now.values()):.1%}",
        ],
    }


def _level_from(memory: list[dict[str, Any]]) -> int:
    """The step from which on neither the host's nor the GPU's memory is a thousandth below that of the end."""
    keys = ("host_bytes", "device_reserved_bytes")
    below = [any(each[key] * 1.001 < memory[-1][key] for key in keys) for each in memory]
    return int(memory[len(below) - below[::-1].index(True)]["step"])


def memory() -> Figures:
    rows = {name: resident(name) for name in (*SHAPES, "350m_512")}
    wide, large, away = rows["124m_4k"], rows["350m_4k"], rows["350m_512"]
    attention = {name: result(f"resident_{name}")["attention_bytes"] for name in (*SHAPES, "350m_512")}
    quality = [result(f"quality_{seed}")["rows"] for seed in range(3)]
    on_gpu, on_cpu = (result(f"predict_int8_{device}")["weights"] for device in ("cuda", "cpu"))
    profiled, on_h200 = result("profiler_overhead"), result("profiler_overhead_h200")
    return {
        "* **`vram`** limits": [contexts()],
        "| tokens a step | tok/s |": table(sweep()).splitlines()[2:],
        "At 2,048 the computation": [f"{sweep()['7b-16gb-2k']['seconds_without_copies']:.2f} s to launch"],
        "| option | 124M, 8 x 512: kept |": options_table(),
        "The two 124M columns are from one machine": [
            f"Checkpointing saves {less(large['bf16, checkpointing'], large['bf16'], 'kept_bytes')} of what is kept "
            f"(fp32: {less(away['checkpointing'], away['tiled head'], 'kept_bytes')})",
            f"{gib(attention['350m_4k']['fused']):.3f} GiB beside {gib(attention['350m_4k']['unfused']):.3f} with",
            f"(350M, 2 x 4096: -{fused(attention['350m_4k'])}; 124M, 4 x 4096: -{fused(attention['124m_4k'])}; "
            f"at 8 x 512 -{fused(attention['124m_512'])})",
            f"reserve {gib(large['unfused attention']['reserved_peak_bytes']):.0f} GiB instead of "
            f"{gib(large['bf16']['reserved_peak_bytes']):.0f}, and "
            f"{gib(wide['unfused attention']['reserved_peak_bytes']):.0f} instead of "
            f"{gib(wide['bf16']['reserved_peak_bytes']):.1f}",
            f"holds {in_a_jump(away['jumps'])} less than a real step",
            f"with 8-bit probes {in_a_jump(away['jumps, int8 probes'])}, with states away "
            f"{in_a_jump(away['jumps, states leave'])}, with both {in_a_jump(away['jumps, both'])}",
        ],
        "After 1000 steps of the nano GPT": [
            "{} with bf16, {} with 8-bit and {} with 4-bit moments".format(
                *(held_out(quality, way) for way in ("bf16", "8-bit moments", "4-bit moments"))
            )
        ],
        "`python -m benchmarks.predict_int8` trains": [
            f"8 bits is {abs(on_gpu['fp32']['relative_difference']):.3%} from that in full",
            f"take {on_gpu['fp32']['weight_memory_saved']:.0%} and {on_gpu['bf16']['weight_memory_saved']:.0%} less",
            f"of a gain of {on_gpu['fp32']['gain_of_the_last_15_steps']:.4f} in loss over the last 15 steps, "
            f"8 bits show {on_gpu['fp32']['the_same_gain_in_int8']:.4f}",
            f"CPU: {abs(on_cpu['fp32']['relative_difference']):.3%}, {on_cpu['fp32']['weight_memory_saved']:.0%} and "
            f"{on_cpu['bf16']['weight_memory_saved']:.0%}, {on_cpu['fp32']['gain_of_the_last_15_steps']:.4f} and "
            f"{on_cpu['fp32']['the_same_gain_in_int8']:.4f}.",
        ],
        '`profiler.export("profile.csv")`': [
            f"{profiled['inside_ms_per_step']:.2f} ms a step on one busy CPU core, {profiled['share']:.2%} of a step",
            f"{on_h200['inside_ms_per_step']:.2f} ms on an H200's host, {on_h200['share']:.2%} of a step of "
            f"{on_h200['ms_per_step']:.0f} ms",
        ],
    }


def resident(shape: str) -> dict[str, Any]:
    return dict(result(f"resident_{shape}")["rows"])


def contexts() -> str:
    """CUDA's own memory, in all streamed runs."""
    rows = newest_rows().values()
    return f"({span((gib(row['context_bytes']) for row in rows), '.1f')} GiB on an H200)"


def less(ours: dict[str, Any], theirs: dict[str, Any], key: str) -> str:
    return f"{1 - ours[key] / theirs[key]:.0%}"


def fused(attention: dict[str, int]) -> str:
    return f"{1 - attention['fused'] / attention['unfused']:.0%}"


def in_a_jump(row: dict[str, Any]) -> str:
    """How much less a jump has allocated than a real step of the same run."""
    return f"{1 - row['peak_bytes']['jump'] / row['peak_bytes']['real step']:.0%}"


def held_out(seeds: list[dict[str, Any]], way: str) -> str:
    """Held-out loss against plain training's, mean over the seeds."""
    return f"{fmean(rows[way]['held_out_loss'] / rows['plain']['held_out_loss'] - 1 for rows in seeds):+.2%}"


def options_table() -> list[str]:
    """What each option of a resident model keeps, reserves and takes, for three shapes; then what a jump takes."""
    lines = []
    for shown, names in OPTIONS.items():
        line = [shown]
        for shape in SHAPES:
            rows = [resident(shape)[name] for name in names if name in resident(shape)]
            kept = {f"{gib(row['kept_bytes']):.2f}" for row in rows}
            line += ["; ".join(kept), "; ".join(f"{gib(row['reserved_peak_bytes']):.2f}" for row in rows)]
            line.append("; ".join(f"{1000 * row['seconds']:.0f}" for row in rows))
        if shown == "+ bf16":  # five runs of the first shape are such steps, four of them with jumps between
            line[3] = span((1000 * resident(SHAPES[0])[name]["seconds"] for name in BF16_STEPS), ".0f")
        lines.append(line)
    jumps = [resident(shape)["jumps, both"] for shape in SHAPES]
    steps = ", ".join(f"{gib(row['peak_bytes']['real step']):.2f}" for row in jumps)
    away = [f"while a jump is tried, int8 and states away: *allocated* (real step: {steps})"]
    for row in jumps:
        away += ["", f"{gib(row['peak_bytes']['jump']):.2f} (-{in_a_jump(row)})", ""]
    return ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in [*lines, away]]
