"""The search before a comparison: equal budgets, the cheapest way to the goal, edges that move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.compare.support import arm
from tests.compare.test_verdict import rising

from hybridtrainer.compare.arms import Arm
from hybridtrainer.compare.curve import Curve
from hybridtrainer.compare.options import Candidate, Grid
from hybridtrainer.compare.tuning import EXTENSIONS, choose, tune
from hybridtrainer.errors import ConfigError

FAST, SLOW, LOW = Candidate(2, "constant", 1), Candidate(1, "constant", 1), Candidate(1, "cosine", 1)


def test_the_cheapest_way_to_the_goal_wins_even_if_another_ends_higher():
    curves = {FAST: rising(speed=3.0, top=0.95), SLOW: rising(speed=1.0), LOW: rising(top=0.5)}
    assert choose(curves, 0.9) == FAST
    assert choose(curves, 0.94) == FAST
    assert choose(curves, 0.96) == SLOW  # the only one that gets there


def test_where_nobody_gets_there_the_nearest_wins():
    assert choose({FAST: rising(top=0.6), SLOW: rising(top=0.7), LOW: None}, 0.9) == SLOW
    assert choose({FAST: rising(top=0.6), SLOW: rising(top=0.7)}, None) == SLOW


def test_where_everything_diverges_it_is_said():
    with pytest.raises(ConfigError, match="diverges at every rate"):
        choose({FAST: None, SLOW: None}, 0.9)


def test_runs_that_are_too_short_are_not_called_diverging():
    with pytest.raises(ConfigError, match="too short: a run needs at least 5 evaluations"):
        choose({FAST: rising(evaluations=3), SLOW: rising(evaluations=2)}, None)


class Machine:
    """Trains nothing: how fast an arm learns depends on how near its rate is to its best one."""

    def __init__(self, best: dict[str, float]) -> None:
        self.best = best
        self.asked: dict[str, set[Candidate]] = {name: set() for name in best}

    def __call__(self, arm: Arm, candidates: Sequence[Candidate]) -> dict[Candidate, Curve | None]:
        self.asked[arm.name] |= set(candidates)
        made: dict[Candidate, Curve | None] = {}
        for candidate in candidates:
            ratio = max(candidate.rate / self.best[arm.name], self.best[arm.name] / candidate.rate)
            made[candidate] = rising(speed=2 / ratio, evaluations=round(50 * candidate.length))
        return made


ARMS = [arm("plain", "baseline"), arm("hybrid")]
GRID = Grid((0.5, 1.0, 2.0), ("constant",), (1.0,))


def test_a_best_rate_inside_the_grid_ends_the_search():
    machine = Machine({"plain": 1.0, "hybrid": 1.0})
    tuned, report, warnings = tune(ARMS, GRID, None, machine)
    assert warnings == [] and report["budget"] == 3
    assert [arm.config.optimizer.lr for arm in tuned] == [0.01, 0.01]


def test_the_grid_grows_for_all_where_one_arm_is_at_its_edge():
    machine = Machine({"plain": 1.0, "hybrid": 4.0})
    tuned, report, warnings = tune(ARMS, GRID, None, machine)
    assert [arm.config.optimizer.lr for arm in tuned] == [0.01, 0.04]
    assert machine.asked["plain"] == machine.asked["hybrid"]
    assert {len(found["candidates"]) for found in report["arms"].values()} == {report["budget"]} == {5}
    assert warnings == []


def test_an_edge_that_cannot_be_reached_is_a_warning():
    machine = Machine({"plain": 1.0, "hybrid": 1000.0})
    _, report, warnings = tune(ARMS, GRID, None, machine)
    assert report["budget"] == 3 + EXTENSIONS
    assert len(warnings) == 1 and "hybrid is at the edge" in warnings[0]
    assert "--tune-lr" in warnings[0] and "--run" in warnings[0]  # the grid of a folder cannot be changed


def test_a_rate_beyond_all_numbers_is_refused():
    huge = [arm("plain", "baseline", optimizer={"lr": 100.0})]
    with pytest.raises(ConfigError, match="beyond all numbers"):
        tune(huge, Grid((1.0, 1e307), ("constant",), (1.0,)), None, Machine({"plain": 1.0}))


def test_a_single_rate_is_not_searched():
    _, report, warnings = tune(ARMS, Grid((1.0,), ("constant",), (1.0,)), None, Machine({"plain": 9.0, "hybrid": 9.0}))
    assert report["budget"] == 1 and warnings == []


def test_a_shorter_run_is_chosen_where_it_reaches_the_goal():
    machine = Machine({"plain": 1.0, "hybrid": 1.0})
    grid = Grid((1.0,), ("constant",), (1.0, 0.5))
    tuned, _, _ = tune(ARMS, grid, 0.5, machine)
    assert {arm.config.train.steps for arm in tuned} <= {30, 60}
    _, report, _ = tune(ARMS, grid, 0.999, machine)
    assert report["arms"]["plain"]["chosen"]["train.steps"] == 60
