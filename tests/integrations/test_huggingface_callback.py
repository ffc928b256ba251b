"""What HybridTrainer does is in Hugging Face's own logs and in its checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.integrations.making import log_of, tiny, windows

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.integrations.test_huggingface import ON, arguments, train  # noqa: E402

from hybridtrainer.integrations.huggingface import Trainer  # noqa: E402
from hybridtrainer.integrations.huggingface_callback import HybridCallback  # noqa: E402

TOLD = {"phase", "clock", "steps_foreseen", "backward_reduction", "jumps_kept", "jumps_undone"}
FINAL = {"final_loss", "final_low", "final_high"}


class Seen(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_logs_of_training_have_phase_skipped_steps_and_forecast_and_those_of_evaluations_the_clock(tmp_path):
    seen = Seen()
    options = {"eval_dataset": windows(8, first=500), "callbacks": [seen]}
    trainer = train(tmp_path, ON, max_steps=60, eval_strategy="steps", eval_steps=20, options=options)
    steps = {record["step"]: record for record in log_of(tmp_path / "hybridtrainer") if record["kind"] == "step"}
    losses = [each for each in trainer.state.log_history if "loss" in each]
    assert [each["phase"] for each in losses] == [steps[each["clock"]]["phase"] for each in losses]
    assert losses[-1]["steps_foreseen"] == trainer.hybrid.statistics().foreseen_steps > 0
    forecast = [record for record in log_of(tmp_path / "hybridtrainer") if record["kind"] == "forecast"][-1]
    assert losses[-1]["final_loss"] == forecast["loss"]
    assert losses[-1]["final_low"] <= losses[-1]["final_loss"] <= losses[-1]["final_high"]
    assert [each for each in seen.logs if "loss" in each] == [
        {name: value for name, value in each.items() if name != "step"} for each in losses
    ]
    evaluations = [each for each in trainer.state.log_history if "eval_loss" in each]
    assert all("clock" in each and "phase" not in each for each in evaluations)
    assert not (TOLD | FINAL) & trainer.evaluate().keys()


def test_a_checkpoint_says_where_the_run_stands_and_a_resumed_run_logs_the_same(tmp_path):
    changes = {
        "save_strategy": "steps",
        "save_steps": 20,
        "max_steps": 45,
        "restore_callback_states_from_checkpoint": True,
    }
    whole = train(tmp_path, ON, **changes)
    file = tmp_path / "checkpoint-20" / "trainer_state.json"
    state = json.loads(file.read_text())
    told = state["stateful_callbacks"]["HybridCallback"]["attributes"]["told"]
    assert told.keys() >= TOLD
    assert told["clock"] == state["log_history"][-1]["clock"]
    logged = [each for each in whole.state.log_history if "loss" in each]
    for known in (True, False):
        if not known:  # as an earlier version wrote it
            del state["stateful_callbacks"]["HybridCallback"]
            file.write_text(json.dumps(state))
        seen = Seen()
        again = train(
            tmp_path, ON, model=tiny(seed=7), resume=str(file.parent), options={"callbacks": [seen]}, **changes
        )
        assert [each for each in again.state.log_history if "loss" in each] == logged
        assert all(each.keys() >= TOLD for each in seen.logs if "loss" in each)


def test_without_the_callback_the_logs_are_as_they_were(tmp_path):
    trainer = Trainer(tiny(), arguments(tmp_path, max_steps=8), train_dataset=windows(40), hybrid=ON)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.remove_callback(HybridCallback)
    trainer.train()
    assert trainer.state.log_history
    assert not any((TOLD | FINAL) & each.keys() for each in trainer.state.log_history)
