"""Resuming is exact: from every step of a run, in every phase, in a process that did not make the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.resume_driver import AHEAD, RUNS, STEPS, record

from hybridtrainer.records import Phase

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(RUNS))
def test_resume_at_each_of_60_steps_has_the_same_future_bit_for_bit(kind, tmp_path):
    made = record(kind, tmp_path)
    assert {phase for _, phase, _ in made[:STEPS]} == set(Phase), "the run must be resumed into every phase"
    done = subprocess.run(
        [sys.executable, "-m", "tests.resume_driver", kind, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    replayed = json.loads(done.stdout)
    assert len(replayed) == STEPS
    for index, (loaded, results, after) in enumerate(replayed):
        assert loaded == made[index][0], f"state after loading step {index}"
        assert results == [result for _, _, result in made[index + 1 : index + 1 + AHEAD]], f"future of step {index}"
        assert after == made[index + AHEAD][0], f"state {AHEAD} steps after step {index}"
