"""Errors say what happened and what to do, and have the exit codes that scripts rely on."""

from __future__ import annotations

import copy
import pickle

import pytest

from hybridtrainer import errors
from hybridtrainer.errors import ConfigError, DataError, HybridTrainerError, Problem

EXIT_CODES = {
    "HybridTrainerError": 1,
    "ConfigError": 2,
    "DataError": 3,
    "ModelError": 2,
    "LossError": 2,
    "DivergenceError": 6,
    "CheckpointError": 4,
    "SaveError": 4,
    "CorruptCheckpointError": 4,
    "ForeignCheckpointError": 4,
    "MemoryBudgetError": 8,
    "GpuMemoryError": 8,
    "TornStepError": 8,
    "RunFolderError": 5,
    "LockedError": 5,
    "RankError": 9,
    "MissingPackageError": 2,
    "HookError": 1,
}


def test_every_error_has_its_exit_code():
    found = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, HybridTrainerError)
    }
    assert {name: kind.exit_code for name, kind in found.items()} == EXIT_CODES


def test_the_message_is_what_happened_and_what_to_do():
    error = DataError("The file is empty.", "Give it lines.")
    assert str(error) == "The file is empty. Give it lines."
    assert (error.what, error.remedy) == ("The file is empty.", "Give it lines.")


def test_a_problem_reads_as_one_line():
    assert str(Problem("train.stepz", "is not a known key.", "Did you mean steps?")) == (
        "train.stepz: is not a known key. Did you mean steps?"
    )
    assert str(Problem("seed", "is -1.")) == "seed: is -1."


def test_a_configuration_error_counts_and_lists_its_problems():
    problems = (Problem("a", "is wrong."), Problem("b", "is too."))
    error = ConfigError("run.toml", problems)
    assert error.problems == list(problems)
    assert "run.toml has 2 errors:\n  a: is wrong.\n  b: is too.\n" in str(error)
    assert "has 1 error:" in str(ConfigError("run.toml", problems[:1]))
    assert "hybridtrainer init" in error.remedy
    assert str(ConfigError("The command line", problems, "See --help.")).endswith("b: is too.\n See --help.")


@pytest.mark.parametrize(
    "error", [DataError("Empty.", "Fill it."), ConfigError("x", [Problem("a", "is wrong.", "Mend it.")], "See --help.")]
)
def test_an_error_survives_the_way_from_another_process(error):
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
