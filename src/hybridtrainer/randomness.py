"""Random states of Python, NumPy, torch and CUDA: taken, put back, and turned into plain values.

NumPy is used only where the program has imported it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hybridtrainer.tree import Tree


@dataclass(frozen=True)
class RandomState:
    """One moment of every generator that a training step may draw from."""

    python: tuple[Any, ...]
    torch_cpu: Tensor
    cuda: list[Tensor]
    numpy: tuple[Any, ...] | None

    @classmethod
    def capture(cls) -> Self:
        """The generators as they are now."""
        numpy = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            torch_cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
            numpy=numpy.random.get_state() if numpy else None,
        )

    def restore(self) -> None:
        """Puts every generator back."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        if self.cuda and torch.cuda.is_available():
            for device, state in enumerate(self.cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)

    def to_tree(self) -> Tree:
        """Plain values and tensors, for a checkpoint."""
        version, internal, gauss = self.python
        tree: dict[str, Tree] = {
            "python": {"version": version, "state": torch.tensor(internal), "gauss": gauss},
            "torch": self.torch_cpu,
            "cuda": self.cuda,
            "numpy": None,
        }
        if self.numpy is not None:
            name, keys, position, has_gauss, cached = self.numpy
            tree["numpy"] = {
                "name": name,
                "keys": torch.tensor([int(key) for key in keys]),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            }
        return tree

    @classmethod
    def from_tree(cls, tree: Tree) -> Self:
        """The inverse of `to_tree`."""
        python, numpy = tree["python"], tree["numpy"]
        restored = None
        if numpy is not None:
            restored = (numpy["name"], numpy["keys"].tolist(), numpy["position"], numpy["has_gauss"], numpy["cached"])
        return cls(
            python=(python["version"], tuple(python["state"].tolist()), python["gauss"]),
            torch_cpu=tree["torch"].clone(),  # torch reads a view's storage from its beginning
            cuda=[state.clone() for state in tree["cuda"]],
            numpy=restored,
        )


def seed_everything(seed: int) -> None:
    """Seeds every generator that a training step may draw from."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)


@contextmanager
def isolated_randomness(seed: int) -> Iterator[None]:
    """Everything inside draws from generators seeded with `seed`; outside nothing is noticed."""
    before = RandomState.capture()
    try:
        random.seed(seed)
        # Not torch.manual_seed: that would also seed a GPU that is started later, outside of here.
        torch.default_generator.manual_seed(seed)
        if before.cuda:
            torch.cuda.manual_seed_all(seed)
        if before.numpy is not None:
            sys.modules["numpy"].random.seed(seed % 2**32)
        yield
    finally:
        before.restore()
