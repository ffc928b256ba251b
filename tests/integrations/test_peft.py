"""Adapters of PEFT on a frozen base: only they are forecast, copied and put back, whatever the base is kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.making import ALL_PHASES, PHASES, log_of, phases_in, same, timeless, tiny, weights, windows

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.integrations.test_huggingface import OFF, ON, arguments, told, train  # noqa: E402

from hybridtrainer.config import HybridTrainerConfig  # noqa: E402
from hybridtrainer.config_memory import MemoryConfig  # noqa: E402
from hybridtrainer.errors import ModelError  # noqa: E402
from hybridtrainer.memory.frozen import quantize_frozen  # noqa: E402
from hybridtrainer.memory.stream import stream  # noqa: E402
from hybridtrainer.report.page import write_report  # noqa: E402
from hybridtrainer.trainer import HybridTrainer  # noqa: E402

RATE = {"learning_rate": 1e-2}


def adapted(kind: str = "llama", bits: int | None = None, seed: int = 0, dropout: float = 0.1) -> Any:
    base = tiny(kind, hidden_size=64, intermediate_size=128) if kind == "llama" else tiny(kind, n_embd=64)
    targets = ["q_proj", "v_proj", "down_proj"] if kind == "llama" else ["c_attn", "c_proj"]
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM",
        fan_in_fan_out=kind == "gpt2",
    )  # fmt: skip
    model = peft.get_peft_model(base, config)
    if bits is not None:
        assert quantize_frozen(model, bits=bits) > 0  # type: ignore[arg-type]
    return model


def frozen(model: Any) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if not one.requires_grad}


@pytest.mark.parametrize("bits", [*(pytest.param(bits, marks=pytest.mark.slow) for bits in (None, 8)), 4])
def test_off_it_is_the_plain_trainer_bit_for_bit(tmp_path, bits):
    steps = 30 if bits == 4 else 200
    plain = train(tmp_path / "plain", model=adapted(bits=bits), max_steps=steps, **RATE)
    hybrid = train(tmp_path / "hybrid", OFF, model=adapted(bits=bits), max_steps=steps, **RATE)
    assert same(weights(plain.model), weights(hybrid.model))
    assert told(plain) == told(hybrid)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [pytest.param("llama", None, marks=pytest.mark.slow), ("gpt2", 8), ("llama", 4)],
)
def test_adapters_go_through_all_phases_and_resume_while_the_base_stays(tmp_path, kind, bits):
    changes = RATE | {"save_strategy": "steps", "save_steps": 34, "max_steps": 60}
    before = frozen(adapted(kind, bits))
    whole = train(tmp_path, ON, model=adapted(kind, bits), **changes)
    assert phases_in(log_of(tmp_path / "hybridtrainer")) == PHASES
    assert same(before, frozen(whole.model))
    if bits is not None:
        with pytest.raises(ModelError, match="few bits"):
            adapted(kind, bits).merge_and_unload()
    again = train(tmp_path, ON, model=adapted(kind, bits, seed=9), resume=str(tmp_path / "checkpoint-34"), **changes)
    assert whole.hybrid.fingerprint() == again.hybrid.fingerprint()


@pytest.mark.slow
def test_two_hundred_steps_visit_all_phases_and_are_those_of_the_native_loop(tmp_path):
    data = windows(800)
    trainer = train(
        tmp_path / "hf", ON, data, model=adapted(dropout=0.0), max_steps=200, max_grad_norm=1.0,
        train_sampling_strategy="sequential", **RATE,
    )  # fmt: skip
    model = adapted(dropout=0.0)
    optimizer = transformers.Trainer(model, arguments(tmp_path / "unused", **RATE)).create_optimizer()
    native = HybridTrainer(model, optimizer, lambda model, batch: model(**batch).loss, ON, clip_norm=1.0)
    batches = [
        {name: torch.stack([piece[name] for piece in data[at : at + 4]]) for name in data[0]}
        for at in range(0, len(data), 4)
    ]
    native.fit(batches, 200, run_dir=tmp_path / "native", progress="off")
    ours, theirs = log_of(tmp_path / "hf" / "hybridtrainer"), log_of(tmp_path / "native")
    assert phases_in(ours) == PHASES
    kinds = ("step", "jump", "phase", "notice", "forecast")
    assert timeless(ours, *kinds) == timeless(theirs, *kinds)
    assert same(weights(trainer.model), weights(model))
    write_report([tmp_path / "hf" / "hybridtrainer"], tmp_path / "report.html")


def test_adapters_on_a_streamed_base_resume_and_are_read_by_peft_again(tmp_path):
    memory = MemoryConfig(mode="split8", clipping="exact")

    def streamed(seed: int = 0) -> Any:
        return stream(adapted(seed=seed), memory, "cpu", lr=1e-2, weight_decay=0.0)

    changes = RATE | {"save_strategy": "steps", "save_steps": 37, "max_steps": 50}
    settings = HybridTrainerConfig(**ALL_PHASES, memory=memory)
    whole = train(tmp_path, settings, model=streamed(), **changes)
    assert phases_in(log_of(tmp_path / "hybridtrainer")) == PHASES
    again = train(tmp_path, settings, model=streamed(9), resume=str(tmp_path / "checkpoint-37"), **changes)
    assert whole.hybrid.fingerprint() == again.hybrid.fingerprint()
    whole.save_model(str(tmp_path / "adapter"))
    read = peft.PeftModel.from_pretrained(tiny("llama", hidden_size=64, intermediate_size=128), tmp_path / "adapter")
    ours = {name: one.float() for name, one in weights(whole.model).items() if "lora_" in name}
    assert same(ours, {name: one.float() for name, one in weights(read).items() if "lora_" in name})


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_what_jumps_keep_is_as_large_as_the_adapters_not_as_the_base(tmp_path):
    model = adapted()
    adapters = [one for one in model.parameters() if one.requires_grad]
    base_bytes, adapter_bytes = bytes_of(frozen(model).values()), bytes_of(adapters)
    assert base_bytes > 10 * adapter_bytes
    settings = HybridTrainerConfig(**ALL_PHASES, readout="averaged")
    trainer = train(
        tmp_path, settings, model=model, **RATE, save_strategy="steps", save_steps=34, max_steps=60,
    ).hybrid  # fmt: skip
    assert trainer.statistics().jumps_accepted
    assert trainer.jumps.history.weights.elements() == sum(one.numel() for one in adapters)
    moments = 2 * adapter_bytes
    assert trainer._undo.nbytes() < 2 * (2 * adapter_bytes + moments)  # weights, their average, and slabs rounded up
    saved = sum(file.stat().st_size for file in (tmp_path / "checkpoint-34").rglob("*.safetensors"))
    assert saved < base_bytes


def test_what_was_trained_is_read_by_peft_again(tmp_path: Path):
    trained = train(tmp_path / "run", ON, model=adapted(), **RATE, max_steps=40)
    trained.save_model(str(tmp_path / "adapter"))
    read = peft.PeftModel.from_pretrained(tiny("llama", hidden_size=64, intermediate_size=128), tmp_path / "adapter")
    ours = {name: one for name, one in weights(trained.model).items() if "lora_" in name}
    assert same(ours, {name: one for name, one in weights(read).items() if "lora_" in name})
