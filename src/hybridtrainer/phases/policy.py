"""Which phase comes next, and why. Pure: a state and what happened in, a state and a reason out.

    Warmup --> Full --> Predict --> Correct --> Full
                 ^        |refused     |rolled back
                 +--------+------------+

The policy never looks at a weight. How far a jump may reach and what it is worth is in `horizon.py`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.phases import bandit
from hybridtrainer.phases.bandit import Arm, Arms, Vector
from hybridtrainer.records import Phase

LEAST_SHARE_LEFT = 0.5
PATIENT_LOOKS = 4  # ahead, in a row, that came to nothing: after as many again and again a Full phase is twice as long
LONGEST_FULL = 8  # times the configured length
LEAST_PROGRESS = 0.2  # chance that the loss falls; below it there is no drift worth following
PROOFS = 2  # jumps in a row that must pass a probe before others are made without one
PRICED_FOR = 4  # jumps that are credited as the newest probe says, until the next is probed
OFF = "predict is off in the configuration"
NOT_NAMED = "the configuration does not name jumps"


@dataclass(frozen=True)
class PolicyState:
    """Where the phase machine stands.

    Attributes:
        phase: The phase of the next step.
        steps_in_phase: Real steps made in it.
        forced_steps: Full steps that must be made before the next jump, whatever else holds.
        longest_jump: Steps that a jump may foresee at present; failure halves it, success doubles it.
        failures: Failed jumps in a row.
        off: Why prediction is switched off; empty while it is not.
        real_steps: Real steps of the whole run.
        balance: Steps gained by jumps minus steps they cost.
        jumps_kept: Jumps that were verified.
        jumps_failed: Jumps that made things worse, or would have.
        rate_checked: Whether the learning rate of the whole run has been looked at.
        arms: What each horizon has paid, with `horizon = "linucb"`; empty otherwise.
        attempt: Of the newest jump its arm, its context and its cost in real steps.
        paid: Whether the newest jump was worth more steps than it cost.
        looks_in_vain: How often Full has begun again since a jump that paid was last kept.
        proofs: Jumps kept in a row; failure halves it.
        price: What share of the steps it foresaw the newest jump that was probed was worth.
        unpriced: Jumps made since then.
        probe_loss: The lowest loss of a probe without the jump.
    """

    phase: Phase
    longest_jump: int
    steps_in_phase: int = 0
    forced_steps: int = 0
    failures: int = 0
    off: str = ""
    real_steps: int = 0
    balance: float = 0.0
    jumps_kept: int = 0
    jumps_failed: int = 0
    rate_checked: bool = False
    arms: Arms = ()
    attempt: tuple[int, Vector, float] | None = None
    paid: bool = True
    looks_in_vain: int = 0
    proofs: int = 0
    price: float = 0.0
    unpriced: int = 0
    probe_loss: float = math.inf

    @property
    def is_trusted(self) -> bool:
        """Whether jumps have shown often enough that they are steps in the right direction."""
        return self.proofs >= PROOFS

    @property
    def needs_probe(self) -> bool:
        """Whether the next jump must be probed, to be let through or to know what it is worth."""
        return not self.is_trusted or self.unpriced >= PRICED_FOR

    def to_tree(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self) | {"phase": self.phase.value}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Self:
        """The inverse of `to_tree`; what an older checkpoint knows besides is left."""
        known = {name: tree[name] for name in cls.__dataclass_fields__ if name in tree}
        arms = tuple(Arm(*arm) for arm in tree["arms"])
        return cls(**{**known, "phase": Phase(tree["phase"]), "arms": arms})

    def arm(self) -> int | None:
        """The horizon that the bandit would play; None where it would not jump, or there is no bandit."""
        return bandit.choose(self.arms, self.context(), self.real_steps)

    def context(self) -> Vector:
        """What the payment of a jump may depend on."""
        return bandit.context(self.real_steps, self.jumps_kept, self.jumps_failed)


def start(rules: HybridTrainerConfig, obstacle: str = "") -> PolicyState:
    """The state before the first step; `obstacle` says why there can be no jumps, where there can be none."""
    return PolicyState(
        phase=Phase.WARMUP if rules.warmup_steps else Phase.FULL,
        longest_jump=min(rules.correction_interval, rules.max_predict_steps),
        off=obstacle if rules.jumps_allowed() else NOT_NAMED if rules.predict != "off" else OFF,
        arms=bandit.NOTHING_KNOWN if rules.horizon == "linucb" else (),
    )


def unless_rate_falls(state: PolicyState, rules: HybridTrainerConfig, share_left: float) -> PolicyState:
    """Switches "auto" off for a run in which only this share of the highest learning rate will be left.

    Jumps do harm that shows when the rate falls (docs/LOG.md). Where the configuration names them they are made anyway.
    """
    state = replace(state, rate_checked=True)
    if state.off or rules.predict != "auto" or share_left >= LEAST_SHARE_LEFT:
        return state
    return replace(state, off=f"the learning rate will fall to {share_left:.0%} of its peak, and jumps do harm then")


def in_warmup(state: PolicyState) -> PolicyState:
    """A model that begins short is in Warmup until it has grown, however long the configuration says that is."""
    return replace(state, phase=Phase.WARMUP)


def after_growth(state: PolicyState, rules: HybridTrainerConfig) -> PolicyState:
    """The model has grown: what was usual has to be seen anew."""
    return replace(
        state, phase=Phase.WARMUP if rules.warmup_steps else Phase.FULL, steps_in_phase=0, proofs=0, probe_loss=math.inf
    )


def full_is_over(state: PolicyState, rules: HybridTrainerConfig) -> bool:
    """Whether a Full phase has come to where one looks ahead."""
    return state.phase is Phase.FULL and state.steps_in_phase >= full_length(state, rules)


def full_length(state: PolicyState, rules: HybridTrainerConfig) -> int:
    """Real steps of a Full phase: the more, the longer nothing has come of looking ahead, which costs time itself.

    Not where jumps are trusted: then it is known that something comes of it.

    >>> rules = HybridTrainerConfig()
    >>> [full_length(replace(start(rules), looks_in_vain=looks), rules) for looks in (0, 4, 8, 12, 1000)]
    [20, 40, 80, 160, 160]
    """
    looks = 0 if state.is_trusted else state.looks_in_vain
    return rules.full_steps * int(min(LONGEST_FULL, 2 ** min(10, looks // PATIENT_LOOKS)))


def after_real_step(
    state: PolicyState, rules: HybridTrainerConfig, finding: str | None, is_short: bool = False
) -> tuple[PolicyState, str]:
    """Counts a real step of Warmup or Full and takes note of an alarm. The reason is empty if nothing changes.

    Args:
        state: The present state.
        rules: The configuration.
        finding: What was alarming about the step.
        is_short: Whether the model has yet to grow, until when it is in Warmup.
    """
    state = replace(
        state,
        steps_in_phase=state.steps_in_phase + 1,
        real_steps=state.real_steps + 1,
        forced_steps=max(0, state.forced_steps - 1),
    )
    reason = ""
    if state.phase is Phase.WARMUP and state.steps_in_phase >= rules.warmup_steps and not is_short:
        state = replace(state, phase=Phase.FULL, steps_in_phase=0)
        reason = f"{rules.warmup_steps} warmup steps are done"
    if finding is not None and not state.off:
        state = replace(
            state,
            steps_in_phase=0 if state.phase is Phase.FULL else state.steps_in_phase,
            forced_steps=rules.recovery_steps,
            longest_jump=max(1, state.longest_jump // 2),
        )
        reason = f"{finding}: no jump for {rules.recovery_steps} steps"
    return state, reason


def confidence(state: PolicyState, expected: float) -> float:
    """The forecaster's own expectation, corrected by how its jumps have fared in this run."""
    prior = 4
    return (prior * expected + state.jumps_kept) / (prior + state.jumps_kept + state.jumps_failed)


