"""Next-token loss of a decoder without its whole logits: ours, or a causal one of Hugging Face.

A model is taken apart into what gives the hidden states and a linear head. Where anything lies between the two that
this module does not know, the model is refused: a loss that is nearly right would never be noticed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.cross_entropy import head_loss
from hybridtrainer.models.gpt import GPT

LOGIT_CAPS = ("final_logit_softcapping", "output_logit_soft_cap")
LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_USE_LOGITS = "Take the loss from the model's own logits, for example `model(input_ids=tokens, labels=tokens).loss`."


def language_loss(model: nn.Module, tokens: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
                  tile_tokens: int = 1024) -> Tensor:  # fmt: skip
    """Next-token cross-entropy in nats of each sequence of `tokens`, (batch, time + 1) to (batch,).

    The head is not called but its weight and bias are read, so that hooks on the head or on the whole model do not run.

    Args:
        model: A `GPT`, or a decoder with a language-modelling head of Hugging Face.
        tokens: Each is the target of those before it.
        ignore_index: A token of this number is no target; a sequence without any target has loss 0. A negative
            one is read as token 0, so that it may mark padding after the end, where no target can see it.
        label_smoothing: Share of the target that is spread over the whole vocabulary.
        tile_tokens: Tokens whose logits exist at one time.

    Raises:
        ModelError: for a model that cannot be taken apart.

    >>> import torch
    >>> from hybridtrainer.models.gpt import build_gpt
    >>> language_loss(build_gpt("nano"), tokens=torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2])
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if ignore_index < 0:
        inputs = inputs.masked_fill(inputs == ignore_index, 0)
    hidden, head = _hidden_and_head(model, inputs)
    losses = head_loss(
        hidden, head.weight, targets,
        bias=head.bias, ignore_index=ignore_index, label_smoothing=label_smoothing, tile_tokens=tile_tokens,
    )  # fmt: skip
    return losses.sum(dim=1) / (targets != ignore_index).sum(dim=1).clamp(min=1)


def head_of(model: nn.Module) -> nn.Linear:
    """The head whose weight `language_loss` reads.

    Raises:
        ModelError: for a model that cannot be taken apart.
    """
    return model.head if isinstance(model, GPT) else _parts(model)[1]


def _hidden_and_head(model: nn.Module, inputs: Tensor) -> tuple[Tensor, nn.Linear]:
    if isinstance(model, GPT):
        return model.hidden(inputs), model.head
    decoder, head = _parts(model)
    hidden: Tensor = decoder(input_ids=inputs, use_cache=False)[0]
    return hidden, head


def _parts(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    if not callable(getattr(model, "get_output_embeddings", None)) or getattr(model, "config", None) is None:
        raise ModelError(
            f"language_loss does not know how {type(model).__name__} computes its logits.",
            "Pass a GPT or a causal decoder of Hugging Face without a wrapper around it, or write a loss_fn that calls "
            "`head_loss` with the hidden states and the head's weight; `plan` takes it as `loss=`.",
        )
    _check_config(model)
    decoder, head = _decoder(model), _linear_head(model)
    _check_nothing_between(model, decoder, head)
    return decoder, head


def _check_config(model: Any) -> None:
    config = model.config
    texts = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    settings = {name: getattr(texts, name, None) for name in (*LOGIT_CAPS, *LOGIT_SCALES)}
    changed = [
        f"{name} = {value}"
        for name, value in settings.items()
        if value is not None and not (name in LOGIT_SCALES and value == 1)
    ]
    if changed:
        raise ModelError(
            f"{type(model).__name__} changes its logits after the head ({', '.join(changed)}), which language_loss "
            f"would leave out.",
            _USE_LOGITS,
        )
    if getattr(texts, "output_router_logits", False):
        raise ModelError(
            f"{type(model).__name__} adds a loss of its router (output_router_logits), which language_loss would "
            f"leave out.",
            "Set `model.config.output_router_logits = False`, or take the loss from the model.",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} is an encoder with a decoder, not a causal decoder.", _USE_LOGITS)


def _decoder(model: Any) -> nn.Module:
    decoder = model.get_decoder() if callable(getattr(model, "get_decoder", None)) else None
    if decoder is None or decoder is model:
        decoder = getattr(model, "base_model", None)
    if not isinstance(decoder, nn.Module) or decoder is model:
        raise ModelError(
            f"{type(model).__name__} has no decoder apart from itself.",
            "Pass the model with its language-modelling head, such as `AutoModelForCausalLM` gives.",
        )
    return decoder


def _linear_head(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head
    if head is None:
        raise ModelError(
            f"{type(model).__name__} has no head.",
            "Pass the model with its language-modelling head, such as `AutoModelForCausalLM` gives.",
        )
    raise ModelError(f"The head of {type(model).__name__} is a {type(head).__name__}, not an nn.Linear.", _USE_LOGITS)


def _check_nothing_between(model: nn.Module, decoder: nn.Module, head: nn.Module) -> None:
    # Weights in neither are used between or beside the two, as in heads of several layers.
    known = {id(parameter) for part in (decoder, head) for parameter in part.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise ModelError(
                f"{name} of {type(model).__name__} is neither in its decoder nor in its head, so that language_loss "
                f"cannot know what it does.",
                _USE_LOGITS,
            )
