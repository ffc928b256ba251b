"""Whole comparisons on real data: what they find, that they go on, and that nothing is trained twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.compare.support import STEPS, Clock, arm, less_accurate

from hybridtrainer.compare.arms import Arm
from hybridtrainer.compare.audit import StoppedError, compare
from hybridtrainer.compare.options import Grid, Options
from hybridtrainer.config import RunConfig
from hybridtrainer.errors import DataError, RunFolderError
from hybridtrainer.observe.progress import Silence
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.tasks import Task, build_task

ROOT = Path(__file__).parents[2]
ARMS = [arm("plain", "baseline"), arm("other")]


def noisy(seed: int, spread: float = 0.05, slower: float = 1.0) -> Callable[[RunConfig], float]:
    """A machine whose speed varies from second to second, and an arm `other` that may be slower."""
    draw = random.Random(seed)
    return lambda config: draw.lognormvariate(0, spread) * (slower if "other" in config.run.name else 1.0)


def run(folder: Path, build: Callable[[RunConfig], Task], arms: list[Arm] = ARMS, **options: Any) -> dict[str, Any]:
    return compare(arms, folder, Options(**({"seeds": 3} | options)), Silence(), build)


def test_plain_against_plain_cannot_be_told_apart(tmp_path, monkeypatch):
    result = run(tmp_path / "aa", Clock(monkeypatch).build(noisy(1)))
    (comparison,) = result["comparisons"]
    assert comparison["verdict"] == "not distinguishable"
    assert comparison["speedup"]["low"] <= 1 <= comparison["speedup"]["high"]
    assert comparison["final_quality"]["per_seed"] == [0.0] * 3  # the same runs, bit for bit, although in turns
    assert comparison["compute"]["mean"] == 1.0


def test_a_slowdown_of_ten_percent_is_found(tmp_path, monkeypatch):
    result = run(tmp_path / "slow", Clock(monkeypatch).build(noisy(1, slower=1.1)), seeds=5)
    (comparison,) = result["comparisons"]
    assert comparison["verdict"] == "slower"
    assert comparison["speedup"]["mean"] == pytest.approx(1 / 1.1, abs=0.03)


def test_a_loss_of_one_percent_of_accuracy_is_found(tmp_path, monkeypatch):
    honest = Clock(monkeypatch).build()

    def build(config: RunConfig) -> Task:
        return less_accurate(honest(config), 0.01) if "other" in config.run.name else honest(config)

    result = run(tmp_path / "worse", build, target=0.5)
    (comparison,) = result["comparisons"]
    assert comparison["verdict"] == "quality lost"
    plain = [trial["final"] for trial in result["arms"]["plain"]["trials"]]
    assert comparison["final_quality"]["mean"] == pytest.approx(-0.01 * sum(plain) / 3)


def test_turns_leave_every_run_as_it_would_be_alone(tmp_path, monkeypatch):
    dropout = {"model": {"name": "cnn-small", "dropout": 0.2}}  # draws from the generator that all share
    arms = [arm("plain", "baseline", **dropout), arm("other", **dropout)]
    run(tmp_path / "turns", Clock(monkeypatch).build(), arms, seeds=1)
    alone = build_task(arms[0].config).fit(None, "off")
    for name in ("plain", "other"):
        log = read_log(tmp_path / "turns" / "trials" / f"{name}-seed0" / "log.jsonl")
        evaluations = [record for record in log if record["kind"] == "evaluation"]
        assert [e["loss"] for e in evaluations] == [e["loss"] for e in alone.evaluations]


def test_arms_take_turns_and_change_their_order(tmp_path, monkeypatch):
    order: list[str] = []

    def noted(config: RunConfig) -> float:
        order.append(config.run.name)
        return 1.0

    build = Clock(monkeypatch).build(noted)
    run(tmp_path / "turns", build, seeds=1)
    turns = [name for name in order if "seed" in name]
    assert turns[:8] == [*["plain-seed0"] * 2, *["other-seed0"] * 4, *["plain-seed0"] * 2]
    order.clear()
    run(tmp_path / "whole", build, seeds=1, whole_runs=True)
    turns = [name for name in order if "seed" in name]
    assert turns == ["plain-seed0"] * STEPS + ["other-seed0"] * STEPS


def test_progress_names_the_seed_or_the_candidate(tmp_path, monkeypatch):
    class Heard(Silence):
        def message(self, text: str) -> None:
            said.append(text)

    said: list[str] = []
    grid = Grid(rates=(1.0,), schedules=("constant",), lengths=(1.0,))
    short: dict[str, Any] = {"train": {"steps": 10, "batch_size": 16, "eval_interval": 1, "eval_batches": 1}}
    arms = [arm("plain", "baseline", **short), arm("other", **short)]
    compare(arms, tmp_path / "c", Options(seeds=2, grid=grid), Heard(), Clock(monkeypatch).build())
    assert said == [
        "tuning plain, candidate 1 of 1 (plain)",
        "tuning other, candidate 1 of 1 (other)",
        "seed 1 of 2 (plain, other)",
        "seed 2 of 2 (plain, other)",
    ]


def test_a_finished_comparison_is_read_not_trained_and_may_get_more_seeds(tmp_path, monkeypatch):
    build = Clock(monkeypatch).build()
    first = run(tmp_path / "c", build, seeds=2)

    def forbidden(config: RunConfig) -> Task:
        raise AssertionError("trained again")

    assert run(tmp_path / "c", forbidden, seeds=2) == first
    again = run(tmp_path / "c", forbidden, seeds=2, target=0.6)
    assert again["target"] == {"value": 0.6, "origin": "given"}
    named = run(tmp_path / "c", forbidden, seeds=2, target=0.6, target_origin="that of the task x")
    assert named["target"] == {"value": 0.6, "origin": "that of the task x"}
    built: list[int] = []

    def counting(config: RunConfig) -> Task:
        built.append(config.seed)
        return build(config)

    more = run(tmp_path / "c", counting, seeds=3)
    assert more["seeds"] == [0, 1, 2] and built.count(2) == 2 and built.count(1) == 0
    assert more["arms"]["plain"]["trials"][:2] == [
        trial | {"reached": new["reached"]}
        for trial, new in zip(first["arms"]["plain"]["trials"], more["arms"]["plain"]["trials"], strict=False)
    ]


@pytest.mark.parametrize(
    "at", [3 * STEPS, pytest.param(3 * STEPS + 2, marks=pytest.mark.slow)]
)  # in the first and in the second arm
def test_a_signal_stops_it_and_the_same_call_goes_on_to_the_same_result(tmp_path, monkeypatch, at):
    whole = run(tmp_path / "whole", Clock(monkeypatch).build(), seeds=2)
    steps = 0

    def interrupted(config: RunConfig) -> float:
        nonlocal steps
        steps += 1
        if steps == at:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    build = Clock(monkeypatch).build(interrupted)
    with pytest.raises(StoppedError) as stopped:
        run(tmp_path / "stopped", build, seeds=2)
    assert stopped.value.signal == signal.SIGTERM
    for name in ("plain", "other"):  # all that were on their way have saved where they were
        log = read_log(tmp_path / "stopped" / "trials" / f"{name}-seed1" / "log.jsonl")
        saved = [record["step"] for record in log if record["kind"] == "checkpoint"][-1]
        assert saved == [record["step"] for record in log if record["kind"] == "step"][-1]
    resumed = run(tmp_path / "stopped", Clock(monkeypatch).build(), seeds=2)
    assert resumed | {"name": "whole"} == whole


def test_a_run_that_diverges_is_a_finding(tmp_path, monkeypatch):
    arms = [arm("plain", "baseline"), arm("other", optimizer={"lr": 1e30, "name": "sgd", "weight_decay": 0.0})]
    result = run(tmp_path / "c", Clock(monkeypatch).build(), arms, target=0.5)
    assert result["comparisons"][0]["verdict"] == "quality lost"
    assert {trial["status"] for trial in result["arms"]["other"]["trials"]} == {"diverged"}
    assert any("other diverged in 3 of 3 seeds" in warning for warning in result["warnings"])
    assert run(tmp_path / "c", Clock(monkeypatch).build(), arms, target=0.5) == result


def test_another_comparison_or_a_run_in_the_folder_is_refused_untouched(tmp_path, monkeypatch):
    build = Clock(monkeypatch).build()
    run(tmp_path / "c", build, seeds=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*") if path.name != "lock"}
    with pytest.raises(RunFolderError, match="holds another comparison"):
        run(tmp_path / "c", build, [ARMS[0], arm("other", optimizer={"lr": 0.5})], seeds=1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*") if path.name != "lock"} == before
    with pytest.raises(RunFolderError, match="holds a run, not a comparison"):
        run(tmp_path / "c" / "trials" / "plain-seed0", build, seeds=1)
    (tmp_path / "c" / "compare.json").write_text("{")
    with pytest.raises(RunFolderError, match="damaged"):
        run(tmp_path / "c", build, seeds=1)


def test_arms_with_different_data_are_refused(tmp_path, monkeypatch):
    arms = [arm("plain", "baseline"), arm("other", data={"source": "digits", "validation_share": 0.3})]
    with pytest.raises(DataError, match="data of the arm other are not those with which"):
        run(tmp_path / "c", Clock(monkeypatch).build(), arms)
    assert not (tmp_path / "c" / "result.json").exists()


def test_data_that_changed_since_the_beginning_are_refused(tmp_path, monkeypatch):
    build = Clock(monkeypatch).build()
    first = run(tmp_path / "c", build, seeds=1)

    def other_data(config: RunConfig) -> Task:
        task = build(config)
        task.loader.dataset.labels[0] += 1  # type: ignore[attr-defined]
        return task

    with pytest.raises(DataError, match="not those with which this comparison was begun"):
        run(tmp_path / "c", other_data, seeds=2)
    assert run(tmp_path / "c", other_data, seeds=1) == first  # what is there is only judged


def test_a_first_attempt_that_finds_no_data_does_not_take_the_name(tmp_path, monkeypatch):
    build = Clock(monkeypatch).build()

    def missing(config: RunConfig) -> Task:
        raise DataError("There is no file.", "Check it.")

    with pytest.raises(DataError):
        run(tmp_path / "c", missing, seeds=1)
    run(tmp_path / "c", build, [ARMS[0], arm("other", optimizer={"lr": 0.5})], seeds=1)


def test_trials_of_an_arm_that_is_tuned_anew_are_not_mixed_with_the_old_ones(tmp_path, monkeypatch):
    build = Clock(monkeypatch).build()
    grid = Grid(rates=(1.0,), schedules=("constant",), lengths=(1.0, 0.5))
    easy = run(tmp_path / "c", build, seeds=1, grid=grid, target=0.3)
    hard = run(tmp_path / "c", build, seeds=2, grid=grid, target=0.999)
    for result in (easy, hard):
        for found in result["arms"].values():
            assert {trial["steps"] for trial in found["trials"]} == {found["config"]["train"]["steps"]}
    assert hard["arms"]["plain"]["config"]["train"]["steps"] == STEPS


def test_numbers_that_json_does_not_have_are_null(tmp_path, monkeypatch):
    arms = [arm("plain", "baseline"), arm("other", optimizer={"lr": 1e30, "name": "sgd", "weight_decay": 0.0})]
    run(tmp_path / "c", Clock(monkeypatch).build(), arms, metric="loss")
    text = (tmp_path / "c" / "result.json").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_tuning_gives_every_arm_the_same_budget_and_keeps_what_it_trained(tmp_path, monkeypatch):
    built: list[tuple[float, str, int]] = []
    clock = Clock(monkeypatch)

    def build(config: RunConfig) -> Task:
        built.append((config.optimizer.lr, config.schedule.name, config.train.steps))
        return clock.build()(config)

    short: dict[str, Any] = {"train": {"steps": 20, "batch_size": 16, "eval_interval": 1, "eval_batches": 1}}
    arms = [
        arm("plain", "baseline", optimizer={"lr": 5e-3, "weight_decay": 0.0}, **short),
        arm("other", optimizer={"lr": 1e-4}, **short),
    ]
    grid = Grid(rates=(0.1, 1.0, 2.0), schedules=("constant",), lengths=(1.0, 0.5))
    result = run(tmp_path / "c", build, arms, seeds=2, grid=grid)
    tuning = result["tuning"]
    assert result["tuned"] and tuning["budget"] > 6
    assert {name: len(found["candidates"]) for name, found in tuning["arms"].items()} == {
        "plain": tuning["budget"],
        "other": tuning["budget"],
    }
    assert max(lr for lr, _, _ in built) > 2e-4  # the grid of the slow arm grew
    for name in ("plain", "other"):
        chosen, used = tuning["arms"][name]["chosen"], result["arms"][name]["config"]
        assert (used["optimizer"]["lr"], used["schedule"]["name"], used["train"]["steps"]) == tuple(chosen.values())
    count = len(built)
    assert run(tmp_path / "c", build, arms, seeds=2, grid=grid) == result
    assert len(built) == count


def test_evaluation_time_is_apart(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)

    def build(config: RunConfig) -> Task:
        task = clock.build()(config)
        evaluate = task.trainer.evaluate

        def slow(*arguments: Any) -> float:
            clock.now += 1000.0
            return evaluate(*arguments)

        task.trainer.evaluate = slow  # type: ignore[assignment, method-assign]
        return task

    result = run(tmp_path / "c", build, seeds=1)
    (trial,) = result["arms"]["plain"]["trials"]
    assert trial["training_seconds"] == STEPS and trial["evaluation_seconds"] == 2000.0 * (STEPS / 2)


def test_the_result_is_on_disk_as_it_was_returned(tmp_path, monkeypatch):
    result = run(tmp_path / "c", Clock(monkeypatch).build(), seeds=1)
    assert json.loads((tmp_path / "c" / "result.json").read_text()) == json.loads(json.dumps(result))
    assert result["comparisons"][0]["verdict"] == "no verdict"  # one seed


def test_a_second_comparison_in_the_same_folder_waits_outside(tmp_path, monkeypatch):
    build = Clock(monkeypatch).build()

    def second(config: RunConfig) -> Task:
        with pytest.raises(RunFolderError, match="Another process"):
            run(tmp_path / "c", build, seeds=1)
        return build(config)

    run(tmp_path / "c", second, seeds=1)


@pytest.mark.slow
def test_killed_twice_it_goes_on_to_the_same_result(tmp_path, monkeypatch):
    arms = [arm("plain", "baseline"), arm("other", readout="averaged")]
    whole = run(tmp_path / "whole", Clock(monkeypatch).build(), arms, seeds=2)
    for steps in (3 * STEPS // 2, STEPS):  # in the first seed, and in the second one after a resume
        command = [sys.executable, "-m", "tests.compare.kill_driver", str(tmp_path / "killed"), str(steps)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "killed" / "result.json").exists()
    resumed = run(tmp_path / "killed", Clock(monkeypatch).build(), arms, seeds=2)
    assert resumed | {"name": "whole"} == whole
