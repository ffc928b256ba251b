"""Whether a model may begin short by itself: what its blocks are, whether they were trained, how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def has_attention(block: nn.Module) -> bool:
    """Whether it is a block of a transformer: of other stacks some were seen to end worse for having grown."""
    return any("att" in type(module).__name__.lower() for module in block.modules())


def all_learn(blocks: Sequence[nn.Module], optimizer: Optimizer | None) -> bool:
    """Whether every parameter of the blocks is trained by the optimizer; without one, whether none is frozen."""
    groups = [] if optimizer is None else optimizer.param_groups
    learning = {id(parameter) for group in groups for parameter in group["params"]}
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    return all(each.requires_grad and (not groups or id(each) in learning) for each in parameters)


def are_fresh(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks look as if nobody had trained them: the gains of norms are one value.

    A loss cannot tell: under a new head a trained model has that of one that knows nothing.
    """
    for block in blocks:
        norms = [module for module in block.modules() if "norm" in type(module).__name__.lower()]
        gains = [gain.detach() for norm in norms if isinstance(gain := getattr(norm, "weight", None), nn.Parameter)]
        if not gains or any(bool((gain != gain.flatten()[0]).any()) for gain in gains):
            return False
    return True


@contextmanager
def chained(blocks: Sequence[nn.Module]) -> Iterator[Callable[[], bool]]:
    """While open, blocks are watched; what is given says whether each had the result of the one before."""
    seen: list[tuple[int, bool]] = []
    last: list[Any] = [None]

    def watch(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            hidden = result[0] if isinstance(result, tuple | list) and result else result
            fits = isinstance(given, Tensor) and isinstance(hidden, Tensor) and given.shape == hidden.shape
            seen.append((number, fits and (number == 0 or given is last[0])))
            last[0] = hidden

        return hook

    handles = [block.register_forward_hook(watch(number), with_kwargs=True) for number, block in enumerate(blocks)]
    try:
        yield lambda: bool(seen) and all(
            number == at % len(blocks) and fits for at, (number, fits) in enumerate(seen)
        ) and len(seen) % len(blocks) == 0  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
