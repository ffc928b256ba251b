"""AdamW for models that stay on their device, with moments of 8 or 4 bits: 2 or 1 bytes per parameter instead of 8.

The updates are those of the streaming engine's kernels. fp32 weights stay fp32, bf16 weights are rounded at random so
that small steps are not lost. Random bits come from a counter, so a resumed run draws the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from hybridtrainer.errors import ForeignCheckpointError, ModelError
from hybridtrainer.kernels.adam import update_
from hybridtrainer.kernels.formats import CODES, Bits, Format, resident_format, state_fields
from hybridtrainer.kernels.reference import Hyper, read_moments, state_piece
from hybridtrainer.weights import flat


class LowBitAdamW(Optimizer):
    """AdamW whose moments are kept in codes, one scale for each block of 256 (8 bits) or 128 (4 bits).

    Norms, biases and whatever has fewer than 4096 elements keep fp32 moments, and are updated as torch's AdamW does.

    Args:
        params: Parameters or groups, as any torch optimizer takes them.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, unless `decoupled` says otherwise.
        bits: 8 or 4.
        decoupled: False adds the decay to the gradient, as Adam does.
        seed: Of random rounding.

    Raises:
        ModelError: for weights that are neither fp32 nor bf16.

    >>> layer = nn.Linear(64, 64)
    >>> optimizer = LowBitAdamW(layer.parameters(), lr=1e-3, bits=8)
    >>> layer(torch.ones(1, 64)).sum().backward(); optimizer.step()
    >>> optimizer.state[layer.weight]["m"].dtype
    torch.int8
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bits: Bits = 8,
        decoupled: bool = True,
        seed: int = 0,
    ) -> None:
        if bits not in (8, 4):
            raise ModelError(f"There are no moments of {bits} bits.", "Use 8 or 4; for 32 take torch.optim.AdamW.")
        sizes = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        wrong = [f"{name} is {value}" for name, value in sizes.items() if not value >= 0]
        wrong += [f"a beta is {beta}" for beta in betas if not 0 <= beta < 1]
        if wrong:
            raise ModelError(f"LowBitAdamW: {', '.join(wrong)}.", "Use 0 or more, and betas from 0 to below 1.")
        self.bits = bits
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled, "seed": seed},
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._format(parameter)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of; torch's own leaves out what it does not know."""
        return {**super().__getstate__(), "bits": self.bits, "_constants": {}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = count()  # of the parameters, the same in every step and every run
        for group in self.param_groups:
            small: list[tuple[nn.Parameter, Tensor]] = []
            for parameter, number in zip(group["params"], numbers, strict=False):
                if parameter.grad is None:
                    continue
                self._count_step(parameter)
                gradient = _checked(parameter.grad)
                if not group["decoupled"] and group["weight_decay"]:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                if self._format(parameter) == "fp32":
                    small.append((parameter, gradient))
                else:
                    self._update_coded_(parameter, gradient, _hyper(group, self.state[parameter]["step"], number))
            if small:
                self._update_small_(small, group)
        return loss

    def moments(self, parameter: nn.Parameter, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Both moments of a range of a parameter's elements in memory order, in fp32; None before its first update."""
        state = self.state.get(parameter)
        if not state:
            return None
        kind, tensors = self._format(parameter), _tensors(state)
        block = CODES[kind].block if kind in CODES else 1
        first, last = start // block * block, -(-stop // block) * block
        m, v = read_moments(kind, state_piece(kind, tensors, slice(first, last)), min(last, parameter.numel()) - first)
        return m[start - first : stop - first], v[start - first : stop - first]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state; torch's own would turn the codes into numbers of the weights' type.

        Raises:
            ForeignCheckpointError: for a state of another number of bits or another optimizer; nothing is changed then.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, values in state_dict["state"].items():
            parameter = parameters[index]
            fields = state_fields(self._format(parameter), parameter.shape)
            found = {name: (value.dtype, value.numel()) for name, value in _tensors(values).items()}
            if found != fields:
                raise ForeignCheckpointError(
                    f"The optimizer state is not one of {self.bits}-bit moments for this model.",
                    "Use the optimizer, and its bits, with which the state was saved.",
                )
        super().load_state_dict(state_dict)
        for index, values in state_dict["state"].items():
            parameter = parameters[index]
            for name, value in _tensors(values).items():
                self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _format(self, parameter: nn.Parameter) -> Format:
        return resident_format(self.bits, parameter.shape, parameter.dtype)

    def _count_step(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name, (dtype, length) in state_fields(self._format(parameter), parameter.shape).items():
                state[name] = torch.zeros(length, dtype=dtype, device=parameter.device)
        state["step"] += 1

    def _update_coded_(self, parameter: nn.Parameter, gradient: Tensor, hyper: Hyper) -> None:
        scale, ok = self._ones(parameter.device)
        update_(
            self._format(parameter),
            flat(parameter),
            _tensors(self.state[parameter]),
            _laid_out_as(parameter, gradient),
            hyper,
            scale,
            ok,
        )

    def _update_small_(self, pairs: list[tuple[nn.Parameter, Tensor]], group: dict[str, Any]) -> None:
        """torch's own AdamW, which updates many at once."""
        states = [self.state[parameter] for parameter, _ in pairs]
        beta1, beta2 = group["betas"]
        adamw(
            [flat(parameter) for parameter, _ in pairs],
            [_laid_out_as(parameter, gradient).float() for parameter, gradient in pairs],
            [state["m"] for state in states],
            [state["v"] for state in states],
            [],
            [torch.tensor(float(state["step"] - 1)) for state in states],
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"] if group["decoupled"] else 0.0,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def _ones(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What the kernels multiply onto gradients, and the permission they look for."""
        if device not in self._constants:
            one = torch.ones((), device=device)
            self._constants[device] = one, one.to(torch.int32)
        return self._constants[device]


def _hyper(group: dict[str, Any], step: int, number: int) -> Hyper:
    beta1, beta2 = group["betas"]
    hyper = Hyper(
        lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
        step=step, seed=group["seed"], tensor=number,
    )  # fmt: skip
    return hyper if group["decoupled"] else replace(hyper, weight_decay=0.0)


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _checked(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise ModelError(
            "A gradient is sparse, and moments of few bits are kept for dense ones only.",
            "Use `nn.Embedding(sparse=False)`, or 32 bits.",
        )
    return gradient


def _laid_out_as(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The gradient's elements in the memory order of its parameter, flat."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return flat(gradient)
