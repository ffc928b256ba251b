"""Phases, skipped steps and forecasts in Hugging Face's own logs, and where the run stands in its checkpoints.

The mixin adds this callback and tells it of the run. It decides nothing: a callback cannot skip a backward pass.
"""

from __future__ import annotations

from typing import Any

from hybridtrainer.integrations.hosted import HostedRun
from hybridtrainer.integrations.optional import require

callbacks = require("transformers.trainer_callback", "hf")


class HybridCallback(callbacks.TrainerCallback, callbacks.ExportableState):  # type: ignore[misc, name-defined]
    """Adds what HybridTrainer does to every log of a training loss, for all other callbacks to see.

    `phase` and `clock` (of the schedule), `steps_foreseen` and `backward_reduction` (the share of steps without a
    backward pass), `jumps_kept` and `jumps_undone`, and where a forecast is known `final_loss` with the ends of its
    90% interval, `final_low` and `final_high`. With `predict = "off"` nothing is added.

    `trainer.remove_callback(HybridCallback)` leaves the logs as they are without it.
    """

    def __init__(self) -> None:
        self._run: HostedRun | None = None

    def follow(self, run: HostedRun | None) -> None:
        """The run whose values are told; None where it is over."""
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Has a place in the trainer's state, where a checkpoint of an earlier version has none."""
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Adds the values to what the other callbacks see, and to the trainer's history."""
        if self._run is None or self._run.trainer.config.predict == "off" or logs is None:
            return
        values = self._run.told()
        if "loss" in logs:  # other logs are what `evaluate` and `train` return
            logs.update(values)
        else:
            values = {"clock": values["clock"]}
        if state.log_history:
            state.log_history[-1].update(values)

    def state(self) -> dict[str, Any]:
        """Where the run stands, for `trainer_state.json` of a checkpoint. The state itself is in a folder beside."""
        return {"args": {}, "attributes": {"told": None if self._run is None else self._run.told()}}
