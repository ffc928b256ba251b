"""Watches losses and gradient norms for divergence. Pure: a state and an observation in, a state and a finding out.

Values that look wrong are kept out of the statistics until they are confirmed, so that one spike does not blind
the watch. What to do about a finding is decided elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Any, Self

from hybridtrainer.errors import DivergenceError
from hybridtrainer.phases.pace import Course, progress_per_step

MIN_LOSSES = 16
LOSS_WINDOW = 200  # the trend is fitted over all of them
NEAR = 32  # level, spread and norms are those of the newest few
EXCESS_WINDOW = 100  # tails are seen only in many losses
SKEWED = 0.7
GRADIENT_FACTOR = 10.0
VANISHING_FACTOR = 0.01
OSCILLATION_STEPS = 20
BAD_STEPS_ALLOWED = 3  # in a row; then the run stops
SPREAD_FLOOR = 0.005  # of the loss: no alarm for less, however smooth the curve was


@dataclass(frozen=True)
class Watch:
    """What the watch remembers.

    Attributes:
        losses: Finite, unsuspicious losses of real steps, oldest first.
        norms: Their gradient norms.
        suspects: Suspicious steps in a row.
        bad: Steps in a row whose loss or gradient was not finite.
        raw: The newest finite losses, suspicious ones too: swings are seen in these.
        course: The unsuspicious losses of the whole run, in bins.
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    suspects: int = 0
    bad: int = 0
    raw: tuple[float, ...] = ()
    course: Course = field(default_factory=Course)

    def to_tree(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Self:
        """The inverse of `to_tree`."""
        course = Course.from_tree(tree["course"]) if "course" in tree else Course()  # a checkpoint of before
        return cls(
            tuple(tree["losses"]), tuple(tree["norms"]), tree["suspects"], tree["bad"], tuple(tree["raw"]), course
        )


def observe(watch: Watch, loss: float, norm: float, sigma: float) -> tuple[Watch, str | None]:
    """Takes in one real step. Returns the new state and, where it is confirmed, what is wrong.

    A loss more than `sigma` standard deviations above its level is suspicious; it is confirmed by the next step,
    or at once beyond twice that. The same holds for gradients ten times or a hundredth of their median, and for
    losses that swing ever wider from step to step.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return observe_bad(watch), None
    watch = replace(watch, bad=0, raw=(*watch.raw, loss)[-2 * OSCILLATION_STEPS :])
    finding, certain = _examine(watch, loss, norm, sigma)
    if finding is None:
        losses, norms = (*watch.losses, loss)[-LOSS_WINDOW:], (*watch.norms, norm)[-NEAR:]
        return Watch(losses, norms, raw=watch.raw, course=watch.course.add(loss)), None
    if certain or watch.suspects >= 1:
        return Watch(course=watch.course.anew()), finding  # a new level from here on
    return replace(watch, suspects=watch.suspects + 1), None


def observe_bad(watch: Watch) -> Watch:
    """Takes in a step whose loss or gradient was not finite; the statistics are left as they are."""
    return replace(watch, bad=watch.bad + 1)


def pace(watch: Watch) -> float | None:
    """How fast the loss falls now, per real step; None if unknown. See `pace.progress_per_step`."""
    return progress_per_step(watch.course, watch.losses)


def level_and_spread(losses: tuple[float, ...]) -> tuple[float, float] | None:
    """Mean of the newest losses and their standard deviation around a line; None while there are too few."""
    if len(losses) < MIN_LOSSES:
        return None
    near = losses[-NEAR:]
    level = statistics.fmean(near)
    _, spread, _ = _fit(near, level)
    return level, max(spread, SPREAD_FLOOR * abs(level), 1e-12)


def not_recovered(before: tuple[float, ...], after: Sequence[float], sigma: float) -> str | None:
    """Why the mean of some losses is too high to come from the same run as those before; None if it is not."""
    usual = level_and_spread(before)
    if usual is None:
        return None
    level, spread = usual
    mean, limit = statistics.fmean(after), level + sigma * spread / math.sqrt(len(after))
    return f"mean loss {mean:.4f} after correction is above {limit:.4f}" if mean > limit else None


def _examine(watch: Watch, loss: float, norm: float, sigma: float) -> tuple[str | None, bool]:
    """What looks wrong about this step, and whether that is certain without a second one."""
    usual_loss = level_and_spread(watch.losses)
    if usual_loss is None:
        return None, False
    level, spread = usual_loss
    excess = _excess(watch.losses[-EXCESS_WINDOW:], loss)
    if excess > sigma:
        return f"loss {loss:.4g} is {excess:.1f} sigma above {level:.4g}", excess > 2 * sigma
    usual = statistics.median(watch.norms)
    if norm > max(GRADIENT_FACTOR * usual, 2 * max(watch.norms)):
        return f"gradient norm {norm:.3g} is over {GRADIENT_FACTOR:g} times its median {usual:.3g}", False
    if norm < min(VANISHING_FACTOR * usual, min(watch.norms) / 2):
        return f"gradient norm {norm:.3g} is under {VANISHING_FACTOR:g} of its median {usual:.3g}", False
    if _oscillates(watch.raw, spread):
        return f"loss swings from step to step over {OSCILLATION_STEPS} steps", False
    return None, False


def _excess(losses: tuple[float, ...], loss: float) -> float:
    """How many standard deviations a loss lies above its trend's level.

    Near convergence losses of small batches are skewed: many near zero, some far above. Those are judged by their
    logarithms, or every hard batch would be an alarm.
    """
    mean = statistics.fmean(losses)
    floor = SPREAD_FLOOR * abs(mean)
    if min(losses) > 0 and loss > 0 and _skewness(losses, mean) > SKEWED:
        losses, loss, floor = tuple(map(math.log, losses)), math.log(loss), SPREAD_FLOOR
        mean = statistics.fmean(losses)
    _, spread, _ = _fit(losses, mean)
    return (loss - mean) / max(spread, floor, 1e-12)


def _skewness(values: tuple[float, ...], mean: float) -> float:
    apart = [value - mean for value in values]
    squares = list(map(mul, apart, apart))
    variance = statistics.fmean(squares)
    scale = variance * math.sqrt(variance)
    return sum(map(mul, squares, apart)) / len(values) / scale if scale > 0 else 0.0


def _oscillates(losses: tuple[float, ...], spread: float) -> bool:
    """Whether the newest losses go up and down in turns, and wider now than before."""
    if len(losses) < 2 * OSCILLATION_STEPS:
        return False
    recent, earlier = losses[-OSCILLATION_STEPS:], losses[-2 * OSCILLATION_STEPS : -OSCILLATION_STEPS]
    changes = [b - a for a, b in pairwise(recent)]
    turns = sum(a * b < 0 for a, b in pairwise(changes))
    swing = statistics.fmean([abs(change) for change in changes])
    before = statistics.fmean([abs(b - a) for a, b in pairwise(earlier)])
    return turns >= len(changes) - 2 and swing > 2 * max(before, SPREAD_FLOOR * abs(recent[-1])) and swing > spread


def _fit(values: tuple[float, ...], mean: float) -> tuple[float, float, float]:
    """Least-squares line: slope, standard deviation around it, standard error of the slope."""
    count, times = len(values), _times(len(values))
    square = count * (count * count - 1) / 12  # sum of the squared times
    slope = sum(map(mul, times, values)) / square
    residuals = [value - mean - slope * time for value, time in zip(values, times, strict=True)]
    residual = sum(map(mul, residuals, residuals))
    spread = math.sqrt(residual / max(count - 2, 1))
    return slope, spread, spread / math.sqrt(square)


@lru_cache(maxsize=8)
def _times(count: int) -> tuple[float, ...]:
    """Of so many steps, from their middle."""
    return tuple(i - (count - 1) / 2 for i in range(count))


def bad_steps_error(problem: str, step: int) -> DivergenceError:
    """What stops a run after `BAD_STEPS_ALLOWED` bad steps; `problem` is what was wrong with the last of them."""
    return DivergenceError(
        f"Loss or gradients were not finite for {BAD_STEPS_ALLOWED} steps in a row ({problem} at step {step}). "
        "Nothing that is not finite was applied.",
        "Lower the learning rate, clip gradients, or look at the data of these batches.",
    )
