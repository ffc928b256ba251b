"""What a streamed step takes: memory for slots, inputs and its largest moment; time for computation and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrainer.config_memory import MemoryConfig, size_in_bytes
from hybridtrainer.kernels.formats import Mode
from hybridtrainer.kernels.packed import GROUP, packed_bytes
from hybridtrainer.memory.inputs import AHEAD
from hybridtrainer.memory.lanes import Event, Lane
from hybridtrainer.memory.packing import staging_bytes
from hybridtrainer.memory.placement import host_bytes
from hybridtrainer.memory.places import Home
from hybridtrainer.memory.portions import divide
from hybridtrainer.memory.residency import PACK_USABLE_SHARE, STALL_SHARE, USABLE_SHARE, packs
from hybridtrainer.memory.rings import Rings, state_slots
from hybridtrainer.memory.slots import Ring
from hybridtrainer.memory.units import PortionKey
from hybridtrainer.planning.estimate import FRAGMENT_SHARE, PROCESS_BYTES, WORKSPACE_BYTES, Estimate, averages_part
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.pieces import Pieces
from hybridtrainer.planning.rehearsal import Spent
from hybridtrainer.predict.averages import NO_AVERAGES, Averages

LINK_SHARE = 0.92  # of the link's speed that a step reaches: slots fill and empty when a pass turns round
# What the host does beside the kernels of a pass, in launches: for each block, and for each portion of its states.
# Found on the four runs of `benchmarks.stream` that wait for the host.
BLOCK_LAUNCHES = 80
PORTION_LAUNCHES = 4
# Bytes that an update reads and writes for each parameter, the norm of its gradient included.
UPDATE_BYTES: dict[Mode, int] = {"fp32": 60, "split8": 18, "sr8": 14, "sr4": 12, "factored": 14}


def estimate_streamed(
    pieces: Pieces,
    memory: MemoryConfig,
    hardware: Hardware | None,
    keeps: bool | None = None,
    pack: bool | None = None,
    averages: Averages = NO_AVERAGES,
) -> Estimate:
    """What a step takes with these settings, after the engine has decided what stays on the GPU.

    Args:
        pieces: Of the step.
        memory: The settings.
        hardware: Its speeds; without them there are no seconds.
        keeps: Whether the engine has decided to keep what fits; None to foresee that, and without speeds it does.
        pack: Whether it has decided that weights travel packed; None to foresee that: where they may, and where that
            is faster.
        averages: Of the weights, in host memory.
    """
    rings = _rings(pieces, memory)
    before = _gpu(pieces, memory, rings)
    times = _times(pieces, memory, rings, hardware) if hardware else None
    if keeps is None:
        keeps = times is None or times.stalled_share > STALL_SHARE
    if keeps:
        taken, budget = sum(before.values()), size_in_bytes(memory.vram)
        room = None if budget is None else PACK_USABLE_SHARE * budget - taken
        if pack is None:
            share = times.stalled_share if times else None
            tried = (True, False) if memory.pack_weights and packs(share, room, pieces.layouts) else (False,)
        else:
            tried = (pack,)
        found = [_kept(pieces, memory, taken, packed) for packed in tried]
        rings = found[-1]
        if hardware:
            times, rings = min(
                ((_times(pieces, memory, each, hardware), each) for each in found), key=lambda each: each[0].step
            )
    return Estimate(
        _gpu(pieces, memory, rings),
        _host(pieces, memory) | averages_part(averages.host_bytes),
        _disk_bytes(pieces) + averages.saved_bytes,
        times.step if times else None,
        times.compute if times else None,
        waits_for_host=bool(times and times.waits_for_host),
    )


@dataclass(frozen=True)
class _Times:
    step: float
    compute: float
    waits_for_host: bool

    @property
    def stalled_share(self) -> float:
        return 1 - self.compute / self.step


class _NoLanes:
    """Nothing is copied in a plan."""

    def mark(self) -> Event:
        """No event."""

    def wait(self, event: Event) -> None:
        """Nothing to wait for."""

    def submit(self, lane: Lane, work: Callable[[], Any], after: Sequence[Event]) -> Event:
        """Nothing is done."""

    def finish(self) -> None:
        """Nothing was begun."""

    def watch_stalls(self) -> None:
        """Nothing stalls."""

    def stalled_seconds(self) -> float:
        """Nothing has stalled."""
        return 0.0


def _rings(pieces: Pieces, memory: MemoryConfig) -> Rings:
    """The engine's own places, without memory."""
    blocks = len(pieces.layouts)
    weight_bytes = max(layout.weight_bytes for layout in pieces.layouts)
    sizes = _state_sizes(pieces)
    few, lanes, meta = min(2, memory.max_gpu_blocks), _NoLanes(), torch.device("meta")
    slots = state_slots(max(len(divide(layout)) for layout in pieces.layouts), memory.max_gpu_blocks)

    def states(key: PortionKey) -> Home:
        return Home([(0, torch.empty(sizes[key], dtype=torch.uint8, device="meta"))])

    def weights(key: int) -> Home:
        return Home([(0, torch.empty(pieces.layouts[key].weight_bytes, dtype=torch.uint8, device="meta"))])

    rings = Rings(
        Ring(lanes, min(memory.max_gpu_blocks, blocks), weight_bytes, meta, weights),
        Ring(lanes, slots, max(sizes.values()), meta, states),
        Ring(lanes, few, weight_bytes, meta, weights) if memory.clipping == "exact" else None,
    )
    rings.keep_small(sizes)
    return rings


