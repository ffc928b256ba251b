"""How optimizer states travel: all of them, in portions of about the same size, each part where its elements are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hybridtrainer.kernels.formats import Format, state_fields
from hybridtrainer.kernels.reference import Hyper, update_
from hybridtrainer.memory import portions
from hybridtrainer.memory.layout import Kind, Layout, lay_out
from hybridtrainer.memory.places import Slot
from hybridtrainer.memory.portions import GRAIN_ELEMENTS, Portion, divide
from hybridtrainer.memory.views import states_in

SIDE = 600  # 360,000 elements: five grains and a half
MATRICES: tuple[Format, ...] = ("fp32", "split8", "sr8", "sr4")
ONE, YES = torch.tensor(1.0), torch.tensor(1, dtype=torch.int32)


def layout_of(kind: Format, count: int = 3) -> Layout:
    kinds = [Kind(f"w{number}", (SIDE, SIDE), kind, True) for number in range(count)]
    return lay_out([*kinds, Kind("norm", (SIDE,), "split32", True), Kind("frozen", (9,), "fp32", False, torch.float32)])


def fetched(portion: Portion, states: Tensor) -> Slot:
    """A slot with a portion in it, copied run by run, and nothing but noise between."""
    slot = Slot(torch.full((portion.nbytes,), 0xFF, dtype=torch.uint8))
    for run in portion.runs:
        slot.buffer[run.at : run.at + run.stop - run.start] = states[run.start : run.stop]
    return slot


@pytest.mark.parametrize("kind", MATRICES)
def test_every_element_of_every_target_is_in_one_part(kind):
    layout = layout_of(kind)
    found = divide(layout, layout.state_bytes // 4)
    for number, target in enumerate(layout.targets):
        parts = [part for portion in found for part in portion.parts if part.target == number]
        ends = [part.start + part.elements for part in parts]
        assert [part.start for part in parts] == [0, *ends[:-1]]
        assert ends[-1] == target.weight.elements
        assert all(part.start % GRAIN_ELEMENTS == 0 for part in parts)
    assert any(part.start for portion in found for part in portion.parts)


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_portions_are_as_many_as_the_limit_asks_for_and_of_about_one_size(kind, count):
    layout = layout_of(kind)
    sizes = [portion.nbytes for portion in divide(layout, -(-layout.state_bytes // count))]
    assert len(sizes) == count
    grain_bytes = GRAIN_ELEMENTS * 8
    assert max(sizes) - min(sizes) <= count * grain_bytes
    assert sum(sizes) == pytest.approx(layout.state_bytes, abs=1 << 14)


def test_what_fits_is_one_run():
    layout = layout_of("split8")
    ((run,),) = [portion.runs for portion in divide(layout)]
    assert (run.start, run.at) == (0, 0)
    assert layout.state_bytes - 256 < run.stop <= layout.state_bytes


def test_equal_layouts_share_their_portions_and_nothing_trained_has_none():
    layout = layout_of("sr8")
    assert divide(layout) is divide(layout)
    assert divide(lay_out([Kind("frozen", (9,), "fp32", False, torch.float32)])) == ()


def test_a_factored_state_is_never_divided():
    layout = lay_out([Kind(f"w{number}", (SIDE, SIDE), "factored", True) for number in range(4)])
    found = divide(layout, 3 * SIDE * 4)
    assert [[part.elements for part in portion.parts] for portion in found] == [[SIDE * SIDE]] * 4


@pytest.mark.parametrize("kind", MATRICES)
def test_an_update_by_portions_is_the_update_of_the_whole(kind):
    layout = layout_of(kind, 1)
    target = layout.targets[0]
    hyper = Hyper(0.01, 0.9, 0.99, 1e-8, 0.1, step=3, seed=1, tensor=2)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(SIDE * SIDE, generator=generator)
    states = torch.zeros(layout.state_bytes, dtype=torch.uint8)
    whole = torch.randn(SIDE * SIDE, generator=generator).to(target.weight.dtype)
    by_parts, other = whole.clone(), states.clone()
    for _ in range(2):
        update_(kind, whole, target.state_views(states), gradient, hyper, ONE, YES)
    for _ in range(2):
        for portion in divide(layout, layout.state_bytes // 3):
            slot = fetched(portion, other)
            for part, state in zip(portion.parts, states_in(slot, portion), strict=True):
                if part.target == 0:
                    own = slice(part.start, part.start + part.elements)
                    settings = Hyper(**{**vars(hyper), "first_element": part.start})
                    update_(kind, by_parts[own], state, gradient[own], settings, ONE, YES)
            for run in portion.runs:
                other[run.start : run.stop] = slot.buffer[run.at : run.at + run.stop - run.start]
    assert torch.equal(whole, by_parts)
    assert torch.equal(states, other) and states.any()


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("grain", [128 * 2, GRAIN_ELEMENTS])
def test_no_byte_travels_twice(monkeypatch, kind, grain):
    # Once two short states with a gap between them went as one run, and with it the state of others in the gap.
    monkeypatch.setattr(portions, "GRAIN_ELEMENTS", grain)
    layout = layout_of(kind)
    runs = sorted((run.start, run.stop) for portion in divide(layout, 500_000 + grain) for run in portion.runs)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(runs))
    wanted = sum(field.stop - field.start for target in layout.targets for field in target.states.values())
    assert wanted <= sum(stop - start for start, stop in runs) <= layout.state_bytes


def test_a_part_has_the_entries_of_its_elements():
    layout = layout_of("sr4", 1)
    (first, *_) = divide(layout, layout.state_bytes // 2)
    part = first.parts[0]
    lengths = {name: length for name, (_, length) in state_fields("sr4", (part.elements, 1)).items()}
    assert {name: field.elements for name, field in part.states.items()} == lengths
