"""Where the training loss is heading: a forecast of the smoothed loss at a later step, with a 90% interval.

It knows losses and steps, and nothing of models, schedules or seconds; nobody decides anything by it.

Curves (c + a t^-b for several b, c - a log t, and A t^-b) are fitted to the recent part of the losses, for several
ideas of "recent". Their forecasts are averaged, those counting more that fit the newest losses better. The interval has
in it the spread between the curves, the noise of a smoothed loss, the error of a fitted curve, and a share of the way
still to go; it is scaled by the errors of earlier forecasts of the same run whose target has been reached.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridtrainer.records import LossForecast

STUDENT90 = 1.75
"""Half a 90% interval in standard errors, where these are known from some fifteen values."""
FINE_BINS = 256  # that a whole run is divided into
FIT_BINS = 32  # that a curve is fitted to, at most
LEAST_BINS = 8
LEAST_LOSSES = 20
POWERS = (0.25, 0.5, 1.0, 2.0)
RECENT_SHARES = (0.25, 0.4, 0.6)
"""Of the clock so far. The beginning of a run falls faster than any law that holds later, so no curve sees it."""
NEWEST = 1
"""Which of these parts the curves are judged on."""
GROWTH = 0.7
"""Standard error of a far forecast, as a share of the way to go at the recent pace in log steps."""
TEMPER = 0.5
"""Neighbouring bins are not independent, and the curves are wrong in their own ways: they count as half as many."""
PRIOR_ERRORS = 4.0
"""So many resolved forecasts count as much as the assumption that the intervals are right as they are."""
FORGETTING = 0.9
REMEMBERED_LOSSES = 512  # one by one, so that those of a jump that is rolled back can be taken out again


class Bin(NamedTuple):
    """Losses of neighbouring steps: how many, their mean step, their mean."""

    weight: float
    step: float
    loss: float


Law = Callable[[float], float]


class Fit(NamedTuple):
    """The fitted curves.

    Attributes:
        laws: The loss by step.
        weights: How much each counts; they add up to 1.
        slope: Change of the loss with the logarithm of the step, at the clock.
        variance: Of a single loss around the best of the curves.
    """

    laws: list[Law]
    weights: list[float]
    slope: float
    variance: float

    def mean(self, values: Sequence[float]) -> float:
        """Of one value for each curve."""
        return sum(weight * value for weight, value in zip(self.weights, values, strict=True))


class _Pending(NamedTuple):
    target_step: int
    loss: float
    deviation: float
    kind: str


def smoothing_steps(steps: int) -> int:
    """Over how many steps of the clock the loss of a run of `steps` steps is smoothed."""
    return max(10, steps // 20)


class Outlook:
    """The losses of a run, and what they say about later ones.

    Args:
        steps: Where the clock ends.

    >>> outlook = Outlook(steps=1000)
    >>> for step in range(1, 401):
    ...     outlook.observe(step, 2 + 3 * step**-0.5)
    >>> (forecast,) = outlook.forecast(1000)
    >>> round(forecast.loss, 1), forecast.low < 2 + 3 * 1000**-0.5 < forecast.high
    (2.1, True)
    """

    def __init__(self, steps: int) -> None:
        self.smoothing = smoothing_steps(steps)
        self._end = steps
        self._width = max(1, steps // FINE_BINS)
        self._bins: dict[int, list[float]] = {}  # count, sum of steps, sum of losses, by number
        self._recent: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_LOSSES)
        self._count = self._clock = 0
        self._lowest, self._highest = math.inf, -math.inf
        self._pending: list[_Pending] = []
        self._errors = {"near": (0.0, 0.0), "far": (0.0, 0.0)}  # how many, and the sum of their squares

    def observe(self, step: int, loss: float) -> None:
        """Takes in the loss of a real step. A clock that went back undoes what was observed after it."""
        if not math.isfinite(loss):
            return
        while self._recent and self._recent[-1][0] >= step:
            self._add(*self._recent.pop(), -1)
        self._recent.append((step, loss))
        self._add(step, loss, 1)
        self._clock = step
        self._lowest, self._highest = min(self._lowest, loss), max(self._highest, loss)

    def forecast(self, *target_steps: int) -> list[LossForecast]:
        """Forecasts of the mean loss over the `smoothing` steps that end at each target; none if too little is known.

        The forecasts are remembered: their errors will widen or narrow the intervals of later ones.
        """
        try:
            made = self._make(target_steps)
        except OverflowError:  # losses that large have no outlook
            return []
        return made if all(math.isfinite(forecast.low + forecast.high) for forecast in made) else []

    def _make(self, target_steps: Sequence[int]) -> list[LossForecast]:
        self._resolve()
        fit = self._fit()
        if fit is None:
            return []
        # A look half as far again is for the outlook itself: by its error it learns how far ahead it can see.
        further = self._clock + max(3 * self.smoothing, self._clock // 2)
        made = []
        for target in (*target_steps, further):
            loss, deviation = self._combine(fit, target)
            if self._clock < target <= self._end:
                self._pending.append(_Pending(target, loss, deviation, self._kind(target)))
            reach = STUDENT90 * deviation * self._scale(target)
            made.append(LossForecast(self._clock, target, loss, max(loss - reach, self._floor()), loss + reach))
        return made[:-1]

    def _add(self, step: int, loss: float, sign: int) -> None:
        held = self._bins.setdefault((step - 1) // self._width, [0.0, 0.0, 0.0])
        held[0] += sign
        held[1] += sign * step
        held[2] += sign * loss
        self._count += sign

    def _between(self, after: float, until: float, width: int) -> list[Bin]:
        """The losses later than `after` and not later than `until`, in bins of at least `width` steps."""
        merged: dict[int, list[float]] = {}
        for number in range(int(after) // self._width, (int(until) - 1) // self._width + 1):
            held = self._bins.get(number)
            if held is not None and held[0] > 0 and after < held[1] / held[0] <= until:
                sums = merged.setdefault(number * self._width // width, [0.0, 0.0, 0.0])
                for index in range(3):
                    sums[index] += held[index]
        return [Bin(count, at / count, loss / count) for count, at, loss in merged.values()]

    def _mean(self, after: float, until: float) -> tuple[float, float] | None:
        """Mean loss between two steps, and of how many; None where there is none."""
        bins = self._between(after, until, self._width)
        count = sum(held.weight for held in bins)
        return (sum(held.weight * held.loss for held in bins) / count, count) if count else None

    def _fit(self) -> Fit | None:
        clock = self._clock
        if self._count < LEAST_LOSSES or clock < self.smoothing:
            return None
        parts = [self._between(clock * (1 - s), clock, math.ceil(clock * s / FIT_BINS)) for s in RECENT_SHARES]
        newest = parts[NEWEST]
        laws: list[Law] = []
        for bins in parts:
            if len(bins) >= LEAST_BINS:
                laws += [_logarithm(bins), *(_power_law(bins, power) for power in POWERS)]
                if all(held.loss > 0 for held in bins):
                    laws.append(_pure_power_law(bins))
        if not laws:
            return None
        misfits = [_misfit(law, newest) for law in laws]
        best = min(misfits)
        exponent = TEMPER * len(newest) / 2
        weights = [(best / misfit) ** exponent if misfit > best else 1.0 for misfit in misfits]
        total = sum(weights)
        fit = Fit(laws, [weight / total for weight in weights], 0.0, best)
        slope = fit.mean([law(clock) - law(clock / 1.25) for law in laws]) / math.log(1.25)
        return fit._replace(slope=slope)

    def _combine(self, fit: Fit, target: int) -> tuple[float, float]:
        """The loss expected at `target`, and its standard error before earlier errors are heeded."""
        begin = max(self._clock, target - self.smoothing)
        middle = (begin + target) / 2
        # An early curve can lead anywhere; no run goes further than it has come.
        span = self._highest - self._lowest
        bottom, top = max(self._lowest - span, self._floor()), self._highest + span
        values = [min(max(law(middle), bottom), top) for law in fit.laws]
        loss = fit.mean(values)
        spread = fit.mean([(value - loss) ** 2 for value in values])
        distance = math.log(middle / self._clock)
        growth = (GROWTH * fit.slope * distance) ** 2
        # Of a straight line over the newest losses, at its end and beyond.
        share = RECENT_SHARES[NEWEST]
        fitting = fit.variance * (1 + 3 * (1 - 2 * distance / math.log(1 - share)) ** 2) / (self._clock * share)
        noise = fit.variance / max(1, target - begin)
        deviation = min(span, math.sqrt(spread + growth + fitting + noise))
        known = self._mean(target - self.smoothing, self._clock)
        if known is None or target - self.smoothing >= self._clock:
            return loss, deviation
        # Part of the smoothed loss is known already.
        ahead = (target - begin) / self.smoothing
        return ahead * loss + (1 - ahead) * known[0], ahead * deviation

    def _resolve(self) -> None:
        """Compares the forecasts whose target has been reached with what came."""
        waiting = []
        for forecast in self._pending:
            if forecast.target_step > self._clock:
                waiting.append(forecast)
                continue
            came = self._mean(forecast.target_step - self.smoothing, forecast.target_step)
            if came is not None and forecast.deviation > 0:
                count, squares = self._errors[forecast.kind]
                error = (came[0] - forecast.loss) / forecast.deviation
                self._errors[forecast.kind] = (FORGETTING * count + 1, FORGETTING * squares + error**2)
        self._pending = waiting

    def _floor(self) -> float:
        """What the loss cannot be below: a loss that has never been negative will not become so."""
        return 0.0 if self._lowest >= 0 else -math.inf

    def _kind(self, target: int) -> str:
        return "near" if target <= self._clock + 2 * self.smoothing else "far"

    def _scale(self, target: int) -> float:
        count, squares = self._errors[self._kind(target)]
        return math.sqrt((PRIOR_ERRORS + squares) / (PRIOR_ERRORS + count))


def _power_law(bins: Sequence[Bin], power: float) -> Law:
    """c + a t^-b, for a given b."""
    constant, factor = _line([(held.weight, held.step**-power, held.loss) for held in bins])
    return lambda step: constant + factor * step**-power


def _logarithm(bins: Sequence[Bin]) -> Law:
    """c - a log t, which is where power laws go as b goes to 0."""
    constant, factor = _line([(held.weight, math.log(held.step), held.loss) for held in bins])
    return lambda step: constant + factor * math.log(step)


def _pure_power_law(bins: Sequence[Bin]) -> Law:
    """A t^-b, a straight line where both axes are logarithmic."""
    constant, exponent = _line([(held.weight, math.log(held.step), math.log(held.loss)) for held in bins])
    return lambda step: math.exp(min(700.0, constant + exponent * math.log(step)))


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Intercept and slope by weighted least squares, from (weight, x, y)."""
    total = sum(weight for weight, _, _ in points)
    x_mean = sum(weight * x for weight, x, _ in points) / total
    y_mean = sum(weight * y for weight, _, y in points) / total
    above = sum(weight * (x - x_mean) * (y - y_mean) for weight, x, y in points)
    below = sum(weight * (x - x_mean) ** 2 for weight, x, _ in points)
    slope = above / below if below > 0 else 0.0
    return y_mean - slope * x_mean, slope


def _misfit(law: Law, bins: Sequence[Bin]) -> float:
    """Mean squared distance, as variance of a single loss."""
    return sum(held.weight * (law(held.step) - held.loss) ** 2 for held in bins) / len(bins)
