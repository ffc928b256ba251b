"""An exact copy of a run's state in host memory, to return to when a jump does not pay."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridtrainer import ranks
from hybridtrainer.tree import Json, Tree, pack, unpack
from hybridtrainer.weights import HostCopy

NO_MEMORY = "GPU memory ran out"
"""How the reason begins for which there is no jump, where memory did not suffice for one."""


class Snapshot:
    """A tree of state, copied. Its buffers are kept, so that taking one again allocates nothing.

    >>> import torch
    >>> snapshot, w = Snapshot(), torch.ones(2)
    >>> snapshot.take({"w": w, "step": 3}); _ = w.zero_()
    >>> snapshot.tree()
    {'w': tensor([1., 1.]), 'step': 3}

    Attributes:
        copies: How often one was taken.
    """

    def __init__(self) -> None:
        self.copies = 0
        self._host = HostCopy()
        self._document: Json = None

    @property
    def taken(self) -> bool:
        """Whether there is something to return to."""
        return self._document is not None

    def take(self, tree: Mapping[str, Tree]) -> None:
        """Copies the tree; the last one is overwritten."""
        tensors, self._document = pack(tree)
        self._host.take(tensors)
        self.copies += 1

    def take_if_it_fits(self, tree: Mapping[str, Tree]) -> str:
        """Copies the tree; where memory runs out it returns so, and there is nothing to return to."""
        try:
            ranks.together("snapshot", lambda: self.take(tree))
        except torch.OutOfMemoryError:
            self.drop()
            return f"{NO_MEMORY} in the snapshot"
        return ""

    def tree(self) -> dict[str, Tree]:
        """The copied tree. Its tensors are the snapshot's own: copy them, do not keep them."""
        return dict(unpack(self._document, self._host.__getitem__))

    def drop(self) -> None:
        """Forgets what was taken; the buffers stay for the next time."""
        self._document = None

    def nbytes(self) -> int:
        """Host memory held."""
        return self._host.nbytes()
