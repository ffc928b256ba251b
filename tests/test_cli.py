"""The command line as people type it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.making import make_run
from typer.testing import CliRunner, Result

from hybridtrainer import HybridTrainer, __version__, cli
from hybridtrainer.cli import app
from hybridtrainer.config_io import load_config
from hybridtrainer.errors import RunFolderError
from hybridtrainer.memory.body import Body

FAST = [
    "--set", "train.steps=40", "--set", "train.batch_size=4", "--set", "train.eval_batches=1",
    "--set", "model.context=16", "--set", "save_interval=15", "--set", "warmup_steps=10", "--set", "full_steps=5",
    "--set", "confidence_threshold=0.1", "--set", "waste_limit=1", "--set", "lasting_share=1",
]  # fmt: skip


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)


def train_arguments(*more: str) -> list[str]:
    return ["train", *FAST, "--set", "data.source=text", "--set", "data.path=text.txt", *more]


VERBS = ["init", "validate", "train", "resume", "verify-resume", "compare", "report", "doctor", "plan", "profile"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb):
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


def test_the_command_line_does_not_drift():
    result = invoke("--help")
    commands = result.output.split("Commands:")[1].split("Exit codes")[0].splitlines()
    assert [line.split()[0] for line in commands if line.startswith("  ") and line[2:3].strip()] == [*VERBS, "bench"]
    assert invoke("--version").output.strip() == __version__
    words = {verb: invoke(verb, "--help").output.replace(",", " ").split() for verb in VERBS}
    words["bench stream"] = invoke("bench", "stream", "--help").output.replace(",", " ").split()
    assert {verb: sorted({word for word in words[verb] if word.startswith("--")}) for verb in words} == {
        "init": ["--force", "--help", "--json", "--no-force", "--preset", "--task"],
        "validate": ["--help", "--json", "--set"],
        "train": ["--help", "--json", "--pause-at", "--quiet", "--run", "--set"],
        "resume": ["--help", "--json", "--quiet"],
        "verify-resume": ["--at", "--help", "--json", "--set"],
        "compare": [
            "--help",
            "--json",
            "--metric",
            "--quiet",
            "--run",
            "--seeds",
            "--set",
            "--target",
            "--tolerance",
            "--tune",
            "--tune-length",
            "--tune-lr",
            "--tune-schedule",
            "--whole-runs",
        ],
        "report": ["--force", "--help", "--json", "--out"],
        "doctor": ["--calibrate", "--help", "--json"],
        "profile": [
            "--csv",
            "--force",
            "--help",
            "--html",
            "--json",
            "--jsonl",
            "--quiet",
            "--set",
            "--spike",
            "--steps",
        ],
        "plan": [
            "--accumulate",
            "--force",
            "--hardware",
            "--help",
            "--json",
            "--model",
            "--ram",
            "--readout",
            "--seq",
            "--tokens",
            "--vram",
            "--write",
        ],
        "bench stream": [
            "--blocks",
            "--context",
            "--device",
            "--help",
            "--json",
            "--max-gpu-blocks",
            "--mode",
            "--model",
            "--no-offload-activations",
            "--no-pack-weights",
            "--offload-activations",
            "--pack-weights",
            "--split",
            "--steps",
            "--tokens",
            "--vram-cap",
        ],
    }


def test_help_needs_neither_torch_nor_pydantic_and_touches_nothing(tmp_path):
    script = """
import sys
sys.argv = ["hybridtrainer", "--help"]
from hybridtrainer.cli import main
try:
    main()
except SystemExit:
    pass
heavy = sorted({"torch", "pydantic", "numpy", "sklearn", "rich", "jinja2"} & set(sys.modules))
print("HEAVY", heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "HEAVY []" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="torch has growing segments on Linux alone")
def test_segments_of_gpu_memory_grow_unless_somebody_says_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "app", lambda: seen.append([os.environ.get(name) for name in cli.ALLOCATOR]))
    for given in ({}, {cli.ALLOCATOR[0]: "backend:native"}, {cli.ALLOCATOR[1]: "backend:native"}):
        monkeypatch.setattr(os, "environ", dict(given))
        cli.main()
    assert seen == [["expandable_segments:True", None], ["backend:native", None], [None, "backend:native"]]


