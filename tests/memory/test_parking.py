"""Parked tensors free their memory and come back to the bit."""

from __future__ import annotations

import torch
from torch import nn

from hybridtrainer.memory.parking import Parking, on_gpu


def test_a_parked_tensor_is_its_copy_and_comes_back_in_memory_of_its_own():
    weight = nn.Parameter(torch.randn(6, 5))
    copy, values, own = weight.detach().clone(), weight.detach().clone(), weight.data_ptr()
    parking = Parking(leaves=lambda tensor: True)
    assert parking.park([(weight, copy)]) == weight.nbytes
    assert weight.data_ptr() == copy.data_ptr() != own
    parking.bring_back()
    assert weight.data_ptr() != copy.data_ptr()
    copy.zero_()
    assert torch.equal(weight, values) and weight.requires_grad and weight.is_leaf


def test_the_layout_comes_back_too():
    turned = torch.randn(4, 6).t()
    values, strides = turned.clone(), turned.stride()
    parking = Parking(leaves=lambda tensor: True)
    parking.park([(turned, values.contiguous())])
    parking.bring_back()
    assert turned.stride() == strides and torch.equal(turned, values)


def test_a_hollow_tensor_keeps_its_place_and_cannot_be_read_unnoticed():
    weight = nn.Parameter(torch.randn(6, 5))
    values = weight.detach().clone()
    parking = Parking(leaves=lambda tensor: True, hollow=True)
    parking.park([(weight, values.clone())])
    assert weight.shape == (6, 5) and weight.device == values.device and bool(weight.isnan().all())
    assert weight.untyped_storage().nbytes() == 4
    parking.bring_back()
    assert torch.equal(weight, values) and weight.is_contiguous()


def test_what_is_in_host_memory_stays():
    tensor = torch.ones(3)
    before = tensor.data_ptr()
    parking = Parking()
    assert parking.leaves is on_gpu
    assert parking.park([(tensor, torch.zeros(3))]) == 0
    parking.bring_back()
    assert tensor.data_ptr() == before and tensor.sum() == 3
