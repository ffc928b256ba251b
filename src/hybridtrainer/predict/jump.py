"""Jumps: proposed from recorded windows, probed, and written into the weights in place.

This module does not decide whether to jump, and cannot undo one: the trainer does both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridtrainer import ranks, schedule
from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.losses import CheckedLoss, samples_in
from hybridtrainer.measure import measure
from hybridtrainer.predict import baselines, coefficients, directions
from hybridtrainer.predict.baselines import Forecast, Past
from hybridtrainer.predict.coefficients import Coefficients, Fit
from hybridtrainer.predict.groups import group_parameters
from hybridtrainer.predict.history import Sample, WindowHistory
from hybridtrainer.predict.probe import Comparison, compare
from hybridtrainer.predict.rollback import NO_MEMORY
from hybridtrainer.state import Training
from hybridtrainer.tree import Tree, fingerprint
from hybridtrainer.weights import Weights

Forecaster = Callable[[Past, int, Tensor], Forecast]
"""From recorded windows, a horizon in steps and its learning-rate time: a proposed displacement."""


class Adviser(Protocol):
    """Who says how far jumps with learned coefficients should go."""

    def window_began(self) -> None:
        """A window has begun."""
        ...

    def window_came(self, fit: Fit) -> None:
        """It has ended, and this is how it would have been forecast."""
        ...

    def gain(self) -> float:
        """By what to multiply a jump from here."""
        ...


Losses = list[list[float]]
"""Of each batch, one or one for each sample."""


class Jumps:
    """Everything a Predict phase needs, for one training setup.

    Args:
        training: Model and optimizer.
        loss: Of a batch, for probes.
        buffers: Puts them back after a probe.
        config: Settings.
        probing: Entered around each probe, in which weights are read and not written.
        adviser: Of jumps whose coefficients are learned, if any.

    Attributes:
        history: The recorded windows.
        forecaster: Who proposes; replace it to try one of your own.
        fit: How well the learned coefficients would have forecast the newest window; None where nothing is learned.
        probed_samples: Samples that the last two probes went over, on all ranks.
    """

    def __init__(
        self,
        training: Training,
        loss: CheckedLoss,
        buffers: BufferGuard,
        config: HybridTrainerConfig,
        probing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        adviser: Adviser | None = None,
    ) -> None:
        self._training = training
        self._loss = loss
        self._buffers = buffers
        self._config = config
        self._probing = probing
        self._adviser = adviser
        self.history = WindowHistory(
            Weights(group_parameters(training.model, training.optimizer)), config.history_windows
        )
        learns = config.forecaster == coefficients.NAME
        self._learned = Coefficients(len(self.history.weights.groups)) if learns else None
        self._momentum: Sample | None = None  # at the start of the open window
        self.forecaster: Forecaster = self._learned_forecast if learns else self._baseline
        self.fit: Fit | None = None
        self.probed_samples = 0

    @property
    def has_windows(self) -> bool:
        """Whether host memory has had any for windows."""
        return bool(self.history.copies or self.history.windows)

    @property
    def seen_steps(self) -> int:
        """Real steps that the recorded windows span together."""
        return sum(window.steps for window in self.history.windows)

    def open_window(self) -> str:
        """Starts a window at the present weights; returns why there is none where memory has run out."""
        return self._recorded(self.begin_window)

    def close_window(self) -> str:
        """Ends the window and starts the next; returns why there is none."""
        return self._recorded(self._close) if self.history.is_open else "no window is open"

    def begin_window(self) -> None:
        """Starts a window at the present weights; out of memory is raised."""
        self.history.open()
        self._note_momentum()

    def _close(self) -> None:
        steps = self.history.open_steps
        self.history.close()
        if self._learned is None or not steps:
            return
        if self._momentum is not None:
            self.fit = self._learned.learn(self._past(), self.history.compare(self._momentum))
            if self.fit is not None and self._adviser is not None:
                self._adviser.window_came(self.fit)
        self._note_momentum()

    def _note_momentum(self) -> None:
        if self._learned is None:
            return
        optimizer = self._training.optimizer
        self._momentum = self.history.sample(lambda bucket: directions.momentum(optimizer, bucket))
        if self._adviser is not None:
            self._adviser.window_began()

    def _recorded(self, record: Callable[[], None]) -> str:
        try:
            record()
        except torch.OutOfMemoryError:
            self.history.leave_open_window()
            return f"{NO_MEMORY} in a window"
        return ""

    def forecast(self, horizon: int) -> Forecast | str:
        """The forecaster's proposal for the next `horizon` steps, or why there is none."""
        windows = self.history.windows
        if len(windows) < baselines.MIN_WINDOWS:
            return f"{len(windows)} windows are recorded and {baselines.MIN_WINDOWS} are needed"
        state = self._training.optimizer.state
        if any(isinstance(value, Tensor) and value.is_sparse for part in state.values() for value in part.values()):
            return "the optimizer keeps sparse state, of which no copy can be put back"
        ahead = schedule.look_ahead(self._training.optimizer, self._training.scheduler, horizon)
        if ahead is None:
            return "the learning-rate schedule ends within the horizon"
        times = [ahead[group.lr_group] for group in self.history.weights.groups]
        return self.forecaster(self._past(), horizon, torch.tensor(times, dtype=torch.float64))

    def _past(self) -> Past:
        lr_groups = [group.lr_group for group in self.history.weights.groups]
        return baselines.stack_past(self.history.gram, [window.lr_time for window in self.history.windows], lr_groups)

    def try_out(self, forecast: Forecast, batches: Sequence[Any], put_back: Callable[[], None]) -> Comparison | str:
        """Probes with and without the displacement, or says why the forecast cannot be used.

        Both probes are made at the average of the recent weights: at the present ones noise drowns the drift, and a
        probe would favour whatever averages noise away, a gain that is lost again a few steps later.

        Args:
            forecast: What to try.
            batches: What to measure on.
            put_back: Restores every weight; called before this returns, whatever happens.
        """
        problem = self.problem_of(forecast)
        if problem:
            return problem
        try:
            found = ranks.together("probe", lambda: self._both_probes(forecast, batches))
        except torch.OutOfMemoryError:
            return f"{NO_MEMORY} in the probe"
        finally:
            put_back()
        self.probed_samples = sum(2 * samples for samples, _, _ in found)
        if getattr(batches, "alike", False):  # all ranks have measured the same
            found = found[:1]
        before = [batch for _, batches, _ in found for batch in batches]
        return compare(before, [batch for _, _, batches in found for batch in batches])

    def _both_probes(self, forecast: Forecast, batches: Sequence[Any]) -> tuple[int, Losses, Losses]:
        """How many samples there are, and their losses without and with the displacement."""
        self.history.displace_(forecast.denoise)
        before = self._probe(batches)
        self._displace_(forecast)
        return sum(map(samples_in, batches)), before, self._probe(batches)

    def displace_(self, forecast: Forecast) -> None:
        """Writes the displacement into the weights, on all ranks or on none that goes on."""
        ranks.together("jump", lambda: self._displace_(forecast))

    def _displace_(self, forecast: Forecast) -> None:
        self.history.displace_(forecast.coefficients)
        if forecast.momentum_time is not None:
            directions.momentum_displace_(self.history.weights, self._training.optimizer, forecast.momentum_time)

    def _baseline(self, past: Past, horizon: int, ahead: Tensor) -> Forecast:
        return baselines.forecast(self._config.forecaster, past, horizon, ahead, self._config.trust_radius)

    def _learned_forecast(self, past: Past, horizon: int, ahead: Tensor) -> Forecast:
        assert self._learned is not None
        if self._momentum is None:
            self._note_momentum()
        assert self._momentum is not None
        return self._learned.forecast(
            past, self.history.compare(self._momentum), horizon, ahead, self._config.trust_radius,
            1.0 if self._adviser is None else self._adviser.gain(),
        )  # fmt: skip

    def state(self) -> Tree:
        """Windows, and what was learned from them, as a tree."""
        if self._learned is None:
            return self.history.state()
        return self.history.state() | {"learned": self._learned.state(), "momentum": self._momentum}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned; what belongs to weights that were divided otherwise is left."""
        self.history.restore(state)
        self._momentum = None
        if self._learned is not None and state.get("learned") is not None:
            self._learned.restore(state["learned"])
            if self.history.is_open and state["momentum"] is not None:
                devices = [bucket.device for bucket in self.history.weights.buckets]
                pairs = zip(state["momentum"], devices, strict=True)
                self._momentum = [(codes.to(device), scales.to(device)) for (codes, scales), device in pairs]

    def _probe(self, batches: Sequence[Any]) -> Losses:
        with self._probing():
            return measure(
                self._training.model,
                self._loss.values,
                batches,
                self._buffers,
                self._config.seed,
                batch_statistics=True,
            )

    def problem_of(self, forecast: Forecast) -> str:
        """Why a forecast cannot be used; empty if it can."""
        groups, windows = len(self.history.weights.groups), len(self.history.windows)
        parts: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "coefficients": (forecast.coefficients, (groups, windows)),
            "denoise": (forecast.denoise, (groups, windows)),
        }
        if forecast.momentum_time is not None:
            parts["momentum time"] = (forecast.momentum_time, (groups,))
            if not directions.has_moments(self._training.optimizer):
                return "the optimizer keeps no moments"
        for name, (values, shape) in parts.items():
            if tuple(values.shape) != shape:
                return f"the forecast's {name} has shape {tuple(values.shape)}, not {shape}"
            if not torch.isfinite(values).all():
                return f"the forecast's {name} is not finite"
        ranks.require_same(
            "the forecast",
            forecast_digest(forecast),
            "A forecaster must say the same on every rank: seed what it draws.",
        )
        return ""


def forecast_digest(forecast: Forecast) -> str:
    """What a forecast says, as a short text; nothing is computed where nobody else has one."""
    return fingerprint(vars(forecast))["all"] if ranks.count() > 1 else ""
