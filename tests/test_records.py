"""Records are plain, immutable, and comparable."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from hybridtrainer.records import JumpRecord, Phase, PhaseChange, StepResult

RECORDS = [
    StepResult(1, Phase.FULL, 2.5, 0, None, 0.1, ""),
    JumpRecord(1, 15, "line_fit", 0.9, "accepted", "worth 3 of 15 steps", worth_steps=3),
    PhaseChange(1, Phase.WARMUP, Phase.FULL, "100 warmup steps are done"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_cannot_be_changed_and_holds_plain_values(record):
    with pytest.raises(FrozenInstanceError):
        record.step = 2
    with pytest.raises((AttributeError, TypeError)):
        record.anything = 2
    assert replace(record) == record
    assert json.loads(json.dumps(asdict(record))) == asdict(record)


def test_the_four_phases_are_written_as_words():
    assert [f"{phase}" for phase in Phase] == ["warmup", "full", "predict", "correct"]
    assert Phase("predict") is Phase.PREDICT
