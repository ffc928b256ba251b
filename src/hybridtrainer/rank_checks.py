"""Whether a run of several ranks can work: asked once, before anything is trained, and on demand between steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hybridtrainer import ranks
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import HybridTrainerError, RankError
from hybridtrainer.measure import batches_of
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.replicas import is_shard, is_sharded, local, unwrapped
from hybridtrainer.state import Streamed, Training
from hybridtrainer.tree import fingerprint

if TYPE_CHECKING:
    from hybridtrainer.trainer import HybridTrainer

ONE_PROCESS_ONLY = ("samples", "depth")  # mechanisms that know nothing of other ranks
UNSHARDED_KEYS = ("checkpoint_every", "offload_activations", "predict_int8")
SAMPLE = 64  # weights of each parameter that are looked at to see whether all ranks start alike
Problem = tuple[str, str]


def rank_problems(
    model: nn.Module, optimizer: Optimizer, scaler: object | None, config: HybridTrainerConfig
) -> Iterator[Problem]:
    """What cannot work on several ranks, or with shards; each with its remedy."""
    inner = unwrapped(model)
    if is_sharded(inner):
        yield from _shard_problems(inner, optimizer, scaler, config)
    elif isinstance(getattr(inner, "optimizer", None), StreamedOptimizer):
        if inner is not model:
            yield (
                "A streamed model is in DistributedDataParallel, which would average what is updated already.",
                "Pass the streamed model itself: its engine averages gradients block by block.",
            )
    elif isinstance(model, DistributedDataParallel):
        yield from _wrapper_problems(model, config.memory.retry_smaller)
    elif ranks.count() > 1:
        yield (
            f"The model is the same on {ranks.count()} ranks, and nothing says how they train it together.",
            "Wrap it in DistributedDataParallel(model), or divide it with fully_shard(model).",
        )
    if ranks.count() > 1:
        for name in ONE_PROCESS_ONLY:
            if name in config.predict:
                yield (
                    f'predict = {json.dumps(config.predict)} needs one process: "{name}" does not work across ranks.',
                    f'Leave "{name}" out.',
                )
        if config.sample_weights:
            yield (
                "sample_weights is set, and across ranks no sample is left out: nothing would be weighed.",
                "Leave it out.",
            )
        if config.dynamics != "off":
            yield (
                f'dynamics = "{config.dynamics}" needs one process: each rank would see the states of its own part.',
                "Leave it out.",
            )


def _wrapper_problems(model: DistributedDataParallel, retry_smaller: bool) -> Iterator[Problem]:
    if torch.distributed.get_world_size(model.process_group) != ranks.count():
        yield (
            "DistributedDataParallel was given a group that is not all ranks.",
            "Leave process_group out: all ranks of the program train one model.",
        )
    hooked = "a communication hook" if getattr(model, "_comm_hooks", None) else ""
    hooked = hooked or ("mixed_precision" if getattr(model, "mixed_precision", None) else "")
    if retry_smaller and (hooked or model.static_graph):
        yield (
            f"DistributedDataParallel has {hooked or 'static_graph'}, and with memory.retry_smaller the trainer "
            "averages gradients itself, once every rank has its own.",
            "Set memory.retry_smaller to false: DDP does it then.",
        )


def _shard_problems(
    model: nn.Module, optimizer: Optimizer, scaler: object | None, config: HybridTrainerConfig
) -> Iterator[Problem]:
    memory = config.memory
    for name, parameter in model.named_parameters():
        if not is_shard(parameter):
            if parameter.requires_grad:
                yield f"{name} is not sharded, and its gradients would stay those of one rank.", "Shard or freeze it."
            continue
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        if mesh.size() != ranks.count() or mesh.ndim != 1 or len(placements) != 1 or not placements[0].is_shard(0):
            yield (
                f"{name} is divided as {placements} over {mesh}.",
                "Use fully_shard with one mesh of all ranks, and let it divide the first dimension.",
            )
    if scaler is not None or memory.precision == "fp16":
        yield (
            "A loss scaler sees the shards of one rank only, and would decide for itself.",
            'Use memory.precision = "bf16", or a MixedPrecisionPolicy of bf16.',
        )
    if hasattr(optimizer, "bits") or isinstance(optimizer, torch.optim.Adafactor):
        yield (
            f"{type(optimizer).__name__} keeps states of another shape than the weights, which cannot be divided.",
            "Use AdamW, Adam or SGD with sharded weights.",
        )
    for key in UNSHARDED_KEYS:
        if getattr(memory, key):
            yield f"memory.{key} is set, and does not work with sharded weights.", "Leave it out."
    if memory.predict_states != "stay" and config.jumps_allowed():
        yield (
            f'memory.predict_states is "{memory.predict_states}", and sharded states stay where they are.',
            'Set it to "stay".',
        )
    if "depth" in config.predict:
        yield 'predict names "depth", which cannot copy blocks whose weights are sharded.', 'Leave "depth" out.'


def require_same_start(
    training: Training, config: HybridTrainerConfig, accumulate: int, clip_norm: float | None
) -> None:
    """Refuses ranks that were set up differently, or start from different weights: their copies would drift apart.

    Raises:
        RankError: saying in what they differ.
    """
    if ranks.count() == 1:
        return
    ranks.require_same("their settings", config.model_dump_json(), "Give all ranks the same configuration.")
    ranks.require_same("accumulate", accumulate, "Give all ranks the same number.")
    ranks.require_same("clip_norm", clip_norm, "Give all ranks the same number.")
    groups, scheduler = training.optimizer.param_groups, training.scheduler
    ranks.require_same("their optimizer", [_plain(group) for group in groups], "Give all ranks the same settings.")
    schedule = None if scheduler is None else _plain(scheduler.state_dict())
    ranks.require_same("their scheduler", schedule, "Give all ranks the same settings.")
    if not is_sharded(training.model):
        ranks.require_same(
            "their first weights",
            _sample(training),
            "Seed all ranks alike before the model is built, or load one file.",
        )


class OwnProbes(list[Any]):
    """The probe batches of this rank.

    Attributes:
        alike: Whether all ranks have the same ones, so that what one of them measures counts for all.
    """

    alike = False


def own_probes(batches: Iterable[Any]) -> OwnProbes:
    """The probe batches that this rank measures: those it was given, or its part where all were given the same.

    Raises:
        RankError: if ranks were given different numbers of them, and would wait for each other.

    >>> own_probes([1, 2])
    [1, 2]
    """
    probes = OwnProbes(batches_of(batches, "probe_batches") or ())
    if ranks.count() == 1:
        return probes
    ranks.require_same("the number of probe batches", len(probes), "Give every rank as many.")
    try:
        digest = fingerprint({"batches": list(probes)})["all"]
    except HybridTrainerError:  # batches of a kind of their own: whoever makes them gives each rank its own
        digest = str(ranks.rank())
    if len(set(ranks.exchange("probe batches", digest))) > 1:
        return probes
    if len(probes) % ranks.count() == 0:
        return OwnProbes(probes[ranks.rank() :: ranks.count()])
    probes.alike = True
    return probes


def require_same_on_all_ranks(trainer: HybridTrainer) -> None:
    """Looks whether all ranks have the same state, but for their random numbers and for what is sharded.

    Reads every weight: for tests, and for runs of which somebody has doubts. Every rank must call it.

    Raises:
        RankError: naming the parts in which they differ.
    """
    state = trainer.state()
    if state.get("sharded"):
        for tree in (state, state["undo"] or {}):
            for part in ("parameters", "optimizer", "readout"):
                tree.pop(part, None)
        state["history"] = {key: state["history"][key] for key in ("gram", "steps", "lr_time")}
    undo = state["undo"]
    state["undo"] = None if undo is None else {key: value for key, value in undo.items() if key != "random"}
    found = {part: digest for part, digest in fingerprint(state).items() if part not in ("random", "all")}
    answers = ranks.exchange("state", found)
    different = [part for part in found if any(each.get(part) != answers[0].get(part) for each in answers)]
    if different:
        raise RankError(
            f"The ranks differ in their state: {', '.join(different)}.", "Start again from the last checkpoint."
        )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of some settings those that are numbers, words, or lists of them; a learning rate may be a tensor."""
    known = {name: value for name, value in settings.items() if name != "params"}
    known = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in known.items()}
    return {name: value for name, value in known.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _sample(training: Training) -> str:
    """A short digest of some weights of every parameter: all of them would take long to read."""
    if isinstance(training.optimizer, Streamed):
        training.optimizer.settle()
    some = {
        name: flat[:: max(1, len(flat) // SAMPLE)].clone()
        for name, parameter in training.model.named_parameters()
        if len(flat := local(parameter.detach()).reshape(-1))
    }
    return fingerprint(some)["all"]
