"""Proof that resuming is exact: the same run made in one piece and in two, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import to_toml
from hybridtrainer.errors import HybridTrainerError, ModelError
from hybridtrainer.observe.runlog import read_log


@dataclass(frozen=True)
class ResumeProof:
    """What was compared and what came out.

    Attributes:
        steps: Length of the run.
        at: Where the second run was interrupted; the clock may have jumped past the step asked for.
        parts: For each part of the final state, whether it is equal.
        compared_losses: Records of steps and jumps in the uninterrupted run.
        equal_losses: How many of them the other run has too, with the same loss to the last bit.
    """

    steps: int
    at: int
    parts: dict[str, bool]
    compared_losses: int
    equal_losses: int

    @property
    def equal(self) -> bool:
        """Whether everything is."""
        return all(self.parts.values()) and self.equal_losses == self.compared_losses

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"equal": self.equal}


def prove_resume(config: RunConfig, at: int | None = None, say: Callable[[str], object] = str) -> ResumeProof:
    """Trains once without and once with an interruption at step `at`, and compares every bit.

    Args:
        config: The run.
        at: Where to interrupt; the middle where left out.
        say: Told what is about to happen; by default nobody is.

    Raises:
        ModelError: if `at` is not inside the run.
        HybridTrainerError: if one of the runs fails.
    """
    steps = config.train.steps
    pause = steps // 2 if at is None else at
    if not 0 < pause < steps:
        raise ModelError(f"A run of {steps} steps cannot be interrupted at step {pause}.", f"Choose 1 to {steps - 1}.")
    with tempfile.TemporaryDirectory(prefix="hybridtrainer-verify-") as scratch:
        root = Path(scratch)
        file = root / "config.toml"
        file.write_text(to_toml(config.model_copy(update={"run": config.run.model_copy(update={"folder": scratch})})))
        say(f"training {steps} steps without a break ...")
        whole = _run("train", str(file), "--run", "whole")
        say(f"done; training again, up to step {pause} ...")
        settled = root / "whole" / "config.toml"  # what was planned for the first run is not planned again
        first = _run("train", str(settled), "--run", "resumed", "--pause-at", str(pause))
        say(f"paused at step {first['steps']}; resuming in a new process ...")
        second = _run("resume", str(root / "resumed"))
        losses, others = (_losses(root / name / "log.jsonl") for name in ("whole", "resumed"))
    ours, theirs = whole["fingerprint"], second["fingerprint"]
    return ResumeProof(
        steps=steps,
        at=first["steps"],
        parts={part: ours[part] == theirs.get(part) for part in ours if part != "all"},
        compared_losses=len(losses),
        equal_losses=sum(a == b for a, b in zip(losses, others, strict=False)) if len(losses) == len(others) else 0,
    )


def _run(verb: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "hybridtrainer", verb, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"error": {"what": done.stderr.strip()[-2000:] or f"exit code {done.returncode}.", "remedy": ""}}
    if "error" in answer:
        raise HybridTrainerError(f"`hybridtrainer {verb}` failed: {answer['error']['what']}", answer["error"]["remedy"])
    return answer


def _losses(log: Path) -> list[tuple[int, str, Any]]:
    return [(r["step"], r["phase"], r["loss"]) for r in read_log(log) if r["kind"] == "step"]
