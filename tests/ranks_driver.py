"""Runs on two ranks: each case is two processes, forked from this one, which has imported everything already.

`python -m tests.ranks_driver FOLDER CASE...` writes for each case and rank what it found into FOLDER. Cases that are
joined by a plus sign share their two processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support import EAGER, take, text_splits, tiny_gpt
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hybridtrainer import disk
from hybridtrainer.checkpoint import read_checkpoint
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.data.endless import endless
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.fit import Loop
from hybridtrainer.integrations.own_loop import own_loop
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.models.language import language_loss
from hybridtrainer.observe.progress import make_progress
from hybridtrainer.predict.history import WindowHistory
from hybridtrainer.predict.jump import Jumps
from hybridtrainer.predict.rollback import Snapshot
from hybridtrainer.randomness import seed_everything
from hybridtrainer.rank_checks import require_same_on_all_ranks
from hybridtrainer.records import Phase, StepResult
from hybridtrainer.run_folder import RunFolder
from hybridtrainer.signals import StopRequest
from hybridtrainer.trainer import HybridTrainer

RANKS, BATCH, STEPS = 2, 8, 44
TIMEOUT_SECONDS = 5.0
LIMIT_SECONDS = TIMEOUT_SECONDS + 10  # after the first rank has ended, the others must have ended too
PATIENCE_SECONDS = 60.0

Case = Callable[[int, Path], dict[str, Any]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def build(kind: str, rank: int, settings: dict[str, Any] | None = None, **options: Any) -> HybridTrainer:
    """A small GPT in copies ("ddp"), in shards ("fsdp"), streamed ("stream") or alone ("plain")."""
    seed_everything(3)
    gpt = tiny_gpt(dropout=options.pop("dropout", 0.1))
    model: nn.Module = gpt
    splits = text_splits()
    optimizer: torch.optim.Optimizer | None = None
    chosen: dict[str, Any] = EAGER if settings is None else settings
    loss: Any = gpt_loss
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(model)
    elif kind == "stream":
        memory = MemoryConfig(mode=options.pop("mode", "split8"), clipping=options.pop("clipping", "fused"))
        model, chosen, loss = stream(model, memory, "cpu", lr=3e-3), {**chosen, "memory": memory}, language_loss
    if kind != "stream":
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.pop("lr", 3e-3))
        if "end" in options:
            options["scheduler"] = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=options.pop("end"))
    options.setdefault("probe_batches", take(PositionedLoader(splits.probe, BATCH), 2))
    seed_everything(100 + rank)
    options = {"clip_norm": 1.0, "loss_fn": loss, **options}
    return HybridTrainer(model, optimizer, options.pop("loss_fn"), HybridTrainerConfig(**chosen), **options)


def batches_of(trainer: HybridTrainer) -> Iterator[Any]:
    loader = trainer.loader(text_splits().train, BATCH)
    return endless(loader, 1)


def weights_of(trainer: HybridTrainer) -> dict[str, list[float]]:
    """Every weight, put together where it is sharded, and brought home where it is streamed."""
    if isinstance(trainer.optimizer, StreamedOptimizer):
        trainer.optimizer.settle()
    whole = {}
    for name, parameter in trainer._training.model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        whole[name] = value.detach().float().reshape(-1).tolist()
    return whole


def digest(trainer: HybridTrainer) -> str:
    return trainer.fingerprint()["all"]


def train(trainer: HybridTrainer, steps: int, each: Callable[[Any], None] = lambda _: None) -> list[list[Any]]:
    """Steps; what every step was, up to the clock `steps`."""
    told = []
    stream_of_batches = batches_of(trainer)
    while trainer.step_count < steps:
        result = trainer.step(next(stream_of_batches))
        told.append([result.step, result.phase.value, result.loss, result.reason])
        each(result)
    return told


@case
def own_loop_resumes(rank: int, folder: Path) -> dict[str, Any]:
    """A loop of one's own in one piece, and in two with a new trainer for the second."""

    def go(name: str, until: int, resume: bool = False) -> HybridTrainer:
        trainer = build("ddp", rank)
        stream_of_batches = batches_of(trainer)
        with own_loop(trainer, STEPS, folder / name, resume=resume) as run:
            while run.left and trainer.step_count < until:
                run.step(next(stream_of_batches))
        return trainer

    whole = go("own-whole", STEPS)
    go("own-parts", 20)
    again = go("own-parts", STEPS, resume=True)
    dist.barrier()  # the first rank may still be writing
    files = sorted(path.name for path in (folder / "own-parts").iterdir())
    return {"same": digest(whole) == digest(again), "clock": again.step_count, "files": files}