def consider(
    state: PolicyState, rules: HybridTrainerConfig, sure: float, progress: float | None = None
) -> tuple[PolicyState, str]:
    """Enters Predict if the forecast is sure enough, or jumps are trusted; otherwise a new Full phase begins.

    How sure a forecast is follows from how well windows agree, which is ever less while noise grows over the drift.
    Averaged over many windows the drift is still there then, and pays (docs/PREDICTION.md).

    Args:
        state: The present state.
        rules: The configuration.
        sure: How sure the forecast of the weights is.
        progress: The chance that the loss goes on falling, as the dynamics model sees it; None where nobody knows.
    """
    if progress is not None and progress < LEAST_PROGRESS:
        return to_full(state), f"the loss is expected to rise: it falls with a chance of {progress:.2f}"
    if state.is_trusted or sure >= rules.confidence_threshold:
        reason = f"confidence {sure:.2f} reaches {rules.confidence_threshold:.2f}"
        if state.is_trusted:
            reason = f"jumps are trusted after {state.proofs} in a row"
        return replace(state, phase=Phase.PREDICT, steps_in_phase=0), reason
    reason = f"confidence {sure:.2f} is below {rules.confidence_threshold:.2f}"
    return to_full(state), reason


def to_full(state: PolicyState) -> PolicyState:
    """Begins a Full phase; what has come of looking ahead is known."""
    return replace(state, phase=Phase.FULL, steps_in_phase=0, looks_in_vain=state.looks_in_vain + 1)


