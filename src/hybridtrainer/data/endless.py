"""A loader that is gone through again and again, for as long as a run needs batches. Knows no epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hybridtrainer.errors import DataError


def endless(loader: Iterable[Any], accumulate: int) -> Iterator[Any]:
    """Batches for one step after another, in lists of `accumulate` where that is more than 1.

    Raises:
        DataError: when a batch is asked for and the loader is empty, or cannot be gone through again.
    """
    singles = _repeated(loader)
    while True:
        yield next(singles) if accumulate == 1 else [next(singles) for _ in range(accumulate)]


def _repeated(loader: Iterable[Any]) -> Iterator[Any]:
    rounds = 0
    while True:
        iterator = iter(loader)
        once_only = iterator is loader
        count = 0
        for batch in iterator:
            count += 1
            yield batch
        rounds += 1
        if not count and rounds == 1:
            raise DataError("The loader gave no batch at all.", "Check that its data set is not empty.")
        if not count or once_only:
            raise DataError(
                f"The data ended after {count} batches, before the run did.",
                "Pass a loader that can be gone through again, such as a DataLoader or a list, or ask for fewer steps.",
            )
