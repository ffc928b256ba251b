"""What a run is told to the dynamics model, and what it says: the trainer's view of `predict/dynamics.py`.

It never changes a weight, a random state or a schedule. Without a model it does nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtrainer import schedule
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.predict.coefficients import Fit
from hybridtrainer.predict.curves import HORIZONS
from hybridtrainer.predict.directions import KeepsMoments
from hybridtrainer.predict.dynamics import Dynamics
from hybridtrainer.predict.features import StepSigns
from hybridtrainer.predict.learners import Kind
from hybridtrainer.predict.moments import moment_sizes
from hybridtrainer.real_step import Outcome
from hybridtrainer.records import LossForecast, Phase
from hybridtrainer.standing import Standing
from hybridtrainer.state import Streamed, Training
from hybridtrainer.tree import Tree

TOLD_EVERY = 50  # steps of the clock
LOOK_AHEAD = 2 * max(HORIZONS)  # learning rates that are looked up at once


class Foresight:
    """Forecasts of one run's loss.

    Args:
        training: Whose steps are followed.
        config: Which model, if any.
    """

    def __init__(self, training: Training, config: HybridTrainerConfig) -> None:
        self._training = training
        parameters = list(training.model.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        kind = kind_for(config)
        device = next((parameter.device for parameter in parameters if parameter.is_cuda), "cpu")
        self._dynamics = None if kind is None else Dynamics(kind, config.seed, device, count, config.residuals)
        self._rates: list[float] = []  # of the steps from `_looked` on
        self._looked = self._jumped = self._told = self._clock = 0

    def observe(self, outcome: Outcome, at: Standing, tell: Callable[[LossForecast], object]) -> None:
        """Takes in a real step that was applied.

        Args:
            outcome: Its loss and gradient norm.
            at: Where the run stood in it, the clock already moved.
            tell: Called with a forecast where one is due.
        """
        if self._dynamics is None:
            return
        if at.clock != self._clock + 1:  # a jump, or its end
            self._rates, self._jumped = [], self._clock
        # What only a model that learns looks at is not looked up for the blend alone.
        is_tick = self._dynamics.is_tick and self._dynamics.training is not None
        self._clock = at.clock
        optimizer = self._training.optimizer
        moments = moment_sizes(optimizer) if is_tick and not isinstance(optimizer, KeepsMoments | Streamed) else None
        self._dynamics.observe(self._signs(outcome, at, is_tick), moments)
        if at.clock // TOLD_EVERY > self._told:
            self._told = at.clock // TOLD_EVERY
            for forecast in self._dynamics.forecasts()[-1:]:
                tell(forecast)

    def chance_of_progress(self) -> float | None:
        """The chance that the loss goes on falling; None where nobody knows."""
        return None if self._dynamics is None else self._dynamics.chance_of_progress()

    def forecasts(self) -> list[LossForecast]:
        """The newest forecasts, 5, 20 and 50 steps ahead; none where there are none."""
        return [] if self._dynamics is None else self._dynamics.forecasts()

    def window_began(self) -> None:
        """A window of weights has begun."""
        if self._dynamics is not None:
            self._dynamics.window_began()

    def window_came(self, fit: Fit) -> None:
        """It has ended."""
        if self._dynamics is not None:
            self._dynamics.window_came(fit)

    def gain(self) -> float:
        """By what to multiply a jump whose coefficients were learned."""
        return 1.0 if self._dynamics is None else self._dynamics.gain()

    def _signs(self, outcome: Outcome, at: Standing, is_tick: bool) -> StepSigns:
        """What the model is told; what is costly to know only where a forecast is made."""
        phase, steps = at.policy.phase, at.policy.steps_in_phase
        if not is_tick:
            return StepSigns(outcome.loss, outcome.norm, self._rate(), clock=at.clock)
        ahead = [sum(self._ahead(h)) / h for h in HORIZONS]
        return StepSigns(
            outcome.loss, outcome.norm, self._rate(), 0.0, 0.0, float(phase is Phase.WARMUP),
            float(phase is Phase.CORRECT), steps, at.clock - self._jumped, at.clock, *ahead,
        )  # fmt: skip

    def _rate(self) -> float:
        return float(self._training.optimizer.param_groups[0]["lr"])

    def _ahead(self, steps: int) -> list[float]:
        """The rates of the next steps, looked up now and then."""
        passed = self._clock - self._looked
        if len(self._rates) - passed < steps:
            training = self._training
            self._rates = schedule.rates_ahead(training.optimizer, training.scheduler, LOOK_AHEAD)
            self._looked, passed = self._clock, 0
        return self._rates[passed : passed + steps]

    def state(self) -> Tree:
        """Everything that decides later forecasts; None without a model."""
        if self._dynamics is None:
            return None
        own = {"rates": list(self._rates), "looked": self._looked, "jumped": self._jumped, "told": self._told}
        return own | {"clock": self._clock, "dynamics": self._dynamics.state()}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        if self._dynamics is None or state is None:
            return
        self._rates = list(state["rates"])
        self._looked, self._jumped = state["looked"], state["jumped"]
        self._told, self._clock = state["told"], state["clock"]
        self._dynamics.restore(state["dynamics"])


def kind_for(config: HybridTrainerConfig) -> Kind | None:
    """Which model forecasts for a run; None for none.

    >>> kind_for(HybridTrainerConfig(dynamics="mlp"))
    'mlp'
    """
    return None if config.predict == "off" or config.dynamics == "off" else config.dynamics
