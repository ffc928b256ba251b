"""All settings: their types, ranges, defaults and presets.

`HybridTrainerConfig` is what the trainer needs; `RunConfig` adds what the command line needs to build a
model, its data and its optimizer. Reading and writing files is in `config_io.py`. This module imports no torch.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from hybridtrainer.config_problems import problems_of
from hybridtrainer.errors import ConfigError

OPTIMIZERS_WITH_BETAS = ("adam", "adamw")
MAX_RUN_NAME = 100
RUN_NAME_RULE = (
    f"Use at most {MAX_RUN_NAME} letters, digits, dots, dashes and underscores, beginning with no dot or dash."
)


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions, no NaN.

    Raises:
        ConfigError: with every mistake in what a section is made of, where it is made in Python.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(type(self).__name__, problems_of(error.errors(), type(self))) from None

    # Sections inside another are then made without it, and their mistakes are told with those of the others.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


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
    clipping: Literal["fused", "exact"] = Field(
        default="fused",
        description='"fused" clips by the last gradient norm; "exact" keeps gradients in host RAM until all are known',
    )

    checkpoint_every: int = Field(
        default=0,
        ge=0,
        description="keep the input of every Nth block only and compute what is between again; 0 keeps all activations",
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
        if isinstance(values, dict) and values.get("vram") is not None and "mode" not in values:
            return {"mode": "auto", **values}
        return values

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


class HybridTrainerConfig(Section):
    """Settings of the phase machine, the forecasts, the checkpoints.

    >>> HybridTrainerConfig(predict="off").warmup_steps
    100
    >>> HybridTrainerConfig.aggressive(seed=7).confidence_threshold
    0.55
    """

    warmup_steps: int = Field(
        default=100, ge=0, description="real steps before anything is forecast; they set the baselines"
    )
    full_steps: int = Field(default=20, ge=1, description="real steps in each Full phase; one displacement window each")
    max_predict_steps: int = Field(default=15, ge=1, description="steps foreseen at most before the next Full phase")
    correction_interval: int = Field(
        default=15, ge=1, description="steps foreseen at most before the next Correct phase"
    )
    correct_steps: int = Field(
        default=5, ge=1, description="real steps in each Correct phase; a verdict on the jump ends it"
    )
    confidence_threshold: float = Field(
        default=0.85, ge=0, le=1, description="least confidence at which a jump is tried"
    )
    divergence_sigma: float = Field(
        default=3.0, gt=0, description="a loss this many standard deviations too high is suspicious"
    )
    predict: Literal["off", "auto"] | list[Literal["jumps", "samples"]] = Field(
        default="auto",
        description='"off" is plain training; "auto" jumps unless the rate falls; or a list of "jumps" and "samples"',
    )
    forecaster: Literal["auto", "persistence", "line_fit", "outer_momentum", "curve", "momentum"] = Field(
        default="auto", description='who proposes jumps; "auto" takes the most confident'
    )
    readout: Literal["last", "averaged"] = Field(
        default="last", description="weights that are evaluated: the last ones, or an average of recent ones"
    )
    readout_decay: float = Field(
        default=0.99, ge=0, lt=1, description="what the average keeps of itself at each step; averaged only"
    )
    history_windows: int = Field(
        default=8, ge=2, le=16, description="displacement windows kept, one byte a parameter each"
    )
    trust_radius: float = Field(
        default=1.0, gt=0, description="longest jump, relative to what as many real steps moved in the newest window"
    )
    max_failures: int = Field(
        default=3, ge=1, description="failed jumps in a row after which prediction is switched off"
    )
    recovery_steps: int = Field(default=20, ge=1, description="Full steps forced after an alarm or a failed jump")
    waste_limit: float = Field(default=0.02, ge=0, le=1, description="share of the run that failed jumps may cost")
    save_interval: int = Field(default=50, ge=1, description="steps between checkpoints")
    keep_last: int = Field(default=3, ge=1, description="checkpoints kept")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of weights, shuffling and probes")
    hooks: list[str] = Field(default=[], description="names of installed hooks (entry points of `hybridtrainer.hooks`)")
    memory: MemoryConfig = MemoryConfig()

    @classmethod
    def conservative(cls, **overrides: Any) -> Self:
        """Longer jumps than the defaults, checked often; tried from a confidence of 0.60."""
        return cls(**(PRESETS["conservative"] | overrides))

    @classmethod
    def aggressive(cls, **overrides: Any) -> Self:
        """The longest jumps, corrected every 10 steps; tried from a confidence of 0.55."""
        return cls(**(PRESETS["aggressive"] | overrides))

    def jumps_allowed(self) -> bool:
        """Whether weight jumps may be tried at all."""
        return self.predict == "auto" or "jumps" in self.predict


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "conservative": {"confidence_threshold": 0.60, "max_predict_steps": 50, "correction_interval": 15},
    "aggressive": {"confidence_threshold": 0.55, "max_predict_steps": 75, "correction_interval": 10},
}


class ModelConfig(Section):
    """Which built-in model to train."""

    name: Literal[
        "nano", "nano-llama", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b",
        "llama-1b", "llama-7b", "llama-13b", "llama-50b", "cnn", "cnn-small",
    ] = Field(default="nano", description="nano to llama-50b for text; cnn or cnn-small for images")  # fmt: skip
    context: int = Field(default=128, ge=2, description="tokens a text model sees at once")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of activations dropped in training")
    batch_norm: bool = Field(default=False, description="normalize each convolution; images only")


class DataConfig(Section):
    """What to train on, and how it is split."""

    source: Literal["stdlib", "digits", "text", "idx"] = Field(
        default="stdlib", description="stdlib is built in, digits come with scikit-learn; text and idx read `path`"
    )
    path: str | None = Field(
        default=None, description="text: a file or folder; idx: a folder with the four image files"
    )
    tokenizer: str = Field(default="bytes", description='"bytes", or a folder with encoder.json and vocab.bpe')
    validation_share: float = Field(default=0.05, gt=0, lt=0.5, description="share of the data kept for validation")
    probe_share: float = Field(default=0.02, gt=0, lt=0.5, description="share kept for judging jumps; never trained on")
    probe_batches: int = Field(default=2, ge=1, description="batches on which every jump is judged")
    workers: int = Field(
        default=0, ge=0, description="processes that load data; the batches are the same for any number"
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["sgd", "adam", "adamw", "adafactor"] = "adamw"
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.1, ge=0, description="applied to matrices, not to norms and biases")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="adam and adamw only"
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd only")


class ScheduleConfig(Section):
    """The learning rate over the run."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = Field(default=50, ge=0, description="steps over which the rate rises to its peak")
    final_ratio: float = Field(default=0.05, ge=0, le=1, description="rate at the end over the peak; not for constant")


