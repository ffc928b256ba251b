"""The trainer on a streamed model: the same phases, the same numbers, the same promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tests.memory.support import failing_block
from tests.support import CONTEXT, EAGER, gpt_setup, tiny_gpt
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import DivergenceError, GpuMemoryError, ModelError, TornStepError
from hybridtrainer.memory import engine
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.stream import stream
from hybridtrainer.memory.updates import Updates, apply_
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.streamed_step import where_weights_are
from hybridtrainer.trainer import HybridTrainer

SETUP = gpt_setup(dropout=0.0)
LR = 1e-3


def trainer_of(mode: Any, settings: dict[str, Any], clipping: Any = "fused", **options: Any) -> HybridTrainer:
    torch.manual_seed(0)
    model: nn.Module = tiny_gpt(0.1)
    optimizer: Any = None
    if mode is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)
    else:
        model = stream(model, MemoryConfig(mode=mode, clipping=clipping, max_gpu_blocks=1), "cpu", lr=LR)
    return HybridTrainer(
        model, optimizer, gpt_loss, HybridTrainerConfig(**settings), probe_batches=SETUP.probes, **options
    )


def run(trainer: HybridTrainer, first: int, last: int) -> list[tuple[Any, ...]]:
    torch.manual_seed(first)
    results = [trainer.step(batch) for batch in SETUP.batches[first:last]]
    return [(r.step, r.phase, r.loss, r.predicted, r.reason, r.grad_norm) for r in results]


def test_all_phases_are_those_of_the_model_that_fits_bit_for_bit():
    plain, streamed = trainer_of(None, EAGER), trainer_of("fp32", EAGER)
    expected = run(plain, 0, 80)
    assert run(streamed, 0, 80) == expected
    assert {phase.value for _, phase, *_ in expected} == {"warmup", "full", "predict", "correct"}
    streamed.state()  # brings everything home
    for one, other in zip(plain.model.parameters(), streamed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.3}, {"clip_norm": 0.3, "accumulate": 2}], ids=str)
def test_exact_clipping_and_accumulation_are_the_trainers_own(options):
    settings = {"predict": "off"}
    trainers = trainer_of(None, settings, **options), trainer_of("fp32", settings, "exact", **options)
    losses = []
    for trainer in trainers:
        torch.manual_seed(0)
        halves = options.get("accumulate", 1)
        batches = [list(batch.chunk(halves)) if halves > 1 else batch for batch in SETUP.batches[:20]]
        losses.append([(trainer.step(batch).loss, trainer.step_count) for batch in batches])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("mode", ["fp32", "split8", "sr8", "sr4", "factored"])
@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, mode, clipping):
    whole = trainer_of(mode, EAGER, clipping, clip_norm=0.5)
    run(whole, 0, 23)
    whole.save(tmp_path / "checkpoint")
    state = torch.get_rng_state()
    expected = [whole.step(batch).loss for batch in SETUP.batches[23:45]]
    again = trainer_of(mode, EAGER, clipping, clip_norm=0.5)
    run(again, 0, 3)  # whatever it has done before is forgotten
    again.load(tmp_path / "checkpoint")
    assert torch.equal(torch.get_rng_state(), state)
    assert [again.step(batch).loss for batch in SETUP.batches[23:45]] == expected
    assert again.fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("mode", ["split8", "sr4"])
def test_a_refused_jump_leaves_no_trace_not_even_in_the_lower_halves(mode):
    trainer = trainer_of(mode, EAGER | {"confidence_threshold": 0.0})
    run(trainer, 0, 40)
    before = trainer.fingerprint()
    forecast = next(f for horizon in range(1, 9) if not isinstance(f := trainer.jumps.forecast(horizon), str))
    from hybridtrainer.state import capture, restore_parameters

    kept = {key: value for key, value in capture(trainer._training).items() if key in ("parameters", "optimizer")}
    kept = _copied(kept)
    trainer.jumps.try_out(forecast, SETUP.probes, lambda: restore_parameters(trainer._training, kept))
    assert trainer.fingerprint() == before


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(item) for item in tree] if isinstance(tree, list) else tree


def test_a_jump_moves_split_weights_by_less_than_bf16_can_show():
    trainer = trainer_of("split8", {"predict": "off"})
    weights = trainer.jumps.history.weights
    before = [bucket.read() for bucket in weights.buckets]
    for bucket in weights.buckets:
        bucket.add_(torch.full((bucket.elements,), 1e-6))
    for bucket, values in zip(weights.buckets, before, strict=True):
        torch.testing.assert_close(bucket.read() - values, torch.full_like(values, 1e-6), rtol=0.1, atol=1e-8)


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_loss_that_is_not_finite_is_withheld_and_training_goes_on(clipping):
    trainer = trainer_of("split8", {"predict": "off"}, clipping)
    run(trainer, 0, 3)
    before = trainer.fingerprint()["parameters"], trainer.fingerprint()["optimizer"]
    original = trainer._loss._loss_fn
    trainer._loss._loss_fn = lambda model, batch: original(model, batch) * float("nan")
    result = trainer.step(SETUP.batches[3])
    assert result.skipped and "loss is nan" in result.reason
    assert (trainer.fingerprint()["parameters"], trainer.fingerprint()["optimizer"]) == before
    trainer._loss._loss_fn = original
    assert not trainer.step(SETUP.batches[4]).skipped


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_bad_gradient_says_how_much_of_the_model_was_updated_before_it_was_seen(clipping):
    trainer = trainer_of("split8", {"predict": "off"}, clipping)
    run(trainer, 0, 2)
    blocks: Any = trainer.model.blocks
    blocks[-2].register_full_backward_hook(lambda _, into, __: (into[0] * float("nan"), *into[1:]))
    counts = {name: int(state["step"]) for name, state in counted(trainer).items()}
    reason = trainer.step(SETUP.batches[2]).reason
    assert "gradient norm is nan" in reason
    later = {name for name, state in counted(trainer).items() if int(state["step"]) > counts[name]}
    assert bool(later) == (clipping == "fused") == ("had been updated with finite ones" in reason)
    trainer.step(SETUP.batches[3])
    with pytest.raises(DivergenceError, match="Nothing that is not finite was applied"):
        trainer.step(SETUP.batches[4])


def counted(trainer: HybridTrainer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return {names[id(parameter)]: state for parameter, state in trainer.optimizer.state.items()}


def fail_in_the_second_block(trainer: HybridTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_block(monkeypatch, 2), pytest.raises(RuntimeError, match="cosmic"):
        trainer.step(SETUP.batches[3])


def test_a_step_that_fails_half_way_cannot_be_saved_until_a_checkpoint_is_loaded(tmp_path, monkeypatch):
    trainer = trainer_of("split8", {"predict": "off"})
    run(trainer, 0, 3)
    trainer.save(tmp_path / "good")
    expected = trainer.fingerprint()
    fail_in_the_second_block(trainer, monkeypatch)
    with pytest.raises(TornStepError, match="Load the last checkpoint"):
        trainer.save(tmp_path / "bad")
    with pytest.raises(TornStepError, match="between two steps"):
        trainer.step(SETUP.batches[4])
    assert not (tmp_path / "bad").exists()
    trainer.load(tmp_path / "good")
    assert trainer.fingerprint() == expected
    assert not trainer.step(SETUP.batches[3]).skipped


@pytest.mark.parametrize("clipping", ["fused", "exact"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_memory_that_runs_out_inside_an_update_is_never_saved_or_trained_on(tmp_path, monkeypatch, clipping, call):
    trainer = trainer_of("split8", {"predict": "off"}, clipping)
    run(trainer, 0, 3)
    trainer.save(tmp_path / "good")
    expected = trainer.fingerprint()
    original, calls = apply_, 0

    def hungry(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise torch.OutOfMemoryError("injected")
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "apply_", hungry)
        with pytest.raises(GpuMemoryError, match=r"in an update .*: injected"):
            for batch in SETUP.batches[3:5]:  # deferred updates of the blocks are made in the step after
                trainer.step(batch)
    with pytest.raises(TornStepError):
        trainer.save(tmp_path / "bad")
    with pytest.raises(TornStepError):
        trainer.step(SETUP.batches[4])
    trainer.load(tmp_path / "good")
    assert trainer.fingerprint() == expected
    assert not trainer.step(SETUP.batches[3]).skipped


def test_with_exact_clipping_a_step_that_fails_leaves_no_trace(monkeypatch):
    trainer = trainer_of("split8", {"predict": "off"}, "exact")
    run(trainer, 0, 3)
    before = trainer.fingerprint()
    fail_in_the_second_block(trainer, monkeypatch)
    assert trainer.fingerprint() == before


def four_blocks(clipping: Any) -> HybridTrainer:
    torch.manual_seed(0)
    model = GPT(GPTConfig("gpt2", 4, 32, 2, vocabulary=256, context=CONTEXT, dropout=0.1))
    streamed = stream(model, MemoryConfig(mode="split8", clipping=clipping, max_gpu_blocks=2), "cpu", lr=LR)
    return HybridTrainer(streamed, None, gpt_loss, HybridTrainerConfig(predict="off"), clip_norm=0.5)


def counters(trainer: HybridTrainer) -> set[int]:
    optimizer = trainer.model.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    return {int(unit.steps) for unit in (*optimizer.engine.blocks, *optimizer.lone)}


@contextmanager
def cosmic_ray(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> Iterator[None]:
    """While open, this one of the calls fails."""
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("a cosmic ray")
        return original(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cosmic"):
        patch.setattr(owner, name, failing)
        yield


@pytest.fixture(scope="module", params=["fused", "exact"])
def saved_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The clipping, a checkpoint after three steps, its fingerprint, the next two losses, and the one after them."""
    trainer, checkpoint = four_blocks(request.param), tmp_path_factory.mktemp("saved") / "good"
    run(trainer, 0, 3)
    trainer.save(checkpoint)
    before = trainer.fingerprint()
    losses = [trainer.step(batch).loss for batch in SETUP.batches[3:5]]
    return request.param, checkpoint, before, losses, trainer.fingerprint()


