"""The measured numbers of the README."""

from __future__ import annotations

import statistics
from statistics import fmean

from benchmarks.figures.values import (
    IMAGES,
    WORDS,
    Figures,
    at_most,
    fewer_backward,
    final,
    gb,
    geometric,
    held,
    interval,
    loss_change,
    missed,
    span,
    times,
    worst_ratios,
)
from benchmarks.record import gib, result
from benchmarks.validation.results import group, seconds_to

FEW_BITS = ("split8", "sr8", "sr4")


def readme() -> Figures:
    stream, again, last = (result(name)["rows"] for name in ("stream", "stream_again", "stream_last"))
    seven, small = stream["7b-16gb-16k"], stream["7b-8gb-16k"]
    fifty = [rows["50b-16gb-4k"] for rows in (stream, again, last)]
    resident, checkpoint = result("resident_350m_4k")["rows"], result("stream_checkpoint_7b")
    peers = result("stream_peers")["rows"] | result("stream_peers_4k")["rows"]
    zero3 = result("stream_peers_zero3")["rows"]["zero3-offload, 4096"]
    bits, audit = result("low_bit")["modes"], result("audit")
    logs, outlook = result("logging_overhead")["rows"], result("outlook")
    cores, many, few = (result(f"overhead{name}")["rows"] for name in ("", "_h200_batch128", "_h200_batch8"))
    plans = result("plan_accuracy")["runs"].values()
    off = {
        key: [abs(run[key][0] / run[key][1] - 1) for run in plans if key in run] for key in ("gpu", "host", "seconds")
    }
    plain, grown = group("124m")["124m cosine"], group("124m")["124m auto"]
    faster = plain["evaluations"][-1]["seconds"] / seconds_to(grown, plain["evaluations"][-1]["loss"])
    near, end = (
        outlook["means"][each]["error"] / outlook["means"][each]["persistence_error"] for each in ("near", "final")
    )
    ratios = geometric("persistence")
    above = [ratio for ratio in worst_ratios() if ratio >= 1]
    return {
        "| depth foreseen: GPT-2 124M": [
            f"{faster:.2f} times as fast",
            f"perplexity {grown['perplexity']:.1f} instead of {plain['perplexity']:.1f}",
        ],
        "| depth foreseen: byte GPT": [
            f"{times('wikitext_2', 'auto', 'cosine')} times as fast",
            f"95% interval {interval('wikitext_2', 'auto', 'cosine')})",
            f"({final('wikitext_2', 'auto'):.3f}, plain {final('wikitext_2', 'cosine'):.3f})",
        ],
        "| samples foreseen": [
            "{}, {} and {} times as fast".format(*(times(study, "samples", "averaged") for study in IMAGES)),
            f"a tuned cosine {times('fashion_mnist', 'samples', 'cosine')} (which misses the target in "
            f"{WORDS[missed('fashion_mnist', 'cosine')]} seeds) and "
            f"{times('fashion_mnist_small', 'samples', 'cosine')}",
        ],
        "| jumps at a constant rate": [
            f"{fewer_backward('gpt, constant rate'):.0%} fewer backward passes",
            f"loss {-loss_change('gpt, constant rate'):.1%} lower",
        ],
        "| jumps under a cosine schedule": [f"loss {loss_change('gpt, cosine'):.1%} *higher*"],
        "| 7B, all parameters": [
            f"{seven['tokens_per_second']:,.0f} tok/s in {gib(seven['reserved_peak_bytes']):.1f} GiB reserved",
            f"(and {gib(seven['context_bytes']):.1f} of CUDA's own)",
            f"{seven['share_of_compute']:.1%} of the same computation",
            f"{gb(seven['host_bytes']):.0f} GB of host RAM",
            f"{small['tokens_per_second']:,.0f} tok/s in {gib(small['reserved_peak_bytes']):.1f} GiB",
        ],
        "| 50B, factored second moment": [
            f"{span((row['seconds_per_step'] for row in fifty), '.2f')} s a step",
            f"in {span((gib(row['reserved_peak_bytes']) for row in fifty), '.1f')} GiB reserved",
            f"{span((gb(row['host_bytes']) for row in fifty), '.0f')} GB of host RAM",
            f"{fmean(result('low_bit_factored')['modes']['factored']['differences']):.2f} nats above AdamW",
        ],
        f"| plans beside {len(plans)} measured runs": [
            f"GPU memory within {at_most(100 * max(off['gpu']), 1)}%",
            f"host memory within {at_most(100 * max(off['host']), 1)}%",
            f"seconds within 15% in {sum(each <= 0.15 for each in off['seconds'])} of {len(off['seconds'])}",
        ],
        "| GPT-2 350M, 2 x 4096 tokens": [
            "{:.1f}, {:.1f}, {:.1f}, {:.1f} GiB reserved".format(
                *(gib(resident[way]["reserved_peak_bytes"]) for way in ("plain", "bf16", "bf16, checkpointing", "lean"))
            ),
            f"{gib(resident['jumps, both']['peak_bytes']['jump']):.1f} of them are in use",
        ],
        "| a 7B checkpoint": [
            f"{gb(checkpoint['checkpoint_bytes']):.1f} GB",
            f"{gb(checkpoint['saving']['extra_bytes']):.1f} GB of extra host memory to save",
            f"{gb(checkpoint['loading']['extra_bytes']):.2f} to load",
        ],
        "| half of the 7B": [
            "{} in {}; resident torch {} in {}, FSDP2 with CPU offload {} in {}.".format(
                *(
                    text
                    for way, unit in (("streamed", " tok/s"), ("resident", ""), ("fsdp2-offload", ""))
                    for text in (
                        f"{peers[f'{way}, 16384']['tokens_per_second']:,.0f}{unit}",
                        f"{gib(peers[f'{way}, 16384']['reserved_peak_bytes']):.1f} GiB",
                    )
                )
            ),
            "At 4k tokens: {:,.0f}, {:,.0f} and {:,.0f}".format(
                *(peers[f"{way}, 4096"]["tokens_per_second"] for way in ("streamed", "resident", "fsdp2-offload"))
            ),
            f"ZeRO-3 with CPU offload {zero3['tokens_per_second']:,.0f} in {gib(zero3['reserved_peak_bytes']):.1f} GiB",
        ],
        "| 8-bit and 4-bit optimizer states": [
            f"within {at_most(max(abs(fmean(bits[each]['differences'])) for each in FEW_BITS), 3)} of fp32",
            f"spread by {statistics.stdev(curve[-1] for curve in bits['fp32']['curves']):.3f}",
        ],
        "| plain against plain": [
            "contains 1 in {interval_contains_1} of {repeats}".format(**audit["plain_against_plain"]),
            f"10% is found in {audit['verdicts']['slower']['slower']} of {sum(audit['verdicts']['slower'].values())}",
            f"answers in {audit['verdicts']['worse']['quality lost']} of {sum(audit['verdicts']['worse'].values())}",
        ],
        "| log, forecasts, memory and progress": [
            f"{logs['lines']['ratio']:.3f} with lines, {logs['bar']['ratio']:.3f} with the bar",
            f"(intervals up to {max(logs[way]['interval'][1] for way in ('lines', 'bar')):.2f})",
            f"{logs['lines']['listeners_share']:.1%} and {logs['bar']['listeners_share']:.1%} of a step",
        ],
        "| forecasts of the training loss": [
            f"cover {outlook['coverage']['near']:.2f} (a twentieth",
            f"and {outlook['coverage']['final']:.2f} (its end)",
            f"error {near:.2f} and {end:.2f} of persistence",
        ],
        "| forecasts of the loss 5, 20 and 50": [
            "error {:.2f}, {:.2f}, {:.2f} of persistence".format(*ratios),
            f"in {len(worst_ratios()) - len(above)} of {len(worst_ratios())} cells",
            f"within {at_most(100 * (max(above) - 1), 1)}% in {len(above)}",
            f"{held()} of the 90% intervals",
        ],
        "| prediction off over a plain loop": [
            f"{cores['prediction off']['ratio']:.3f} on two cores ({result('overhead')['parameters'] / 1e6:.1f}M GPT)",
            f"{span((rows['prediction off']['ratio'] for rows in (few, many)), '.3f')} on an H200 "
            f"({result('overhead_h200_batch8')['parameters'] / 1e6:.1f}M GPT)",
        ],
        "| Full-phase bookkeeping": [
            f"{cores['Full bookkeeping']['ratio']:.3f} on two cores",
            f"{many['Full bookkeeping']['ratio']:.3f} at 64k tokens a step, "
            f"{few['Full bookkeeping']['ratio']:.3f} at 4k on an H200",
        ],
        "| a forecaster that is always wrong": [
            f"off after {result('no_regret')['jumps_refused']} jumps",
            f"{result('no_regret')['time_over_plain'] - 1:.1%} of the time lost",
        ],
        "| `hybridtrainer --help`": [f"{result('startup')['median_seconds']['hybridtrainer --help']:.2f} s"],
    }
