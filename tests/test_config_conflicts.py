"""Which settings exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtrainer.config import RunConfig
from hybridtrainer.config_conflicts import conflicts, without_jumps
from hybridtrainer.config_memory import MemoryConfig

IMAGES = {"model": {"name": "cnn"}, "data": {"source": "digits"}}
STREAMED = {"memory": {"mode": "split8"}}


def merged(*parts: dict[str, Any]) -> RunConfig:
    settings: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("parts", "key", "words"),
    [
        ([{"data": {"source": "text"}}], "data.path", 'needed with data.source = "text"'),
        ([IMAGES, {"data": {"source": "idx"}}], "data.path", 'needed with data.source = "idx"'),
        ([{"data": {"path": "x"}}], "data.path", 'not read with data.source = "stdlib"'),
        ([IMAGES, {"data": {"path": "x"}}], "data.path", 'not read with data.source = "digits"'),
        ([{"model": {"name": "cnn-small"}}], "model.name", 'does not fit data.source = "stdlib"'),
        ([{"data": {"source": "digits"}}], "model.name", 'does not fit data.source = "digits"'),
        ([IMAGES, {"data": {"tokenizer": "bpe"}}], "data.tokenizer", "not read with data.source"),
        ([IMAGES, {"model": {"context": 64}}], "model.context", "not read with data.source"),
        ([{"model": {"batch_norm": True}}], "model.batch_norm", "not read with data.source"),
        (
            [IMAGES, {"data": {"source": "idx", "path": "x", "validation_share": 0.1}}],
            "data.validation_share",
            'not read with data.source = "idx"',
        ),
        ([{"data": {"validation_share": 0.45, "probe_share": 0.45}}], "data.probe_share", "too little to train on"),
        ([{"optimizer": {"name": "sgd", "betas": (0.5, 0.5)}}], "optimizer.betas", 'optimizer.name = "sgd"'),
        ([{"optimizer": {"name": "adafactor", "betas": (0.5, 0.5)}}], "optimizer.betas", "adafactor"),
        ([{"optimizer": {"name": "adamw", "momentum": 0.9}}], "optimizer.momentum", 'optimizer.name = "adamw"'),
        ([{"schedule": {"final_ratio": 0.5}}], "schedule.final_ratio", 'schedule.name = "constant"'),
        ([{"predict": "off", "depth": {"share": 0.5}}], "depth", 'not read without "depth" in predict'),
        ([{"predict": "off", "dynamics": "mlp"}], "dynamics", "nothing is forecast"),
        ([{"residuals": True}], "residuals", "no features to compare"),
        ([{"predict": ["samples"], "horizon": "linucb"}], "horizon", "no jumps"),
        ([{"predict": ["jumps"], "sample_weights": True}], "sample_weights", "no sample is left out"),
        ([{"predict": "off", "sample_weights": True}], "sample_weights", 'not read with predict = "off"'),
        ([{"predict": ["depth", "depth"]}], "predict", "twice"),
        ([IMAGES, {"depth": {"share": 0.5}}], "depth", "a conv net has no repeated blocks"),
        ([IMAGES, {"predict": ["depth"]}], "predict", "a conv net has none"),
        ([{"predict": ["samples"], "memory": {"predict_int8": True}}], "memory.predict_int8", "no jumps"),
        ([{"memory": {"split": 2}}], "memory.split", 'not read with memory.mode = "resident"'),
        ([{"memory": {"mode": "auto"}}, IMAGES], "memory.mode", "plans language models only"),
        ([{"memory": {"vram": "8GB"}}, IMAGES], "memory.mode", "plans language models only"),
        (
            [{"memory": {"vram": "8GB", "checkpoint_every": 2, "split": 2}}],
            "memory.mode",
            'memory.split is not read with memory.mode = "resident"; for a streamed one, memory.checkpoint_every is',
        ),
        (
            [{"memory": {"vram": "8GB", "optimizer_bits": 8}, "optimizer": {"name": "sgd"}}],
            "memory.mode",
            'optimizer_bits is not read with optimizer.name = "sgd"; for a streamed one, memory.optimizer_bits',
        ),
        (
            [{"memory": {"vram": "8GB", "split": 2}, "train": {"accumulate": 2}}],
            "memory.mode",
            "for a streamed one, train.accumulate needs",
        ),
        (
            [{"memory": {"offload_activations": True}, "train": {"device": "cpu"}}],
            "memory.offload_activations",
            "no GPU",
        ),
        ([{"memory": {"predict_states": "auto"}, "train": {"device": "cpu"}}], "memory.predict_states", "no GPU"),
        ([{"memory": {"mode": "resident", "vram": "8GB"}}], "memory.vram", 'not read with memory.mode = "resident"'),
        ([{"memory": {"cleanup_every": 5}, "train": {"device": "cpu"}}], "memory.cleanup_every", "there is no GPU"),
        ([{"memory": {"pack_weights": False}}], "memory.pack_weights", 'not read with memory.mode = "resident"'),
        ([STREAMED, {"optimizer": {"name": "sgd"}}], "optimizer.name", "must be adamw"),
        ([IMAGES, {"memory": {"offload_activations": True}}], "memory.offload_activations", "needs repeated blocks"),
        ([STREAMED, {"memory": {"predict_int8": True}}], "memory.predict_int8", 'memory.mode = "split8"'),
        ([STREAMED, {"memory": {"predict_states": "leave"}}], "memory.predict_states", 'memory.mode = "split8"'),
        ([STREAMED, {"memory": {"precision": "adaptive"}}], "memory.precision", 'cannot be "adaptive"'),
        ([IMAGES, {"memory": {"checkpoint_every": 1}}], "memory.checkpoint_every", "needs repeated blocks"),
        ([{"memory": {"checkpoint_keep": "products"}}], "memory.checkpoint_keep", "without memory.checkpoint_every"),
        ([{"memory": {"checkpoint_keep": "by_phase"}}], "memory.checkpoint_keep", "without memory.checkpoint_every"),
        (
            [STREAMED, {"memory": {"checkpoint_keep": "products"}}],
            "memory.checkpoint_keep",
            'not read with memory.mode = "split8"',
        ),
        (
            [{"memory": {"optimizer_bits": 8}, "optimizer": {"name": "sgd"}}],
            "memory.optimizer_bits",
            'not read with optimizer.name = "sgd"',
        ),
        (
            [STREAMED, {"memory": {"optimizer_bits": 4}}],
            "memory.optimizer_bits",
            'not read with memory.mode = "split8"',
        ),
        ([STREAMED, IMAGES], "memory.mode", "repeated blocks"),
        ([STREAMED, {"memory": {"retry_smaller": False}}], "memory.retry_smaller", "always divided"),
        ([STREAMED, {"memory": {"precision": "fp16"}}], "memory.precision", 'cannot be "fp16"'),
        ([STREAMED, {"train": {"accumulate": 2}}], "train.accumulate", 'memory.clipping = "exact"'),
        (
            [{"schedule": {"name": "cosine", "warmup_steps": 20}, "train": {"steps": 20}}],
            "schedule.warmup_steps",
            "leaves nothing of train.steps = 20",
        ),
    ],
)
def test_each_conflict_is_named_by_its_key_and_alone(parts, key, words):
    (problem,) = conflicts(merged(*parts))
    assert problem.key == key
    assert words in problem.message


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [IMAGES, {"model": {"batch_norm": True}, "data": {"validation_share": 0.2}}],
        [IMAGES, {"data": {"source": "idx", "path": "x"}}],
        [{"data": {"source": "text", "path": "x", "tokenizer": "bpe"}, "model": {"context": 64}}],
        [STREAMED, {"memory": {"vram": "8GB", "ram": "900 MiB", "split": 2, "offload_activations": True}}],
        [STREAMED, {"memory": {"clipping": "exact"}, "train": {"accumulate": 2}}],
        [{"memory": {"offload_activations": True, "checkpoint_every": 2, "precision": "adaptive"}}],
        [{"memory": {"checkpoint_every": 1, "checkpoint_keep": "products", "offload_activations": True}}],
        [{"memory": {"checkpoint_every": 1, "checkpoint_keep": "by_phase"}}],
        [{"memory": {"mode": "auto", "checkpoint_keep": "products"}}],
        [{"memory": {"vram": "8GB", "ram": "8GB", "precision": "fp16", "optimizer_bits": 4}}],
        [{"memory": {"vram": "8GB", "split": 2, "clipping": "exact"}, "train": {"accumulate": 2}}],
        [{"memory": {"mode": "split8", "offload_activations": True}, "train": {"device": "cpu"}}],
        [{"memory": {"predict_int8": True, "predict_states": "leave", "optimizer_bits": 4}}],
        [IMAGES, {"memory": {"predict_int8": True, "predict_states": "leave", "precision": "adaptive"}}],
        [{"optimizer": {"name": "sgd", "momentum": 0.9}}],
        [{"sample_weights": True}],
        [{"predict": ["depth", "samples"], "sample_weights": True}],
        [{"optimizer": {"name": "adam", "betas": (0.5, 0.5)}, "memory": {"optimizer_bits": 8}}],
        [{"schedule": {"name": "linear", "final_ratio": 0.5, "warmup_steps": 19}, "train": {"steps": 20}}],
    ],
)
def test_settings_that_are_read_are_no_conflict(parts):
    assert conflicts(merged(*parts)) == []


def test_several_conflicts_are_found_at_once():
    config = merged({"data": {"source": "text"}, "optimizer": {"momentum": 0.5}, "schedule": {"final_ratio": 1.0}})
    assert {problem.key for problem in conflicts(config)} == {"data.path", "optimizer.momentum", "schedule.final_ratio"}


@pytest.mark.parametrize("memory", [{"predict_int8": True}, {"predict_states": "leave"}])
def test_what_only_jumps_read_is_refused_where_there_are_none(memory):
    (problem,) = conflicts(RunConfig.model_validate({"predict": "off", "memory": memory}))
    assert problem.key == f"memory.{next(iter(memory))}"
    assert 'not read with predict = "off"' in problem.message


def test_a_difference_between_phases_is_refused_where_there_is_one_phase_only():
    memory = {"checkpoint_every": 1, "checkpoint_keep": "by_phase"}
    (problem,) = conflicts(RunConfig.model_validate({"predict": "off", "memory": memory}))
    assert problem.key == "memory.checkpoint_keep" and "no Correct steps" in problem.message


def test_without_what_only_jumps_read_there_is_no_conflict():
    memory = {"predict_int8": True, "predict_states": "leave", "checkpoint_every": 2, "checkpoint_keep": "by_phase"}
    config = RunConfig.model_validate({"memory": memory})
    assert without_jumps(config.memory) == MemoryConfig(checkpoint_every=2)
    kept = MemoryConfig(checkpoint_every=2, checkpoint_keep="products")
    assert without_jumps(kept) == kept
