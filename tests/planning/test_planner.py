"""What is chosen: the most exact mode that fits, and the fastest in it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import ConfigError, MemoryBudgetError, ModelError
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import H200
from hybridtrainer.planning.nothing_fits import SAFE_SHARE
from hybridtrainer.planning.planner import Plan, _resident, choose, plan
from hybridtrainer.planning.rehearsals import Rehearsals
from hybridtrainer.predict.averages import NO_AVERAGES
from hybridtrainer.sizes import GIB


def found(name: str, vram: float, ram: float, tokens: int = 4096, context: int = 1024) -> Plan:
    model = build_gpt(name, context=context, device="meta")
    return plan(model, int(vram * GIB), int(ram * GIB), tokens=tokens, context=context, hardware=H200)


@pytest.fixture(scope="module")
def seven_b() -> Plan:
    return found("llama-7b", 8, 64)


def test_what_is_chosen_fits(seven_b):
    for option in (seven_b.best, *seven_b.others):
        assert option.estimate.gpu_bytes <= SAFE_SHARE * (8 * GIB - H200.context_bytes)
        assert option.estimate.host_bytes <= 64 * GIB
    assert seven_b.best.memory.vram == f"{(8 * GIB - H200.context_bytes) / GIB:.2f}GB"


def test_precision_is_given_up_only_for_memory(seven_b):
    assert seven_b.best.memory.mode == "split8"
    assert [found("llama-7b", 8, ram).best.memory.mode for ram in (30, 22, 16)] == ["sr8", "sr4", "factored"]


def test_the_others_are_no_better(seven_b):
    modes = ("split8", "sr8", "sr4", "factored")
    ranks = [modes.index(option.memory.mode) for option in (seven_b.best, *seven_b.others)]
    assert len(seven_b.others) == 2
    assert ranks == sorted(ranks)


@pytest.mark.slow
def test_more_memory_is_never_slower():
    rehearsals = Rehearsals("llama-1b", 4096, 1024)
    quick = replace(H200, launch=0.0)  # or else such a small model would wait for the host
    plans = [choose(rehearsals, vram * GIB, 32 * GIB, hardware=quick) for vram in (3, 5, 12)]
    seconds = [each.best.estimate.seconds or 0.0 for each in plans]
    assert all(later <= earlier * 1.02 for earlier, later in pairwise(seconds))
    assert seconds[-1] < 0.9 * seconds[0]


@pytest.mark.parametrize(
    ("vram", "ram", "tokens", "context", "words"),
    [
        (0, 8, 1024, 1024, "vram: must be a positive size"),
        (8, -1, 1024, 1024, "ram: must be a positive size"),
        (8, 8, 1000, 1024, "no whole sequences"),
    ],
)
def test_sizes_that_make_no_sense_are_named(vram, ram, tokens, context, words):
    model = build_gpt("nano", device="meta")
    with pytest.raises(ConfigError, match=words):
        plan(model, vram * GIB, ram * GIB, tokens=tokens, context=context)


def test_without_speeds_something_that_fits_is_found():
    model = build_gpt("llama-1b", context=1024, device="meta")
    chosen = plan(model, 6 * GIB, 32 * GIB, tokens=4096, context=1024)
    assert chosen.best.estimate.seconds is None
    assert chosen.best.memory.mode == "split8"


@pytest.mark.slow
def test_a_model_that_fits_as_it_is_stays_on_the_gpu_and_blocks_are_computed_again_only_for_memory():
    rehearsals = Rehearsals("gpt2-350m", 4096, 512)
    chosen = [choose(rehearsals, vram * GIB, 64 * GIB, hardware=H200).best.memory for vram in (16, 9, 4)]
    assert [memory.mode for memory in chosen] == ["resident", "resident", "split8"]
    assert chosen[0].checkpoint_every == 0 < chosen[1].checkpoint_every


@pytest.mark.parametrize(
    "kind",
    [
        "LlamaConfig",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("GPT2Config", "Qwen2Config", "MistralConfig")),
    ],
)
def test_decoders_of_hugging_face_are_planned_resident_and_streamed(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    if kind != "GPT2Config":
        sizes["num_key_value_heads"] = 2
    config = getattr(transformers, kind)(**sizes, vocab_size=32000)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    assert plan(str(tmp_path), "8GB", "8GB", tokens=1024, context=256).best.memory.mode == "resident"
    streamed = Rehearsals(str(tmp_path), 1024, 256)
    assert choose(streamed, int(1.5 * GIB), 8 * GIB, is_allowed=lambda memory: memory.mode == "split8").best


def test_a_model_of_one_block_is_refused():
    with pytest.raises(ModelError, match="repeated blocks"):
        plan(build_gpt("nano", blocks=1, device="meta"), "4GB", "4GB", tokens=64, context=64)


@pytest.mark.slow
def test_accumulation_lets_a_resident_model_keep_its_activations():
    whole, parts = (
        choose(Rehearsals("gpt2-124m", 8192, 1024, number), 6 * GIB, 32 * GIB, given={"split": 1}) for number in (1, 8)
    )
    assert whole.best.memory.checkpoint_every > 0
    assert parts.best.memory.mode == "resident" and parts.best.memory.checkpoint_every == 0
    assert parts.accumulate == 8


@pytest.mark.slow
def test_averages_of_the_weights_are_counted_where_they_are_kept():
    rehearsals = Rehearsals("gpt2-124m", 4096, 512)
    copy = rehearsals.trained_bytes

    def gpu(vram: int, given: dict[str, Any], **settings: Any) -> Estimate:
        config = HybridTrainerConfig(**settings)
        return choose(rehearsals, vram * GIB, 64 * GIB, given={"split": 1, **given}, settings=config).best.estimate

    resident = {"checkpoint_every": 0}
    large, off, averaged = (gpu(139, resident, **each) for each in ({}, {"predict": "off"}, {"readout": "averaged"}))
    assert large.gpu_bytes == pytest.approx(4.42 * GIB, rel=0.01)  # as reserved on an H200
    assert (large.gpu["averages"], averaged.gpu["averages"], "averages" in off.gpu) == (2 * copy, copy, False)
    assert large.gpu_bytes - off.gpu_bytes == large.disk_bytes - off.disk_bytes == 2 * copy
    assert (large.predict_bytes or 0) - (off.predict_bytes or 0) == 2 * copy
    assert "averages" not in gpu(24, resident).gpu  # they would be more than a fiftieth of it
    kept = choose(rehearsals, 2 * GIB, 64 * GIB, given={"split": 1}, settings=HybridTrainerConfig(readout="averaged"))
    assert kept.best.memory.mode != "resident" and kept.best.estimate.host["averages"] == 2 * copy


def test_what_fits_depends_on_the_averages():
    model = build_gpt("nano", device="meta")
    copy = 4 * sum(parameter.numel() for parameter in model.parameters())
    rehearsals = Rehearsals(model, 1024, 128)

    def chosen(ram: int, readout: Any) -> Plan:
        settings = HybridTrainerConfig(readout=readout)
        is_allowed = lambda memory: memory.mode == "split8"  # noqa: E731
        return choose(rehearsals, 2 * GIB, ram, settings=settings, given={"split": 1}, is_allowed=is_allowed)

    least = chosen(8 * GIB, "last").best.estimate.host_bytes
    assert chosen(least, "auto").best and chosen(least + 2 * copy, "averaged").best
    with pytest.raises(MemoryBudgetError, match="Host memory") as refused:
        chosen(least + 2 * copy - 1, "averaged")
    assert 'readout = "last"' in refused.value.remedy


def test_the_price_of_computing_blocks_again_is_among_the_next_best():
    found = choose(Rehearsals("gpt2-124m", 8192, 512), 16 * GIB, 32 * GIB, hardware=H200, given={"split": 1})
    again = found.others[0]
    assert (again.memory.mode, again.memory.checkpoint_every > 0) == ("resident", True)
    assert again.estimate.gpu_bytes < found.best.estimate.gpu_bytes
    assert again.estimate.seconds > found.best.estimate.seconds  # type: ignore[operator]


@pytest.mark.parametrize(
    ("hardware", "between"), [(replace(H200, launch=0.0), "products"), (H200, "inputs"), (None, "inputs")]
)
def test_what_is_cheap_is_computed_again_before_whole_blocks_are_where_the_host_has_time(hardware, between):
    rehearsals = Rehearsals("gpt2-124m", 8192, 512)
    chosen = [
        choose(rehearsals, int(vram * GIB), 32 * GIB, hardware=hardware, given={"split": 1}).best.memory
        for vram in (8, 5, 4)
    ]
    assert [memory.checkpoint_every > 0 for memory in chosen] == [False, True, True]
    assert [memory.checkpoint_keep for memory in chosen] == ["inputs", between, "inputs"]


def test_what_is_kept_of_blocks_can_be_given():
    rehearsals = Rehearsals(build_gpt("nano", device="meta"), 768, 128)

    def kept(**given: Any) -> set[tuple[int, str]]:
        settings = given | {"offload_activations": False, "optimizer_bits": 32}
        options = _resident(rehearsals, 8 * GIB, 2, H200, settings, NO_AVERAGES, None)
        return {(option.memory.checkpoint_every, option.memory.checkpoint_keep) for option in options}

    assert kept() == {(0, "inputs"), (1, "products"), (1, "inputs"), (2, "inputs"), (4, "inputs")}
    assert kept(checkpoint_every=3) == {(3, "products"), (3, "inputs")}
    assert kept(checkpoint_every=0) == {(0, "inputs")}
    assert kept(checkpoint_keep="products") == {(1, "products"), (2, "products"), (4, "products")}
    assert kept(checkpoint_keep="by_phase", checkpoint_every=2) == {(2, "by_phase")}
    assert kept(checkpoint_keep="products", checkpoint_every=0) == set()


def test_a_difference_between_phases_takes_the_memory_of_the_one_and_the_time_of_the_other():
    rehearsals = Rehearsals("gpt2-124m", 4096, 512)
    given = {"checkpoint_every": 1, "offload_activations": False, "optimizer_bits": 32}
    quick = replace(H200, launch=0.0)
    by_phase, products, inputs = (
        next(_resident(rehearsals, 8 * GIB, 2, quick, given | {"checkpoint_keep": keep}, NO_AVERAGES, None)).estimate
        for keep in ("by_phase", "products", "inputs")
    )
    assert by_phase.gpu_bytes == products.gpu_bytes > inputs.gpu_bytes
    assert by_phase.seconds == inputs.seconds > products.seconds  # type: ignore[operator]


def test_a_streamed_model_is_planned_in_the_arithmetic_that_is_given():
    rehearsals = Rehearsals(build_gpt("nano", device="meta"), 1024, 128)
    found = [
        choose(
            rehearsals, 2 * GIB, 8 * GIB, given=given | {"split": 1}, is_allowed=lambda memory: memory.mode == "split8"
        )
        for given in ({}, {"precision": "bf16"})
    ]
    plain, autocast = (each.best for each in found)
    assert (plain.memory.precision, autocast.memory.precision) == ("fp32", "bf16")
    assert autocast.estimate.gpu["activations"] > plain.estimate.gpu["activations"]


def test_settings_that_are_given_are_not_chosen():
    given = {"split": 3, "offload_activations": True, "max_gpu_blocks": 2, "clipping": "exact", "checkpoint_every": 3}
    rehearsals = Rehearsals(build_gpt("nano", device="meta"), 768, 128)
    found = choose(rehearsals, 2 * GIB, 8 * GIB, given=given | {"precision": "fp16"})
    assert (found.best.memory.checkpoint_every, found.best.memory.precision) == (3, "fp16")
    streamed = choose(rehearsals, 2 * GIB, 8 * GIB, given=given, is_allowed=lambda memory: memory.mode == "split8").best
    assert {key: getattr(streamed.memory, key) for key in given if key != "checkpoint_every"} == {
        key: value for key, value in given.items() if key != "checkpoint_every"
    }


def test_jumps_take_host_memory_only_where_they_may_be_made():
    rehearsals = Rehearsals("nano", 256, 64)
    taken = [
        choose(rehearsals, 8 * GIB, 8 * GIB, settings=settings).best.estimate.jump_disk_bytes
        for settings in (
            HybridTrainerConfig(predict="off"),
            HybridTrainerConfig(history_windows=4),
            HybridTrainerConfig(history_windows=8),
        )
    ]
    assert taken[0] == 0 < taken[1] < taken[2]


def test_there_are_two_others_wherever_three_ways_fit():
    tight = found("llama-13b", 8, 32, tokens=8192)
    assert {each.memory.mode for each in (tight.best, *tight.others)} == {"factored"}
    assert len(tight.others) == 2


@pytest.mark.slow
def test_what_would_come_first_is_told_where_it_is_too_large():
    roomy, tight = (found("gpt2-124m", vram, 16, tokens=16384) for vram in (24, 4))
    assert roomy.too_large == ()
    assert tight.too_large[0].memory == roomy.best.memory
    assert tight.too_large[0].estimate.gpu_bytes > SAFE_SHARE * (tight.vram_bytes - tight.context_bytes)
