"""Nested state as tensors and JSON: what goes in comes out, and a fingerprint sees every bit."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hybridtrainer.errors import ModelError
from hybridtrainer.tree import fingerprint, pack, tensor_bytes, unpack

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def through_json(tree: Any) -> Any:
    tensors, document = pack(tree)
    return unpack(json.loads(json.dumps(document, allow_nan=False)), tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit; NaN equals NaN."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def bits(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return values


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


tensors = st.builds(
    some, st.sampled_from(DTYPES), st.integers(0, 3), st.integers(1, 3)
)  # empty ones too: a shape of (0, n)
keys = st.text(alphabet="ab$é \n", min_size=1)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.dictionaries(st.tuples(st.integers(), keys), inner, max_size=2)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(trees)
def test_any_tree_survives_json(tree):
    assert same(through_json(tree), tree)


@settings(deadline=None)
@given(trees)
def test_equal_trees_have_equal_fingerprints(tree):
    assert fingerprint({"part": tree}) == fingerprint({"part": through_json(tree)})


@pytest.mark.parametrize(
    "tree",
    [
        {"betas": (0.9, 0.95), "foreach": None, "nested": ((), [], {}, ({"a": ()},))},
        {"milestones": Counter({30: 1, 80: 2})},
        {0: {"step": 1}, 17: {"step": 2}},
        {"best": math.inf, "worst": -math.inf, "unknown": math.nan, "zero": -0.0, "tiny": 5e-324},
        {"$tensor": "w", "$float": "inf", "$": 1, "$dict": {"$tuple": [1]}},
        {"$tensor": "w"},
        {1.5: "float", True: "bool", None: "none", ("a", 1): "tuple", math.inf: "inf"},
        {"big": 2**200, "text": "é\0\U0001f600"},
        [[[[]]]],
        None,
        torch.ones(2),
    ],
    ids=repr,
)
def test_what_json_cannot_say_survives_it(tree):
    assert same(through_json(tree), tree)


def test_other_mappings_and_numpy_numbers_become_plain_ones():
    tree = OrderedDict(
        a=numpy.float32(0.5), b=numpy.int64(3), c=numpy.bool_(True), d=numpy.float64("inf"), e=numpy.array(2.5)
    )
    assert same(through_json(tree), {"a": 0.5, "b": 3, "c": True, "d": math.inf, "e": 2.5})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_shape_are_named_by_their_path_and_not_copied(dtype):
    tree: Any = {
        "a": [some(dtype, 3, 2), {"b": some(dtype)}],
        "c": {7: (some(dtype, 0, 4), some(dtype, 4, 6)[::2, 1::3])},
    }
    tensors, document = pack(tree)
    assert sorted(tensors) == ["a/0", "a/1/b", "c/7/0", "c/7/1"]
    assert tensors["a/0"] is tree["a"][0]
    assert same(unpack(document, tensors.__getitem__), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {1: torch.zeros(1), "1": torch.ones(1)},
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {"a": [torch.zeros(1)], "a/0": torch.ones(1)},
        {"": {"a": torch.zeros(1)}, "a": torch.ones(1)},
    ],
    ids=["number and word", "slash", "slash and index", "empty key"],
)
def test_no_two_tensors_share_a_name(tree):
    tensors, _ = pack(tree)
    assert len(tensors) == 2
    assert same(through_json(tree), tree)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda step: step, "function"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (object(), "object"),
        (torch.float32, "dtype"),
        (1j, "complex"),
        (numpy.zeros(3), "ndarray"),
        (nn.Linear(1, 1), "Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_pickle_could_store_is_refused_by_type_and_place(value, kind):
    with pytest.raises(ModelError, match=rf"holds a {kind} at `optimizer/groups/1/key`"):
        pack({"optimizer": {"groups": [0, {"key": value}]}})


OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD,
    torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon,
]  # fmt: skip


def trained(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=kind is not torch.optim.Muon).to(dtype)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.01, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 3, dtype=dtype)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]  # LBFGS calls it again, the others once
    return optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_state_of_every_torch_optimizer_survives(kind):
    state = trained(kind).state_dict()
    assert same(through_json(state), state)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        (torch.optim.SGD, torch.bfloat16, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, torch.float64, {"amsgrad": True, "capturable": False}),
        (torch.optim.AdamW, torch.bfloat16, {"fused": True}),
        (torch.optim.Adam, torch.float32, {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}),
    ],
)
def test_unusual_optimizer_options_survive(kind, dtype, options):
    state = trained(kind, dtype, **options).state_dict()
    assert same(through_json(state), state)


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [3])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_every_torch_scheduler_survives_and_can_be_loaded(name):
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = trained(torch.optim.SGD, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    optimizer, scheduler = made()
    for _ in range(3):
        step(optimizer, scheduler)
    state = scheduler.state_dict()
    restored = through_json(state)
    assert same(restored, state)
    other_optimizer, other = made()
    other_optimizer.load_state_dict(through_json(optimizer.state_dict()))
    other.load_state_dict(restored)
    for _ in range(5):
        step(optimizer, scheduler)
        step(other_optimizer, other)
        assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flipping_any_bit_changes_the_fingerprint_of_its_part_and_of_the_whole(dtype):
    tensor = some(dtype, 5)
    state = {"weights": {"w": tensor}, "other": [1, 2.0]}
    before = fingerprint(state)
    raw = tensor.view(torch.uint8)
    for byte in range(len(raw)):
        for bit in range(8 if dtype != torch.bool else 1):
            raw[byte] ^= 1 << bit
            after = fingerprint(state)
            assert after["weights"] != before["weights"], (byte, bit)
            assert after["all"] != before["all"]
            assert after["other"] == before["other"]
            raw[byte] ^= 1 << bit
    assert fingerprint(state) == before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1.0, math.nextafter(1.0, 2)),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (0, None),
        (math.inf, -math.inf),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ({1: 0}, {"1": 0}),
        ([1, [2]], [[1], 2]),
        (Counter({1: 2}), {1: 2}),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        ({"a": torch.zeros(1), "b": torch.ones(1)}, {"a": torch.ones(1), "b": torch.zeros(1)}),
    ],
)
def test_every_difference_changes_the_fingerprint(before, after):
    a, b = fingerprint({"part": before}), fingerprint({"part": after})
    assert a["part"] != b["part"]
    assert a["all"] != b["all"]


def test_layout_order_and_gradients_do_not_change_the_fingerprint():
    tensor = some(torch.float32, 4, 6, 2, 2)
    ours = fingerprint({"w": {"a": tensor, "b": 1}, "n": 2})
    assert ours == fingerprint({"n": 2, "w": {"b": 1, "a": tensor.clone().requires_grad_()}})
    assert ours == fingerprint({"w": {"a": tensor.to(memory_format=torch.channels_last), "b": 1}, "n": 2})
    assert ours == fingerprint({"w": {"a": torch.stack([tensor, tensor])[1], "b": 1}, "n": 2})


def test_the_order_of_numbered_keys_does_not_change_the_fingerprint():
    assert fingerprint({"state": {0: "a", 1: "b"}}) == fingerprint({"state": {1: "b", 0: "a"}})


def test_the_fingerprint_of_the_whole_depends_on_which_part_is_which():
    assert fingerprint({"a": 1, "b": 2})["all"] != fingerprint({"b": 1, "a": 2})["all"]
    assert fingerprint({"a": 1})["all"] != fingerprint({"b": 1})["all"]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_bytes_are_those_of_c_order_in_pieces_of_at_most_the_size_asked_for(dtype, chunk_bytes):
    tensor = some(dtype, 4, 5).t()
    whole = bytearray()
    for piece in tensor_bytes(tensor, chunk_bytes):
        assert len(piece) <= chunk_bytes
        whole += piece
    assert list(whole) == bits(tensor)


def test_an_empty_tensor_has_no_bytes():
    assert list(tensor_bytes(torch.empty(0, 3))) == []


def test_pieces_stay_valid_after_the_iteration_has_ended():
    tensor = torch.arange(512.0).view(16, 32).t()  # its bytes are those of a copy, which somebody has to keep
    pieces = list(tensor_bytes(tensor, 256))
    others = [torch.full((32, 16), -1.0) for _ in range(50)]
    assert list(b"".join(pieces)) == bits(tensor)
    assert len(others) == 50
