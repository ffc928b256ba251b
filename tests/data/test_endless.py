"""A loader gone through again and again."""

from __future__ import annotations

from itertools import islice

import pytest

from hybridtrainer.data.endless import endless
from hybridtrainer.errors import DataError


def test_batches_come_again_and_again_and_are_gathered_across_epochs():
    assert list(islice(endless([1, 2, 3], 1), 7)) == [1, 2, 3, 1, 2, 3, 1]
    assert list(islice(endless([1, 2, 3], 2), 3)) == [[1, 2], [3, 1], [2, 3]]


def test_a_loader_without_batches_and_one_that_ends_are_refused_when_asked():
    batches = endless([], 1)
    with pytest.raises(DataError, match="no batch at all"):
        next(batches)
    batches = endless(iter([1, 2]), 1)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(DataError, match="ended after 2 batches"):
        next(batches)