def test_init_writes_a_file_that_validates_and_never_overwrites():
    assert invoke("init", "mine.toml", "--preset", "aggressive").exit_code == 0
    assert load_config("mine.toml").confidence_threshold == 0.55
    assert "# real steps before anything is forecast" in Path("mine.toml").read_text()
    assert invoke("validate", "mine.toml").exit_code == 0
    again = invoke("init", "mine.toml")
    assert again.exit_code != 0 and "--force" in again.output
    assert load_config("mine.toml").confidence_threshold == 0.55
    assert invoke("init", "mine.toml", "--force").exit_code == 0
    assert load_config("mine.toml").confidence_threshold == 0.85
    assert invoke("init", "x.toml", "--preset", "agressive").exit_code == 2
    assert not Path("x.toml").exists()


def test_validate_lists_every_error_at_once_and_touches_nothing(tmp_path):
    Path("bad.toml").write_text('warmup_step = 5\nfull_steps = "x"\n[optimizer]\nname = "adamm"\nlr = -1\n')
    before = sorted(tmp_path.rglob("*"))
    result = invoke("validate", "bad.toml", "--set", "run.nam=x")
    assert result.exit_code == 2
    for part in (
        "warmup_step",
        "warmup_steps?",
        "full_steps",
        "optimizer.name",
        "adam",
        "optimizer.lr",
        "run.nam",
        "name?",
    ):
        assert part in result.output
    as_json = json.loads(invoke("validate", "bad.toml", "--json").output)
    assert {problem["key"] for problem in as_json["error"]["problems"]} == {
        "warmup_step", "full_steps", "optimizer.name", "optimizer.lr",
    }  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["validate", "missing.toml"], 2),
        (["train", "--set", "model.name=llama"], 2),
        (["train", "--set", "train.steps=0"], 2),
        (["train", "--run", "../evil"], 2),
        (["validate", "--set", "run.name=../evil"], 2),
        (["train", "--set", "data.source=text", "--set", "data.path=missing.txt"], 3),
        (["train", "--set", "data.source=idx", "--set", "data.path=.", "--set", "model.name=cnn"], 3),
        (["train", "--set", "data.source=text", "--set", "data.path=text.txt", "--set", "model.context=100000"], 3),
        (["train", "--set", "train.device=cuda"], 2),
        (["train", "--set", 'hooks=["nobody"]', "--set", "data.source=text", "--set", "data.path=text.txt"], 1),
        (["resume", "nowhere"], 5),
        (["report", "nowhere"], 5),
        (["report", "."], 5),
        (["verify-resume", "--set", "train.steps=10", "--at", "10"], 2),
    ],
)
def test_bad_input_gives_a_clear_error_its_exit_code_and_no_run_folder(arguments, code):
    import torch

    if "train.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert "Error:" in result.output and "Traceback" not in result.output
    as_json = invoke(*arguments, "--json")
    assert as_json.exit_code == code
    error = json.loads(as_json.output)["error"]
    assert error["what"] and error["type"].endswith("Error")
    assert not Path("runs").exists() and not Path("../evil").exists()


def test_train_makes_a_run_that_can_be_resumed_and_is_not_overwritten():
    result = invoke(*train_arguments("--json", "--pause-at", "20"))
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["status"] == "paused" and answer["run"] == "runs/run"
    assert sorted(path.name for path in Path("runs/run").iterdir()) == [
        "checkpoints", "config.toml", "environment.json", "lock", "log.jsonl", "statistics.json",
    ]  # fmt: skip
    again = invoke(*train_arguments())
    assert again.exit_code == 5 and "already holds a run" in again.output
    assert "hybridtrainer resume" in again.output
    resumed = invoke("resume", "runs/run", "--quiet")
    assert resumed.exit_code == 0, resumed.output
    assert "Finished at step 40" in resumed.output and "real steps" in resumed.output
    finished = json.loads(invoke("resume", "runs/run", "--json").output)
    assert finished["status"] == "finished" and finished["steps"] == 40


