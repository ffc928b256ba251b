"""Where the parameters of a block lie in a run of bytes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hybridtrainer.kernels.formats import state_fields
from hybridtrainer.memory.layout import ALIGNMENT, Field, Kind, lay_out

KINDS = [
    Kind("matrix", (70, 65), "split8", True),
    Kind("bias", (65,), "split32", True),
    Kind("scalar", (), "split32", True),
    Kind("frozen", (3, 5), "split32", False, torch.bfloat16),
    Kind("codes", (7,), "split32", False, torch.int8),
    Kind("factors", (64, 80), "factored", True),
]


def test_a_field_is_a_view_of_its_bytes():
    buffer = torch.zeros(64, dtype=torch.uint8)
    field = Field(torch.bfloat16, 8, 4)
    field.view(buffer).fill_(1)
    assert field.stop == 16
    assert buffer[8:16].view(torch.bfloat16).tolist() == [1.0] * 4
    assert not buffer[:8].any() and not buffer[16:].any()


def test_parts_are_aligned_and_do_not_overlap():
    layout = lay_out(KINDS)
    weights = [entry.weight for entry in layout.entries]
    states = [field for entry in layout.entries for field in entry.states.values()]
    for unordered, total in ((weights, layout.weight_bytes), (states, layout.state_bytes)):
        fields = sorted(unordered, key=lambda field: field.start)
        assert all(field.start % ALIGNMENT == 0 for field in fields)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(fields))
        assert fields[-1].stop <= total < fields[-1].stop + 2 * fields[-1].dtype.itemsize * ALIGNMENT


def test_weights_and_states_have_the_types_of_their_format():
    layout = lay_out(KINDS)
    assert [entry.weight.dtype for entry in layout.entries] == [
        torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int8, torch.bfloat16,
    ]  # fmt: skip
    for kind, entry in zip(KINDS, layout.entries, strict=True):
        assert entry.weight.elements == math.prod(kind.shape)
        found = {name: (field.dtype, field.elements) for name, field in entry.states.items()}
        assert found == (dict(state_fields(kind.format, kind.shape)) if kind.trainable else {})


def test_views_have_the_shape_of_the_parameter_and_flat_states():
    layout = lay_out(KINDS)
    weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    states = torch.zeros(layout.state_bytes, dtype=torch.uint8)
    for number, (kind, entry) in enumerate(zip(KINDS, layout.entries, strict=True), start=1):
        view = entry.weight_view(weights)
        assert view.shape == kind.shape
        view.fill_(number)
        for state in entry.state_views(states).values():
            assert state.dim() == 1
            state.fill_(number)
    for number, entry in enumerate(layout.entries, start=1):  # nothing was written over
        assert bool((entry.weight_view(weights) == number).all())
        assert all(bool((state == number).all()) for state in entry.state_views(states).values())


@pytest.mark.parametrize("kinds", [[], [Kind("f", (2,), "fp32", False, torch.float32)]])
def test_without_trained_parameters_there_are_no_states(kinds):
    assert lay_out(kinds).state_bytes == 0
    assert lay_out([]).weight_bytes == 0


def test_equal_parameters_have_equal_layouts():
    one, other = lay_out(KINDS), lay_out(list(KINDS))
    assert (one.entries, one.targets) == (other.entries, other.targets)
    assert lay_out(KINDS) != lay_out(KINDS[1:])


VECTORS = [
    Kind("norm", (300,), "split32", True, group=1),
    Kind("matrix", (70, 65), "split8", True),
    Kind("frozen", (9,), "split32", False, torch.bfloat16),
    Kind("bias", (65,), "split32", True),
    Kind("other", (3,), "split32", True, group=1),
]


def test_every_trained_parameter_is_in_one_target_and_vectors_of_a_group_share_theirs():
    layout = lay_out(VECTORS)
    trained = [entry for entry in layout.entries if entry.trainable]
    names = [[trained[number].name for number, _ in target.members] for target in layout.targets]
    assert names == [["matrix"], ["norm", "other"], ["bias"]]
    assert [entry.name for entry in layout.entries] == [kind.name for kind in VECTORS]


def test_a_target_covers_its_members_where_they_are():
    layout = lay_out(VECTORS)
    trained = [entry for entry in layout.entries if entry.trainable]
    weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    states = torch.zeros(layout.state_bytes, dtype=torch.uint8)
    for target in layout.targets:
        whole = target.weight.view(weights)
        whole.fill_(7)
        for number, start in target.members:
            entry = trained[number]
            assert bool((entry.weight_view(weights) == 7).all())
            part = whole[start : start + entry.weight.elements]
            assert part.data_ptr() == entry.weight_view(weights).data_ptr()
            if len(target.members) > 1:
                for name, state in target.state_views(states).items():
                    assert state[start:].data_ptr() == entry.state_views(states)[name].data_ptr()
        whole.fill_(0)
        assert not weights.any()
