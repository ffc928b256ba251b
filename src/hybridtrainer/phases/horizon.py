"""How far the next jump may reach, what it costs, and what it turned out to be worth. Pure.

Costs are counted in real steps, not in seconds, so that a resumed run takes the same decisions.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.phases import bandit
from hybridtrainer.phases.policy import PolicyState, full_is_over
from hybridtrainer.records import Phase

FORWARD_SHARE = 1 / 3  # of a real step: a backward pass costs about two forward passes
Where = Literal["cpu", "gpu", "streamed"]
# Snapshot, displacement, roll-back, in real steps: measured on an H200 2.0 with 124M parameters
# (`benchmarks.gpu_check`) and 48 with a streamed 1.5B (`benchmarks.validation`).
JUMP_OVERHEAD: dict[Where, float] = {"cpu": 0.5, "gpu": 2.0, "streamed": 50.0}
LASTING_POWER = 4
SURE = 2.0  # standard errors
MOST_WORTH = 1 / 2  # of the steps that a jump foresees: no more was ever measured to last for long
REACH = 1 / 4  # of the steps that windows span: a loop that looks further ahead than back swings (docs/PREDICTION.md)


def jump_cost(probe_batches: int, where: Where = "cpu") -> float:
    """What one attempt costs, in real steps: two probes on every batch, and the work around them.

    Args:
        probe_batches: How many.
        where: The weights are: a GPU is quicker at steps than at copies, and more so where the model is streamed.
    """
    return 2 * probe_batches * FORWARD_SHARE + JUMP_OVERHEAD[where]


def next_horizon(
    state: PolicyState, rules: HybridTrainerConfig, cost: float, seen_steps: int, steps_left: int | None
) -> tuple[int, str]:
    """How many steps the next jump may foresee, and why none where it is 0.

    Args:
        state: The present state of the phase machine.
        rules: The configuration.
        cost: What the attempt costs, in real steps.
        seen_steps: Real steps that the recorded windows span.
        steps_left: Steps until the run ends; None if nobody knows.
    """
    if state.off:
        return 0, state.off
    if state.phase is Phase.FULL and not full_is_over(state, rules):
        return 0, "the Full phase goes on"
    if state.forced_steps:
        return 0, f"Full is forced for {state.forced_steps} more steps"
    if state.balance - cost < -rules.waste_limit * state.real_steps:
        allowed = rules.waste_limit * state.real_steps
        return (
            0,
            f"a failed jump would bring what jumps have cost to {cost - state.balance:.1f} steps; {allowed:.1f} are "
            "allowed so far",
        )
    horizon = rules.max_predict_steps
    if not state.arms:
        horizon = min(horizon, state.longest_jump)
    else:
        number = state.arm()
        if number is None:
            return 0, "no horizon has paid, and none is expected to"
        horizon = max(1, int(bandit.SHARES[number] * horizon))
    horizon = min(horizon, max(1, int(REACH * seen_steps)))
    if steps_left is not None:
        horizon = min(horizon, steps_left - correction_steps(min(horizon, steps_left), rules))
    if horizon < 1:
        return 0, "the run is about to end"
    return horizon, ""


def correction_steps(horizon: int, rules: HybridTrainerConfig) -> int:
    """Real steps of the Correct phase after a jump over so many.

    >>> rules = HybridTrainerConfig(correct_steps=3, correction_interval=15)
    >>> [correction_steps(horizon, rules) for horizon in (1, 15, 16, 50)]
    [3, 3, 6, 12]
    """
    return rules.correct_steps * -(-horizon // rules.correction_interval)


class Worth(NamedTuple):
    """What a jump is worth.

    Attributes:
        steps: Real steps it stands for; 0 to refuse it.
        reason: The figures behind that.
    """

    steps: int
    reason: str


class Compared(Protocol):
    """A probe with the jump beside one without it, on the same batches."""

    @property
    def before(self) -> float:
        """Mean loss without it."""

    @property
    def error(self) -> float:
        """Standard error of that mean."""

    @property
    def gain(self) -> float:
        """How much lower it is with the jump."""

    @property
    def chance_better(self) -> float:
        """Chance that it is truly lower."""


def probed_worth(
    found: Compared, confidence: float, pace: float, horizon: int, state: PolicyState, rules: HybridTrainerConfig
) -> Worth:
    """How many real steps a probed jump stands for, at least 1 where it is made.

    A gain seen at the averaged weights does not last whole: the average lags behind, and what part of the displacement
    is noise is soon lost. What lasts is a share, a quarter where nothing else is said, and falls with the fourth power
    of the confidence (docs/LOG.md). Where the loss does not fall there is nothing to measure it by.

    Where jumps are trusted a probe decides on no more than that, because late in a run it sees losses in jumps that
    make the run faster. But if the loss of the probe batches is rising there is nothing to be gained by being faster.

    Args:
        found: What the probes say, at the averaged weights.
        confidence: Expected cosine between the jump and the drift.
        pace: How much the loss falls per real step.
        horizon: Steps foreseen.
        state: Whether jumps are trusted, and the lowest loss of a probe so far.
        rules: The configuration; its `confidence_threshold` is the least chance of being better at which a jump is
            made that is not trusted.
    """
    gain = found.gain
    if state.is_trusted and found.before > state.probe_loss + SURE * found.error:
        return Worth(0, f"the probe loss has risen from {state.probe_loss:.4f}")
    if not (math.isfinite(gain) if state.is_trusted else gain > 0):
        return Worth(0, "no better")
    if not state.is_trusted and found.chance_better < (threshold := rules.confidence_threshold):
        return Worth(0, f"better with a chance of {found.chance_better:.2f}, below {threshold:.2f}")
    lasting = rules.lasting_share * confidence**LASTING_POWER * gain
    steps = max(1, int(min(MOST_WORTH * horizon, lasting / pace if pace else 0.0)))
    return Worth(steps, f"worth {steps} of {horizon} steps")


def trusted_worth(state: PolicyState, horizon: int) -> Worth:
    """How many real steps a jump stands for that is made without a probe: the share that the newest probe has shown."""
    steps = max(1, int(state.price * horizon))
    return Worth(steps, f"trusted after {state.proofs} in a row, worth {steps} of {horizon} steps")
