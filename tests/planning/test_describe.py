"""A plan in words: everything that was found is there, and the settings can be pasted."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest

from hybridtrainer.config_io import parse_config
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.planning.describe import as_data, as_text, name_of, summary
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import H200
from hybridtrainer.planning.planner import Plan
from hybridtrainer.planning.ranking import Option
from hybridtrainer.sizes import GIB

BEST = Option(
    MemoryConfig(mode="split8", vram="7.12GB", split=2, offload_activations=True, max_gpu_blocks=2),
    Estimate({"weights": 2 * GIB, "activations": 3 * GIB}, {"weights and states": 40 * GIB}, 39 * GIB, 2.0, 1.5),
)
OTHER = Option(
    MemoryConfig(mode="sr8", vram="7.12GB"),
    Estimate({"weights": 4 * GIB}, {"weights and states": 30 * GIB}, 29 * GIB, 2.5, 1.5),
)
PLAN = Plan(BEST, (OTHER,), 8 * GIB, 64 * GIB, GIB, 7_000_000_000, 16384, 2048, hardware=H200)


def test_every_component_and_the_total_with_cudas_own_are_named():
    text = as_text(PLAN)
    for words in ("7.00B parameters", "weights", "2.00 GiB", "activations", "3.00 GiB", "CUDA itself", "6.00 GiB",
                  "40.00 GiB", "39.00 GiB on disk", "2.00 s a step", "8,192 tokens/s", "75%", "NVIDIA"):  # fmt: skip
        assert words in text


def test_the_settings_can_be_pasted():
    text = as_text(PLAN)
    settings = tomllib.loads(text[text.index("[memory]") : text.index("Next best")])
    assert parse_config(settings).memory == BEST.memory


def test_the_price_of_the_next_best_is_told():
    named = "sr8, split 1, inputs on the GPU, 3 slots: "
    taken = "GPU 5.00 GiB (-1.00 GiB), host 30.00 GiB (-10.00 GiB), 2.50 s (+25% time)"
    assert f"  {named}{taken}" in as_text(PLAN)


def test_what_is_small_is_not_told_as_nothing():
    small = Option(MemoryConfig(precision="bf16"), Estimate({"weights": 5 << 20}, {}, 900, None, None))
    other = Option(MemoryConfig(checkpoint_every=1), Estimate({"weights": 4 << 20}, {}, 900, None, None))
    text = as_text(Plan(small, (other,), 8 * GIB, 64 * GIB, GIB, 1_200_000, 16, 8))
    assert "1.2M parameters" in text and "5.0 MiB" in text and "0.9 KiB on disk" in text
    assert "(-1.0 MiB)" in text and "(same)" in text


def test_seconds_that_the_host_takes_are_said_to_be_rough():
    plan = replace(PLAN, best=replace(PLAN.best, estimate=replace(PLAN.best.estimate, waits_for_host=True)))
    assert "waits for the host" in as_text(plan) and "waits for the host" not in as_text(PLAN)
    assert as_data(plan)["best"]["waits_for_host"] is True


def test_unknown_seconds_are_not_made_up():
    unknown = Option(BEST.memory, Estimate(BEST.estimate.gpu, BEST.estimate.host, 1, None, None))
    text = as_text(Plan(unknown, (OTHER,), 8 * GIB, 64 * GIB, GIB, 7_000_000_000, 16384, 2048))
    assert "not known" in text
    assert "tokens/s" not in text


def test_the_data_is_json_and_has_all_of_it():
    data = json.loads(json.dumps(as_data(PLAN)))
    assert data["best"]["gpu_bytes"] == 5 * GIB
    assert data["best"]["memory"]["mode"] == "split8"
    assert [other["seconds_per_step"] for other in data["others"]] == [2.5]
    assert data["vram_bytes"] == pytest.approx(8 * GIB)


@pytest.mark.parametrize("keep", ["inputs", "products", "by_phase"])
def test_a_resident_plan_can_be_pasted_too(keep):
    memory = MemoryConfig(precision="bf16", checkpoint_every=2, checkpoint_keep=keep)
    option = Option(memory, Estimate({"weights": GIB}, {}, 1, None, None))
    text = as_text(Plan(option, (BEST,), 8 * GIB, 64 * GIB, GIB, 1, 16, 8))
    settings = tomllib.loads(text[text.index("[memory]") : text.index("Next best")])
    assert parse_config(settings).memory == option.memory
    assert "split8, split 2" in text
    assert ("results of products kept" in name_of(option)) == (keep != "inputs")


@pytest.mark.parametrize(("seconds", "words"), [(2.5, "(+25% time)"), (2.004, "(same time)"), (1.5, "(-25% time)")])
def test_a_price_in_time_has_its_sign(seconds, words):
    other = Option(OTHER.memory, replace(OTHER.estimate, seconds=seconds))
    assert words in as_text(replace(PLAN, others=(other,)))


def test_a_resident_plan_has_seconds_and_no_copies():
    resident = Option(MemoryConfig(precision="bf16"), Estimate({"weights": GIB}, {}, 1, 0.5, 0.5))
    text = as_text(replace(PLAN, best=resident))
    assert "0.50 s a step, 32,768 tokens/s." in text
    assert "without copies" not in text


@pytest.mark.parametrize(("mode", "batch", "parts"), [("resident", 2, 4), ("split8", 8, 1)])
def test_accumulation_is_told_where_it_was_asked_for(mode, batch, parts):
    best = replace(BEST, memory=MemoryConfig(precision="bf16")) if mode == "resident" else BEST
    text = as_text(replace(PLAN, best=best, accumulate=4))
    train = tomllib.loads(text[text.index("[memory]") : text.index("Next best")])["train"]
    assert train == {"batch_size": batch, "accumulate": parts}
    assert "[train]" not in as_text(replace(PLAN, best=best))


def test_a_summary_is_one_line_with_the_choice_its_room_and_the_next_best():
    text = summary(PLAN)
    for words in ("split8, split 2", "5.00 GiB of GPU memory", "in 8.00 GiB", "40.00 GiB of host", "2.00 s", "sr8"):
        assert words in text
    assert "\n" not in text


def test_why_nothing_plainer_was_chosen_is_told():
    plan = replace(PLAN, too_large=(OTHER,), resident_bytes=50 * GIB)
    text = as_text(plan)
    assert "  resident: 50.00 GiB of weights and gradients alone\n" in text
    assert "  sr8, split 1, inputs on the GPU, 3 slots: GPU 5.00 GiB, host 30.00 GiB\n" in text
    assert "; too large: sr8" in summary(plan) and "too large" not in summary(PLAN)
    assert as_data(plan)["too_large"] == as_data(plan)["others"]
    assert "too large" not in as_text(PLAN)


def test_fewer_than_two_others_are_said_to_be_all():
    assert "nothing else: no other settings fit" in as_text(PLAN)
    assert "nothing at all: no other settings fit" in as_text(replace(PLAN, others=()))
    assert "no other settings" not in as_text(replace(PLAN, others=(OTHER, OTHER)))