@case
def plain_equals(rank: int, _folder: Path) -> dict[str, Any]:
    """Prediction off beside a plain DDP loop with accumulation and clipping."""
    found = {}
    for accumulate, retry in ((1, True), (2, True), (2, False)):
        settings = {"predict": "off", "memory": {"retry_smaller": retry}}
        trainer = build("ddp", rank, settings, accumulate=accumulate)
        stream_of_batches = batches_of(trainer)
        own = [next(stream_of_batches) for _ in range(8)]
        seed_everything(3)
        model = DistributedDataParallel(tiny_gpt(dropout=0.1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seed_everything(100 + rank)
        for start in range(0, len(own), accumulate):
            for number, batch in enumerate(own[start : start + accumulate]):
                model.require_backward_grad_sync = number == accumulate - 1
                (gpt_loss(model, batch).mean() / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seed_everything(100 + rank)
        for start in range(0, len(own), accumulate):
            group = own[start : start + accumulate]
            trainer.step(group if accumulate > 1 else group[0])
        state = trainer._training.model.state_dict()
        found[f"{accumulate}, {retry}"] = all(
            torch.equal(state[name], v) for name, v in model.module.state_dict().items()
        )
    return found


def settings_of(kind: str) -> dict[str, Any]:
    return {**EAGER, "readout": "averaged", "forecaster": "auto" if kind.startswith("stream") else "learned"}


def whole_run(kind: str, resume_in: tuple[str, ...], rank: int, folder: Path) -> dict[str, Any]:
    """A run through all phases: compared across ranks after every step, saved in each phase, resumed from some."""
    trainer = build(kind, rank, settings_of(kind))
    made_in: dict[str, int] = {}
    steps: list[int] = []

    def look(result: Any) -> None:
        require_same_on_all_ranks(trainer)
        steps.append(result.step)
        phase = trainer.current_phase.value
        if phase not in made_in:
            trainer.save(folder / f"{kind}-{phase}")
            made_in[phase] = len(steps)

    told = train(trainer, STEPS, look)
    resumed = {}
    for phase in resume_in:
        again = build(kind, rank, settings_of(kind))
        again.load(folder / f"{kind}-{phase}")
        resumed[phase] = train(again, STEPS) == told[made_in[phase] :] and digest(again) == digest(trainer)
    kept, gram = trainer.statistics().jumps_kept, trainer.jumps.history.gram
    return {"told": told, "resumed": resumed, "jumps_kept": kept, "gram": gram.tolist()}


for _kind in ("ddp", "fsdp", "stream"):
    CASES[f"run_{_kind}"] = partial(whole_run, _kind, ("predict", "correct"))
    CASES[f"rerun_{_kind}"] = partial(whole_run, _kind, ("warmup", "full"))

ALIKE: dict[str, dict[str, Any]] = {
    "ddp": {}, "fsdp": {}, "stream": {"mode": "fp32"}, "stream, exact": {"mode": "fp32", "clipping": "exact"},
}  # fmt: skip


@case
def as_one(rank: int, _folder: Path) -> dict[str, Any]:
    """Some steps in every way, without dropout: what one process with the whole batch would have done."""
    return {name: few_steps(name.split(",")[0], rank, **options) for name, options in ALIKE.items()}


def few_steps(kind: str, rank: int, **options: Any) -> dict[str, Any]:
    trainer = build(kind, rank, {"predict": "off"}, dropout=0.0, **options)
    told = train(trainer, 6)
    return {"losses": [each[2] for each in told], "weights": weights_of(trainer)}


class Trouble:
    """A loss function that fails on one rank when it is told to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.what: Callable[[Tensor], Tensor] | None = None
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        loss = gpt_loss(model, batch)
        return self.what(loss) if self.what is not None and self.rank == 1 else loss


class Failing:
    """A hook that stops the run before its step, when it is told to."""

    fails = False

    def before_step(self, _trainer: HybridTrainer, _batch: Any) -> None:
        if self.fails:
            raise KeyError("a hook of one rank")


def _raise(error: BaseException) -> Any:
    raise error


def outcome(work: Callable[[], Any]) -> list[str]:
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["fine", ""]


@case
def failing_step(rank: int, _folder: Path) -> dict[str, Any]:
    """An error, and values that are not finite, on one rank alone."""
    trouble, hook = Trouble(rank), Failing()
    trainer = build("ddp", rank, loss_fn=trouble, hooks=[hook])
    stream_of_batches = batches_of(trainer)
    for _ in range(3):
        trainer.step(next(stream_of_batches))
    before = digest(trainer)
    found: dict[str, Any] = {}
    trouble.what = lambda _: _raise(ValueError("no such token"))
    found["error"] = outcome(lambda: trainer.step(next(stream_of_batches)))
    found["undone"] = digest(trainer) == before
    trouble.what, hook.fails = None, rank == 1
    found["hook"] = outcome(lambda: trainer.step(next(stream_of_batches)))
    found["hook undone"], hook.fails = digest(trainer) == before, False
    found["goes on"] = outcome(lambda: trainer.step(next(stream_of_batches)))
    parameters = trainer.fingerprint()["parameters"]
    trouble.what = lambda loss: loss * float("nan")
    trainer.step(next(stream_of_batches))
    found["withheld"] = trainer.fingerprint()["parameters"] == parameters
    trainer.step(next(stream_of_batches))
    found["not finite"] = outcome(lambda: trainer.step(next(stream_of_batches)))
    require_same_on_all_ranks(trainer)
    return found


@case
def wrong_batches(rank: int, _folder: Path) -> dict[str, Any]:
    """Too few micro-batches on one rank: both say so at once, and nothing has happened."""
    trainer = build("ddp", rank, {"predict": "off"}, accumulate=2)
    stream_of_batches = batches_of(trainer)
    pair = [next(stream_of_batches) for _ in range(2)]
    trainer.step(pair)
    before = digest(trainer)
    found: dict[str, Any] = {"error": outcome(lambda: trainer.step(pair[: 2 - rank]))}
    found["undone"] = digest(trainer) == before
    found["goes on"] = outcome(lambda: trainer.step(pair))
    require_same_on_all_ranks(trainer)
    return found


@case
def memory_runs_out(rank: int, _folder: Path) -> dict[str, Any]:
    """Out of memory on one rank: in a forward pass, where both divide, and in a probe, where neither jumps."""
    warnings.simplefilter("ignore")
    trouble = Trouble(rank)
    trainer = build("ddp", rank, loss_fn=trouble, dropout=0.0)
    other = build("ddp", rank, dropout=0.0)
    stream_of_batches, theirs = batches_of(trainer), batches_of(other)
    trouble.what = lambda loss: _raise(torch.OutOfMemoryError("injected")) if trouble.calls == 1 else loss
    losses = [trainer.step(next(stream_of_batches)).loss for _ in range(2)]
    expected = [other.step(next(theirs)).loss for _ in range(2)]
    require_same_on_all_ranks(trainer)
    found: dict[str, Any] = {"losses": losses, "expected": expected, "parts": trainer._real_step.state()["parts"]}
    trouble.what = None
    while trainer.current_phase is not Phase.PREDICT:
        trainer.step(next(stream_of_batches))
    trouble.what = lambda loss: loss if torch.is_grad_enabled() else _raise(torch.OutOfMemoryError("injected"))
    found["probe"] = trainer.step(next(stream_of_batches)).reason
    require_same_on_all_ranks(trainer)
    trouble.what = None
    for place, (owner, name, call) in PLACES.items():
        with failing_on_call(owner, name, call if rank == 1 else 0) as calls:
            found[place] = ""
            while place not in found[place] and trainer.step_count < 200:
                calls[0] = 0  # they are counted in a step
                found[place] = trainer.step(next(stream_of_batches)).reason
        require_same_on_all_ranks(trainer)
    return found


PLACES: dict[str, tuple[type, str, int]] = {
    "in the snapshot": (Snapshot, "take", 1),
    "in the jump": (Jumps, "_displace_", 2),  # the first is that of the probe
    "in a window": (WindowHistory, "_measure", 1),
}


@contextmanager
def failing_on_call(owner: type, name: str, number: int) -> Iterator[list[int]]:
    """Memory runs out in one call of a method; in none for 0."""
    original, calls = getattr(owner, name), [0]

    def method(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise torch.OutOfMemoryError("injected")
        return original(*arguments)

    setattr(owner, name, method)
    yield calls
    setattr(owner, name, original)


@case
def spike_after_a_jump(rank: int, _folder: Path) -> dict[str, Any]:
    """The loss of one rank explodes in Correct: both return to where they were."""
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        trouble = Trouble(rank)
        trainer = build(kind, rank, settings_of(kind), loss_fn=trouble)
        stream_of_batches = batches_of(trainer)
        parts = ("parameters", "optimizer", "buffers", "random", "readout", "scheduler")
        while trainer.current_phase is not Phase.CORRECT:
            before = {part: value for part, value in trainer.fingerprint().items() if part in parts}
            position = trainer.state()["standing"]["data"]["position"]
            trainer.step(next(stream_of_batches))
        trouble.what = lambda loss: loss * 1000
        reasons = []
        while trainer.current_phase is Phase.CORRECT:
            reasons.append(trainer.step(next(stream_of_batches)).reason)
        after = trainer.fingerprint()
        require_same_on_all_ranks(trainer)
        found[kind] = {
            "reason": reasons[-1],
            "equal": [part for part in parts if after[part] == before[part]],
            "position": trainer.state()["standing"]["data"]["position"] == position,
        }
    return found


@case
def converted(rank: int, folder: Path) -> dict[str, Any]:
    """Checkpoints of Correct go on in another way than they were made: with the same weights, and a jump to undo."""
    found = {}
    for source, target in (("ddp", "fsdp"), ("fsdp", "ddp"), ("plain", "ddp"), ("plain", "fsdp")):
        trouble = Trouble(rank)
        trainer = build(target, rank, settings_of(target), loss_fn=trouble)
        trainer.load(folder / f"{source}-correct")
        whole = read_checkpoint(folder / f"{source}-correct").state()
        loaded = _equal(trainer, whole["parameters"])
        trouble.what = lambda loss: loss * 1000
        reason = trainer.step(next(batches_of(trainer))).reason
        undone = _equal(trainer, whole["undo"]["parameters"])
        trouble.what = None
        train(trainer, trainer.step_count + 3)
        require_same_on_all_ranks(trainer)
        found[f"{source} to {target}"] = [loaded, undone, reason.startswith("rolled back")]
    return found


def _equal(trainer: HybridTrainer, expected: dict[str, Tensor]) -> bool:
    whole = weights_of(trainer)
    return all(torch.equal(torch.tensor(whole[name]), value.float().reshape(-1)) for name, value in expected.items())


@case
def read_by_torch(rank: int, folder: Path) -> dict[str, Any]:
    """torch's distributed checkpoint reads shards into those of a model, and divides them along another dimension."""
    reader = HuggingFaceStorageReader(str(folder / "fsdp-correct"))
    trainer = build("fsdp", rank)
    model = trainer.model
    load({f"parameters/{name}": each.detach() for name, each in model.named_parameters()}, storage_reader=reader)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = read_checkpoint(folder / "fsdp-correct").state()
    expected = {f"parameters/{name}": value for name, value in whole["parameters"].items() if value.dim() == 2}
    state = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(1)]) for name, value in expected.items()}
    load(state, storage_reader=reader)
    anew = [torch.equal(state[name].full_tensor(), value) for name, value in expected.items()]
    return {"model": _equal(trainer, whole["parameters"]), "anew": anew}


