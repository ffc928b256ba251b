"""How large the optimizer's moments are: two numbers that say how much of the gradient is direction and how much noise.

Only moments that torch's own optimizers keep in plain tensors are read; of others nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

FIRST = ("exp_avg", "momentum_buffer")
SECOND = ("exp_avg_sq",)


@torch.no_grad()
def moment_sizes(optimizer: Optimizer) -> Tensor:
    """The root mean square of the first moments, and the mean of the second moments to the power of 1/2, in fp32.

    Nothing here waits for a device. A moment that is not there has size 0.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()
    >>> [round(size, 3) for size in moment_sizes(optimizer).tolist()]
    [3.536, 0.0]
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    first = _squares(_found(optimizer, FIRST), 2, device)
    # The 1-norm of values that are never negative is their sum.
    return torch.stack([first, _squares(_found(optimizer, SECOND), 1, device)]).sqrt()


def _found(optimizer: Optimizer, keys: Iterable[str]) -> list[Tensor]:
    """The tensors under any of these keys, in the order of the parameters."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            held = next((state[key] for key in keys if isinstance(state.get(key), Tensor)), None)
            if held is not None and held.is_floating_point() and not held.is_sparse and held.numel():
                found.append(held)
    return found


def _squares(moments: list[Tensor], order: int, device: torch.device) -> Tensor:
    """Mean over all elements of |x|^order, in fp32."""
    if not moments:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch.stack([norm.to(device, torch.float32) for norm in torch._foreach_norm(moments, order)])
    return norms.pow(order).sum() / sum(moment.numel() for moment in moments)