def after_correction_step(state: PolicyState) -> PolicyState:
    """Counts a real step of Correct."""
    return replace(state, steps_in_phase=state.steps_in_phase + 1, real_steps=state.real_steps + 1)


def after_accepted(
    state: PolicyState, horizon: int, worth: int, cost: float, probe_loss: float | None = None
) -> PolicyState:
    """A jump was made, and Correct begins.

    Args:
        state: The state before it.
        horizon: Steps that it foresaw.
        worth: Steps that it is credited with.
        cost: What the attempt cost, in real steps.
        probe_loss: The loss in its probe, without the jump; None where there was no probe.
    """
    jumped = replace(
        _paid(state, worth, cost),
        phase=Phase.CORRECT,
        steps_in_phase=0,
        balance=state.balance - cost + worth,
        paid=worth > cost,
        unpriced=state.unpriced + 1,
    )
    if probe_loss is None:
        return jumped
    return replace(jumped, price=worth / horizon, unpriced=0, probe_loss=min(probe_loss, state.probe_loss))


def after_kept(state: PolicyState, rules: HybridTrainerConfig) -> PolicyState:
    """The jump was verified."""
    longest = min(2 * state.longest_jump, rules.max_predict_steps)
    return replace(
        state,
        failures=0,
        longest_jump=longest,
        jumps_kept=state.jumps_kept + 1,
        proofs=state.proofs + 1,
        looks_in_vain=0 if state.paid else state.looks_in_vain,
    )


def after_refused(state: PolicyState, rules: HybridTrainerConfig, cost: float) -> tuple[PolicyState, str]:
    """The probe did not let the jump through, which cost so many real steps; none is trusted any more."""
    return _after_failure(replace(_paid(state, 0, cost), proofs=0), rules, cost)


def after_rolled_back(state: PolicyState, rules: HybridTrainerConfig, worth: int) -> tuple[PolicyState, str]:
    """An accepted jump was undone: what it seemed worth is gone, and so are the correction steps made on it."""
    lost = worth + state.steps_in_phase
    if state.attempt is not None:
        number, x, cost = state.attempt
        state = replace(state, arms=bandit.learn(state.arms, number, x, -lost / cost, again=True))
    return _after_failure(state, rules, lost)


def _paid(state: PolicyState, worth: int, cost: float) -> PolicyState:
    """Tells the bandit what an attempt was worth, where there is one."""
    number, x = state.arm(), state.context()
    if number is None:
        return replace(state, attempt=None)
    return replace(state, arms=bandit.learn(state.arms, number, x, (worth - cost) / cost), attempt=(number, x, cost))


def after_no_memory(state: PolicyState, rules: HybridTrainerConfig) -> tuple[PolicyState, str]:
    """GPU memory did not suffice for a jump or its preparation: no fault of the forecaster, but none for a while.

    A warmup goes on, and too many in a row switch prediction off.
    """
    failures = state.failures + 1
    begun = state if state.phase is Phase.WARMUP else to_full(state)
    failed = replace(begun, failures=failures, forced_steps=rules.recovery_steps)
    if failures >= rules.max_failures:
        off = f"{failures} jumps in a row failed, the last for want of GPU memory"
        return replace(failed, off=off), f"prediction is switched off: {off}"
    return failed, ""


def _after_failure(state: PolicyState, rules: HybridTrainerConfig, cost: float) -> tuple[PolicyState, str]:
    """Shorter jumps, Full for a while, and prediction off after too many failures in a row."""
    failures = state.failures + 1
    failed = replace(
        to_full(state),
        failures=failures,
        jumps_failed=state.jumps_failed + 1,
        longest_jump=max(1, state.longest_jump // 2),
        forced_steps=rules.recovery_steps,
        balance=state.balance - cost,
        proofs=state.proofs // 2,
    )
    if failures >= rules.max_failures:
        off = f"{failures} jumps in a row failed"
        return replace(failed, off=off), f"prediction is switched off: {off}"
    return failed, ""
