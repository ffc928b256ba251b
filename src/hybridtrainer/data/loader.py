"""A loader whose position is state: it can be saved, restored and wound back in the middle of an epoch.

The order of an epoch depends on the seed and the epoch alone, and what a data set draws at random depends on the
seed and the batch alone, so any number of worker processes gives the same batches. It knows no trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hybridtrainer.errors import DataError
from hybridtrainer.randomness import isolated_randomness
from hybridtrainer.tree import Tree

OBITUARY_SECONDS = 1.0


class MapDataset(Protocol):
    """Anything with a length and samples by index. `batch_of(indices)` is used instead where there is one.

    A class with a `batch_of` may have an attribute `draws_nothing` that is true: then no randomness of its own is set
    up for each batch, which takes longer than to gather small samples. It does not hold for classes derived from it.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Given(NamedTuple):
    """The samples of a batch that was given.

    Attributes:
        indices: Which.
        weights: What each counts, see `sample_weights`; None where all count alike.
    """

    indices: Tensor
    weights: Tensor | None = None


class PositionedLoader:
    """Batches of a data set in a shuffled order that can be entered anywhere.

    Iterating yields the rest of the current epoch; iterating again yields the next. There is one position, so two
    iterations at the same time share it.

    Args:
        dataset: Samples by index; a method `batch_of(indices)` may build a whole batch at once.
        batch_size: Samples in a batch; the last batch of an epoch is left out when it is not full.
        seed: Decides the order of every epoch.
        shuffle: Whether to draw in random order.
        workers: Processes that load ahead; 0 loads in this one.
        collate: Makes a batch of a list of samples; torch's default where none is given.
        keep_partial: Give the last batch of an epoch even if it is not full; for measuring.
        share: Which part of every batch to give, of how many: a rank of a distributed run, and the number of ranks. All
            of them are at the same position.

    Attributes:
        starts: How often somebody began to go through it, or put it somewhere.

    >>> loader = PositionedLoader(list(range(6)), batch_size=2, shuffle=False)
    >>> next(iter(loader)), loader.position()
    (tensor([0, 1]), {'epoch': 0, 'batch': 1})
    >>> loader.restore({"epoch": 0, "batch": 2}); list(loader)
    [tensor([4, 5])]

    Raises:
        DataError: if the data set does not fill one batch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        keep_partial: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        if batch_size < 1:
            raise DataError(f"A batch size of {batch_size} is not possible.", "Choose at least 1.")
        if len(dataset) < batch_size:
            raise DataError(
                f"The data set has {len(dataset)} samples and a batch needs {batch_size}.",
                "Give it more data, a shorter context, or a smaller batch_size.",
            )
        if batch_size % share[1] or (keep_partial and share[1] > 1):
            raise DataError(
                f"A batch of {batch_size} samples cannot be divided among {share[1]} ranks.",
                "Choose a batch_size that they can share evenly: it counts the samples of all ranks together.",
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.share = share
        self.seed = seed
        self.shuffle = shuffle
        self.workers = workers
        self.keep_partial = keep_partial
        self._batches = _Batches(dataset, collate or default_collate, seed)
        self._epoch = 0
        self._batch = 0
        self._rewinds = self.starts = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        extra = self.batch_size - 1 if self.keep_partial else 0
        return (len(self.dataset) + extra) // self.batch_size

    def given(self) -> list[Given]:
        """Which samples each batch had that was given since this was last asked; none where nobody needs to know."""
        return []

    def position(self) -> dict[str, Any]:
        """Where the next batch comes from."""
        return {"epoch": self._epoch, "batch": self._batch}

    def restore(self, position: Tree) -> None:
        """Goes to a position; a running iteration goes on from there."""
        self._epoch, self._batch = int(position["epoch"]), int(position["batch"])
        self._rewinds += 1
        self.starts += 1

    def identity(self) -> dict[str, int | bool]:
        """What must be equal for a position to mean the same batches."""
        return {
            "samples": len(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def __iter__(self) -> Iterator[Any]:
        self.starts += 1
        if self._batch >= len(self):
            self._epoch, self._batch = self._epoch + 1, 0
        while self._batch < len(self):
            rewinds = self._rewinds
            for batch in self._stream():
                self._give()
                yield batch
                if self._rewinds != rewinds:
                    break

    def _give(self) -> None:
        """The next batch is about to be given."""
        self._batch += 1

    def _ahead(self) -> tuple[int, int]:
        """How many worker processes there are, and how many batches each loads ahead."""
        return self.workers, 2

    def _stream(self) -> Iterator[Any]:
        """Batches from the current position to the end of the epoch."""
        workers, ahead = self._ahead()
        if not workers:
            return map(self._batches.__getitem__, self._keys())
        loader: DataLoader[Any] = DataLoader(
            self._batches,  # type: ignore[arg-type]  # anything with __getitem__ will do
            batch_size=None,
            sampler=_Sampler(self._keys),  # each item is passed on as an index
            num_workers=workers,
            prefetch_factor=ahead,
            generator=torch.Generator().manual_seed(self.seed),  # or it draws from the run's generator
            collate_fn=_as_is,
        )
        return _naming_the_dead(iter(loader))

    def _keys(self) -> Iterator[tuple[int, list[int]]]:
        order = self._order(self._epoch)
        part, parts = self.share
        size = self.batch_size // parts
        for batch in range(self._batch, len(self)):
            start = batch * self.batch_size + part * size
            indices = order[start : start + size].tolist()
            yield (self._epoch * len(self) + batch) * parts + part, indices

    def _order(self, epoch: int) -> Tensor:
        """In which samples come in an epoch."""
        count = len(self.dataset)
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)


class _Sampler:
    """What a DataLoader takes its indices from, each when it is needed."""

    def __init__(self, keys: Callable[[], Iterator[Any]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Any]:
        return self._keys()


class _Batches:
    """The data set seen as a sequence of whole batches, each with randomness of its own."""

    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self._draws = not vars(type(dataset)).get("draws_nothing", False)  # of its own: who derives it may well draw

    def __getitem__(self, key: tuple[int, Sequence[int]]) -> Any:
        number, indices = key
        gather = getattr(self.dataset, "batch_of", None)
        if gather is not None and not self._draws:
            return gather(indices)
        with isolated_randomness(mix(self.seed, number)):
            if gather is not None:
                return gather(indices)
            return self.collate([self.dataset[index] for index in indices])


def _naming_the_dead(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; of a worker's death torch's own error, where a broken connection is the first sign of it."""
    try:
        yield from batches
    except (ConnectionError, EOFError):
        time.sleep(OBITUARY_SECONDS)  # torch's handler of SIGCHLD raises in here, and says who died and of what
        raise


def _as_is(batch: Any) -> Any:
    return batch


def mix(seed: int, number: int) -> int:
    """A seed for each number that does not coincide with that of a neighbouring seed."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % 2**63
