"""The measured numbers of the README."""

from __future__ import annotations

from statistics import fmean

from benchmarks.figures.values import (
    IMAGES,
    WORDS,
    Figures,
    at_most,
    fewer_backward,
    final,
    gb,
    interval,
    loss_change,
    missed,
    times,
)
from benchmarks.record import gib, result

TUNED = {
    "tune_wikitext": ("auto", "cosine"),
    "tune_wikitext_lora": ("auto", "cosine"),
    "tune_shakespeare": ("auto", "cosine"),
    "tune_shakespeare_lora": ("auto-cosine", "cosine"),
}


def readme() -> Figures:
    stream = result("stream")["rows"]
    seven, small = stream["7b-16gb-16k"], stream["7b-8gb-16k"]
    fifty = stream["50b-16gb-4k"]
    peers = result("stream_peers")["rows"] | result("stream_peers_4k")["rows"]
    zero3 = result("stream_peers_zero3")["rows"]["zero3-offload, 4096"]
    plans = result("plan_accuracy")["runs"].values()
    off = {
        key: [abs(run[key][0] / run[key][1] - 1) for run in plans if key in run]
        for key in ("gpu", "host", "seconds", "host's seconds")
    }
    hosts = off["host's seconds"]
    return {
        "| depth foreseen: GPT-2 124M": [
            f"{times('gpt2_124m', 'auto', 'cosine')} times as fast",
            f"95% interval {interval('gpt2_124m', 'auto', 'cosine')})",
            f"({final('gpt2_124m', 'auto'):.3f}, plain {final('gpt2_124m', 'cosine'):.3f})",
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
        "| a window of averages that is learned": [
            "{}, {}, {} and {} times as fast".format(*(times(study, *best) for study, best in TUNED.items())),
        ],
        "| jumps at a constant rate": [
            f"{fewer_backward('gpt, constant rate'):.0%} fewer backward passes",
            f"loss within {at_most(100 * abs(loss_change('gpt, constant rate')), 1)}% of plain's",
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
            f"{fifty['seconds_per_step']:.2f} s a step",
            f"in {gib(fifty['reserved_peak_bytes']):.1f} GiB reserved",
            f"{gb(fifty['host_bytes']):.0f} GB of host RAM",
            f"{fmean(result('low_bit_factored')['modes']['factored']['differences']):.2f} nats above AdamW",
        ],
        f"| plans beside {len(plans)} measured runs": [
            f"GPU memory within {at_most(100 * max(off['gpu']), 1)}%",
            f"host memory (of {len(off['host'])}) within {at_most(100 * max(off['host']), 1)}%",
            f"seconds within {at_most(100 * max(off['seconds']), 1)}% in {len(off['seconds'])} that wait for GPU or "
            f"link, within 15% in {sum(each <= 0.15 for each in hosts)} of {len(hosts)} that wait for the host",
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
        "| a forecaster that is always wrong": [
            f"off after {result('no_regret')['jumps_refused']} jumps",
            f"{result('no_regret')['time_over_plain'] - 1:.1%} of the time lost",
        ],
    }
