"""The command line under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridtrainer.cli import app
from hybridtrainer.cli_ranks import command, is_first_launched, joined, launched_ranks
from hybridtrainer.observe.runlog import read_log

SETTINGS = [
    "--set", "train.steps=60", "--set", "train.device=cpu", "--set", "save_interval=10", "--set", 'predict=["jumps"]',
    "--set", "warmup_steps=12", "--set", "full_steps=6", "--set", "confidence_threshold=0.0", "--set",
    "waste_limit=1.0", "--set", "lasting_share=1.0", "--set", "train.eval_interval=20", "--json",
]  # fmt: skip


def torchrun(*arguments: str) -> dict[str, Any]:
    """What the first of two ranks answers; it alone prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "hybridtrainer", *arguments], capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    (line,) = done.stdout.strip().splitlines() or [done.stderr]
    answer: dict[str, Any] = json.loads(line)
    return answer


def test_without_torchrun_there_is_one_process_and_nothing_to_join(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # some schedulers set it
    assert launched_ranks() == 1 and is_first_launched()
    assert command() == "hybridtrainer"
    with joined("auto"):
        pass


@pytest.mark.parametrize("verb", ["report", "compare", "doctor"])
def test_verbs_of_one_process_are_refused_on_several_ranks(monkeypatch, verb):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launched_ranks() == 2 and not is_first_launched()
    assert command() == "torchrun --nproc-per-node 2 -m hybridtrainer"
    done = CliRunner().invoke(app, [verb, "somewhere"])
    assert done.exit_code == 2 and "Start it without torchrun" in done.output


def test_two_ranks_train_as_one_process_does_and_write_one_run(tmp_path):
    folder = ["--set", f"run.folder={tmp_path}"]
    both = torchrun("train", "digits", *folder, *SETTINGS, "--set", "run.name=two")
    one = json.loads(CliRunner().invoke(app, ["train", "digits", *folder, *SETTINGS, "--run", "one"]).stdout)
    assert both["status"] == one["status"] == "finished"
    assert both["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], rel=1e-3)
    assert both["statistics"]["forward_samples"] == one["statistics"]["forward_samples"]
    assert both["statistics"]["jumps_accepted"] == one["statistics"]["jumps_accepted"] > 0
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    kinds = [[record["kind"] for record in read_log(tmp_path / run / "log.jsonl")] for run in ("two", "one")]
    assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_a_run_of_two_ranks_resumes_exactly_on_two_and_goes_on_with_one(tmp_path):
    settings = ["digits", "--set", f"run.folder={tmp_path}", *SETTINGS]
    whole = torchrun("train", *settings, "--set", "run.name=whole")
    torchrun("train", *settings, "--set", "run.name=again", "--pause-at", "25")
    torchrun("train", *settings, "--set", "run.name=alone", "--pause-at", "25")
    again = torchrun("resume", str(tmp_path / "again"), "--json")
    assert again["fingerprint"] == whole["fingerprint"]
    alone = json.loads(CliRunner().invoke(app, ["resume", str(tmp_path / "alone"), "--json"]).stdout)
    assert alone["status"] == "finished"
    assert alone["evaluation"]["loss"] == pytest.approx(whole["evaluation"]["loss"], rel=1e-3)


@pytest.mark.slow
def test_a_folder_that_is_taken_is_refused_by_all_ranks(tmp_path):
    (tmp_path / "taken").mkdir()
    Path(tmp_path / "taken" / "log.jsonl").write_text("")
    answer = torchrun("train", "digits", "--set", f"run.folder={tmp_path}", *SETTINGS, "--set", "run.name=taken")
    assert answer["error"]["type"] == "RunFolderError"


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--shard"]])
def test_the_example_learns_on_two_ranks(how):
    example = str(Path(__file__).parent.parent / "examples" / "several_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", example, *how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    assert len(losses) == 7 and losses[0] > 2.8 > losses[5]
