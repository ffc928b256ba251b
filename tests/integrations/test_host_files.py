"""Files of other libraries that end too early are found before those libraries read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridtrainer.errors import CorruptCheckpointError
from hybridtrainer.integrations.host_files import damage_of, require_whole


def written(folder: Path, name: str) -> Path:
    path, values = folder / name, {"w": torch.arange(999.0)}
    makers: dict[str, Any] = {
        ".json": lambda: path.write_text('{"step": 4}'),
        ".safetensors": lambda: save_file(values, path),
    }
    makers.get(path.suffix, lambda: torch.save(values, path))()
    return path


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt", "a.safetensors", "a.json"])
@pytest.mark.parametrize("bytes_lost", [1, 2000])
def test_a_file_that_lacks_its_end_is_named_and_a_whole_one_passes(tmp_path, name, bytes_lost):
    path = written(tmp_path, name)
    require_whole([path])
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - bytes_lost)])
    with pytest.raises(CorruptCheckpointError, match=f"{name} is .*older checkpoint"):
        require_whole([path])


def test_what_is_missing_is_named_and_what_nobody_knows_passes(tmp_path):
    with pytest.raises(CorruptCheckpointError, match=r"rng_state\.pth is not there"):
        require_whole([tmp_path / "rng_state.pth"])
    (tmp_path / "README.md").write_text("of the user")
    assert damage_of(tmp_path / "README.md") == ""
