"""Host memory of this process, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridtrainer.observe.own_host import own_host_bytes


def test_pages_of_files_do_not_count(tmp_path: Path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t  100 kB\nRssFile:\t  700 kB\nRssShmem:\t   20 kB\n")
    assert own_host_bytes(status) == 120 * 1024


def test_a_tensor_counts():
    before = own_host_bytes()
    tensor = torch.ones(1 << 24)
    assert own_host_bytes() - before > 0.9 * tensor.nbytes
