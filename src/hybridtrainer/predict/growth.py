"""When a model that began short grows, where nobody has said. Pure.

The later, the cheaper the run, up to where the deep model has too little time left to learn. On runs of up to some
millions of tokens that is late (docs/PREDICTION.md). A run that sees many tokens for each parameter grows much sooner:
from there on a short model learns too slowly. For such runs there is a published rule.
"""

from __future__ import annotations

import math

LATEST = 0.65  # of the run
FLOPS = 6  # of a training step, for each parameter and token


def published_tokens(parameters: int, tokens: float) -> float:
    """After how many tokens a model grows by the rule of Du et al., "Stacking Your Transformers" (2405.15319).

    log10(d) = 0.88 log10(N) + 163.27 / log10(C) - 5.74, for a quarter of the blocks that grows into all of them. C is
    the number of operations of the run, N that of parameters.

    Args:
        parameters: Of the whole model.
        tokens: Of the whole run.

    >>> f"{published_tokens(7_000_000_000, 2e12) / 1e9:.1f}", f"{published_tokens(8_000_000_000, 15e12) / 1e9:.1f}"
    ('11.1', '6.6')
    """
    operations = math.log10(max(10.0, FLOPS * parameters * tokens))
    return float(10 ** (0.88 * math.log10(parameters) + 163.27 / operations - 5.74))


def growth_step(end: int, parameters: int, tokens_per_step: float) -> int:
    """The step after which a run of `end` steps grows; the published rule counts only where tokens are known.

    >>> growth_step(1000, 124_000_000, 4096), growth_step(100_000, 124_000_000, 1 << 20), growth_step(1000, 124, 0)
    (650, 3710, 650)
    """
    latest = math.ceil(LATEST * end)
    if not tokens_per_step:
        return latest
    return min(latest, math.ceil(published_tokens(parameters, end * tokens_per_step) / tokens_per_step))
