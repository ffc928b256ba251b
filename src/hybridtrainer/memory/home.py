"""The exact values of a streamed parameter, for those who read and displace weights."""

from __future__ import annotations

from torch import Tensor, nn

from hybridtrainer.kernels.formats import Format
from hybridtrainer.kernels.reference import read, write_
from hybridtrainer.memory.engine import Engine


class StreamedHome:
    """Reads and writes ranges of a parameter, the lower half of split weights included.

    Args:
        parameter: As the model shows it.
        low: Its lower halves; None where there are none.
        engine: What may still be on its way home.
    """

    def __init__(self, parameter: nn.Parameter, kind: Format, low: Tensor | None, engine: Engine) -> None:
        self._weight = parameter.detach().view(-1)
        self._kind = kind
        self._low = low
        self._engine = engine

    def read(self, start: int, stop: int) -> Tensor:
        """The values in fp32, where the parameter is."""
        self._engine.settle()
        return read(self._kind, *self._range(start, stop))

    def write_(self, values: Tensor) -> None:
        """Replaces all values, as exactly as they are kept; the moments stay."""
        self._engine.settle()
        self._store(0, values.to(self._weight.device))

    def add_(self, start: int, displacement: Tensor) -> None:
        """Adds to the values from `start` on, as exactly as they are kept."""
        self._store(start, self.read(start, start + len(displacement)) + displacement)

    def _store(self, start: int, values: Tensor) -> None:
        stop = start + len(values)
        weight, state = self._range(start, stop)
        write_(self._kind, weight, state, values)
        if self._low is not None:
            self._low[start:stop].copy_(state["low"])

    def _range(self, start: int, stop: int) -> tuple[Tensor, dict[str, Tensor]]:
        weight = self._weight[start:stop]
        return weight, {} if self._low is None else {"low": self._low[start:stop].to(weight.device)}
