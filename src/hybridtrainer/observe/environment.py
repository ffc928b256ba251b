"""What this machine and this installation are: versions, processors, memory. Nothing here is required to work."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridtrainer import __version__

EXTRAS: dict[str, tuple[str, str]] = {
    "scikit-learn": ("sklearn", 'the digits data set; pip install ".[demo]"'),
    "tokenizers": ("tokenizers", 'byte-pair encoding; pip install ".[bpe]"'),
    "tensorboard": ("tensorboard", 'run.trackers = ["tensorboard"]; pip install ".[track]"'),
    "wandb": ("wandb", 'run.trackers = ["wandb"]; pip install ".[track]"'),
    "triton": ("triton", 'updates of streamed models on a GPU at full speed; pip install ".[kernels]"'),
    "transformers": ("transformers", 'plans from a config.json of Hugging Face; pip install ".[hf]"'),
    "nvidia-ml-py": ("pynvml", 'GPU memory as the driver sees it; pip install ".[gpu]"'),
}
"""Optional packages: name to import, and what is missing without it."""


def environment() -> dict[str, Any]:
    """Versions and hardware, as plain values."""
    return {
        "hybridtrainer": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "packages": {name: _version(name) for name in EXTRAS},
    }


def diagnose(folder: Path) -> list[tuple[str, bool, str]]:
    """Checks of this machine: what was looked at, whether it is well, and what follows."""
    found = environment()
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    checks = [
        ("Python", True, found["python"]),
        ("torch", True, found["torch"]),
        ("processors", True, f"{found['processors']}, torch uses {found['threads']} threads"),
        (
            "memory",
            True,
            f"{psutil.virtual_memory().available / 2**30:.1f} of {found['memory_bytes'] / 2**30:.1f} GiB free",
        ),
        _locked_memory(found["memory_bytes"]),
        _disk(folder, free),
        _run_folder(folder),
        _nvml(),
    ]
    if found["gpus"]:
        for gpu in found["gpus"]:
            checks.append(("GPU", True, f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB"))
    else:
        remedy = "a GPU needs NVIDIA's driver and the torch build for its CUDA version"
        checks.append(("GPU", False, f"none found by torch: training runs on the CPU; {remedy}"))
    for name, (module, use) in EXTRAS.items():
        installed = importlib.util.find_spec(module) is not None
        checks.append((name, installed, f"{_version(name)}" if installed else f"not installed; needed for {use}"))
    return checks


def _locked_memory(total: int) -> tuple[str, bool, str]:
    """A streamed model registers its host memory with CUDA, which some systems count as locked."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= total:
        return "locked memory", True, "not limited"
    told = f"{limit / 2**20:,.0f} MiB allowed; if CUDA refuses to register host memory: ulimit -l unlimited"
    return "locked memory", False, told


def _disk(folder: Path, free: int) -> tuple[str, bool, str]:
    is_well = free > 2**30
    remedy = "" if is_well else "; checkpoints need more: free some, or set run.folder to another disk"
    return "disk", is_well, f"{free / 2**30:.1f} GiB free in {folder}{remedy}"


def _run_folder(folder: Path) -> tuple[str, bool, str]:
    if os.access(folder, os.W_OK):
        return "run folder", True, f"{folder} can be written"
    return "run folder", False, f"{folder} cannot be written; set run.folder to one that can"


def _nvml() -> tuple[str, bool, str]:
    """NVIDIA's library that tells of a card's memory, whoever uses it."""
    try:
        is_well = ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0
    except (OSError, AttributeError):
        is_well = False
    return "NVML", is_well, "there" if is_well else "not found; it comes with NVIDIA's driver"


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory_bytes": properties.total_memory}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
