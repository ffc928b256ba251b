"""What Hugging Face's Trainer may be asked for when HybridTrainer makes its steps, and which Trainer that must be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from hybridtrainer.errors import CorruptCheckpointError, ModelError
from hybridtrainer.integrations.host_files import require_whole
from hybridtrainer.integrations.hosted import RUN
from hybridtrainer.integrations.huggingface_streamed import is_streamed
from hybridtrainer.integrations.optional import require

UPDATES_IN_BACKWARD = ("lomo", "adalomo")
STATE = "trainer_state.json"
READ = ("*.json", "*.safetensors", "*.pt", "pytorch_model*.bin", "adapter_model.bin", "*/adapter_model.*")
"""Files of a checkpoint that a Trainer reads when it goes on, beside the random states."""
OWN = ("_make_hybrid", "_begin", "_follow", "_read_out", "_make_step", "_norm", "_load_hybrid")
"""Methods of the mixin that replace none of Trainer's."""


def require_known(kind: type, mixin: type) -> None:
    """Refuses a class that is not a Trainer with all that the mixin stands before.

    Raises:
        MissingPackageError: if transformers or accelerate is not installed.
        ModelError: if the class has no Trainer behind the mixin, or one of another build.
    """
    transformers = require("transformers", "hf")
    require("accelerate", "hf")
    if not issubclass(kind, transformers.Trainer):
        raise ModelError(
            f"{kind.__name__} has no `transformers.Trainer` behind the mixin.",
            "Derive it from both: class Mine(HybridTrainerMixin, transformers.Trainer).",
        )
    order = kind.__mro__
    if order.index(mixin) > order.index(transformers.Trainer):
        raise ModelError(
            f"{kind.__name__} has the mixin behind `transformers.Trainer`, where nobody asks it.",
            "Name the mixin first.",
        )
    behind = next(each for each in order[order.index(mixin) + 1 :] if "training_step" in vars(each))
    if behind is not transformers.Trainer:
        warnings.warn(
            f"{behind.__name__} has a training_step of its own, which is not called: HybridTrainer makes the steps, "
            "with compute_loss.",
            stacklevel=3,
        )
    own = [name for name in vars(mixin) if callable(vars(mixin)[name]) and not name.startswith("__")]
    missing = [name for name in own if name not in OWN and not hasattr(transformers.Trainer, name)]
    if missing:
        raise ModelError(
            f"The Trainer of transformers {transformers.__version__} has no {', '.join(missing)}.",
            "Use transformers 5.22, for which this was written.",
        )


def is_moved_by_metrics(scheduler: Any) -> bool:
    """Whether a scheduler waits for evaluations."""
    greedy = getattr(require("transformers.optimization", "hf"), "GreedyLR", None)
    return isinstance(scheduler, (ReduceLROnPlateau,) if greedy is None else (ReduceLROnPlateau, greedy))


def to_resume(asked: Any, folder: Path) -> Any:
    """What a Trainer is to go on from: the checkpoint that was asked for, or for True the newest whole one.

    Args:
        asked: As `train` was given it.
        folder: The Trainer's output folder.

    Raises:
        CorruptCheckpointError: if that checkpoint, or for True every one, is not whole.
    """
    if asked is True:
        return newest_whole(folder) or True
    if isinstance(asked, str | Path):
        require_whole(_files(Path(asked)))
    return asked


def newest_whole(folder: Path) -> str | None:
    """The newest checkpoint in a Trainer's output folder that was written to its end; None where there is none at all.

    The Trainer writes a checkpoint file by file under its name, `trainer_state.json` last.

    Raises:
        CorruptCheckpointError: if there are some, and none is whole.
    """
    numbered = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    made = [path for path, number in numbered.items() if number.isdecimal()]
    for path in sorted(made, key=lambda path: int(numbered[path]), reverse=True):
        try:
            require_whole([path / STATE, *_files(path)])
        except CorruptCheckpointError as error:
            warnings.warn(f"{path} was not written to its end, and is passed over: {error.what}", stacklevel=3)
        else:
            return str(path)
    if made:
        raise CorruptCheckpointError(
            f"No checkpoint in {folder} was written to its end, so there is none to go on from.",
            "Begin anew: call train() without resume_from_checkpoint.",
        )
    return None


def _files(checkpoint: Path) -> list[Path]:
    """What the Trainer reads of a checkpoint with our state in it; nothing of one without: that is its own affair."""
    if not (checkpoint / RUN).is_dir():
        return []
    found = [path for pattern in READ for path in sorted(checkpoint.glob(pattern))]
    return [*found, *(checkpoint / name for name in (STATE, "rng_state.pth"))]


def require_possible(trainer: Any) -> None:
    """Refuses arguments that HybridTrainer cannot follow.

    Raises:
        ModelError: the first of them.
    """
    for what, remedy in _problems(trainer):
        raise ModelError(what, remedy)


def _problems(trainer: Any) -> Iterator[tuple[str, str]]:
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield (
            "The arguments ask for several devices, and decisions of the phases are made for one.",
            "Use one GPU (CUDA_VISIBLE_DEVICES=0), without DeepSpeed and FSDP.",
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size would begin the run anew with smaller batches.",
            "Leave it out: where memory runs out, batches are computed in parts, with the same samples.",
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in UPDATES_IN_BACKWARD or "layerwise" in optim:
        yield f"The optimizer {optim} updates weights in the backward pass.", "Use another, such as adamw_torch."
    if is_streamed(trainer.model):
        for name in ("gradient_checkpointing", "torch_compile", "fp16"):
            if getattr(args, name):
                yield f"{name} is on, and the model is streamed, which does that in its own way.", "Leave it out."
