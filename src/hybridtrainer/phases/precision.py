"""Arithmetic that follows the stability of the loss: bf16 while nothing is suspicious, fp32 for a while when it is.

Pure: what the watch has seen goes in, how many careful steps are left comes out. The signals are those of
`divergence.py`; the weights are fp32 in either case.
"""

from __future__ import annotations

from hybridtrainer.phases.divergence import Watch

CAREFUL_STEPS = 20  # real steps in fp32 after the last sign of trouble
ADAPTIVE = "adaptive"


def precision_at(setting: str, careful_steps: int) -> str:
    """The arithmetic of the next step: the setting itself, unless it is "adaptive".

    >>> precision_at("adaptive", 0), precision_at("adaptive", 3), precision_at("fp16", 3)
    ('bf16', 'fp32', 'fp16')
    """
    if setting != ADAPTIVE:
        return setting
    return "fp32" if careful_steps else "bf16"


def trouble(watch: Watch, finding: str | None) -> str:
    """What speaks against bf16 after a real step; empty if nothing does.

    Args:
        watch: After the step.
        finding: What the watch, or the check for finite values, has found.
    """
    if finding is not None:
        return finding
    return "the last step looks suspicious" if watch.suspects else ""


def careful_after(careful_steps: int, reason: str) -> int:
    """Careful steps that are left after a real step, with or without trouble."""
    return CAREFUL_STEPS if reason else max(0, careful_steps - 1)
