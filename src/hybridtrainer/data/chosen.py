"""A loader that leaves samples out: each is given with a chance that somebody else says, by what is known of it.

Samples pass by in the shuffled order of one epoch after another, and those that are taken fill the batches. Batches
are chosen a round at a time, one round ahead: worker processes may load ahead, and any number of them gives the same
batches. It knows no trainer and no forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtrainer.data.loader import Given, MapDataset, PositionedLoader, mix
from hybridtrainer.errors import DataError
from hybridtrainer.sample_weights import weights_of
from hybridtrainer.tree import Tree

ROUND_BATCHES = 32  # at most; fewer where they would be more than an eighth of the data
ROUNDS_IN_DATA = 8
CANDIDATES = 1 << 14  # looked at in one go
PATIENT_PASSES = 4  # over the data: where a round is not full by then, whatever passes by is taken

Chances = Callable[[Tensor, int, int], Tensor | None]
"""For samples by index, the chance of each to be given, when so many have passed by and so many were taken; None where
all of them are."""


class _Round(NamedTuple):
    """What was chosen in one go, and the same batch by batch, which is asked for at every step."""

    samples: Given
    batches: list[Given]
    indices: list[list[int]]  # of each batch


class ChosenLoader(PositionedLoader):
    """Batches of a data set that leave samples out by chance; an epoch has as many of them as without.

    Args:
        dataset: Samples by index.
        batch_size: Samples in a batch.
        chances: Asked when a round is chosen, always at the same moment of a run.
        weighs: Whether it says what each sample counts, by the chance with which it was taken.
        options: As `PositionedLoader` takes them; `keep_partial` makes no sense here.

    Attributes:
        passed: Samples that have passed by, taken or not.
        taken: Those that were taken.

    >>> odd = ChosenLoader(list(range(64)), 2, chances=lambda indices, *_: (indices % 2).float(), shuffle=False)
    >>> next(iter(odd)), [batch.indices.tolist() for batch in odd.given()]
    (tensor([1, 3]), [[1, 3]])
    """

    def __init__(
        self, dataset: MapDataset, batch_size: int, chances: Chances, weighs: bool = False, **options: Any
    ) -> None:
        super().__init__(dataset, batch_size, **options)
        if self.keep_partial:
            raise DataError(
                "A loader that leaves samples out has no last batch that is not full.",
                'Leave keep_partial out, or "samples" out of predict.',
            )
        batches = max(1, min(ROUND_BATCHES, len(dataset) // (ROUNDS_IN_DATA * batch_size)))
        self._chances, self._weighs = chances, weighs
        self._in_a_round = batches
        self._given: list[Given] = []
        self._walk = (0, 0)  # which epoch's order samples pass by in, and how many of it have passed
        self._known_order: tuple[int, Tensor] | None = None
        self.passed = self.taken = 0
        self._round = 0
        self._drawn: list[_Round] = []  # this round and the next
        self._standing: dict[str, Any] | None = None  # of a position what changes with rounds; None where it has

    def given(self) -> list[Given]:
        """Which samples each batch had that was given since this was last asked."""
        given, self._given = self._given, []
        return given

    def position(self) -> dict[str, Any]:
        """Where the next batch comes from, and what is chosen already."""
        if self._standing is None:  # a position is taken down after every step, and rounds change seldom
            rounds = [each.samples for each in self._rounds()]
            drawn = torch.stack([each.indices for each in rounds])
            weights = [each.weights for each in rounds if each.weights is not None]
            chosen = {"round": self._round, "drawn": drawn, "walk": list(self._walk)}
            weighed = {"weights": torch.stack(weights)} if weights else {}
            self._standing = {**chosen, **weighed, "passed": self.passed, "taken": self.taken}
        return {**super().position(), **self._standing}

    def restore(self, position: Tree) -> None:
        """Goes to a position; a running iteration goes on from there."""
        super().restore(position)
        drawn = position["drawn"].clone()
        weights = position["weights"].clone() if self._weighs else [None] * len(drawn)
        self._round = int(position["round"])
        self._drawn = [self._by_batch(Given(*each)) for each in zip(drawn, weights, strict=True)]
        self._standing = None
        self._walk = (int(position["walk"][0]), int(position["walk"][1]))
        self.passed, self.taken = int(position["passed"]), int(position["taken"])
        self._given = []

    def identity(self) -> dict[str, int | bool]:
        """What must be equal for a position to mean the same batches."""
        weighed = {"weighed": True} if self._weighs else {}
        return {**super().identity(), "chosen": True, **weighed}

    def _ahead(self) -> tuple[int, int]:
        """No further than the next round: what comes after it has not been chosen."""
        workers = min(self.workers, self._in_a_round - 1)
        return workers, min(2, (self._in_a_round - 1) // max(1, workers))

    def _give(self) -> None:
        number = self._number(self._batch)
        self._given.append(self._found(number)[0])
        if number // self._in_a_round > self._round:
            self._round += 1
            self._drawn, self._standing = [self._rounds()[1], self._draw(self._round + 1)], None
        super()._give()

    def _keys(self) -> Iterator[tuple[int, list[int]]]:
        for batch in range(self._batch, len(self)):
            number = self._number(batch)
            yield number, self._found(number)[1]

    def _number(self, batch: int) -> int:
        return self._epoch * len(self) + batch

    def _found(self, number: int) -> tuple[Given, list[int]]:
        """The samples of a batch, and which they are once more."""
        round_, batch = divmod(number, self._in_a_round)
        drawn = self._rounds()
        if not 0 <= round_ - self._round < len(drawn):
            raise DataError(
                "Two iterations over one loader that leaves samples out have come too far apart.",
                "Go through it once at a time: there is one position, and what comes next depends on what came.",
            )
        chosen = drawn[round_ - self._round]
        return chosen.batches[batch], chosen.indices[batch]

    def _rounds(self) -> list[_Round]:
        """The samples of this round and of the next; nobody is asked for chances before they are needed."""
        if not self._drawn:
            self._drawn = [self._draw(0), self._draw(1)]
        return self._drawn

    def _by_batch(self, samples: Given) -> _Round:
        size, numbers = self.batch_size, samples.indices.tolist()
        indices = torch.split(samples.indices, size)
        weights = [None] * len(indices) if samples.weights is None else torch.split(samples.weights, size)
        return _Round(
            samples,
            list(map(Given, indices, weights)),
            [numbers[start : start + size] for start in range(0, len(numbers), size)],
        )

    def _draw(self, round_: int) -> _Round:
        """The samples of a round: those that are taken of as many as it needs to pass by."""
        generator = torch.Generator().manual_seed(mix(self.seed + 1, round_))
        found: list[Tensor] = []
        chances: list[tuple[Tensor, Tensor]] = []  # of those that were taken, and of all that passed by
        missing, patience = self._in_a_round * self.batch_size, self.passed + PATIENT_PASSES * len(self.dataset)
        while missing:
            candidates = self._next(CANDIDATES)
            chance = self._chances(candidates, self.passed, self.taken)
            if chance is None or self.passed >= patience:
                taken = candidates[:missing]
                passed = len(taken)
                if self._weighs:
                    chances.append((torch.ones(passed), torch.ones(passed)))
            else:
                places = (torch.rand(len(candidates), generator=generator) < chance).nonzero().flatten()[:missing]
                # What has passed by ends with the last one that was needed; the rest passes by in the next round.
                passed = int(places[-1]) + 1 if len(places) == missing else len(candidates)
                taken = candidates.index_select(0, places)
                if self._weighs:
                    chances.append((chance[places], chance[:passed]))
            self._walk = (self._walk[0], self._walk[1] + passed)
            self.passed += passed
            self.taken += len(taken)
            missing -= len(taken)
            found.append(taken)
        weights = weights_of(*(torch.cat(each) for each in zip(*chances, strict=True))) if self._weighs else None
        return self._by_batch(Given(torch.cat(found).to(torch.int32), weights))

    def _next(self, count: int) -> Tensor:
        """Up to so many samples that pass by next, of one epoch's order."""
        epoch, passed = self._walk
        whole = len(self) * self.batch_size  # as in a loader that gives all, the rest of an epoch is left out
        if passed == whole:
            epoch, passed = epoch + 1, 0
            self._walk = (epoch, passed)
        if self._known_order is None or self._known_order[0] != epoch:
            self._known_order = (epoch, self._order(epoch))
        return self._known_order[1][passed : min(passed + count, whole)]


def make_loader(
    dataset: MapDataset, batch_size: int, chances: Chances | None, weighs: bool = False, **options: Any
) -> PositionedLoader:
    """A loader that gives every sample, or leaves some out where somebody says chances."""
    if chances is None:
        return PositionedLoader(dataset, batch_size, **options)
    return ChosenLoader(dataset, batch_size, chances, weighs, **options)