def _kept(pieces: Pieces, memory: MemoryConfig, taken: int, pack: bool) -> Rings:
    """The places of an engine that keeps what fits."""
    rings = _rings(pieces, memory)
    spare = max(0, int(USABLE_SHARE * (size_in_bytes(memory.vram) or 0) - taken))
    if pack:
        rings.weights.pack()
        spare = max(0, spare - staging_bytes(rings.weights.slot_bytes))
    blocks = range(len(pieces.layouts))
    rings.keep(spare, blocks, [key for key in _state_sizes(pieces) if key[0] in blocks])
    return rings


def _state_sizes(pieces: Pieces) -> dict[PortionKey, int]:
    """What each portion of the states takes of a slot, blocks first."""
    return {
        (key, number): portion.nbytes
        for key, layout in enumerate((*pieces.layouts, *pieces.lone))
        for number, portion in enumerate(divide(layout))
    }


def _gpu(pieces: Pieces, memory: MemoryConfig, rings: Rings) -> dict[str, int]:
    """By component, at the largest moment: the first backward pass of a block, or the head."""
    places = {name: ring.nbytes for name, ring in zip(("weights", "states", "gradients"), rings, strict=False)}
    waiting = 2 * AHEAD if memory.offload_activations else len(pieces.layouts)
    inputs = (waiting + 1) * pieces.hidden_bytes
    backward = pieces.backward.peak_bytes + pieces.tied_bytes
    trained = sum(entry.weight.stop - entry.weight.start for entry in pieces.layouts[0].entries if entry.trainable)
    gradients = min(backward, trained)
    head = pieces.head.peak_bytes + pieces.widened_bytes
    if head > backward:
        gradients = pieces.head.left_bytes
    moment = max(backward, head)
    found = {
        "weights": places["weights"] + pieces.rest_bytes,
        "optimizer states": places["states"],
        "gradients": places.get("gradients", 0) + gradients,
        "activations": inputs + moment - gradients,
        "workspace": WORKSPACE_BYTES,
    }
    return found | {"fragments": int(FRAGMENT_SHARE * (gradients + found["activations"]))}


def _host(pieces: Pieces, memory: MemoryConfig) -> dict[str, int]:
    deferred = memory.clipping == "exact"
    blocks = sum(host_bytes(layout, True, deferred) for layout in pieces.layouts)
    lone = sum(host_bytes(layout, False, deferred) for layout in pieces.lone)
    found = {"weights and states": blocks + lone, "process": PROCESS_BYTES}
    if memory.offload_activations:
        found["inputs of blocks"] = len(pieces.layouts) * pieces.hidden_bytes
    return found


def _disk_bytes(pieces: Pieces) -> int:
    return (
        sum(layout.weight_bytes + layout.state_bytes for layout in pieces.layouts)
        + sum(layout.state_bytes for layout in pieces.lone)
        + pieces.rest_bytes
    )


def _times(pieces: Pieces, memory: MemoryConfig, rings: Rings, hardware: Hardware) -> _Times:
    """Each pass is as long as its computation, as its copies, or as its slots take to be filled, used and emptied."""
    assert memory.mode != "resident" and memory.mode != "auto"  # noqa: PLR1714, PT018
    blocks = len(pieces.layouts)

    def seconds(spent: Spent) -> float:
        return hardware.seconds(spent.flops, spent.other_bytes)

    forward = blocks * seconds(pieces.forward)
    updates = hardware.seconds(0.0, UPDATE_BYTES[memory.mode] * pieces.parameters)
    backward = blocks * seconds(pieces.backward) + updates
    head = seconds(pieces.head)

    passing = blocks - len(rings.weights.pinned)
    slots = len(rings.weights.slots)
    travels = pieces.layouts[0].weight_bytes
    if rings.weights.is_packed:
        travels = packed_bytes(travels // 2 // GROUP * GROUP)
        packing = hardware.seconds(0.0, passing * (pieces.layouts[0].weight_bytes + travels))
        forward, backward = forward + packing, backward + 2 * packing
    weights = passing * travels
    fetched = max(0, passing - slots) * travels  # others are there when a pass turns round
    states = sum(nbytes for key, nbytes in _state_sizes(pieces).items() if key not in rings.states.pinned)
    inputs = blocks * pieces.hidden_bytes if memory.offload_activations else 0
    one_way = min(hardware.inward, hardware.outward)
    in_turn = [fetched / hardware.inward, (fetched / hardware.inward + forward * passing / blocks) / slots]
    copies = max((fetched + states + weights + states + inputs) / hardware.both, (weights + states) / one_way)
    in_turns = [
        copies / LINK_SHARE,
        (2 * weights / one_way + backward * passing / blocks) / slots,
        (2 * states / one_way + updates) / len(rings.states.slots),
    ]
    step = max(forward, *in_turn) + head + max(backward, *in_turns)
    launches = blocks * (pieces.forward.kernels + pieces.backward.kernels + BLOCK_LAUNCHES) + pieces.head.kernels
    host = hardware.launch * (launches + PORTION_LAUNCHES * len(_state_sizes(pieces)))
    return _Times(max(step, host), max(forward + head + backward, host), host > step)