@pytest.mark.parametrize("name", ["forward", "gradients"])
@pytest.mark.parametrize("block", [0, 1, 2, 3])
def test_a_failure_in_any_block_never_leaves_a_half_updated_model_in_a_checkpoint(
    tmp_path, saved_run, monkeypatch, name, block
):
    clipping, good, before, losses, after = saved_run
    trainer = four_blocks(clipping)
    trainer.load(good)
    with cosmic_ray(monkeypatch, Body, name, 1 + (block if name == "forward" else 3 - block)):
        trainer.step(SETUP.batches[3])
    if clipping == "exact" or name == "forward":
        assert trainer.fingerprint() == before  # nothing at all has changed
        trainer.save(tmp_path / "later")
        trainer = four_blocks(clipping)
        trainer.load(tmp_path / "later")
    else:
        assert counters(trainer) == {3, 4}
        with pytest.raises(TornStepError):
            trainer.save(tmp_path / "later")
        assert not (tmp_path / "later").exists()
        trainer.load(good)
    assert counters(trainer) == {3}
    assert trainer.fingerprint() == before
    assert [trainer.step(batch).loss for batch in SETUP.batches[3:5]] == losses
    assert trainer.fingerprint() == after
    assert counters(trainer) == {5}


@pytest.mark.parametrize("call", [1, 2, 3])
def test_with_exact_clipping_a_failure_between_two_updates_outside_the_blocks_is_never_saved(
    tmp_path, monkeypatch, call
):
    trainer = four_blocks("exact")
    run(trainer, 0, 2)
    trainer.save(tmp_path / "good")
    expected = trainer.fingerprint()
    with cosmic_ray(monkeypatch, Engine, "update_with", call):
        trainer.step(SETUP.batches[2])
    with pytest.raises(TornStepError):
        trainer.save(tmp_path / "later")
    trainer.load(tmp_path / "good")
    assert trainer.fingerprint() == expected


