"""Where a run stands: all that decides its future besides the training objects and the recorded windows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Self

from hybridtrainer.phases import precision
from hybridtrainer.phases.divergence import Watch
from hybridtrainer.phases.policy import PolicyState
from hybridtrainer.records import JumpRecord, PrecisionChange
from hybridtrainer.tree import Tree


@dataclass
class Standing:
    """The trainer's own state.

    Attributes:
        policy: The phase machine.
        watch: Recent losses and gradient norms.
        clock: Real steps that were not undone, and steps foreseen.
        confidence: That of the newest forecast.
        jump: The accepted jump that is being corrected.
        correction_losses: Losses of the correction steps made on it.
        data: Position and identity of the loader at the last completed step; None without `trainer.loader`.
        careful_steps: Real steps left in fp32, where the arithmetic follows the loss. A roll-back does not return to
            it: what has been seen stays seen.
    """

    policy: PolicyState
    watch: Watch = field(default_factory=Watch)
    clock: int = 0
    confidence: float | None = None
    jump: JumpRecord | None = None
    correction_losses: list[float] = field(default_factory=list)
    data: Tree = None
    careful_steps: int = 0

    def arithmetic(self, setting: str) -> str:
        """The precision of the next step, where `memory.precision` is `setting`."""
        return precision.precision_at(setting, self.careful_steps)

    def adapt(self, setting: str, finding: str | None) -> PrecisionChange | None:
        """Counts a real step towards the arithmetic of the next; returns the change, if there is one."""
        reason = precision.trouble(self.watch, finding)
        before = self.arithmetic(setting)
        self.careful_steps = precision.careful_after(self.careful_steps, reason)
        after = self.arithmetic(setting)
        if before == after:
            return None
        return PrecisionChange(self.clock, before, after, reason or f"{precision.CAREFUL_STEPS} steps without trouble")

    def to_tree(self) -> dict[str, Tree]:
        """Plain values. Seconds are left out: equal runs must have equal states."""
        return {
            "policy": self.policy.to_tree(),
            "watch": self.watch.to_tree(),
            "clock": self.clock,
            "confidence": self.confidence,
            "jump": None if self.jump is None else asdict(self.jump) | {"seconds": 0.0},
            "correction_losses": list(self.correction_losses),
            "data": self.data,
            "careful_steps": self.careful_steps,
        }

    @classmethod
    def from_tree(cls, tree: Tree) -> Self:
        """The inverse of `to_tree`."""
        return cls(
            policy=PolicyState.from_tree(tree["policy"]),
            watch=Watch.from_tree(tree["watch"]),
            clock=tree["clock"],
            confidence=tree["confidence"],
            jump=None if tree["jump"] is None else JumpRecord(**tree["jump"]),
            correction_losses=list(tree["correction_losses"]),
            data=tree["data"],
            careful_steps=tree["careful_steps"],
        )

    def to_undo(self) -> dict[str, Tree]:
        """What a roll-back returns to. The phase machine keeps counting: it must learn from the failure."""
        return {"watch": self.watch.to_tree(), "clock": self.clock, "data": self.data}

    def undo(self, tree: Tree) -> None:
        """Goes back to what `to_undo` returned."""
        self.watch = Watch.from_tree(tree["watch"])
        self.clock, self.data = tree["clock"], tree["data"]
