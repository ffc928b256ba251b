"""Resident steps: against what was measured, and against what is known by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.plan_accuracy import compare_resident

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.models.gpt import build_gpt, gpt_loss
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.estimate import PRODUCTS_FP32_BYTES, WORKSPACE_BYTES
from hybridtrainer.planning.hardware import H200, Hardware
from hybridtrainer.planning.resident import DISPLACED_BYTES, estimate_resident, rehearse_resident

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


QUICK = replace(H200, launch=0.0)


def estimate(every: int = 0, samples: int = 8, accumulate: int = 1, hardware: Hardware = H200, **settings: Any):
    model = build_gpt("gpt2-124m", context=512, vocabulary=256, dropout=0.1, device="meta")
    memory = MemoryConfig.model_validate({"precision": "bf16", "checkpoint_every": every} | settings)
    step = rehearse_resident(model, memory, samples, 512, accumulate)
    return estimate_resident(step, hardware, memory=memory)


def test_what_was_measured_is_what_is_planned():
    """`benchmarks.gpu_check`: the peak that was allocated in real steps with bf16 arithmetic."""
    measured = json.loads((RESULTS / "gpu_check.json").read_text())["gpt2-124m"]["peak_real_gib"] * 2**30
    found = estimate()
    assert found.gpu_bytes - found.gpu["fragments"] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "resident_7b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resident_1.5b", "resident_350m_4k")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resident_124m_512", "resident_350m_512")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resident_124m_4k", "resident_124m_4k_alone")),
    ],
)
def test_what_each_option_takes_is_what_is_planned(name):
    found = compare_resident(json.loads((RESULTS / f"{name}.json").read_text()))
    assert found
    for option, figures in found.items():
        for figure, error in (("gpu", 0.05), ("a jump", 0.05), ("host", 0.08), ("seconds", 0.15)):
            planned, measured = figures.get(figure, (1.0, 1.0))  # seconds that the host takes are rough
            assert planned == pytest.approx(measured, rel=error), (option, figure)


def test_components_are_those_of_adamw():
    found = estimate()
    parameters = sum(
        each.numel() for each in build_gpt("gpt2-124m", context=512, vocabulary=256, device="meta").parameters()
    )
    assert found.gpu["weights"] == found.gpu["gradients"] == 4 * parameters
    assert found.gpu["optimizer states"] == 8 * parameters
    assert found.gpu["workspace"] == WORKSPACE_BYTES
    assert found.disk_bytes == 12 * parameters


def test_blocks_computed_again_and_16_bits_save_activations():
    plain, again, wide = estimate(), estimate(every=2), estimate(precision="fp32")
    assert again.gpu["activations"] < 0.5 * plain.gpu["activations"]
    assert plain.gpu["activations"] < 0.75 * wide.gpu["activations"]


def test_activations_grow_with_the_batch():
    one, two = estimate(samples=8), estimate(samples=16)
    assert two.gpu["activations"] == pytest.approx(2 * one.gpu["activations"], rel=0.15)


def test_accumulation_takes_the_activations_of_one_micro_batch_beside_the_gradients():
    whole, parts, one = estimate(samples=32), estimate(samples=8, accumulate=4), estimate(samples=8)
    assert one.gpu["activations"] <= parts.gpu["activations"] < 0.4 * whole.gpu["activations"]
    # What a single micro-batch frees before its gradients are there stays beside those of the one before.
    assert parts.gpu_bytes > one.gpu_bytes
    assert parts.gpu["gradients"] == whole.gpu["gradients"]


def test_accumulation_makes_as_many_passes_and_one_update():
    one, four = estimate(hardware=QUICK), estimate(accumulate=4, hardware=QUICK)
    update = H200.seconds(0.0, 17 * one.gpu["gradients"])
    passes = one.compute_seconds - update
    assert 4 * passes <= four.compute_seconds - update < 4.4 * passes  # gradients are added, which one pass does not


@pytest.mark.parametrize(
    ("name", "case", "accumulate"),
    [("124m_4k", "all", 4), ("350m_4k", "lean", 1), ("124m_512", "lean", 1), ("124m_512", "bf16, products kept", 1)],
)
def test_what_is_reserved_is_within_a_twentieth_of_what_was_measured(name, case, accumulate):
    """`benchmarks.resident_options` on an H200, where most is reserved beside tensors."""
    result = json.loads((RESULTS / f"resident_{name}.json").read_text())
    lean = {"checkpoint_every": 1, "optimizer_bits": 8}
    settings = {"checkpoint_every": 1, "checkpoint_keep": "products"} if "products" in case else lean
    memory = MemoryConfig.model_validate({"precision": "bf16"} | settings)
    model = build_gpt(result["model"], context=result["context"], device="meta")
    step = rehearse_resident(model, memory, result["batch"] // accumulate, result["context"], accumulate)
    planned = estimate_resident(step, memory=memory).gpu_bytes
    assert planned == pytest.approx(result["rows"][case]["reserved_peak_bytes"], rel=0.05)


def test_a_process_holds_more_where_products_are_in_32_bits():
    model = build_gpt("nano", device="meta")
    full, half = (
        estimate_resident(rehearse_resident(model, MemoryConfig(precision=precision), 2, 32)).host["process"]
        for precision in ("fp32", "bf16")
    )
    assert full - half == PRODUCTS_FP32_BYTES


def test_the_seconds_of_a_plain_loop_are_what_is_planned():
    """`benchmarks.overhead`: 12 blocks of 768, bf16 arithmetic, a batch so large that no step waits for the host."""
    measured = json.loads((RESULTS / "overhead_h200_batch128.json").read_text())["rows"]["plain loop"]["ms_per_step"]
    model = build_gpt("gpt2-124m", context=512, vocabulary=256, device="meta")
    step = rehearse_resident(model, MemoryConfig(precision="bf16"), 128, 512, loss=gpt_loss)
    assert estimate_resident(step, H200).seconds == pytest.approx(measured / 1000, rel=0.15)


def test_blocks_computed_again_cost_time():
    kept, again = estimate(samples=64), estimate(samples=64, every=1)
    assert 1.15 * kept.seconds < again.seconds < 1.6 * kept.seconds


def test_kept_products_are_between_all_and_blocks_computed_again_in_memory_and_in_time():
    kept, products, again = (
        estimate(every, samples=64, checkpoint_keep=keep, hardware=QUICK)
        for every, keep in ((0, "inputs"), (1, "products"), (1, "inputs"))
    )
    assert again.gpu["activations"] < 0.6 * products.gpu["activations"] < 0.4 * kept.gpu["activations"]
    assert 1.02 * kept.seconds < products.seconds < 0.97 * again.seconds


def test_a_difference_between_phases_is_planned_by_its_larger_peak():
    by_phase, products = (estimate(1, checkpoint_keep=keep) for keep in ("by_phase", "products"))
    assert by_phase.gpu_bytes == products.gpu_bytes


def test_of_kept_products_inputs_alone_leave():
    products, inputs = (
        estimate(1, samples=64, checkpoint_keep=keep, offload_activations=True) for keep in ("products", "inputs")
    )
    assert products.host["activations"] == inputs.host["activations"]
    assert products.gpu_bytes > inputs.gpu_bytes


def test_small_batches_wait_for_the_host():
    assert estimate(samples=1).seconds > 5 * estimate(samples=1, hardware=QUICK).seconds
    large = rehearse_resident(build_gpt("llama-7b", blocks=2, device="meta"), MemoryConfig(precision="bf16"), 8, 2048)
    found = estimate_resident(large, H200)
    assert found.seconds == found.compute_seconds


def test_activations_in_host_memory_leave_the_gpu_and_take_the_link():
    here, there = estimate(hardware=QUICK), estimate(hardware=QUICK, offload_activations=True)
    assert there.gpu["activations"] < 0.5 * here.gpu["activations"]
    assert there.host["activations"] > 0.8 * (here.gpu["activations"] - there.gpu["activations"])
    assert there.seconds > there.compute_seconds == pytest.approx(here.seconds, rel=0.1)


def test_with_blocks_computed_again_only_their_inputs_leave():
    found = estimate(every=1, samples=64, offload_activations=True)
    assert found.host["activations"] == 12 * 64 * 512 * 1024 * 4  # the residual stream in fp32, in powers of two
    assert found.gpu_bytes < estimate(every=1, samples=64).gpu_bytes


@pytest.mark.parametrize(("bits", "share"), [(8, 2.03 / 8), (4, 1.06 / 8)])
def test_coded_moments_take_a_part_of_32_bits_and_no_temporaries(bits, share):
    whole, coded = estimate(samples=1), estimate(samples=1, optimizer_bits=bits)
    assert coded.gpu["optimizer states"] == pytest.approx(share * whole.gpu["optimizer states"], rel=0.02)
    assert coded.gpu["activations"] <= whole.gpu["activations"]
    assert coded.disk_bytes < whole.disk_bytes


def test_a_probe_takes_what_its_forward_pass_needs():
    kept = estimate(samples=64)
    assert kept.predict_bytes < kept.gpu_bytes
    widest = 3072 * 768 * 4  # is read whole
    coded = estimate(samples=64, predict_int8=True, predict_states="leave")
    saved = kept.predict_bytes - coded.predict_bytes + widest
    assert saved == pytest.approx(0.746 * kept.gpu["weights"] + kept.gpu["optimizer states"], rel=0.01)
    assert coded.predict_bytes < 0.3 * kept.gpu_bytes


def test_a_jump_is_written_into_the_full_weights_before_it_is_probed_in_8_bits():
    found = estimate(predict_int8=True, predict_states="leave", samples=1)
    assert found.predict_bytes == found.gpu["weights"] + DISPLACED_BYTES + WORKSPACE_BYTES


def test_seconds_in_32_bits_and_on_unknown_hardware_are_not_made_up():
    model = build_gpt("nano", device="meta")
    step = rehearse_resident(model, MemoryConfig(), 2, 64)
    assert estimate_resident(step, H200).seconds is None
    assert estimate_resident(rehearse_resident(model, MemoryConfig(precision="bf16"), 2, 64)).seconds is None


def test_jumps_take_windows_and_a_snapshot_of_what_a_checkpoint_holds():
    model = build_gpt("nano", context=64, device="meta")
    elements = sum(parameter.numel() for parameter in model.parameters())
    found = estimate_resident(rehearse_resident(model, MemoryConfig(), 4, 64), windows=4)
    assert found.jump_disk_bytes == int(elements * (4 + 4 * 1.02))
    assert found.jump_host_bytes == found.disk_bytes + int(elements * (4 + 5 * 1.02))
    assert found.host_bytes == estimate_resident(rehearse_resident(model, MemoryConfig(), 4, 64), windows=8).host_bytes


def test_buffers_are_saved_too():
    model = build_gpt("nano", context=64, device="meta")
    before = estimate_resident(rehearse_resident(model, MemoryConfig(), 4, 64)).disk_bytes
    model.register_buffer("table", torch.zeros(1000, device="meta"))
    assert estimate_resident(rehearse_resident(model, MemoryConfig(), 4, 64)).disk_bytes == before + 4000


def test_fewer_states_take_less():
    step = rehearse_resident(build_gpt("nano", device="meta"), MemoryConfig(precision="bf16"), 2, 64)
    assert estimate_resident(step, states=0).gpu["optimizer states"] == 0


def test_whole_logits_take_what_tiles_do_not():
    model = build_gpt("gpt2-124m", context=512, device="meta")
    tiled, whole = (rehearse_resident(model, MemoryConfig(), 8, 512, loss=loss) for loss in (language_loss, gpt_loss))
    logits = 8 * 512 * 50257 * 4
    assert whole.spent.peak_bytes > tiled.spent.peak_bytes + logits