def test_a_step_that_failed_says_nothing_of_the_loss_of_the_next(monkeypatch):
    trainer, expected = four_blocks("fused"), four_blocks("fused")
    original = trainer._loss._loss_fn
    trainer._loss._loss_fn = lambda model, batch: original(model, batch) * float("inf")
    with cosmic_ray(monkeypatch, Updates, "measure", 1):  # after the loss was found not to be finite
        trainer.step(SETUP.batches[0])
    trainer._loss._loss_fn = original
    assert run(trainer, 0, 2) == run(expected, 0, 2)
    assert trainer.fingerprint() == expected.fingerprint()


def test_jumps_are_off_where_they_do_not_pay_or_do_not_fit(monkeypatch):
    assert "costs more than jumps save" in trainer_of("split8", {"predict": "auto"})._at.policy.off
    assert not trainer_of("split8", EAGER)._at.policy.off
    assert not trainer_of(None, {"predict": "auto"})._at.policy.off
    little = psutil.virtual_memory()._replace(available=(1 << 30) + 10_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    trainer = HybridTrainer(
        _already_streamed(monkeypatch), None, gpt_loss, HybridTrainerConfig(**EAGER), probe_batches=SETUP.probes
    )
    assert "of host memory for a snapshot" in trainer._at.policy.off


def _already_streamed(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    with monkeypatch.context() as patch:
        patch.setattr("hybridtrainer.memory.arena.require_room", lambda *_: None)
        return stream(tiny_gpt(), MemoryConfig(mode="split8"), "cpu", lr=LR)


def test_setups_that_cannot_work_are_refused():
    with pytest.raises(ModelError, match=r"memory.split instead"):
        trainer_of("split8", {}, accumulate=2)
    with pytest.raises(ModelError, match="loss scaler"):
        trainer_of("split8", {"memory": MemoryConfig(precision="fp16")})
    with pytest.raises(ModelError, match="is not streamed"):
        trainer_of(None, {"memory": MemoryConfig(mode="split8")})
    with pytest.raises(ModelError, match="None, not a torch optimizer"):
        HybridTrainer(tiny_gpt(), None, gpt_loss)
    model = stream(tiny_gpt(), MemoryConfig(mode="fp32"), "cpu")
    with pytest.raises(ModelError, match="not its own"):
        HybridTrainer(model, torch.optim.AdamW(model.parameters()), gpt_loss)


@pytest.mark.parametrize(
    ("on_gpu", "streamed", "where"), [(0, 0, "cpu"), (0, 1, "cpu"), (1, 0, "gpu"), (1, 1, "streamed")]
)
def test_where_the_weights_are_is_seen_from_any_of_them(on_gpu, streamed, where):
    here, there = SimpleNamespace(is_cuda=False), SimpleNamespace(is_cuda=bool(on_gpu))
    optimizer = StreamedOptimizer.__new__(StreamedOptimizer) if streamed else None
    training = SimpleNamespace(model=SimpleNamespace(parameters=lambda: iter([here, there])), optimizer=optimizer)
    assert where_weights_are(training) == where  # type: ignore[arg-type]
