"""The dynamics model: where the loss is heading, 5, 20 and 50 steps ahead, with intervals that hold.

Every five real steps (a tick) the simple forecasts of `curves.py` are made, weighted by how they have done so far
(`blend.py`), and a learned model shifts the weights by what the 64 features say. Whether what it says is believed is
decided by its errors in this run, and so is the width of the intervals. Where asked, what came of earlier ticks with
like features is a third voice. All of it is a function of what was observed
and of the seed: two equal runs forecast alike, to the bit.

It knows nothing of phases, jumps or schedules but what it is told in `StepSigns`, and decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hybridtrainer.predict.begun import Begun, Pending, corrected, on_its_way
from hybridtrainer.predict.blend import Blend
from hybridtrainer.predict.calibration import Calibration
from hybridtrainer.predict.coefficients import Fit
from hybridtrainer.predict.curves import HORIZONS, NAMES, TRUST, LossCurve, target_window
from hybridtrainer.predict.features import NAMES as FEATURES
from hybridtrainer.predict.features import FeatureRing, StepSigns
from hybridtrainer.predict.gain import Gain
from hybridtrainer.predict.learners import TRAINING, Kind, make_model
from hybridtrainer.predict.learning import Learner
from hybridtrainer.predict.replay import Replay
from hybridtrainer.records import LossForecast
from hybridtrainer.tree import Tree

STRIDE = 5  # real steps from tick to tick
TICKS = tuple(horizon // STRIDE for horizon in HORIZONS)
WINDOWS = np.array([target_window(horizon) for horizon in HORIZONS])
LEVEL = NAMES.index("level_25")
# In the blend alone, in the model, and in what is recalled, before any error is known.
BELIEF = np.array([0.7, 0.3, 0.3])
SHARPNESS = 4.0  # of the belief in the model: it has to show soon what it is good for
PACES = (0.12, 0.12, 0.05)  # of calibration: the errors of far forecasts resemble each other longer


class Dynamics:
    """Follows one run; see the module.

    Args:
        kind: Which model learns; "blend" for the blend of simple forecasts alone.
        seed: Of its first weights and of what it learns from.
        device: Where features and model are.
        parameters: Of the trained model, by which the size of "rssm" is chosen.
        residuals: Whether what came of like ticks has a say; only with a model that learns.

    Attributes:
        training: How the model learns; None for "blend".

    >>> dynamics = Dynamics("linear")
    >>> for step in range(1, 201):
    ...     dynamics.observe(StepSigns(loss=2 + 3 * step**-0.5, grad_norm=1.0, rate=1e-3, clock=step))
    >>> near, middle, far = dynamics.forecasts()
    >>> far.target_step, abs(far.loss - (2 + 3 * 238**-0.5)) < 0.01
    (250, True)
    """

    def __init__(
        self,
        kind: Kind,
        seed: int = 0,
        device: torch.device | str = "cpu",
        parameters: int = 0,
        residuals: bool = False,
    ) -> None:
        self.training = TRAINING.get(kind)
        self._generator = torch.Generator().manual_seed(seed)
        self._ring = FeatureRing(device)
        self._curve = LossCurve()
        self._voices = 3 if residuals and self.training else 2
        self._blend = Blend(TRUST, len(HORIZONS))
        self._belief = Blend(BELIEF[: self._voices], len(HORIZONS), SHARPNESS)
        self._calibrations = [Calibration(pace) for pace in PACES]
        self._pending: list[Pending] = []
        self._errors = [0.0] * len(HORIZONS)  # newest, in spreads
        self._begun: Begun | None = None
        self._gain, self._said, self._window = Gain(), 0.0, -1  # the tick at which the open window began
        self._made: list[Pending] = []  # at the newest tick that is complete
        model = make_model(kind, TICKS, len(NAMES), self._generator, device, parameters)
        self._learner: Learner | None = None
        if model is not None and self.training is not None:
            latent = model.latent()
            shape = (0, 0) if latent is None else (len(latent), latent.shape[1])
            replay = Replay(len(FEATURES), len(HORIZONS), len(NAMES), shape, device)
            self._learner = Learner(model, self.training, replay, self._generator, device)

    def observe(self, signs: StepSigns, moments: Tensor | None = None) -> None:
        """Takes in a real step. A clock that went back means that what came after it was undone.

        Args:
            signs: What is known of it.
            moments: Sizes of the optimizer's two moments, in place of those in `signs`; they may be on the device.
        """
        if not math.isfinite(signs.loss) or not math.isfinite(signs.grad_norm):
            return
        self._finish()
        clock = int(signs.clock)
        if clock <= self._curve.clock:
            self._undo(clock)
        self._curve.add(clock, signs.loss)
        self._resolve()
        self._ring.write(replace(signs, **dict(zip(("error_5", "error_20", "error_50"), self._errors, strict=True))))
        if moments is not None:
            self._ring.write_on_device("first_moment", moments)
        if self._ring.count % STRIDE == 0:
            self._tick()

    @property
    def is_tick(self) -> bool:
        """Whether the next step observed is a tick: what is costly to know is told then."""
        return (self._ring.count + 1) % STRIDE == 0

    def forecasts(self) -> list[LossForecast]:
        """The forecasts of the newest tick, one for each horizon; none while too little is known."""
        self._finish()
        floor = self._curve.floor()
        told = []
        for made, calibration in zip(self._made, self._calibrations, strict=False):
            reach = calibration.reach() * made.scale
            target = made.clock + HORIZONS[made.horizon]
            low = max(made.loss - reach, floor)
            window = target_window(HORIZONS[made.horizon])
            told.append(LossForecast(made.clock, target, made.loss, low, made.loss + reach, window))
        return told

    def chance_of_progress(self) -> float | None:
        """The chance that the loss 20 steps ahead is below its present level; None while too little is known."""
        self._finish()
        if not self._made:
            return None
        made, level = self._made[1], float(self._made[1].experts[LEVEL])
        return self._calibrations[1].chance_below((level - made.loss) / made.scale)

    def window_began(self) -> None:
        """From here on the weights are watched, too: what is the model's word on how far they will go?"""
        self._finish()
        self._window = -1 if self._learner is None else self._learner.replay.count - 1
        self._gain.say(self._said)

    def window_came(self, fit: Fit) -> None:
        """What the learned coefficients would have forecast of the window is known, and what came."""
        self._gain.judge(fit)
        if self._learner is not None and self._window >= 0:
            self._learner.replay.resolve_jump(self._window, fit.along, fit.length)

    def gain(self) -> float:
        """By what to multiply a jump from here."""
        return self._gain.factor()

    def calibration_error(self) -> float | None:
        """Expected calibration error, the mean over the horizons; None before any forecast could be judged."""
        errors = [error for each in self._calibrations if (error := each.expected_error()) is not None]
        return math.fsum(errors) / len(errors) if errors else None

    def _tick(self) -> None:
        """Begins a forecast, and learns a little. What the model says of it may still be on its way from the device."""
        experts = self._curve.experts()
        if experts is None:
            return
        weights = self._blend.weights()
        blended = (weights * experts.losses).sum(1)
        apart = experts.losses - blended[:, None]
        scale = np.sqrt((weights * apart**2).sum(1) + experts.spread**2 / WINDOWS)
        tick, told, recalled = 0, None, None
        if self._learner is not None:
            relative = torch.from_numpy(apart / scale[:, None])
            tick, told = self._learner.take(self._ring.read(), relative, torch.from_numpy(weights))
            recalled = on_its_way([self._learner.replay.recalled(tick)]) if self._voices > 2 else None
        self._begun = Begun(tick, self._curve.clock, experts, weights, blended, scale, told, recalled)

    def _finish(self) -> None:
        """Completes the forecast of the newest tick, by the time of the next step: the device has been heard since."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        better, wider = begun.blended, begun.scale
        if begun.told is not None:
            better, wider, self._said = corrected(begun)
        recalled = begun.blended
        if begun.recalled is not None:
            recalled = recalled + begun.recalled()[0].numpy() * begun.scale
        trust = self._belief.weights()
        loss = (trust * np.stack([begun.blended, better, recalled][: self._voices], 1)).sum(1)
        final = begun.scale ** (1 - trust[:, 1]) * wider ** trust[:, 1]
        told = np.stack([begun.blended, better, recalled, loss, begun.scale, final], 1).tolist()
        self._made = [
            Pending._make([begun.tick, begun.clock, q, begun.experts.losses[q], *each, begun.experts.spread])
            for q, each in enumerate(told)
        ]
        self._pending += self._made

    def _resolve(self) -> None:
        """Compares forecasts whose target has been reached with what came."""
        waiting = []
        for made in self._pending:
            horizon = HORIZONS[made.horizon]
            until = made.clock + horizon
            if self._curve.clock < until:
                waiting.append(made)
                continue
            came = self._curve.mean(until - target_window(horizon), until)
            if came is None:  # jumped over
                continue
            q = made.horizon
            self._blend.learn(q, made.experts, came)
            said = np.array([made.blended, made.corrected, made.recalled])
            self._belief.learn(q, said[: self._voices], came)
            self._calibrations[q].learn((came - made.loss) / made.scale)
            self._errors[q] = max(-8.0, min(8.0, (came - made.loss) / made.spread))
            if self._learner is not None:
                self._learner.replay.resolve(made.tick, q, (came - made.blended) / made.plain_scale)
        self._pending = waiting

    def _undo(self, clock: int) -> None:
        """Forgets forecasts that were made after this clock."""
        for made in self._pending:
            if made.clock >= clock and self._learner is not None:
                self._learner.replay.drop(made.tick)
        self._pending = [made for made in self._pending if made.clock < clock]
        self._made = [made for made in self._made if made.clock < clock]

    def state(self) -> dict[str, Tree]:
        """Everything that decides later forecasts, as a tree of live tensors and plain values."""
        self._finish()
        learned: dict[str, Tree] = {} if self._learner is None else self._learner.state()
        return learned | {
            "ring": self._ring.state(),
            "curve": self._curve.state(),
            "blend": [self._blend.state(), self._belief.state()],
            "calibrations": [each.state() for each in self._calibrations],
            "pending": [made.state() for made in self._pending],
            "made": [made.state() for made in self._made],
            "errors": list(self._errors),
            "gain": [self._gain.state(), self._said, self._window],
            "random": self._generator.get_state(),
        }

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned, to the bit."""
        if self._learner is not None:
            self._learner.restore(state)
        self._ring.restore(state["ring"])
        self._curve.restore(state["curve"])
        for blend, saved in zip((self._blend, self._belief), state["blend"], strict=True):
            blend.restore(saved)
        for calibration, saved in zip(self._calibrations, state["calibrations"], strict=True):
            calibration.restore(saved)
        self._begun = None
        gain, self._said, self._window = state["gain"]
        self._gain.restore(gain)
        self._pending = [Pending.of(made) for made in state["pending"]]
        self._made = [Pending.of(made) for made in state["made"]]
        self._errors = list(state["errors"])
        self._generator.set_state(state["random"].clone())
