"""What the samples of a step count in its mean loss where each was taken by chance: the rarer it comes, the more.

A sample that comes with chance p and counts 1 / p counts as much in the long run as one that always comes, so that the
expected gradient is that of all samples. It knows no loader, no model and no forecast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CAP = 5.0
"""The most that one sample counts. Once all samples were seen, a ledger gives none a chance below 1 / 4.3 of the mean
(its BASE says so), and nothing is at the cap; before, what is known must not outweigh all that was never computed."""


def weights_of(taken: Tensor, passed: Tensor) -> Tensor:
    """What each sample counts that was taken: the mean chance over its own, and no more than `CAP`.

    The mean is over all that passed by, so that a weight is 1 in the mean of many. To make it 1 in each batch would
    pull the expected gradient back towards that of the samples that often come, in a batch of 8 by a tenth.

    Args:
        taken: Chances of the samples that were taken.
        passed: Those of all that passed by meanwhile; what has no chance counts in no mean.

    >>> weights_of(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.5, 0.5, 0.5, 1.0]))
    tensor([0.7000, 1.4000])
    """
    return (passed[passed > 0].double().mean() / taken.double()).clamp(max=CAP).float()


class StepWeights:
    """The weights of the samples of one step, handed out in the order in which its parts are computed.

    Args:
        weights: Of the samples of each micro-batch.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self.begin_again()

    def begin_again(self) -> None:
        """The step is made again from its first sample."""
        self._batch = self._offset = 0

    def weigh(self, losses: Tensor, samples: int) -> Tensor:
        """The losses times their weights; as they are from the first on that are not one for each sample.

        Args:
            losses: As `loss_fn` returned them for the next part of a micro-batch, or for all of it.
            samples: How many that part has.
        """
        weights = self._weights[self._batch] if self._batch < len(self._weights) else torch.empty(0)
        count = len(losses) if losses.dim() else 0
        is_whole = not self._offset and count == len(weights)
        if not count or not (is_whole or (count == samples and self._offset + count <= len(weights))):
            self._batch = len(self._weights)
            return losses
        found = weights[self._offset : self._offset + count]
        self.pass_over(count)
        return losses * found.to(losses.device)

    def pass_over(self, samples: int) -> None:
        """The next so many samples have been computed, or count nothing and will not be."""
        if self._batch == len(self._weights):
            return
        self._offset += samples
        if self._offset >= len(self._weights[self._batch]):
            self._batch, self._offset = self._batch + 1, 0
