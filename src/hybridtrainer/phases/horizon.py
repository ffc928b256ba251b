"""How far the next jump may reach, what it costs, and what it turned out to be worth. Pure.

Costs are counted in real steps, not in seconds, so that a resumed run takes the same decisions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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


def jump_cost(probe_batches: int, where: Where = "cpu") -> float:
    """What one attempt costs, in real steps: two probes on every batch, and the work around them.

    Args:
        probe_batches: How many.
        where: The weights are: a GPU is quicker at steps than at copies, and more so where the model is streamed.
    """
    return 2 * probe_batches * FORWARD_SHARE + JUMP_OVERHEAD[where]


def next_horizon(
    state: PolicyState, rules: HybridTrainerConfig, cost: float, steps_left: int | None
) -> tuple[int, str]:
    """How many steps the next jump may foresee, and why none where it is 0.

    Args:
        state: The present state of the phase machine.
        rules: The configuration.
        cost: What the attempt costs, in real steps.
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
    horizon = min(rules.correction_interval, rules.max_predict_steps - state.foreseen_steps)
    if not state.arms:
        horizon = min(horizon, state.longest_jump)
    elif horizon >= 1:
        number = state.arm()
        if number is None:
            return 0, "no horizon has paid, and none is expected to"
        horizon = max(1, int(bandit.SHARES[number] * horizon))
    if horizon < 1:
        return 0, f"{state.foreseen_steps} steps were foreseen since the last Full phase"
    if steps_left is not None:
        horizon = min(horizon, steps_left - rules.correct_steps)
    if horizon < 1:
        return 0, "the run is about to end"
    return horizon, ""


class Worth(NamedTuple):
    """What a probed jump is worth.

    Attributes:
        steps: Real steps it stands for; 0 to refuse it.
        failed: Whether it was a mistake, rather than merely not worth a step.
        reason: The figures behind that.
    """

    steps: int
    failed: bool
    reason: str


def jump_worth(
    gain: float, chance_better: float, confidence: float, pace: float, horizon: int, rules: HybridTrainerConfig
) -> Worth:
    """How many real steps a probed jump stands for.

    A gain seen at the averaged weights does not last whole: the average lags behind, and what part of the displacement
    is noise is soon lost. What lasts is a share, a quarter where nothing else is said, and falls with the fourth power
    of the confidence (docs/LOG.md).

    Args:
        gain: How much lower the probe loss is with the jump, at the averaged weights.
        chance_better: Chance that it is truly lower.
        confidence: Expected cosine between the jump and the drift.
        pace: How much the loss falls per real step.
        horizon: Steps foreseen, the most it can be worth.
        rules: The configuration; its `confidence_threshold` is the least chance at which a jump is accepted.

    >>> rules = HybridTrainerConfig(confidence_threshold=0.85)
    >>> jump_worth(gain=0.02, chance_better=0.99, confidence=0.9, pace=0.001, horizon=15, rules=rules).steps
    3
    """
    if not gain > 0:  # NaN too
        return Worth(0, failed=True, reason="no better")
    if chance_better < (threshold := rules.confidence_threshold):
        return Worth(0, failed=True, reason=f"better with a chance of {chance_better:.2f}, below {threshold:.2f}")
    lasting = rules.lasting_share * confidence**LASTING_POWER * gain
    steps = horizon if pace == 0 else int(min(horizon, lasting / pace))
    return Worth(steps, failed=False, reason=f"worth {steps} of {horizon} steps")
