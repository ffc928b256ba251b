"""Files that a host has written into its checkpoints: whether they are whole, before the host reads them.

Only what ends too early, or is not what its name says, is found here, which takes milliseconds; single wrong bits are
found by the sums that HybridTrainer keeps of what the host writes. This module knows no framework.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hybridtrainer.errors import CorruptCheckpointError

MADE_BY_TORCH = {".pt", ".pth", ".bin", ".ckpt"}


def require_whole(files: Iterable[Path]) -> None:
    """Refuses a checkpoint of a host with a file that is missing, or that was not written to its end.

    Raises:
        CorruptCheckpointError: naming the file.
    """
    for path in files:
        found = damage_of(path)
        if found:
            raise CorruptCheckpointError(
                f"{path} {found}: the checkpoint was not written to its end, or was damaged since. Nothing was loaded.",
                "Use an older checkpoint, or restore that file from a copy.",
            )


def damage_of(path: Path) -> str:
    """What is wrong with a file, by its ending; empty where nothing is, or nobody knows.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "state.json"
    ...     damage_of(path), path.write_text("{}"), damage_of(path), path.write_text("{"), damage_of(path)
    ('is not there', 2, '', 1, 'is no JSON')
    """
    if not path.is_file():
        return "is not there"
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in MADE_BY_TORCH and not zipfile.is_zipfile(path):
            return "is cut short, or is no file of torch.save"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except SafetensorError as error:
        return f"is cut short, or is no safetensors file ({error})"
    except ValueError:
        return "is no JSON"
    return ""
