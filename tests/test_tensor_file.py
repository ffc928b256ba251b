"""A tree as two files that anybody can read without running code."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hybridtrainer.errors import ModelError
from hybridtrainer.tensor_file import write_tree


def test_both_files_are_plain_and_as_long_as_said(tmp_path):
    tree = {
        "w": torch.arange(3.0),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "step": 4,
        "nothing": torch.empty(0, 3),
    }
    written = write_tree(tmp_path, "part", tree)
    assert sorted(written) == ["part.json", "part.safetensors"]
    for name, (size, digest) in written.items():
        raw = (tmp_path / name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (size, digest)
    found = load_file(tmp_path / "part.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tree.items() if isinstance(value, torch.Tensor))
    assert json.loads((tmp_path / "part.json").read_text())["step"] == 4


def test_the_header_says_where_shards_begin_if_there_are_some(tmp_path):
    tree = {"shard": torch.zeros(2, 3), "whole": torch.zeros(4), "scalar": torch.tensor(1.0)}
    write_tree(tmp_path, "part", tree, {id(tree["shard"]): 5})
    write_tree(tmp_path, "plain", tree)
    with safe_open(tmp_path / "part.safetensors", framework="pt") as file:
        found = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    assert {name: each["saved_offsets"] for name, each in found.items()} == {
        "shard": [5, 0],
        "whole": [0],
        "scalar": [],
    }
    with safe_open(tmp_path / "plain.safetensors", framework="pt") as file:
        assert file.metadata() is None


def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"`w` is torch\.complex128"):
        write_tree(tmp_path, "part", {"w": torch.zeros(2, dtype=torch.complex128)})