class Uneven(nn.Module):
    """One half of it is used on the first rank only, and its norm sees what each rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.one(x) + (self.other(x) if dist.get_rank() == 0 else 0))
        return result


@case
def uneven(rank: int, _folder: Path) -> dict[str, Any]:
    """A parameter that one rank does not use, and buffers that differ."""
    seed_everything(0)
    model = DistributedDataParallel(Uneven())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = HybridTrainer(
        model, optimizer, lambda model, x: model(x).square().mean(dim=1), HybridTrainerConfig(predict="off")
    )
    seed_everything(rank)
    before = model.module.other.weight.clone()
    for _ in range(3):
        trainer.step(torch.randn(8, 4))
        require_same_on_all_ranks(trainer)
    return {"moved": not torch.equal(before, model.module.other.weight)}


@case
def refusals(rank: int, folder: Path) -> dict[str, Any]:
    """What cannot work is said at once, on every rank."""
    splits = text_splits()
    probes = take(PositionedLoader(splits.probe, BATCH), 2)
    fsdp = {"predict": "off"}
    found = {
        "plain": outcome(lambda: build("plain", rank)),
        "settings": outcome(lambda: build("ddp", rank, {**EAGER, "warmup_steps": 10 + rank})),
        "samples": outcome(lambda: build("ddp", rank, {"predict": ["samples"]})),
        "depth": outcome(lambda: build("fsdp", rank, {"predict": ["depth"]})),
        "probes": outcome(lambda: build("ddp", rank, probe_batches=probes[: 1 + rank])),
        "memory": outcome(lambda: build("fsdp", rank, {**fsdp, "memory": {"checkpoint_every": 1}})),
        "scaler": outcome(lambda: build("fsdp", rank, {**fsdp, "memory": {"precision": "fp16"}})),
        "batch": outcome(lambda: build("ddp", rank).loader(splits.train, 7)),
        "weights": outcome(lambda: build_unlike(rank)),
        "clipping": outcome(lambda: build("ddp", rank, clip_norm=1.0 + rank)),
        "rates": outcome(lambda: build("ddp", rank, lr=0.1 + rank)),
        "schedules": outcome(lambda: build("ddp", rank, end=5 + rank)),
    }
    trainer = build("ddp", rank)
    for number in range(2):
        trainer.step(next(batches_of(trainer)))
        trainer.save(folder / f"refused-{number}")
    found["checkpoints"] = outcome(lambda: trainer.load(folder / f"refused-{rank}"))
    (folder / "lacking-0").symlink_to("refused-0") if rank == 0 else None
    found["a checkpoint on one rank"] = outcome(lambda: trainer.load(folder / f"lacking-{rank}"))
    trainer = build("ddp", rank)
    other = trainer.jumps.forecaster

    def unlike(*arguments: Any) -> Any:
        forecast = other(*arguments)
        return replace(forecast, coefficients=forecast.coefficients + 1e-6 * rank)

    trainer.jumps.forecaster = unlike
    found["forecaster"] = outcome(lambda: train(trainer, STEPS))
    return found


def build_unlike(rank: int) -> HybridTrainer:
    seed_everything(rank)
    model = stream(tiny_gpt(), MemoryConfig(mode="fp32"), "cpu")
    return HybridTrainer(model, None, language_loss, HybridTrainerConfig(memory=MemoryConfig(mode="fp32")))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """Ends its process in one phase.

    Warmup in a forward pass, Full in a backward pass, Predict in a probe, Correct when weights are updated; "save" in
    the middle of a checkpoint.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.trainer: HybridTrainer | None = None

    def attach(self, trainer: HybridTrainer) -> None:
        self.trainer = trainer
        if self.phase == "correct":
            trainer.optimizer.register_step_pre_hook(self.before_update)
        if self.phase == "save":
            disk.write_durably = lambda *_: die()  # type: ignore[assignment]

    def before_update(self, *_: Any) -> None:
        if self.is_time():
            die()

    def is_time(self) -> bool:
        return self.trainer is not None and self.trainer.current_phase.value == self.phase

    def around(self, function: Any) -> Any:
        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            loss: Tensor = function(model, batch)
            if self.is_time() and self.phase == "full":
                loss.register_hook(lambda _: die())
            elif self.is_time() and self.phase != "correct":
                die()
            return loss

        return loss_fn