class TrainConfig(Section):
    """Length, batch and device of the run."""

    steps: int = Field(default=1000, ge=1, description="the clock at which the run ends; jumps move it too")
    batch_size: int = Field(default=16, ge=1, description="samples in a batch")
    accumulate: int = Field(default=1, ge=1, description="batches in one optimizer step")
    clip_norm: float | None = Field(default=1.0, gt=0, description="largest gradient norm; 0 for none")
    eval_interval: int = Field(default=100, ge=1, description="steps between evaluations on the validation split")
    eval_batches: int = Field(default=8, ge=1, description="batches in one evaluation")
    device: Literal["auto", "cpu", "cuda"] = "auto"

    # TOML has no null, so a file says 0 for no clipping.
    @field_validator("clip_norm", mode="before")
    @classmethod
    def _zero_is_none(cls, value: object) -> object:
        return None if value == 0 and not isinstance(value, bool) else value

    @field_serializer("clip_norm", when_used="json")
    def _none_is_zero(self, value: float | None) -> float:
        return 0.0 if value is None else value


class FolderConfig(Section):
    """Where the run is kept."""

    folder: str = Field(default="runs", description="the folder that holds all runs")
    name: str = Field(default="run", description="the run's own folder in it: letters, digits, dot, dash, underscore")
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        default=[],
        description='who follows the log besides: "tensorboard", "wandb" (offline unless WANDB_MODE says else)',
    )


class RunConfig(HybridTrainerConfig):
    """Everything `hybridtrainer train` needs: the trainer's settings and one section for each thing to build."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    run: FolderConfig = FolderConfig()


def is_run_name(name: str) -> bool:
    """Whether a run may have this name: one that leads nowhere but into its own folder."""
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)) and len(name) <= MAX_RUN_NAME and ".." not in name
