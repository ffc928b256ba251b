"""What `model.load_state_dict` means for weights with bits below those that the model shows.

Such a weight is a half that the model shows and a half among the optimizer's states. Loading only the first would leave
the second as it was, of another value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hybridtrainer.memory.optimizer import StreamedOptimizer


def follow_loads(model: nn.Module, optimizer: StreamedOptimizer) -> None:
    """From now on what is loaded into a streamed model is kept as exactly as the mode can.

    Values in 16 bits stand for themselves, unless the optimizer's state was loaded just before: then the lower halves
    are in it.
    """
    found: list[tuple[nn.Parameter, Tensor]] = []
    halved = {
        name: each for name, each in model.named_parameters() if "low" in optimizer.uncollected_state().get(each, {})
    }

    def before(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        optimizer.settle()  # what is due must not come after what is loaded
        given = {name: state_dict.get(prefix + name) for name in halved}
        found[:] = [
            (halved[name], value)
            for name, value in given.items()
            if isinstance(value, Tensor) and value.shape == halved[name].shape and is_news(halved[name], value)
        ]

    def is_news(parameter: nn.Parameter, value: Tensor) -> bool:
        return value.dtype != parameter.dtype or not optimizer.is_loaded

    def after(*_: Any) -> None:
        for parameter, value in found:
            parameter.home.write_(value.detach().reshape(-1).float())  # type: ignore[attr-defined]
        found.clear()

    model.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(after)  # type: ignore[no-untyped-call]