def fitted(kind: str, rank: int, run_dir: Path, deadly: Deadly | None = None, **options: Any) -> tuple[Any, Any]:
    loss = language_loss if kind == "stream" else gpt_loss
    trainer = build(
        kind, rank, {**settings_of(kind), "save_interval": 5}, hooks=options.pop("hooks", []),
        loss_fn=loss if deadly is None else deadly.around(loss),
    )  # fmt: skip
    if deadly is not None:
        trainer.listeners.append(lambda record: deadly.attach(trainer) if deadly.trainer is None else None)
    result = trainer.fit(trainer.loader(text_splits().train, BATCH), STEPS, run_dir=run_dir, progress="off", **options)
    return trainer, result


class Signalling:
    """A hook that sends its process a signal when a phase has come."""

    def before_step(self, trainer: HybridTrainer, _batch: Any) -> None:
        if trainer.current_phase is Phase.FULL:
            os.kill(os.getpid(), signal.SIGTERM)


@case
def signal_to_one(rank: int, folder: Path) -> dict[str, Any]:
    """SIGTERM to one rank: both save and end at the same step; the resumed run ends like one in one piece."""
    _, first = fitted("ddp", rank, folder / "signalled", hooks=[Signalling()] if rank == 1 else [])
    resumed, second = fitted("ddp", rank, folder / "signalled", resume=True)
    return {
        "status": [first.status, second.status],
        "step": first.steps,
        "digest": digest(resumed),
        "files": sorted(path.name for path in (folder / "signalled").iterdir()),
    }


