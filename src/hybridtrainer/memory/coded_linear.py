"""A linear layer whose frozen weight is kept as codes, whatever they are; it makes the matrix anew for each pass."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrainer.errors import ModelError


class CodedMatrix(Protocol):
    """A matrix as codes and scales."""

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None: ...

    @property
    def codes(self) -> Tensor:
        """What stands for the elements."""
        ...

    @property
    def scales(self) -> Tensor:
        """What codes are multiplied with."""
        ...

    @classmethod
    def of(cls, matrix: Tensor) -> Self:
        """The nearest codes of a matrix."""
        ...

    def read(self) -> Tensor:
        """The matrix that the codes stand for, in its type."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        ...


class CodedLinear(nn.Module):
    """A linear layer with a frozen weight in few bits.

    Args:
        linear: Whose weight to take; its bias is taken over, trainable or not.

    Attributes:
        kind: How the weight is coded.
    """

    kind: ClassVar[type[CodedMatrix]]

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        matrix = self.kind.of(linear.weight.detach())
        # Parameters rather than buffers: nothing changes them, and buffers are copied to be put back after each step.
        self.codes = nn.Parameter(matrix.codes, requires_grad=False)
        self.scales = nn.Parameter(matrix.scales, requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        self.train(linear.training)

    @property
    def matrix(self) -> CodedMatrix:
        """The weight."""
        return self.kind(self.codes, self.scales.float(), self._dtype)

    @property
    def weight(self) -> Tensor:
        """The weight in its own type, made anew: to be read, not to be written to."""
        return self.matrix.read().as_subclass(_Made)

    def forward(self, x: Tensor) -> Tensor:
        """As a linear layer does."""
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else self._dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        out: Tensor = _CodedProduct.apply(x.to(dtype), bias, self.codes, self.scales.float(), self.kind)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        """Its shape, for people."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Made(Tensor):
    """A weight that nobody keeps. What is computed from it is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """Nothing: who asks for it is about to write into it, as PEFT does where it merges an adapter.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "The frozen weight of this layer is kept in few bits: what is written into it, such as an adapter that is "
            "merged, would be lost.",
            "Save the adapter, load the base anew as it was, and merge there.",
        )

    @data.setter
    def data(self, value: Tensor) -> None:  # noqa: ARG002
        _ = self.data


class _CodedProduct(torch.autograd.Function):
    """Makes the full matrix again in the backward pass, rather than keeping it until then."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor, kind: type[CodedMatrix]
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.kind = kind
        return F.linear(x, kind(codes, scales, x.dtype).read(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        codes, scales = ctx.saved_tensors
        for_input = gradient @ ctx.kind(codes, scales, gradient.dtype).read() if ctx.needs_input_grad[0] else None
        for_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return for_input, for_bias, None, None, None
