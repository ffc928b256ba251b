"""The proof of exact resuming notices when resuming is not exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridtrainer import resume_proof
from hybridtrainer.config import RunConfig
from hybridtrainer.errors import HybridTrainerError, ModelError
from hybridtrainer.resume_proof import prove_resume


def fake_runs(monkeypatch: pytest.MonkeyPatch, resumed_print: str, resumed_losses: list[float]) -> None:
    """Replaces the child processes by canned answers and logs."""

    def run(verb: str, *arguments: str) -> dict[str, Any]:
        is_whole = "whole" in arguments
        folder = Path(arguments[0]).parent / ("whole" if is_whole else "resumed")
        folder.mkdir(exist_ok=True)
        losses = [2.0, 1.5, 1.0, 0.5] if is_whole else resumed_losses
        lines = [{"v": 1, "kind": "step", "step": i, "phase": "full", "loss": loss} for i, loss in enumerate(losses)]
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        part = "same" if is_whole else resumed_print
        return {"steps": 2, "fingerprint": {"parameters": part, "random": "r", "all": "whatever"}}

    monkeypatch.setattr(resume_proof, "_run", run)


def test_equal_runs_are_proven_equal(monkeypatch):
    fake_runs(monkeypatch, "same", [2.0, 1.5, 1.0, 0.5])
    assert prove_resume(RunConfig()).equal


def test_the_interrupted_run_has_the_settings_that_were_settled_for_the_first(monkeypatch):
    fake_runs(monkeypatch, "same", [2.0, 1.5, 1.0, 0.5])
    fake, calls = resume_proof._run, []

    def run(*arguments: str) -> dict[str, Any]:
        calls.append(arguments)
        return fake(*arguments)

    monkeypatch.setattr(resume_proof, "_run", run)
    prove_resume(RunConfig())
    root = Path(calls[0][1]).parent
    assert calls[1][:4] == ("train", str(root / "whole" / "config.toml"), "--run", "resumed")


def test_a_single_different_part_is_named(monkeypatch):
    fake_runs(monkeypatch, "other", [2.0, 1.5, 1.0, 0.5])
    proof = prove_resume(RunConfig())
    assert not proof.equal
    assert proof.parts == {"parameters": False, "random": True}


@pytest.mark.parametrize("losses", [[2.0, 1.5, 1.0, 0.5000001], [2.0, 1.5, 1.0], []])
def test_a_single_different_or_missing_loss_is_noticed(monkeypatch, losses):
    fake_runs(monkeypatch, "same", losses)
    assert not prove_resume(RunConfig()).equal


@pytest.mark.parametrize("at", [0, -1, 1000, 5000])
def test_an_interruption_outside_the_run_is_refused(at):
    with pytest.raises(ModelError, match="cannot be interrupted"):
        prove_resume(RunConfig(), at)


def test_a_run_that_fails_is_reported_with_its_own_words():
    with pytest.raises(HybridTrainerError, match="no file or folder"):
        prove_resume(RunConfig.model_validate({"data": {"source": "text", "path": "/nowhere/at/all"}}))
