"""A loop of one's own keeps the run folder of `fit`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integrations.making import ALL_PHASES, PHASES, log_of, phases_in, statistics, timeless
from tests.support import gpt_setup

from hybridtrainer.errors import ModelError, RunFolderError
from hybridtrainer.integrations.own_loop import own_loop
from hybridtrainer.report.page import write_report

KINDS = ("step", "jump", "phase", "notice", "forecast", "evaluation", "checkpoint")
SETTINGS: dict[str, Any] = ALL_PHASES | {"save_interval": 25}


def go(folder: Any, setup: Any, until: int = 200, first: int = 0, steps: int = 200, **options: Any) -> Any:
    trainer = setup.trainer(settings=SETTINGS)
    options = {"validation": setup.probes, "eval_interval": 40, **options}
    used = first
    with own_loop(trainer, steps, folder, **options) as run:
        for batch in setup.batches[first:]:
            if trainer.step_count >= min(until, steps):
                break
            result = run.step(batch)
            assert result.step == trainer.step_count
            used += 1
        assert run.left == max(0, steps - trainer.step_count)
    return trainer, used


@pytest.mark.slow
def test_two_hundred_steps_leave_what_fit_leaves(tmp_path):
    trainer, _ = go(tmp_path / "own", gpt_setup())
    assert trainer.step_count >= 200 and trainer.statistics().jumps_kept
    native = gpt_setup()
    fitted = native.trainer(settings=SETTINGS)
    fitted.fit(native.batches, 200, run_dir=tmp_path / "native", validation=native.probes, eval_interval=40,
               progress="off")  # fmt: skip
    ours, theirs = log_of(tmp_path / "own"), log_of(tmp_path / "native")
    assert phases_in(ours) == PHASES
    assert timeless(ours, *KINDS) == timeless(theirs, *KINDS)
    assert {record["kind"] for record in ours} == {record["kind"] for record in theirs}
    assert timeless(ours, "end") == timeless(theirs, "end")
    assert trainer.fingerprint() == fitted.fingerprint()
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("own", "native")]
    assert files[0] == files[1]
    assert (tmp_path / "own" / "config.toml").read_text() == (tmp_path / "native" / "config.toml").read_text()
    assert statistics(tmp_path / "own").keys() == statistics(tmp_path / "native").keys()
    page = tmp_path / "report.html"
    write_report([tmp_path / "own"], page)
    assert "predict" in page.read_text().lower()


def test_a_loop_that_was_left_resumes_exactly(tmp_path):
    trainer, _ = go(tmp_path / "whole", gpt_setup(), steps=70)
    _, used = go(tmp_path / "parts", gpt_setup(), until=40, steps=70)
    assert log_of(tmp_path / "parts")[-1]["status"] == "paused"
    again, _ = go(tmp_path / "parts", gpt_setup(), first=used, steps=70, resume=True)
    assert again.fingerprint() == trainer.fingerprint()
    kinds = ("step", "jump", "phase", "evaluation", "forecast")
    assert timeless(log_of(tmp_path / "parts"), *kinds) == timeless(log_of(tmp_path / "whole"), *kinds)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_loop_is_logged_and_leaves_a_checkpoint(tmp_path, error):
    setup = gpt_setup()
    trainer = setup.trainer(settings=SETTINGS)
    with pytest.raises(error), own_loop(trainer, 200, tmp_path / "run") as run:
        run.step(setup.batches[0])
        raise error("mine")
    assert timeless(log_of(tmp_path / "run"), "error")[0]["error"] == f"{error.__name__}: {error('mine')}"
    again = gpt_setup().trainer(settings=SETTINGS)
    with own_loop(again, 200, tmp_path / "run", resume=True) as run:
        assert again.step_count == 1
        run.step(setup.batches[1])
        run.save()
    assert again.listeners == []


def test_what_makes_no_sense_is_refused_and_a_folder_with_a_run_too(tmp_path):
    trainer = gpt_setup().trainer()
    with pytest.raises(ModelError, match="0 steps"), own_loop(trainer, 0, tmp_path / "run"):
        pass
    steps: Any = "a"
    with pytest.raises(ModelError, match="'a' steps"), own_loop(trainer, steps, tmp_path / "run"):
        pass
    with own_loop(trainer, 1, tmp_path / "run"):
        pass
    with pytest.raises(RunFolderError, match="already holds a run"), own_loop(trainer, 1, tmp_path / "run"):
        pass


def test_a_run_that_is_over_says_so_and_makes_no_step(tmp_path):
    setup = gpt_setup()
    trainer = setup.trainer(settings={"predict": "off"})
    with own_loop(trainer, 3, tmp_path / "run") as run:
        run.step(setup.batches[0])
    for late in (lambda: run.step(setup.batches[1]), run.save):
        with pytest.raises(RunFolderError, match=r"is over.*inside the block"):
            late()
    assert trainer.step_count == 1
