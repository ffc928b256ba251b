"""What a plan is asked for: every mistake that shows without a rehearsal, at once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hybridtrainer import plan
from hybridtrainer.errors import ConfigError, ModelError
from hybridtrainer.planning.asked import batch_problems, mistakes
from hybridtrainer.planning.hardware import H200


def keys(**changes: Any) -> list[str]:
    budgets = {"vram": "8GB", "ram": 1 << 30}
    given: dict[str, Any] = {"model": "nano", "budgets": budgets, "tokens": 64, "context": 32, "accumulate": 2}
    return [problem.key for problem in mistakes(**given | changes)]


def test_what_makes_sense_has_no_mistake():
    assert keys() == keys(model=nn.Linear(1, 1)) == []


def test_all_are_found_together():
    found = keys(model="gpt-7", budgets={"vram": "much", "ram": -1}, tokens=0, accumulate=-1)
    assert found == ["vram", "ram", "tokens", "accumulate", "model"]


def test_a_readout_that_there_is_not_is_named():
    assert keys(readout="averaged") == []
    assert keys(readout="mean") == ["readout"]
    with pytest.raises(ConfigError, match="readout: must be one of auto, last, averaged, not 'mean'"):
        plan("nano", "8GB", "8GB", readout="mean")


def test_a_name_that_is_not_known_is_told_in_company_only():
    assert keys(model="gpt-7") == []
    with pytest.raises(ModelError, match="'gpt-7'"):
        plan("gpt-7", "8GB", "8GB")
    with pytest.raises(ConfigError, match="'gpt-7'"):
        plan("gpt-7", "8GB", "8GB", tokens=-1)


@pytest.mark.parametrize("size", ["", "8", "\uff18GB", "inf", "1e999GB", "-0GB", "0GB", 0, -1, None, 1.5, True])
def test_what_is_no_size_is_named(size):
    assert keys(budgets={"ram": size}) == ["ram"]


def test_what_was_typed_for_a_size_is_quoted():
    with pytest.raises(ConfigError, match=r"vram: must be a size such as .*, not '12 parsecs'"):
        plan("nano", "12 parsecs", "8GB")


def test_tokens_must_be_whole_sequences_and_micro_batches():
    assert [batch_problems(*each)[0].key for each in ((65, 32, 1), (96, 32, 2))] == ["tokens", "accumulate"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": "512"}, "tokens: must be a whole number, not '512'"),
        ({"tokens": None}, "tokens: must be a whole number, not None"),
        ({"tokens": 512.0}, "tokens: must be a whole number"),
        ({"context": None}, "context: must be a whole number, not None"),
        ({"accumulate": "2"}, "accumulate: must be a whole number"),
        ({"accumulate": True}, "accumulate: must be a whole number"),
        ({"context_bytes": "1GB"}, "context_bytes: must be a number of bytes, 0 or more, not '1GB'"),
        ({"context_bytes": -1}, "context_bytes: must be a number of bytes"),
        ({"hardware": "h200"}, r"hardware: must be a `Hardware`, not 'h200'.*speeds_for"),
        ({"loss": 3}, "loss: must be a function"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_named(given, words):
    with pytest.raises(ConfigError, match=words):
        plan("nano", "8GB", "8GB", **{"tokens": 512, "context": 128} | given)


def test_arguments_of_another_type_are_told_together():
    found = keys(tokens=None, hardware="h200", context_bytes=-1, loss=None, readout="mean")
    assert found == ["tokens", "hardware", "context_bytes", "loss", "readout"]
    assert keys(hardware=H200, context_bytes=0) == []
