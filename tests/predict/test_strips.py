"""Strips: the same weights as in the buckets, in fewer pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.kernels.int8 import BLOCK, quantize
from hybridtrainer.predict import strips as strips_module
from hybridtrainer.predict.strips import Strip, anchor_buffers, inner_products, strips_of, window_buffers
from hybridtrainer.weights import Bucket, WeightGroup, Weights


class Doubled:
    """Where a parameter's exact values are that are twice what it shows."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def read(self, start: int, stop: int) -> Tensor:
        return 2 * self.parameter.detach().view(-1)[start:stop].float()


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(0)
    sizes = [(40, 30), (700,), (5, 5), (900,)]
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    half = nn.Parameter(torch.randn(300).half())
    groups = [WeightGroup("one", 0, (*parameters[:2], half)), WeightGroup("two", 0, tuple(parameters[2:]))]
    return Weights(groups, bucket_elements=600)


def padded(bucket: Bucket) -> Tensor:
    return torch.cat([bucket.read(), torch.zeros(-bucket.elements % BLOCK)])


def joined(monkeypatch: pytest.MonkeyPatch, weights: Weights, most: int = 10**6, sample: int = 700) -> list[Strip]:
    monkeypatch.setattr(strips_module, "runs_beside", lambda _: True)
    monkeypatch.setattr(strips_module, "STRIP_ELEMENTS", most)
    monkeypatch.setattr(strips_module, "SAMPLE_ELEMENTS", sample)
    return strips_of(weights)


def test_on_a_cpu_every_bucket_is_a_strip(weights):
    assert [strip.buckets for strip in strips_of(weights)] == [(bucket,) for bucket in weights.buckets]


@pytest.mark.parametrize("most", [1, 600, 1200, 10**6])
def test_strips_are_neighbours_of_one_type_and_no_larger_than_allowed(weights, monkeypatch, most):
    strips = joined(monkeypatch, weights, most)
    assert [bucket for strip in strips for bucket in strip.buckets] == weights.buckets
    for strip in strips:
        assert strip.buckets[0] is weights.buckets[strip.first]
        assert {bucket.segments[0].parameter.dtype for bucket in strip.buckets} == {strip.dtype}
        assert len(strip.buckets) == 1 or sum(bucket.elements for bucket in strip.buckets) <= most
    assert len(strips) == {1: 7, 600: 7, 1200: 4, 10**6: 3}[most]


def test_a_strip_reads_its_buckets_filled_up_to_whole_blocks_each_time_as_they_are(weights, monkeypatch):
    for strip in joined(monkeypatch, weights):
        read = strip.reader()
        for _ in range(2):
            assert torch.equal(read(), torch.cat([padded(bucket) for bucket in strip.buckets]))
            with torch.no_grad():
                for bucket in strip.buckets:
                    bucket.add_(torch.ones(bucket.elements))


def test_values_that_are_elsewhere_are_read_there_each_time(weights, monkeypatch):
    strip = joined(monkeypatch, weights)[0]
    for parameter in {segment.parameter for bucket in strip.buckets for segment in bucket.segments}:
        parameter.home = Doubled(parameter)  # type: ignore[attr-defined]
    read, before = strip.reader(), strip.buckets[0].segments[0].parameter.detach().clone()
    assert torch.equal(read()[:10], 2 * before.view(-1)[:10])
    with torch.no_grad():
        strip.buckets[0].segments[0].parameter.add_(1.0)
    assert torch.equal(read()[:10], 2 * (before + 1.0).view(-1)[:10])


def test_what_is_chosen_of_a_strip_is_what_is_chosen_of_its_buckets(weights, monkeypatch):
    for strip in joined(monkeypatch, weights):
        values = strip.reader()()
        codes, scales = quantize(values)
        by_bucket = strip.by_bucket(values, BLOCK)
        chosen = strips_module.choose_blocks(weights)[strip.first : strip.first + len(strip.buckets)]
        expected = [
            part if some is None else part.view(-1, BLOCK)[some].view(-1)
            for part, some in zip(by_bucket, chosen, strict=True)
        ]
        assert torch.equal(strip.sample(values), torch.cat(expected))
        taken = quantize(torch.cat(expected))
        assert all(torch.equal(a, b) for a, b in zip(strip.take((codes, scales)), taken, strict=True))
        assert [len(part) for part in expected] == [BLOCK * count for count in strip.counts]
    assert any(strip.chosen is not None for strip in joined(monkeypatch, weights))
    assert all(strip.chosen is None for strip in joined(monkeypatch, weights, sample=10**6))


def test_inner_products_count_a_chosen_block_for_those_that_it_stands_for(weights, monkeypatch):
    for strip in joined(monkeypatch, weights):
        one, other = (strip.take(quantize(torch.full((sum(strip.blocks) * BLOCK,), value))) for value in (2.0, 3.0))
        found = inner_products(strip, [one, other])
        blocks = torch.tensor(strip.blocks, dtype=torch.float32)
        assert torch.allclose(found, torch.stack([6.0 * blocks, 9.0 * blocks], 1) * BLOCK)


def test_buffers_have_room_for_every_strip(weights, monkeypatch):
    strips = joined(monkeypatch, weights)
    for strip, anchor, (codes, scales) in zip(strips, anchor_buffers(strips), window_buffers(strips), strict=True):
        blocks = sum(strip.blocks)
        assert (len(anchor), anchor.dtype) == (blocks * BLOCK, strip.dtype)
        assert (len(codes), codes.dtype, len(scales), scales.dtype) == (
            blocks * BLOCK, torch.int8, blocks, torch.float32,
        )  # fmt: skip
