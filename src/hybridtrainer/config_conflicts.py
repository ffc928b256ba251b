"""Settings that are right one by one and wrong together, or that nothing would read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hybridtrainer.config import (
    OPTIMIZERS_WITH_BETAS,
    RUN_NAME_RULE,
    DepthConfig,
    FolderConfig,
    HybridTrainerConfig,
    RunConfig,
    is_run_name,
)
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.config_section import Section
from hybridtrainer.errors import Problem

STREAMING_KEYS = ("vram", "ram", "max_gpu_blocks", "split", "clipping", "pack_weights")
PREDICT_KEYS = ("predict_int8", "predict_states")
RESIDENT_KEYS = ("optimizer_bits", "checkpoint_keep", *PREDICT_KEYS)
BLOCK_KEYS = ("checkpoint_every", "offload_activations")
GPU_KEYS = ("cleanup_every", "offload_activations", "predict_states")


def set_keys(memory: MemoryConfig, keys: Sequence[str]) -> list[str]:
    """Those of the keys that say something else than where they are left out."""
    return [key for key in keys if getattr(memory, key) != MemoryConfig.model_fields[key].default]


def set_for_a_gpu(memory: MemoryConfig) -> list[str]:
    """Those of the settings that nothing follows on a CPU; a streamed model plans there as it would on a GPU."""
    return set_keys(memory, GPU_KEYS if memory.mode == "resident" else ("cleanup_every",))


def without_jumps(memory: MemoryConfig) -> MemoryConfig:
    """The same settings without what only jumps and the steps after them read."""
    unread = {key: MemoryConfig.model_fields[key].default for key in PREDICT_KEYS}
    keep = "inputs" if memory.checkpoint_keep == "by_phase" else memory.checkpoint_keep
    return memory.model_copy(update=unread | {"checkpoint_keep": keep})


def _folder_problems(run: FolderConfig) -> Iterator[Problem]:
    if not is_run_name(run.name):
        yield Problem("run.name", "cannot be the name of a run.", RUN_NAME_RULE)
    if "\0" in run.folder:
        yield Problem("run.folder", "has a NUL character in it.")
    if len(set(run.trackers)) < len(run.trackers):
        yield Problem("run.trackers", "names a tracker twice.")


def depth_problem(config: HybridTrainerConfig) -> str:
    """Why nothing would read `depth`; empty where something does, or where it says nothing."""
    if config.predict == "auto" or "depth" in config.predict:
        return ""
    is_set = any(getattr(config.depth, key) != field.default for key, field in DepthConfig.model_fields.items())
    return 'is not read without "depth" in predict.' if is_set else ""


def unread_by_predict(config: HybridTrainerConfig) -> Iterator[tuple[str, str]]:
    """Settings that nothing would read with this `predict`, each with the reason."""
    if problem := depth_problem(config):
        yield "depth", problem
    if config.predict == "off" and config.dynamics != "off":
        yield "dynamics", 'is not read with predict = "off": nothing is forecast.'
    if config.residuals and config.dynamics in ("off", "blend"):
        yield "residuals", f'is not read with dynamics = "{config.dynamics}": there are no features to compare.'
    if config.sample_weights and not config.samples_allowed():
        yield "sample_weights", f"is not read with predict = {json.dumps(config.predict)}: no sample is left out."
    if config.horizon != HybridTrainerConfig.model_fields["horizon"].default and not config.jumps_allowed():
        yield "horizon", f"is not read with predict = {json.dumps(config.predict)}: no jumps."


def _predict_problems(config: RunConfig) -> Iterator[Problem]:
    for key, problem in unread_by_predict(config):
        yield Problem(key, problem, "Leave it out, or change predict.")
    if isinstance(config.predict, list) and len(set(config.predict)) < len(config.predict):
        yield Problem("predict", "names something twice.")
    is_grown = config.depth != DepthConfig() and config.predict == "auto"
    if is_grown and config.model.name.startswith("cnn"):
        yield Problem("depth", "is not read: a conv net has no repeated blocks.", "Leave it out.")
    if "depth" in config.predict and config.model.name.startswith("cnn"):
        yield Problem("predict", "names depth, which needs repeated blocks; a conv net has none.", "Leave it out.")


def _memory_problems(config: RunConfig) -> Iterator[Problem]:
    if config.train.device == "cpu":
        for key in set_for_a_gpu(config.memory):
            what = 'is not read with train.device = "cpu": there is no GPU.'
            yield Problem(f"memory.{key}", what, "Leave it out.")
    yield from _unplanned_problems(config) if config.memory.mode == "auto" else _settled_problems(config)


def _unplanned_problems(config: RunConfig) -> Iterator[Problem]:
    """What keeps a model both from staying on the GPU and from being streamed, whatever a plan would choose."""
    if config.model.name.startswith("cnn"):
        what, remedy = "plans language models only, and a conv net is none.", 'Use "resident" without memory.vram.'
        yield Problem("memory.mode", what, remedy)
        return
    memory = config.memory
    again = memory.checkpoint_every if "checkpoint_every" in memory.model_fields_set else 1
    staying: dict[str, Any] = {"mode": "resident", "vram": None, "ram": None, "checkpoint_every": again}
    ways = {"a resident model": staying, "a streamed one": {"mode": "split8"}}
    against = {
        way: list(_settled_problems(config.model_copy(update={"memory": memory.model_copy(update=update)})))
        for way, update in ways.items()
    }
    if all(against.values()):
        told = (f"for {way}, {found[0].key} {found[0].message.rstrip('.')}" for way, found in against.items())
        yield Problem("memory.mode", f'is "auto", and no way is left: {"; ".join(told)}.', "Leave one of them out.")


def _settled_problems(config: RunConfig) -> Iterator[Problem]:
    if config.memory.mode != "resident":
        yield from _streamed_problems(config)
        return
    for key in set_keys(config.memory, STREAMING_KEYS):
        remedy = 'Use memory.mode = "auto" to let it be planned for, or leave it out.' if key == "vram" else ""
        yield Problem(f"memory.{key}", 'is not read with memory.mode = "resident".', remedy)
    yield from _resident_problems(config)


def keep_problem(memory: MemoryConfig, jumps_allowed: bool) -> str:
    """Why nothing would follow `checkpoint_keep` in a resident model; empty if something does."""
    if memory.checkpoint_keep == "inputs":
        return ""
    if not memory.checkpoint_every:
        return "is not read without memory.checkpoint_every: all activations are kept."
    if memory.checkpoint_keep == "by_phase" and not jumps_allowed:
        return 'is "by_phase", and without jumps in predict there are no Correct steps.'
    return ""


def _resident_problems(config: RunConfig) -> Iterator[Problem]:
    memory = config.memory
    if problem := keep_problem(memory, config.jumps_allowed()):
        yield Problem("memory.checkpoint_keep", problem, 'Use "inputs", or leave it out.')
    if config.model.name.startswith("cnn"):
        for key in BLOCK_KEYS:
            if getattr(memory, key):
                yield Problem(
                    f"memory.{key}", "needs repeated blocks, which a conv net does not have.", "Leave it out."
                )
    if not config.jumps_allowed():
        for key in set_keys(memory, PREDICT_KEYS):
            yield Problem(f"memory.{key}", f"is not read with predict = {json.dumps(config.predict)}: no jumps.")
    if memory.optimizer_bits != 32 and config.optimizer.name not in OPTIMIZERS_WITH_BETAS:
        yield Problem(
            "memory.optimizer_bits", f'is not read with optimizer.name = "{config.optimizer.name}".', "Use 32."
        )


def against_streaming(memory: MemoryConfig) -> Iterator[Problem]:
    """Settings of memory that do not go with its mode, which streams."""
    mode = f'memory.mode = "{memory.mode}"'
    for key in set_keys(memory, RESIDENT_KEYS):
        yield Problem(f"memory.{key}", f"is not read with {mode}.")
    if memory.checkpoint_every:
        yield Problem("memory.checkpoint_every", f"is not read with {mode}: streamed blocks are always computed again.")
    if not memory.retry_smaller:
        yield Problem("memory.retry_smaller", f"is not read with {mode}: streamed blocks are always divided.")
    if memory.precision in ("fp16", "adaptive"):
        yield Problem("memory.precision", f'cannot be "{memory.precision}" with {mode}.', 'Use "bf16" or "fp32".')


def _streamed_problems(config: RunConfig) -> Iterator[Problem]:
    memory = config.memory
    yield from against_streaming(memory)
    if config.model.name.startswith("cnn"):
        yield Problem("memory.mode", "streams repeated blocks, which a conv net does not have.", 'Use "resident".')
    if config.optimizer.name != "adamw":
        yield Problem("optimizer.name", f'must be adamw with memory.mode = "{memory.mode}".', 'Use "adamw".')
    if config.train.accumulate > 1 and memory.clipping == "fused":
        yield Problem(
            "train.accumulate", 'needs memory.clipping = "exact" in a streamed model.', "Use memory.split instead."
        )


def conflicts(config: RunConfig) -> list[Problem]:
    """Settings that are right one by one and wrong together, or that nothing would read."""
    data, optimizer, schedule = config.data, config.optimizer, config.schedule
    reads_images = data.source in ("digits", "idx")
    needs_path = data.source in ("text", "idx")
    found: list[Problem] = []

    def unread(section: Section, key: str, owner: str, value: str) -> None:
        if getattr(section, key) != type(section).model_fields[key].default:
            name = next(name for name in type(config).model_fields if getattr(config, name) is section)
            found.append(Problem(f"{name}.{key}", f'is not read with {owner} = "{value}".'))

    found += _folder_problems(config.run)
    found += _memory_problems(config)
    found += _predict_problems(config)
    if config.readout != "averaged" and config.readout_decay != type(config).model_fields["readout_decay"].default:
        found.append(Problem("readout_decay", f'is not read with readout = "{config.readout}".'))
    if needs_path and data.path is None:
        found.append(Problem("data.path", f'is needed with data.source = "{data.source}".'))
    if not needs_path:
        unread(data, "path", "data.source", data.source)
    if config.model.name.startswith("cnn") != reads_images:
        wanted = "cnn" if reads_images else "nano"
        found.append(Problem("model.name", f'does not fit data.source = "{data.source}".', f'Use "{wanted}".'))
    if reads_images:
        unread(data, "tokenizer", "data.source", data.source)
        unread(config.model, "context", "data.source", data.source)
    else:
        unread(config.model, "batch_norm", "data.source", data.source)
    if data.source == "idx":
        unread(data, "validation_share", "data.source", data.source)
    if data.validation_share + data.probe_share >= 0.9:
        found.append(Problem("data.probe_share", "leaves too little to train on beside data.validation_share."))
    if optimizer.name not in OPTIMIZERS_WITH_BETAS:
        unread(optimizer, "betas", "optimizer.name", optimizer.name)
    if optimizer.name != "sgd":
        unread(optimizer, "momentum", "optimizer.name", optimizer.name)
    if schedule.name == "constant":
        unread(schedule, "final_ratio", "schedule.name", schedule.name)
    elif schedule.warmup_steps >= config.train.steps:
        found.append(Problem("schedule.warmup_steps", f"leaves nothing of train.steps = {config.train.steps}."))
    return found
