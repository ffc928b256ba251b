"""What to do as a GPU fills up: warn, clean up, and have a checkpoint written before nothing is left.

    62%  warn        once
    75%  clean up    if torch holds much more than its tensors ever took, and not again for a while
    87%  emergency   clean up; if that did not help, warn and ask for a checkpoint, once until it has fallen again

Cleaning up costs time: what is given back has to be asked for again. Between two steps torch always holds more than its
tensors take, and needs it in the next, so that what counts is the peak of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from hybridtrainer.memory.vram import Vram, VramUse
from hybridtrainer.sizes import as_size

FALLEN_SHARE = 0.05  # below a threshold; a use that flutters about it crosses it once
WORTHWHILE_SHARE = 0.05  # of what there is, reserved and never taken by a tensor
PAUSE_STEPS = 50  # between two clean-ups by need: what comes back at once is needed


class Level(IntEnum):
    """How full the GPU is."""

    CALM = 0
    WARN = 1
    CLEAN_UP = 2
    EMERGENCY = 3


SHARES = {Level.WARN: 0.62, Level.CLEAN_UP: 0.75, Level.EMERGENCY: 0.87}
"""From which share of the card, or of the budget, on."""


def level_of(share: float, before: Level = Level.CALM) -> Level:
    """The level for a share; it falls only once the share is well below the threshold.

    >>> level_of(0.8), level_of(0.86, before=Level.EMERGENCY), level_of(0.80, before=Level.EMERGENCY)
    (<Level.CLEAN_UP: 2>, <Level.EMERGENCY: 3>, <Level.CLEAN_UP: 2>)
    """
    reached = [
        level for level, least in SHARES.items() if share >= (least - FALLEN_SHARE if level <= before else least)
    ]
    return max(reached, default=Level.CALM)


class Pressure:
    """Watches a GPU fill up, step by step.

    Args:
        vram: Its memory.
        say: Called with what a person should know.
        save: Called where a checkpoint should be written before the next step; returns whether there will be one.
        cleanup_every: Steps between clean-ups that were asked for; 0 cleans up by need alone.
        clock: Where the run's clock stands.

    Attributes:
        cleanups: How often memory was given back to the card.
    """

    def __init__(
        self,
        vram: Vram,
        say: Callable[[str], None],
        save: Callable[[], bool],
        cleanup_every: int = 0,
        clock: int = 0,
    ) -> None:
        self.vram = vram
        self.cleanups = 0
        self._say = say
        self._save = save
        self._every = cleanup_every
        self._clock = clock
        self._level = Level.CALM
        self._cleaned_at: int | None = None

    def after_step(self, step: int) -> VramUse:
        """Looks, and does what is due; returns what was found in the end.

        Args:
            step: The run's clock, which a jump moves by several steps and a roll-back moves back.
        """
        use = self.vram.read()
        before, self._clock = self._clock, step
        level = level_of(use.share, self._level)
        asked = self._every > 0 and before // self._every != step // self._every
        needed = level >= Level.CLEAN_UP and _is_worthwhile(use) and self._has_paused(step)
        if asked or needed:
            self.vram.give_back()
            self.cleanups += 1
            self._cleaned_at = step
            use = self.vram.read()
            level = level_of(use.share, self._level)
        if level > self._level:
            self._say(_warning(use, saved=level is Level.EMERGENCY and self._save()))
        self._level = level
        return use

    def _has_paused(self, step: int) -> bool:
        return self._cleaned_at is None or abs(step - self._cleaned_at) >= PAUSE_STEPS


def _is_worthwhile(use: VramUse) -> bool:
    return use.reserved_bytes - use.highest_allocated_bytes >= WORTHWHILE_SHARE * use.limit_bytes


def _warning(use: VramUse, saved: bool) -> str:
    of = "memory.vram" if use.has_budget else "the GPU"
    text = f"{use.share:.0%} of {of} ({as_size(use.limit_bytes, digits=1)}) is in use"
    if not use.has_budget and use.card_bytes is not None and use.card_bytes > use.reserved_bytes:
        text += f", {as_size(use.card_bytes - use.reserved_bytes, digits=1)} of it not by torch"
    return f"{text}: a checkpoint is written, in case memory runs out" if saved else text