@case
def loader_fails(rank: int, folder: Path) -> dict[str, Any]:
    """The data of one rank end with an error: both stop, and there is a checkpoint of the last step."""
    trainer = build("ddp", rank)
    own = [next(batches) for batches in [batches_of(trainer)] for _ in range(9)]

    def loader() -> Any:
        yield from own
        if rank == 1:
            raise OSError("the disk has gone")
        yield from own

    found = outcome(lambda: trainer.fit(loader(), STEPS, run_dir=folder / "loader", progress="off"))
    saved = sorted(path.name for path in (folder / "loader" / "checkpoints").iterdir())
    return {"error": found, "saved": saved, "step": trainer.step_count}


@case
def save_by_need(rank: int, folder: Path) -> dict[str, Any]:
    """The memory of one rank is nearly full after its third step: all save together."""
    trainer = build("ddp", rank)
    loop = Loop(trainer, trainer.loader(text_splits().train, BATCH), 8, make_progress("off"), None, {}, 100)

    def watch(record: Any) -> None:
        if rank == 1 and isinstance(record, StepResult) and record.step == 3:
            loop._save_after_step()

    trainer.listeners.append(watch)
    with ExitStack() as stack, StopRequest() as stop:
        loop.keep_in(stack.enter_context(RunFolder(folder / "needed", 9)), False, None, stack)
        with loop:
            loop.advance(6, stop)
    return {"saved": sorted(path.name for path in (folder / "needed" / "checkpoints").iterdir())}


