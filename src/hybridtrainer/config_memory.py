"""Settings of memory: where a model is while it is trained, what is kept, what is computed again."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from hybridtrainer.config_section import Section

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB)", re.IGNORECASE | re.ASCII)
_UNITS = {"gb": 2**30, "gib": 2**30, "mb": 2**20, "mib": 2**20}  # memory is sold in powers of two
_LARGEST = 2**63


def size_in_bytes(text: str | None) -> int | None:
    """A size such as "16GB" in bytes; None stays None.

    >>> size_in_bytes("1.5GB")
    1610612736
    """
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    size = float(match.group(1)) * _UNITS[match.group(2).lower()] if match else math.inf
    if size >= _LARGEST:
        raise ValueError('a size such as "16GB" or "900MB"')
    return int(size)


class MemoryConfig(Section):
    """How a training step uses memory."""

    mode: Literal["resident", "fp32", "split8", "sr8", "sr4", "factored", "auto"] = Field(
        default="resident",
        description='"resident" keeps the model on its device; the others stream it from host RAM, with 12, 6, 4, 3 or '
        '2 bytes per parameter; "auto", also meant by `memory.vram` alone, plans at the start and settles what was '
        "left out",
    )
    vram: str | None = Field(
        default=None,
        description='GPU memory that may be used, such as "8GB"; all where left out. With "auto" the card\'s, CUDA\'s '
        "own included",
    )
    ram: str | None = Field(default=None, description='host memory that may be used, such as "64GB"; what is free')
    max_gpu_blocks: int = Field(default=3, ge=1, description="blocks of a streamed model on the GPU at a time")
    split: int = Field(default=1, ge=1, description="parts of a batch that are computed one after the other in a block")
    offload_activations: bool = Field(
        default=False, description="whether what blocks keep for the backward pass waits in host RAM"
    )
    pack_weights: bool = Field(
        default=True,
        description="whether weights of a streamed model may travel in 12.5 bits instead of 16, exactly, where its "
        "steps wait long for copies to a GPU and are measured to be shorter that way",
    )
    clipping: Literal["fused", "exact"] = Field(
        default="fused",
        description='"fused" clips by the last gradient norm; "exact" keeps gradients in host RAM until all are known',
    )

    checkpoint_every: int = Field(
        default=0,
        ge=0,
        description="keep the input of every Nth block only and compute what is between again; 0 keeps all activations "
        'and "auto" leaves it to the plan of memory.mode = "auto"',
    )
    checkpoint_keep: Literal["inputs", "products", "by_phase"] = Field(
        default="inputs",
        description='"products" keeps results of matrix products and attention inside the blocks too and computes the '
        'cheap rest again; "by_phase" does so in Correct steps only',
    )
    precision: Literal["fp32", "bf16", "fp16", "adaptive"] = Field(
        default="fp32",
        description="arithmetic of forward and backward; weights stay as they are (fp16 scales the loss), and streamed "
        "models of 16-bit weights compute in those; "
        '"adaptive" is bf16, and fp32 for some steps after signs of instability',
    )
    optimizer_bits: Literal[32, 8, 4] = Field(
        default=32, description="bits of each of Adam's two moments in a resident model; norms and biases keep 32"
    )
    predict_int8: bool = Field(
        default=False, description="whether jumps are probed with 8-bit copies of a resident model's matrices"
    )
    predict_states: Literal["stay", "leave", "auto"] = Field(
        default="stay",
        description='"leave" keeps optimizer states in host RAM while a jump is tried; "auto" does so where fetching '
        "them takes less than 5% of the time of the foreseen steps",
    )
    cleanup_every: int = Field(
        default=0, ge=0, description="steps between giving unused GPU memory back; 0 does it by need, from 75% on"
    )
    profile: bool = Field(default=False, description="whether memory at each step is written to profile.csv")

    # Before the rest is looked at: a file that is written and read again must mean the same.
    @model_validator(mode="before")
    @classmethod
    def _budget_alone_is_auto(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        is_left = values.get("checkpoint_every") == "auto" and values.get("mode", "auto") == "auto"
        if is_left:
            values = {key: value for key, value in values.items() if key != "checkpoint_every"}
        return {"mode": "auto", **values} if is_left or values.get("vram") is not None else values

    @field_validator("checkpoint_every", mode="before")
    @classmethod
    def _is_a_number(cls, value: object) -> object:
        if value == "auto":
            raise ValueError('a number: only with memory.mode = "auto" is it planned')
        return value

    retry_smaller: bool = Field(
        default=True,
        description="where GPU memory runs out, compute a batch in smaller parts, with the same samples in a step",
    )

    @field_validator("vram", "ram")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if size_in_bytes(value) == 0:
            raise ValueError("more than 0")
        return value
