"""All settings: their types, ranges, defaults and presets.

`HybridTrainerConfig` is what the trainer needs; `RunConfig` adds what the command line needs to build a
model, its data and its optimizer. Reading and writing files is in `config_io.py`. This module imports no torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_serializer, field_validator

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.config_section import Section

OPTIMIZERS_WITH_BETAS = ("adam", "adamw")
MAX_RUN_NAME = 100
RUN_NAME_RULE = (
    f"Use at most {MAX_RUN_NAME} letters, digits, dots, dashes and underscores, beginning with no dot or dash."
)


class DepthConfig(Section):
    """How a model of repeated blocks grows, with "depth" in `predict`."""

    share: float = Field(
        default=0.25, gt=0, lt=1, description="of the blocks, with which training begins; at least two"
    )
    until: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the run after which it grows; where left out 0.65, or sooner in a run of very many "
        "tokens for each parameter; warmup_steps if no end is known",
    )
    order: Literal["stack", "repeat"] = Field(
        default="stack", description='"stack" repeats the short stack as a whole, "repeat" each of its blocks in place'
    )


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
    max_predict_steps: int = Field(
        default=30, ge=1, description="steps that a jump foresees at most, and no more than a quarter of those it knows"
    )
    correction_interval: int = Field(
        default=15, ge=1, description="steps foreseen for which there are correct_steps real ones"
    )
    correct_steps: int = Field(
        default=3,
        ge=1,
        description="real steps in a Correct phase for each correction_interval foreseen; a verdict ends it",
    )
    confidence_threshold: float = Field(
        default=0.85, ge=0, le=1, description="least confidence at which a jump is tried"
    )
    divergence_sigma: float = Field(
        default=3.0, gt=0, description="a loss this many standard deviations too high is suspicious"
    )
    predict: Literal["off", "auto"] | list[Literal["jumps", "samples", "depth"]] = Field(
        default="auto",
        description='"off" is plain training; "auto" uses what pays of all; or name "jumps", "samples", "depth"',
    )
    sample_weights: bool = Field(
        default=False,
        description="whether a sample counts the more the seldomer it is taken, so that the expected gradient is that "
        "of all samples; with samples in predict",
    )
    forecaster: Literal[
        "auto", "drift", "line_fit", "outer_momentum", "persistence", "curve", "momentum", "learned"
    ] = Field(default="auto", description='who proposes jumps; "auto" takes the most confident of the first three')
    horizon: Literal["halving", "linucb"] = Field(
        default="halving",
        description='how long jumps are: halved by failure, doubled by success; "linucb" learns what each length pays',
    )
    dynamics: Literal["off", "blend", "linear", "mlp", "rssm"] = Field(
        default="off", description="model that forecasts the loss while training goes on; none with predict off"
    )
    residuals: bool = Field(
        default=False,
        description="whether what came of earlier steps with like features has a say in forecasts of the loss; with "
        "a model that learns",
    )
    readout: Literal["auto", "last", "averaged"] = Field(
        default="auto",
        description='weights that are evaluated: "last", "averaged" over recent ones, or the best of them by probes; '
        '"auto" is "last" unless predict is "auto" and there are probe batches',
    )
    readout_decay: float = Field(
        default=0.99, ge=0, lt=1, description="what the average keeps of itself at each step; averaged only"
    )
    history_windows: int = Field(
        default=8, ge=2, le=16, description="displacement windows kept, one byte a parameter each"
    )
    trust_radius: float = Field(
        default=1.0, gt=0, description="longest jump, relative to how far the newest window moved"
    )
    max_failures: int = Field(
        default=3, ge=1, description="failed jumps in a row after which prediction is switched off"
    )
    recovery_steps: int = Field(default=20, ge=1, description="Full steps forced after an alarm or a failed jump")
    lasting_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of a jump's probed gain that is credited, times the fourth power of its confidence",
    )
    waste_limit: float = Field(default=0.02, ge=0, le=1, description="share of the run that failed jumps may cost")
    save_interval: int = Field(default=50, ge=1, description="steps between checkpoints")
    keep_last: int = Field(default=3, ge=1, description="checkpoints kept")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of weights, shuffling and probes")
    hooks: list[str] = Field(default=[], description="names of installed hooks (entry points of `hybridtrainer.hooks`)")
    depth: DepthConfig = DepthConfig()
    memory: MemoryConfig = MemoryConfig()

    @classmethod
    def conservative(cls, **overrides: Any) -> Self:
        """Longer jumps than the defaults, checked often; tried from a confidence of 0.60."""
        return cls(**(PRESETS["conservative"] | overrides))

    @classmethod
    def aggressive(cls, **overrides: Any) -> Self:
        """The longest jumps, corrected every 10 steps; tried from a confidence of 0.55."""
        return cls(**(PRESETS["aggressive"] | overrides))

    def samples_allowed(self) -> bool:
        """Whether samples may be left out."""
        return self.predict == "auto" or "samples" in self.predict

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
        "nano", "nano-llama", "mini", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1.5b",
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

    name: Literal["sgd", "adam", "adamw", "adafactor"] = Field(
        default="adamw", description="torch's optimizer of that name; a streamed model takes adamw"
    )
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.1, ge=0, description="applied to matrices, not to norms and biases")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="adam and adamw only"
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd only")


class ScheduleConfig(Section):
    """The learning rate over the run."""

    name: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="how the rate goes on after its rise"
    )
    warmup_steps: int = Field(default=50, ge=0, description="steps over which the rate rises to its peak")
    final_ratio: float = Field(default=0.05, ge=0, le=1, description="rate at the end over the peak; not for constant")


class TrainConfig(Section):
    """Length, batch and device of the run."""

    steps: int = Field(default=1000, ge=1, description="the clock at which the run ends; jumps move it too")
    batch_size: int = Field(default=16, ge=1, description="samples in a batch")
    accumulate: int = Field(default=1, ge=1, description="batches in one optimizer step")
    clip_norm: float | None = Field(default=1.0, ge=0, description="largest gradient norm; 0 for none")
    eval_interval: int = Field(default=100, ge=1, description="steps between evaluations on the validation split")
    eval_batches: int = Field(default=8, ge=1, description="batches in one evaluation")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description='"auto" takes a GPU where there is one')

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