def killed(kind: str, phase: str, rank: int, folder: Path) -> dict[str, Any]:
    deadly = Deadly(phase) if rank == 1 else None
    return {"error": outcome(lambda: fitted(kind, rank, folder / f"{kind}-{phase}-run", deadly))}


def restarted(kind: str, phase: str, rank: int, folder: Path) -> dict[str, Any]:
    resume = phase != "reference"
    run_dir = folder / f"{kind}-{phase}-run"
    trainer, result = fitted(kind, rank, run_dir, resume=resume)
    hidden = [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
    return {"digest": digest(trainer), "status": result.status, "left behind": hidden}


for _kind in ("ddp", "fsdp", "stream"):
    for _phase in ("reference", "warmup", "full", "predict", "correct", "save"):
        CASES[f"kill_{_kind}_{_phase}"] = partial(killed, _kind, _phase)
        CASES[f"restart_{_kind}_{_phase}"] = partial(restarted, _kind, _phase)


@case
def auto(rank: int, _folder: Path) -> dict[str, Any]:
    """Everything allowed: what needs one process stays away, and all ranks read out the same average."""
    found = {}
    for kind in ("ddp", "fsdp"):
        trainer = build(kind, rank, {"predict": "auto", "warmup_steps": 4, "full_steps": 4})
        train(trainer, 14)
        loss = trainer.evaluate(take(PositionedLoader(text_splits().validation, BATCH), 2))
        require_same_on_all_ranks(trainer)
        found[kind] = [loss, trainer.state()["samples"], trainer.state()["depth"]["short"]]
    return found


@case
def hang(rank: int, _folder: Path) -> dict[str, Any]:
    """One rank stops answering without dying."""
    trainer = build("ddp", rank)
    train(trainer, 3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    found = outcome(lambda: train(trainer, 6))
    return {"error": found, "waited": time.monotonic() - began}


def run_case(name: str, rank: int, folder: Path) -> None:
    """One rank of one case, or of several one after the other, in a process of its own."""
    torch.set_num_threads(1)
    seconds = TIMEOUT_SECONDS if name == "hang" else PATIENCE_SECONDS
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name[:40]}-store", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    for each in name.split("+"):
        try:
            found = CASES[each](rank, folder)
        except BaseException:
            found = {"trace": traceback.format_exc()}
        (folder / f"{each}-{rank}.json").write_text(json.dumps(found))


def launch(name: str, folder: Path) -> None:
    """Both ranks of a case; whoever has not ended long after the other is ended, and has no result."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            try:
                run_case(name, rank, folder)
            finally:
                os._exit(0)
        children.append(child)
    left, deadline = set(children), None
    while left:
        for child in list(left):
            ended = os.waitpid(child, os.WNOHANG)[0] == child
            if ended:
                left.remove(child)
        if len(left) < RANKS and deadline is None:
            deadline = time.monotonic() + (0 if name == "hang" else LIMIT_SECONDS)
        if deadline is not None and time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
            deadline = None if not left else deadline + LIMIT_SECONDS
        time.sleep(0.01)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    text_splits()
    for name in names:
        began = time.monotonic()
        launch(name, folder)
        print(name, f"{time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
