"""Options and grids are checked when they are made."""

from __future__ import annotations

import pytest
from tests.compare.support import config

from hybridtrainer.compare.options import Candidate, Grid, Options
from hybridtrainer.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds: is 0; it must be 1 to 1000"),
        ({"seeds": -1}, "seeds"),
        ({"metric": "f1"}, "metric: is 'f1', not one of accuracy, loss"),
        ({"seeds": 10**9}, "seeds"),
        ({"tolerance": -0.1}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"tolerance": float("inf")}, "tolerance"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as refused:
        Options(**options)
    assert "compare --help" in refused.value.remedy and "init" not in refused.value.remedy


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"rates": ()}, "tune-lr"),
        ({"rates": (1.0, -2.0)}, "tune-lr"),
        ({"rates": (float("nan"),)}, "tune-lr"),
        ({"schedules": ("cosin", "foo")}, "tune-schedule: is cosin, foo; choose from.*constant, cosine, linear"),
        ({"rates": (-1.0,)}, "tune-lr: is -1.0; it must"),
        ({"lengths": (0.5,)}, "must have 1"),
        ({"lengths": (0.0, 1.0)}, "tune-length"),
    ],
)
def test_wrong_grids_are_refused(grid, message):
    with pytest.raises(ConfigError, match=message):
        Grid(**grid)


def test_a_grid_has_every_combination_once():
    candidates = Grid((0.5, 1.0), ("constant", "cosine"), (1.0, 0.6)).candidates()
    assert len(candidates) == len(set(candidates)) == 8
    assert len({candidate.name for candidate in candidates}) == 8
    assert Candidate(1.0, "cosine", 0.6).name == "rate1-cosine-length0.6"
    assert Candidate(1.0000001, "cosine", 1.0).name == "rate1.0000001-cosine-length1"


def test_a_candidate_changes_rate_schedule_and_length_and_nothing_else():
    base = config(schedule={"name": "cosine", "warmup_steps": 10, "final_ratio": 0.2})
    made = Candidate(2.0, "constant", 0.1).apply(base)
    assert (made.optimizer.lr, made.schedule.name, made.train.steps) == (0.02, "constant", 6)
    assert made.schedule.warmup_steps == 5  # within the run
    assert made.schedule.final_ratio == 0.05  # nothing would read another one
    assert made.model == base.model and made.data == base.data and made.seed == base.seed
    assert Candidate(1.0, "cosine", 1.0).apply(base).schedule == base.schedule
