"""GPU memory runs out at every place of a streamed run, once or for ever: done again smaller, or said what to do.

A place that can be made smaller is done again and the losses stay, up to rounding. Where nothing smaller is left, the
error says where and lists remedies with their prices, no half-updated model is saved, and what was saved goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.support import CONTEXT, EAGER, gpt_setup, text_splits
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import GpuMemoryError, TornStepError
from hybridtrainer.kernels import cross_entropy
from hybridtrainer.memory import engine
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.slots import Ring
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, GPTConfig
from hybridtrainer.models.language import language_loss
from hybridtrainer.records import Phase, StepResult
from hybridtrainer.trainer import HybridTrainer

Clipping = Literal["fused", "exact"]
SETUP = gpt_setup(dropout=0.0)
SETTINGS = EAGER | {"warmup_steps": 6, "full_steps": 2}
STEPS = 3


@dataclass(frozen=True)
class Place:
    """Where memory runs out.

    Attributes:
        owner, name: The function that fails.
        call: Which of its calls is the first to fail.
        where: Where the error says it was.
        warning: How it is said that it was done again; empty where it cannot be.
        torn: With which clipping the model is between two steps, if it goes on for ever.
        fits: Samples at a time for which there would be memory, where the function is told.
    """

    owner: Any
    name: str
    call: int
    where: str
    warning: str = ""
    torn: tuple[Clipping, ...] = ()
    phase: Phase = Phase.FULL
    in_save: bool = False
    fits: int | None = None


REMEDIES = ("What takes less, the cheapest first:", 'memory.mode = "sr8": ', "no other program on this GPU")
FOR_THE_HEAD = ("`language_loss` as the loss: ", "`tile_tokens`", "the logits are computed twice")
HALF_THE_SAMPLES, HALF_THE_TILE = "4 samples are computed at a time", "computed again, 128 tokens at a time"

PLACES = {
    "forward": Place(Body, "forward", 2, "the forward pass of a block, in `blocks.1` (", HALF_THE_SAMPLES, fits=4),
    "backward": Place(
        Body, "gradients", 2, "the backward pass of a block (", HALF_THE_SAMPLES, torn=("fused",), fits=4
    ),
    "head": Place(cross_entropy, "_log_sum_exp_", 1, "what is outside the blocks", HALF_THE_TILE),
    "backward of the head": Place(cross_entropy, "_slope_", 1, "what is outside the blocks", HALF_THE_TILE),
    # By then some blocks are updated and others are not, with either clipping.
    "update": Place(engine, "apply_", 5, "an update", torn=("fused", "exact")),
    "probe": Place(Body, "forward", 2, "the forward pass of a block", HALF_THE_SAMPLES, phase=Phase.PREDICT, fits=4),
    "save, on the way home": Place(
        Ring, "bring_home", 2, "a save, in the return of the model to host memory", in_save=True
    ),
    "save, in an update that is due": Place(engine, "apply_", 2, "a save, in an update", torn=("exact",), in_save=True),
}
RETRIED = [name for name, place in PLACES.items() if place.warning]
CASES = [
    pytest.param(name, clipping, for_ever, id=f"{name}-{clipping}-{'for ever' if for_ever else 'once'}")
    for name, place in PLACES.items()
    for clipping in ("fused", "exact")
    for for_ever in (False, True)
    if (for_ever or not place.warning) and (clipping == "exact" or "due" not in name)
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_trainer(mode: Any, clipping: Clipping) -> HybridTrainer:
    torch.manual_seed(0)
    model = GPT(GPTConfig("llama", 3, 32, 2, vocabulary=256, context=CONTEXT, tied=False))
    streamed = stream(model, MemoryConfig(mode=mode, clipping=clipping, max_gpu_blocks=1), "cpu", lr=1e-3)
    config = HybridTrainerConfig(**SETTINGS)
    return HybridTrainer(streamed, None, language_loss, config, probe_batches=SETUP.probes, clip_norm=1.0)


@dataclass(frozen=True)
class Undisturbed:
    """A run in which nothing has failed, from a checkpoint on."""

    checkpoint: Path
    results: list[StepResult]
    fingerprints: list[dict[str, str]]  # before the first step, and after each


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Undisturbed]:
    @cache
    def run(mode: str, clipping: Clipping, phase: Phase) -> Undisturbed:
        trainer = make_trainer(mode, clipping)
        batches = iter(SETUP.batches)
        while trainer.current_phase is not phase:
            trainer.step(next(batches))
        checkpoint = tmp_path_factory.mktemp("undisturbed") / "checkpoint"
        trainer.save(checkpoint)
        results, fingerprints = [], [trainer.fingerprint()]
        for batch in SETUP.batches[:STEPS]:
            results.append(trainer.step(batch))
            fingerprints.append(trainer.fingerprint())
        return Undisturbed(checkpoint, results, fingerprints)

    return run


@contextmanager
def running_out(monkeypatch: pytest.MonkeyPatch, place: Place, for_ever: bool) -> Iterator[None]:
    original: Callable[..., Any] = getattr(place.owner, place.name)
    calls = 0

    def hungry(*args: Any) -> Any:
        nonlocal calls
        if any(each.is_meta for each in tree_leaves(args) if isinstance(each, Tensor)):
            return original(*args)  # a rehearsal, which needs no memory
        calls += 1
        too_much = calls == place.call if place.fits is None else calls >= place.call and args[-1] > place.fits
        if too_much or (for_ever and calls > place.call):
            raise torch.OutOfMemoryError("injected")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(place.owner, place.name, hungry)
        yield
    assert calls >= place.call


def counters(trainer: HybridTrainer) -> list[int]:
    optimizer = trainer.model.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    return [int(unit.steps) for unit in (*optimizer.engine.blocks, *optimizer.lone)]


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
@pytest.mark.parametrize("clipping", ["fused", "exact"])
@pytest.mark.parametrize("name", RETRIED)
def test_what_does_not_fit_once_is_done_again_smaller_and_the_losses_stay(undisturbed, monkeypatch, name, clipping):
    place = PLACES[name]
    expected = undisturbed("fp32", clipping, place.phase)
    trainer = make_trainer("fp32", clipping)
    trainer.load(expected.checkpoint)
    steps = counters(trainer)
    with running_out(monkeypatch, place, for_ever=False), pytest.warns(UserWarning, match=place.warning):
        results = [trainer.step(SETUP.batches[0])]
    results += [trainer.step(batch) for batch in SETUP.batches[1:STEPS]]
    assert [result.loss for result in results] == pytest.approx([one.loss for one in expected.results], rel=1e-5)
    for found, one in zip(results, expected.results, strict=True):
        assert (found.step, found.phase, found.predicted) == (one.step, one.phase, one.predicted)
        assert (found.forward_samples, found.backward_samples) == (one.forward_samples, one.backward_samples)
        assert not found.skipped
    real = sum(not result.predicted for result in results)
    assert counters(trainer) == [count + real for count in steps]


@pytest.mark.parametrize(("name", "clipping", "for_ever"), CASES)
@pytest.mark.filterwarnings("ignore:GPU memory ran out")
def test_what_cannot_be_done_smaller_says_what_to_do_and_what_was_saved_goes_on(
    tmp_path, undisturbed, monkeypatch, name, clipping, for_ever
):
    place = PLACES[name]
    expected = undisturbed("split8", clipping, place.phase)
    trainer = make_trainer("split8", clipping)
    trainer.load(expected.checkpoint)
    done = 1 if place.in_save else 0
    if done:
        trainer.step(SETUP.batches[0])
    with running_out(monkeypatch, place, for_ever), pytest.raises(GpuMemoryError) as raised:
        if place.in_save:
            trainer.save(tmp_path / "not written")
        for batch in SETUP.batches[done:STEPS]:  # a deferred update is made in the step after its own
            trainer.step(batch)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert raised.value.exit_code == 8
    told = str(raised.value)
    assert told.startswith(f"Out of GPU memory in {place.where}"), told
    assert "(phase " in told and ": injected. " in told
    assert ("Planned were " in told and "activations" in told) == (not place.in_save)
    assert all(part in told for part in (*REMEDIES, *(FOR_THE_HEAD if "head" in name else ()))), told
    assert ("is between two steps until a checkpoint is loaded" in told) == (clipping in place.torn)
    assert told.count("between two steps") <= 1
    assert "max_gpu_blocks" not in told  # it is 1

    if clipping in place.torn:
        with pytest.raises(TornStepError, match="Load the last checkpoint"):
            trainer.save(tmp_path / "not written")
        with pytest.raises(TornStepError, match="between two steps"):
            trainer.step(SETUP.batches[0])
        with pytest.raises(TornStepError):
            trainer.fingerprint()
    else:
        assert trainer.fingerprint() == expected.fingerprints[done]
    assert list(tmp_path.iterdir()) == []

    trainer.load(expected.checkpoint)
    assert len(set(counters(trainer))) == 1
    assert trainer.fingerprint() == expected.fingerprints[0]
    for batch, result, fingerprint in zip(SETUP.batches, expected.results, expected.fingerprints[1:], strict=False):
        assert trainer.step(batch).loss == result.loss
        assert trainer.fingerprint() == fingerprint


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_step_that_failed_for_want_of_memory_is_made_again_if_nothing_was_updated(undisturbed, monkeypatch, clipping):
    expected = undisturbed("split8", clipping, Phase.FULL)
    trainer = make_trainer("split8", clipping)
    trainer.load(expected.checkpoint)
    with running_out(monkeypatch, PLACES["backward of the head"], True), pytest.raises(GpuMemoryError):
        trainer.step(SETUP.batches[0])
    assert [trainer.step(batch).loss for batch in SETUP.batches[:STEPS]] == [one.loss for one in expected.results]
    assert trainer.fingerprint() == expected.fingerprints[-1]


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_fit_leaves_a_whole_checkpoint_or_none_when_memory_runs_out(tmp_path, monkeypatch, clipping):
    def fit(**options: Any) -> HybridTrainer:
        trainer = make_trainer("split8", clipping)
        trainer.fit(trainer.loader(text_splits().train, 8), 4, progress="off", **options)
        return trainer

    in_the_third_step = Place(Body, "gradients", 8, "")
    with running_out(monkeypatch, in_the_third_step, True), pytest.raises(GpuMemoryError) as raised:
        fit(run_dir=tmp_path / "run")
    assert 'memory.mode = "sr8": saves ' in str(raised.value)
    assert ("between two steps" in str(raised.value)) == (clipping == "fused")
    assert "GpuMemoryError: Out of GPU memory in the backward pass" in (tmp_path / "run" / "log.jsonl").read_text()
    checkpoints = [each.name for each in (tmp_path / "run").glob("checkpoints/*")]
    assert checkpoints == ([] if clipping == "fused" else ["000001-step-2"])
    assert fit(run_dir=tmp_path / "run", resume=True).fingerprint() == fit().fingerprint()
