"""What each rank of a distributed run adds to a checkpoint, and how any number of ranks takes one up again.

    state.safetensors, state.json              of the first rank
    rank-0001.safetensors, rank-0001.json      of the next one, and so on

Ranks with copies of a model differ only in their random numbers, and that is all that the others add. Where weights are
sharded, every rank adds its own part of everything. As many ranks as saved a checkpoint go on exactly; another number
of them gets the same weights, optimizer states and position, put together from the parts, with random numbers of its
own for those ranks that are new. Recorded windows of sharded weights are cut differently by then, and are left behind.

The files of shards say in their headers where each tensor begins in the whole one, in the words of torch's distributed
checkpoint, whose reader of safetensors puts weights and moments together from that, or divides them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtrainer import ranks
from hybridtrainer.randomness import RandomState
from hybridtrainer.tree import Tree

FIRST = "state"
NO_SHARD = -1
SHARDED = "sharded"  # in a state: the names of parameters of which it has a part


def name_of(rank: int) -> str:
    """How the files of a rank are called.

    >>> name_of(0), name_of(3)
    ('state', 'rank-0003')
    """
    return f"rank-{rank:04d}" if rank else FIRST


def own_part(state: Mapping[str, Tree]) -> Mapping[str, Tree]:
    """What this rank has to write down of its state."""
    if ranks.is_first() or state.get(SHARDED):
        return state
    undo = state.get("undo")
    return {"random": state["random"], "undo_random": None if undo is None else undo["random"]}


def first_rows(state: Tree) -> dict[int, int]:
    """Of every shard in a state, by the `id` of its tensor, the row of the whole tensor that it begins with.

    Work of all ranks, where there are shards. Everything else begins at 0, and is not in it.
    """
    if ranks.count() == 1 or not state.get(SHARDED):
        return {}
    shards = list(_shards(state))
    lengths = ranks.exchange("lengths of shards", [len(each) if is_one else NO_SHARD for each, is_one in shards])
    before = [0 if NO_SHARD in of_all else sum(of_all[: ranks.rank()]) for of_all in zip(*lengths, strict=True)]
    return {id(each): rows for (each, _), rows in zip(shards, before, strict=True)}


def _shards(state: Mapping[str, Tree]) -> Iterator[tuple[Tensor, bool]]:
    """What may be a shard, in an order that is the same on all ranks, and whether it looks like one here."""
    names = [name for group in state["signature"]["optimizer_groups"] for name in group]
    for tree in (state, state.get("undo")):
        if tree is None:
            continue
        own = tree["parameters"]
        yield from ((own[name], True) for name in tree[SHARDED])
        for index, values in tree["optimizer"]["state"].items():
            weight = own.get(names[index]) if names[index] in tree[SHARDED] else None
            yield from (
                (value, _is_like_its_weight([value], [weight])) for value in values.values() if _has_rows(value)
            )
        yield from _averages(tree["readout"])


def _averages(readout: Tree) -> Iterator[tuple[Tensor, bool]]:
    if isinstance(readout, Mapping) and "shards" in readout:
        kept = readout["average"]  # nothing before the first step
        yield from ((kept[number], True) for number in readout["shards"] if number < len(kept))
    elif isinstance(readout, Mapping | list):
        for each in readout.values() if isinstance(readout, Mapping) else readout:
            yield from _averages(each)


def in_manifest(state: Tree) -> dict[str, Any]:
    """What a manifest says of the ranks; nothing where there was one."""
    if ranks.count() == 1:
        return {}
    return {"ranks": {"count": ranks.count(), SHARDED: bool(state.get(SHARDED))}}


def state_of(manifest: Mapping[str, Any], read: Callable[[str], Tree], sharded: bool) -> Tree:
    """The state that this rank goes on with.

    Args:
        manifest: Of the checkpoint.
        read: Gives the tree of the files of that name.
        sharded: Whether this rank has a part of the weights only.
    """
    saved = manifest.get("ranks", {"count": 1, SHARDED: False})
    count, rank = int(saved["count"]), ranks.rank()
    if not saved[SHARDED]:
        state = read(FIRST)
        if rank == 0 or not isinstance(state, dict) or "random" not in state:
            return state
        return _with_random(state, read(name_of(rank)) if rank < count else _own_random(state))
    if sharded and count == ranks.count():
        return read(name_of(rank))
    state = assemble([read(name_of(each)) for each in range(count)])
    return state if rank == 0 else _with_random(state, _own_random(state))


def assemble(parts: Sequence[Tree]) -> Tree:
    """The whole state, from the parts of all ranks in their order."""
    first = dict(parts[0])
    names = [name for group in first["signature"]["optimizer_groups"] for name in group]
    whole = _assembled(parts, names)
    if first["undo"] is not None:
        whole["undo"] = _assembled([part["undo"] for part in parts], names)
    groups = len(first["history"]["gram"])
    nothing = {"windows": [], "gram": torch.zeros(groups, 0, 0, dtype=torch.float64)}
    whole["history"] = nothing | {"anchors": None, "steps": 0, "lr_time": []}
    return whole


def _assembled(parts: Sequence[Tree], optimizer_names: Sequence[str]) -> dict[str, Tree]:
    """A captured state, with every sharded tensor whole."""
    first = dict(parts[0])
    sharded = set(first.pop(SHARDED))
    own = [part["parameters"] for part in parts]
    first["parameters"] = {
        name: torch.cat([each[name] for each in own]) if name in sharded else value for name, value in own[0].items()
    }
    states = {}
    for index, values in first["optimizer"]["state"].items():
        name = optimizer_names[index]
        found = [part["optimizer"]["state"][index] for part in parts]
        states[index] = {
            key: torch.cat([each[key] for each in found])
            if name in sharded and _is_like_its_weight([each[key] for each in found], [each.get(name) for each in own])
            else value
            for key, value in values.items()
        }
    first["optimizer"] = {**first["optimizer"], "state": states}
    first["readout"] = _whole_averages([part["readout"] for part in parts])
    return first


def _whole_averages(parts: Sequence[Tree]) -> Tree:
    """The state of a read-out, with the averages in it whole, however many there are."""
    first = parts[0]
    if isinstance(first, list):
        return [_whole_averages(each) for each in zip(*parts, strict=True)]
    if not isinstance(first, Mapping):
        return first
    if "shards" not in first:
        return {key: _whole_averages([part[key] for part in parts]) for key in first}
    whole = [
        torch.cat(each) if number in first["shards"] else each[0]
        for number, each in enumerate(zip(*(part["average"] for part in parts), strict=True))
    ]
    return {key: value for key, value in first.items() if key != "shards"} | {"average": whole}


def _is_like_its_weight(values: Sequence[Any], weights: Sequence[Tensor | None]) -> bool:
    pairs = zip(values, weights, strict=True)
    return all(
        isinstance(value, Tensor) and weight is not None and value.shape == weight.shape for value, weight in pairs
    )


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _own_random(state: Mapping[str, Tree]) -> dict[str, Tree]:
    """The random numbers that this rank has now: it was not there when the checkpoint was made."""
    random = RandomState.capture().to_tree()
    return {"random": random, "undo_random": None if state.get("undo") is None else random}


def _with_random(state: dict[str, Tree], own: Mapping[str, Tree]) -> dict[str, Tree]:
    state["random"] = own["random"]
    if state.get("undo") is not None:
        state["undo"] = {**state["undo"], "random": own["undo_random"]}
    return state
