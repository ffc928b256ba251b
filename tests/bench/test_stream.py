"""Speed and memory of streamed training, on a CPU with a model that is there at once."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hybridtrainer.bench.stream import DECIDING_STEPS, StreamCase, describe, measure_stream
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.models.gpt import build_gpt


def case(**changes: Any) -> StreamCase:
    settings: dict[str, Any] = {
        "model": "nano",
        "memory": MemoryConfig(mode="split8"),
        "tokens": 32,
        "context": 16,
        "steps": 2,
    }
    return StreamCase(**(settings | changes))


@pytest.fixture(scope="module")
def found():
    said: list[str] = []
    result = measure_stream(case(blocks=2), "cpu", said.append)
    return result | {"said": said}


def test_everything_is_measured(found):
    assert found["seconds_per_step"] > 0 and found["seconds_without_copies"] > 0
    assert found["tokens_per_second"] == pytest.approx(32 / found["seconds_per_step"])
    assert found["share_of_compute"] == pytest.approx(found["seconds_without_copies"] / found["seconds_per_step"])
    assert found["model_tflops"] == pytest.approx(6e-12 * found["parameters"] * found["tokens_per_second"])
    assert len(found["losses"]) == 2 + DECIDING_STEPS
    assert all(math.isfinite(loss) for loss in found["losses"])
    assert (found["split"], found["kept_weights"], found["kept_states"]) == (1, 0, 0)
    assert not {"link", "reserved_peak_bytes"} & set(found)  # of a GPU only


def test_the_model_is_the_one_that_was_asked_for(found):
    model = build_gpt("nano", context=16, blocks=2, device="meta")
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["losses"][0] == pytest.approx(math.log(model.config.vocabulary), rel=0.1)
    assert 4 < found["host_bytes_per_parameter"] < 14


def test_the_result_is_json_and_has_the_whole_case(found):
    again = json.loads(json.dumps(found))
    assert again["case"]["model"] == "nano"
    assert again["case"]["blocks"] == 2
    assert again["case"]["memory"]["mode"] == "split8"


def test_a_line_says_when_it_is_ready(found):
    (line,) = found["said"]
    assert line.startswith(f"nano: {found['parameters'] / 1e3:.1f}k parameters in host memory")


def test_the_description_has_the_numbers(found):
    text = describe(found)
    assert f"{found['tokens_per_second']:,.0f} tokens/s" in text
    assert f"{found['share_of_compute']:.1%} of the speed" in text
    assert "batches computed whole; weights of 0 blocks stay" in text
    assert "batches computed in 4 parts; weights" in describe(found | {"split": 4})
    assert ", 384 model TFLOP/s" in describe(found | {"model_tflops": 384.4})
    assert ", 0.00016 model TFLOP/s" in describe(found | {"model_tflops": 0.000164})
    assert ", 3.3 ms a step" in describe(found | {"seconds_per_step": 0.00333})
    assert "link" not in text
    rates = {"link": {"inward": 2.5e10, "outward": 2e10, "both": 4e10}}
    peaks = {"reserved_peak_bytes": 2**33, "allocated_peak_bytes": 2**32, "context_bytes": 2**29}
    on_gpu = describe(found | rates | peaks)
    assert "reserved peak 8.00 GiB, allocated 4.00; CUDA itself takes 0.50" in on_gpu
    assert "25.0 GB/s in, 20.0 out, 40.0 both ways" in on_gpu


def test_the_same_without_copies_is_left_out_where_nobody_asks():
    result = measure_stream(case(without_copies=False, blocks=2, steps=1), "cpu", lambda _: None)
    assert not {"seconds_without_copies", "share_of_compute"} & set(result)
    assert "without copies" not in describe(result)


def test_tokens_that_are_no_whole_sequences_are_refused():
    with pytest.raises(ModelError, match="33 tokens are no whole sequences of 16"):
        measure_stream(case(tokens=33), "cpu", lambda _: pytest.fail("a model was built"))


def test_a_model_that_does_not_exist_is_refused():
    with pytest.raises(ModelError, match="no model named 'gpt5'"):
        measure_stream(case(model="gpt5"), "cpu")