def test_a_run_that_was_made_from_python_is_not_resumed_and_the_message_says_where_it_is():
    model = torch.nn.Linear(2, 1)
    trainer = HybridTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    trainer.fit([torch.ones(3, 2)], 4, run_dir="runs/mine", pause_at=2, progress="off")
    before = Path("runs/mine/log.jsonl").read_bytes()
    result = invoke("resume", "runs/mine")
    assert result.exit_code == 5
    assert "made from Python" in result.output and "resume=True" in result.output
    assert Path("runs/mine/log.jsonl").read_bytes() == before
    with pytest.raises(RunFolderError, match="from its own program, with resume=True"):
        trainer.fit([torch.ones(3, 2)], 4, run_dir="runs/mine", progress="off")


def test_the_resolved_configuration_in_the_run_folder_is_the_one_that_ran():
    arguments = train_arguments("--set", "preset=conservative", "--quiet", "--run", "mine")
    assert invoke(*arguments).exit_code == 0
    kept = load_config("runs/mine/config.toml")
    assert kept.max_predict_steps == 50 and kept.train.steps == 40 and kept.run.name == "mine"


def test_digits_train_from_the_command_line():
    result = invoke(
        "train", "--set", "data.source=digits", "--set", "model.name=cnn-small", "--set", "train.steps=30", "--json",
        "--set", "model.batch_norm=true", "--set", "optimizer.name=sgd", "--set", "optimizer.momentum=0.9",
        "--set", "schedule.name=cosine", "--set", "schedule.warmup_steps=5", "--set", "train.accumulate=2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert 0 < json.loads(result.output)["evaluation"]["accuracy"] <= 1


def test_report_says_where_the_page_is_and_how_large():
    make_run(Path("runs/mine"), 100)
    said = invoke("report", "runs/mine")
    assert said.exit_code == 0 and "runs/mine/report.html" in said.output and "kB" in said.output
    answer = json.loads(invoke("report", "runs/mine", "--out", "other.html", "--json").output)
    assert answer == {"path": "other.html", "bytes": Path("other.html").stat().st_size}
    Path("mine.html").write_text("my own page")
    refused = invoke("report", "runs/mine", "--out", "mine.html")
    assert refused.exit_code == 5 and "--force" in refused.output and Path("mine.html").read_text() == "my own page"
    assert invoke("report", "runs/mine", "--out", "mine.html", "--force").exit_code == 0


def test_a_budget_alone_is_planned_and_the_run_folder_keeps_what_was_settled():
    result = invoke(*train_arguments("--set", "memory.vram=2GB", "--set", "train.steps=2"))
    assert result.exit_code == 0
    assert "planned: resident" in result.output
    kept = load_config("runs/run/config.toml").memory
    assert (kept.mode, kept.vram) == ("resident", None)


def test_a_planned_run_ends_with_its_plan_against_what_it_took_and_a_resumed_one_too():
    budget = train_arguments("--set", "memory.vram=2GB", "--set", "train.steps=20", "--quiet")
    paused = invoke(*budget, "--pause-at", "8")
    assert paused.exit_code == 0
    lines = {line[:14].strip(): line for line in paused.output.splitlines()}
    assert lines["GPU memory"].endswith("unavailable: there is no GPU")
    assert lines["seconds a step"].endswith("unavailable: plans have seconds for GPUs only")
    assert lines["host memory"].endswith("%") and "this one ran on a CPU" in paused.output
    found = json.loads(invoke("resume", "runs/run", "--json").output)["against_plan"]
    assert (found["step"], found["from_step"]) == (20, 8)
    assert "Measured from step 8 on" in found["remarks"][-1]
    assert min(found["figures"][1]["planned"], found["figures"][1]["actual"]) > 1 << 20
    assert invoke("report", "runs/run").exit_code == 0
    assert "Plan against actual" in Path("runs/run/report.html").read_text()


def test_a_run_that_was_not_planned_has_no_plan_in_its_answer():
    result = invoke(*train_arguments("--set", "train.steps=2", "--json"))
    assert json.loads(result.output)["against_plan"] is None


def test_doctor_says_what_is_there_and_what_is_not():
    result = invoke("doctor")
    assert result.exit_code == 0
    for part in ("torch", "memory", "disk", "GPU", "scikit-learn"):
        assert part in result.output
    assert json.loads(invoke("doctor", "--json").output)["environment"]["hybridtrainer"] == __version__


def test_sigterm_ends_a_real_process_with_a_checkpoint_and_code_143(tmp_path):
    command = [sys.executable, "-m", "hybridtrainer", *train_arguments("--set", "train.steps=100000", "--quiet")]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs/run/log.jsonl"
    for _ in range(600):
        if log.exists() and log.read_bytes().count(b"\n") > 20:
            break
        time.sleep(0.1)
    os.kill(child.pid, signal.SIGTERM)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 143, errors
    assert "hybridtrainer resume runs/run" in output
    assert list((tmp_path / "runs/run/checkpoints").glob("*-step-*"))


@pytest.mark.slow
def test_verify_resume_proves_equality_in_processes_of_their_own():
    arguments = [
        "verify-resume",
        *FAST,
        "--set",
        "data.source=text",
        "--set",
        "data.path=" + str(Path("text.txt").resolve()),
    ]
    result = invoke(*arguments, "--at", "23", "--json")
    assert result.exit_code == 0, result.output
    proof: dict[str, Any] = json.loads(result.output)
    assert proof["equal"] and all(proof["parts"].values())
    assert proof["equal_losses"] == proof["compared_losses"] > 30
    assert proof["at"] >= 23
    assert not Path("runs").exists()


def test_compare_says_a_verdict_writes_a_report_and_is_not_trained_twice():
    settings = ["--set", "train.steps=30", "--set", "train.eval_batches=1", "--set", "warmup_steps=5"]
    result = invoke("compare", "digits", "--seeds", "1", "-q", *settings)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("No verdict:")
    assert "As a picture: runs/compare-digits/report.html" in result.output
    assert Path("runs/compare-digits/report.html").read_text().startswith("<!DOCTYPE html>")
    before = Path("runs/compare-digits/trials/hybrid-seed0/log.jsonl").stat()
    again = invoke("compare", "digits", "--seeds", "1", "--json", "--target", "0.2", *settings)
    answer = json.loads(again.output)
    assert answer["target"] == {"value": 0.2, "origin": "given"} and answer["report"].endswith("report.html")
    assert Path("runs/compare-digits/trials/hybrid-seed0/log.jsonl").stat() == before
    Path("runs/compare-digits/report.html").write_text("mine")
    third = invoke("compare", "digits", "--seeds", "1", *settings)
    assert "comparing: plain, plain-averaged and hybrid, 1 seed, 90 steps in all" in third.output
    assert third.exit_code == 0 and "As a picture: none" in third.output
    assert Path("runs/compare-digits/report.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Name a file, or a task: digits, stdlib-gpt, mnist"),
        (["digits", "--seeds", "0"], 2, "seeds: is 0"),
        (["digits", "--seeds", "0"], 2, "hybridtrainer compare --help"),
        (["digits", "--target", "soon"], 2, "target"),
        (["digits", "--tune", "--tune-lr", "a"], 2, "tune-lr"),
        (["digits", "--set", "predict=off"], 2, "hybrid would be plain"),
        (["nothing.toml"], 2, "cannot be read"),
        (["digits", "--run", "../x"], 5, "cannot be the name"),
        (["fashion-mnist"], 2, "data.path"),
        (["fashion-mnist", "--set", "data.path=nowhere"], 3, "has no file"),
    ],
)
def test_compare_refuses_bad_input_before_it_trains(arguments, code, message):
    result = invoke("compare", *arguments)
    assert result.exit_code == code and message in result.output, result.output
    assert not list(Path().rglob("log.jsonl"))


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
def test_a_streamed_model_that_runs_out_of_gpu_memory_ends_with_its_code_and_one_object(monkeypatch):
    original = Body.gradients

    def hungry(body: Body, weights: Any, *rest: Any) -> Any:
        if weights[0].is_meta:
            return original(body, weights, *rest)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(Body, "gradients", hungry)
    result = invoke(*train_arguments("--set", "memory.mode=split8", "--run", "r", "--json"))
    assert result.exit_code == 8, result.output
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "GpuMemoryError" and "in the backward pass of a block" in error["what"]
    assert "memory.max_gpu_blocks = 2: " in error["remedy"]
