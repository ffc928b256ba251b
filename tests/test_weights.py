"""Weights in buckets: every element once, read and displaced in place whatever its type and layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.weights import BUCKET_ELEMENTS, HostCopy, Segment, WeightGroup, Weights, flat, gradient_norm

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def channels_last(*shape: int) -> nn.Parameter:
    return nn.Parameter(parameter(*shape).detach().to(memory_format=torch.channels_last))


def group(*parameters: nn.Parameter, lr_group: int = 0) -> WeightGroup:
    return WeightGroup("some", lr_group, parameters)


@pytest.mark.parametrize("bucket_elements", [1, 7, 10, 64, 1000])
def test_buckets_hold_every_element_of_every_group_once(bucket_elements):
    groups = [group(parameter(3, 5), parameter(7)), group(parameter(2, 2, 2), parameter(1), parameter(0, 4))]
    weights = Weights(groups, bucket_elements)
    assert weights.elements() == 15 + 7 + 8 + 1
    seen = [
        (bucket.group, id(segment.parameter), element)
        for bucket in weights.buckets
        for segment in bucket.segments
        for element in range(segment.start, segment.stop)
    ]
    assert len(seen) == len(set(seen)) == weights.elements()
    for bucket in weights.buckets:
        assert bucket.elements == sum(segment.stop - segment.start for segment in bucket.segments)
        assert bucket.elements <= bucket_elements
        assert all(any(segment.parameter is p for p in groups[bucket.group].parameters) for segment in bucket.segments)
    assert sum(bucket.elements < bucket_elements for bucket in weights.buckets) <= len(groups)  # only the last of each


def test_a_large_parameter_is_cut_and_a_bucket_is_bounded():
    weights = Weights([group(nn.Parameter(torch.zeros(2 * BUCKET_ELEMENTS + 1)))])
    assert [bucket.elements for bucket in weights.buckets] == [BUCKET_ELEMENTS, BUCKET_ELEMENTS, 1]


def test_reading_gives_the_elements_in_order_as_one_flat_tensor():
    a, b = parameter(3, 4), parameter(5, seed=1)
    whole = torch.cat([a.detach().reshape(-1), b.detach()])
    read = [bucket.read() for bucket in Weights([group(a, b)], 6).buckets]
    assert torch.equal(torch.cat(read), whole)
    assert all(not piece.requires_grad for piece in read)


def test_types_are_kept_apart_and_read_in_at_least_32_bits():
    parameters = [parameter(4, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.float16, torch.float32)]
    buckets = Weights([group(*parameters)]).buckets
    assert len(buckets) == 4
    assert [bucket.read().dtype for bucket in buckets] == [torch.float32, torch.float64, torch.float32, torch.float32]
    for bucket, one in zip(buckets, parameters, strict=True):
        assert torch.equal(bucket.read(), one.detach().to(bucket.read().dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bucket_elements", [5, 1000])
def test_adding_displaces_each_weight_by_its_own_amount(dtype, bucket_elements):
    a, b = parameter(3, 4, dtype=dtype), parameter(5, dtype=dtype, seed=1)
    before = torch.cat([a.detach().reshape(-1), b.detach()])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    displacement = torch.linspace(-1, 1, 17, dtype=wide) / 3
    pointers = a.data_ptr(), b.data_ptr()
    offset = 0
    with torch.no_grad():
        for bucket in Weights([group(a, b)], bucket_elements).buckets:
            bucket.add_(displacement[offset : offset + bucket.elements])
            offset += bucket.elements
    after = torch.cat([a.detach().reshape(-1), b.detach()])
    assert torch.equal(after, (before.to(wide) + displacement).to(dtype))  # rounded once
    assert (a.data_ptr(), b.data_ptr()) == pointers


def test_a_displacement_of_fewer_bits_costs_the_weights_none_of_theirs():
    weight = nn.Parameter(torch.full((4,), 1 / 3, dtype=torch.float64))
    (bucket,) = Weights([group(weight)]).buckets
    with torch.no_grad():
        bucket.add_(torch.tensor([0.0, 0.25, 0.0, -0.25]))
    assert torch.equal(weight.detach(), 1 / 3 + torch.tensor([0.0, 0.25, 0.0, -0.25], dtype=torch.float64))


@pytest.mark.parametrize(
    "one",
    [
        parameter(4, 6),
        nn.Parameter(parameter(4, 6).detach().t()),
        channels_last(2, 3, 4, 5),
        nn.Parameter(parameter(2, 3, 4).detach().permute(2, 0, 1)),
        parameter(),
        parameter(0, 3),
        nn.Parameter(parameter(8, 3).detach()[2:5]),
        nn.Parameter(parameter(4, 1, 6).detach().transpose(0, 2)),
    ],
    ids=["plain", "transposed", "channels last", "permuted", "scalar", "empty", "slice", "size one"],
)
def test_a_flat_view_is_the_parameters_own_memory_in_any_dense_layout(one):
    view = flat(one)
    assert view.dim() == 1
    assert len(view) == one.numel()
    assert view.data_ptr() == one.data_ptr()
    assert torch.equal(view.sort().values, one.detach().reshape(-1).sort().values)
    view.fill_(7.0)
    assert bool((one == 7).all())


def test_a_complex_parameter_is_seen_as_its_real_numbers():
    one = parameter(3, dtype=torch.complex64)
    assert torch.equal(flat(one), torch.view_as_real(one.detach()).reshape(-1))
    (bucket,) = Weights([group(one)]).buckets
    with torch.no_grad():
        bucket.add_(torch.ones(6))
    assert torch.equal(one.detach(), parameter(3, dtype=torch.complex64).detach() + (1 + 1j))


@pytest.mark.parametrize(
    "one",
    [
        parameter(4, 6).detach()[:, ::2],
        parameter(4, 6).detach()[:, :3],
        parameter(4).detach().expand(3, 4),
        parameter(9).detach().as_strided((3, 3), (1, 1)),
    ],
    ids=["every second", "part of each row", "expanded", "overlapping"],
)
def test_gaps_and_overlaps_are_refused(one):
    with pytest.raises(ModelError, match="gaps or overlaps"):
        flat(one)
    with pytest.raises(ModelError, match="gaps or overlaps"):
        Weights([group(nn.Parameter(one))])


def test_a_segment_can_view_another_tensor_of_the_same_layout():
    one = channels_last(2, 3, 4, 5)
    like = torch.empty_like(one).copy_(one.detach() * 2)
    segment = Segment(one, 10, 30)
    assert torch.equal(segment.view(like), segment.view() * 2)


def assorted() -> dict[str, Tensor]:
    made = {str(dtype): (torch.randn(7, 3) * 9).to(dtype) for dtype in DTYPES}
    strange = {
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 6).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": parameter(3),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    return made | strange


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    )


@pytest.mark.parametrize("slab_bytes", [64, 256, 1 << 26])
def test_a_host_copy_is_exact_for_every_type_and_layout(monkeypatch, slab_bytes):
    monkeypatch.setattr(HostCopy, "SLAB_BYTES", slab_bytes)
    torch.manual_seed(0)
    tensors = assorted()
    copy = HostCopy()
    copy.take(tensors)
    for name, tensor in tensors.items():
        assert same_bits(copy[name], tensor), name
    originals = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.detach().zero_()
    assert all(same_bits(copy[name], original) for name, original in originals.items())  # nothing is shared
    assert copy.nbytes() >= sum(tensor.nbytes for tensor in tensors.values())


def test_copying_again_reuses_the_memory():
    torch.manual_seed(0)
    copy, tensors = HostCopy(), assorted()
    copy.take(tensors)
    # Kept alive: memory that is free again might be given out at the same place.
    first, held = {name: copy[name] for name in tensors}, copy.nbytes()
    again = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    copy.take(again)
    assert all(copy[name].data_ptr() == tensor.data_ptr() for name, tensor in first.items())
    assert copy.nbytes() == held
    assert all(same_bits(copy[name], tensor) for name, tensor in again.items())


@pytest.mark.parametrize(
    "changed", [{"a": torch.ones(3)}, {"a": torch.ones(2, dtype=torch.float64)}, {"b": torch.ones(2)}, {}]
)
def test_other_shapes_types_or_names_get_other_memory(changed):
    copy = HostCopy()
    copy.take({"a": torch.zeros(2)})
    copy.take(changed)
    for name, tensor in changed.items():
        assert same_bits(copy[name], tensor)
    with pytest.raises(KeyError):
        copy["gone" if changed else "a"]


def test_copies_never_overlap():
    copy = HostCopy()
    tensors = {str(i): torch.full((i,), i, dtype=torch.uint8) for i in range(1, 200)}
    copy.take(tensors)
    assert all(torch.equal(copy[name], tensor) for name, tensor in tensors.items())


def test_the_gradient_norm_is_that_of_all_gradients_together():
    a, b, frozen = parameter(3, 4), parameter(5), parameter(2)
    a.grad, b.grad = torch.full_like(a, 2.0), torch.full_like(b, -3.0)
    assert gradient_norm([a, b, frozen]).item() == pytest.approx((12 * 4 + 5 * 9) ** 0.5)


def test_sparse_gradients_count_by_their_sums():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([3, 3, 5])).sum().backward()  # row 3 is used twice: its gradient is 2
    assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
    assert gradient_norm(embedding.parameters()).item() == pytest.approx((4 * 4 + 4 * 1) ** 0.5)


def test_without_gradients_the_norm_is_zero():
    assert gradient_norm([parameter(3)]).item() == 0
    assert gradient_norm([]).item() == 0


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    a, b = parameter(3), parameter(3)
    a.grad, b.grad = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert not gradient_norm([a, b]).isfinite()


def test_weights_frozen_meanwhile_are_not_displaced():
    layer = nn.Linear(4, 2)
    weights = Weights([WeightGroup("all", 0, tuple(layer.parameters()))])
    layer.weight.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    for bucket in weights.buckets:
        bucket.add_(torch.ones(bucket.elements))
    assert torch.equal(layer.weight, before[0])
    assert torch.equal(layer.bias, before[1] + 1)
