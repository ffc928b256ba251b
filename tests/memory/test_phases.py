"""Every option of a resident model, alone and with the others: what it promises, in all phases of a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from tests.support import EAGER, text_splits
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.memory import offload, recompute
from hybridtrainer.memory import phases as phases_module
from hybridtrainer.memory.frozen import quantize_frozen
from hybridtrainer.memory.low_bit import LowBitAdamW
from hybridtrainer.memory.offload import HostTensors, offload_blocks
from hybridtrainer.memory.phases import TABLE, PredictMemory
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.phases import divergence, pace
from hybridtrainer.planning.rehearsal import Ledger
from hybridtrainer.records import Phase
from hybridtrainer.trainer import HybridTrainer

SHAPE = GPTConfig("gpt2", 2, 64, 2, vocabulary=256, context=32, dropout=0.1)
STEPS = 24
EARLY = {"warmup_steps": 8, "full_steps": 4, "recovery_steps": 1, "forecaster": "line_fit"}
# These change where numbers are kept, and not one of them.
WHERE: dict[str, Any] = {"checkpoint_every": 1, "offload_activations": True, "predict_states": "leave"}


PLACES = {*WHERE, "checkpoint_keep"}  # the same, and read with others only


def everything(tensor: Tensor) -> bool:
    return True


@pytest.fixture(autouse=True)
def all_memory_counts_as_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As there is no GPU here: all tensors leave that would leave one."""
    for module, least in ((divergence, 8), (pace, 4)):  # jumps come sooner, and tests end sooner
        monkeypatch.setattr(module, "MIN_LOSSES", least)
    monkeypatch.setattr(pace, "LEAST_BINS", 4)
    monkeypatch.setattr("hybridtrainer.trainer.PredictMemory", partial(PredictMemory, leaves=everything))
    monkeypatch.setattr(
        phases_module, "offload_blocks", lambda model, on=True: offload_blocks(model, on, leaves=everything)
    )


def make(**settings: Any) -> HybridTrainer:
    memory = settings.pop("memory", {})
    torch.manual_seed(0)
    model = GPT(SHAPE)
    bits = memory.get("optimizer_bits", 32)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=5e-4)
        if bits == 32
        else LowBitAdamW(model.parameters(), lr=5e-4, bits=bits)
    )
    config = HybridTrainerConfig(**{**EAGER, **EARLY, "memory": memory, **settings})
    probes = [batch for batch, _ in zip(PositionedLoader(text_splits().probe, 4, seed=0), range(2), strict=False)]
    return HybridTrainer(model, optimizer, gpt_loss, config, clip_norm=1.0, probe_batches=probes)


def data() -> list[Tensor]:
    return [batch for batch, _ in zip(PositionedLoader(text_splits().train, 4, seed=0), range(STEPS), strict=False)]


def run(trainer: HybridTrainer, batches: list[Tensor]) -> list[float]:
    return [trainer.step(batch).loss for batch in batches]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """Runs without the options that change nothing, to compare with."""
    return {}


def expected_run(known: dict[str, Any], memory: dict[str, Any]) -> tuple[list[float], dict[str, str]]:
    kept = {name: value for name, value in memory.items() if name not in PLACES}
    if str(kept) not in known:
        trainer = make(memory=kept)
        losses = run(trainer, data())
        assert trainer.statistics().jumps_accepted == 2
        known[str(kept)] = losses, trainer.fingerprint()
    found: tuple[list[float], dict[str, str]] = known[str(kept)]
    return found


@pytest.mark.parametrize(
    "memory",
    [
        *({name: value} for name, value in WHERE.items()),
        {"checkpoint_every": 2, "offload_activations": True},
        {"checkpoint_every": 1, "checkpoint_keep": "products", "offload_activations": True},
        {"checkpoint_every": 2, "checkpoint_keep": "by_phase"},
        {"precision": "bf16", "checkpoint_every": 1, "checkpoint_keep": "by_phase", "predict_int8": True},
        {"predict_int8": True, "predict_states": "leave"},
        {"predict_int8": True, "checkpoint_every": 1},
        {"optimizer_bits": 8, "predict_states": "leave"},
        {"optimizer_bits": 4, "predict_states": "leave", "offload_activations": True},
        {"precision": "bf16", "offload_activations": True},
        {"precision": "adaptive", "checkpoint_every": 1, "predict_int8": True},
        {"optimizer_bits": 8, "precision": "bf16", "predict_int8": True, **WHERE},
    ],
    ids=str,
)
def test_where_numbers_are_kept_changes_none_of_them(known, memory):
    losses, fingerprint = expected_run(known, memory)
    trainer = make(memory=memory)
    assert run(trainer, data()) == losses
    assert trainer.fingerprint() == fingerprint


@pytest.mark.parametrize(
    "memory",
    [
        {"optimizer_bits": 8},
        {"optimizer_bits": 4},
        {"precision": "bf16"},
        {"precision": "adaptive"},
        {"optimizer_bits": 8, "precision": "bf16", "predict_int8": True},
    ],
    ids=str,
)
def test_what_rounds_leaves_the_loss_within_three_percent(known, memory):
    losses, _ = expected_run(known, memory)
    plain, _ = expected_run(known, {})
    assert sum(losses[-5:]) == pytest.approx(sum(plain[-5:]), rel=0.03)


def test_while_a_jump_is_probed_nothing_holds_the_memory_of_what_has_left():
    trainer = make(memory={"predict_int8": True, "predict_states": "leave"})
    known: list[StorageWeakRef] = []
    probed: list[bool] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            probed.append(all(storage.expired() for storage in known))
        return gpt_loss(model, batch)

    trainer._loss._loss_fn = loss
    for batch in data():
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        matrices = [parameter for parameter in trainer.model.parameters() if parameter.numel() >= 4096]
        known[:] = [StorageWeakRef(tensor.untyped_storage()) for tensor in (*matrices, *states) if tensor.dim()]
        trainer.step(batch)
    assert len(probed) >= 4
    assert all(probed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_a_jump_is_tried_in_less_memory():
    shape = GPTConfig("gpt2", 2, 512, 4, vocabulary=256, context=32)

    def most(**memory: Any) -> int:
        gc.collect()  # of the run before this one
        torch.manual_seed(0)
        model = GPT(shape).cuda()
        batches = [batch.cuda() for batch in data()]
        config = HybridTrainerConfig(**{**EAGER, **EARLY, "memory": memory})
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        trainer = HybridTrainer(model, optimizer, gpt_loss, config, clip_norm=1.0, probe_batches=batches[:2])
        try_out, peaks = trainer.jumps.try_out, []

        def measured(*arguments: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            found = try_out(*arguments)
            peaks.append(torch.cuda.max_memory_allocated())
            return found

        trainer.jumps.try_out = measured  # type: ignore[assignment,method-assign]
        run(trainer, batches)
        assert peaks
        return max(peaks)

    weights = sum(parameter.nbytes for parameter in GPT(shape).parameters())
    kept, states_away, both = most(), most(predict_states="leave"), most(predict_int8=True, predict_states="leave")
    assert kept - states_away > 1.9 * weights
    assert both < states_away + weights // 10  # in so small a model what 8 bits save is scales and workspaces of cuBLAS


def test_probes_in_8_bits_round_no_weight():
    """Where every jump is refused, a run that probes in 8 bits is the plain run."""
    plain = make(predict="off")
    losses = run(plain, data())
    trainer = make(memory={"predict_int8": True, "predict_states": "leave"})
    own = trainer.jumps._baseline

    def much_too_far(*arguments: Any) -> Any:
        forecast = own(*arguments)
        object.__setattr__(forecast, "coefficients", forecast.coefficients * 1e6)
        return forecast

    trainer.jumps.forecaster = much_too_far
    assert run(trainer, data()) == losses
    assert trainer.statistics().jumps_refused
    ours, theirs = trainer.fingerprint(), plain.fingerprint()
    assert all(ours[part] == theirs[part] for part in ("parameters", "optimizer", "buffers", "random"))


def test_a_loss_that_reads_a_weight_beside_its_module_lets_no_jump_through():
    trainer = make(memory={"predict_int8": True})
    weight = trainer.model.get_parameter("head.weight")
    inner = trainer._loss._loss_fn
    trainer._loss._loss_fn = lambda model, batch: inner(model, batch) + 0.0 * weight.sum()
    run(trainer, data())
    told = trainer.statistics()
    assert told.jumps_refused and not told.jumps_accepted
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_a_frozen_base_of_8_bits_goes_through_all_phases_and_resumes(tmp_path):
    def tuned() -> HybridTrainer:
        torch.manual_seed(0)
        model = GPT(SHAPE)
        for layer in model.blocks.modules():
            if isinstance(layer, nn.Linear):
                layer.requires_grad_(False)
        assert quantize_frozen(model) > 0
        optimizer = LowBitAdamW([one for one in model.parameters() if one.requires_grad], lr=5e-4)
        memory = {"optimizer_bits": 8, "predict_int8": True, "checkpoint_every": 1, "offload_activations": True}
        config = HybridTrainerConfig(**{**EAGER, **EARLY, "memory": memory, "readout": "averaged"})
        return HybridTrainer(model, optimizer, gpt_loss, config, clip_norm=1.0, probe_batches=data()[:2])

    whole = tuned()
    frozen = [name for name, one in whole.model.named_parameters() if not one.is_floating_point()]
    before = {name: whole.model.get_parameter(name).clone() for name in frozen}
    run(whole, data()[:20])
    assert whole.statistics().jumps_accepted
    whole.save(tmp_path / "checkpoint")
    expected = run(whole, data()[20:])
    resumed = tuned()
    resumed.load(tmp_path / "checkpoint")
    assert run(resumed, data()[20:]) == expected
    assert resumed.fingerprint() == whole.fingerprint()
    assert frozen and all(torch.equal(whole.model.get_parameter(name), value) for name, value in before.items())


def kept_by_phase(keep: str) -> dict[Phase, set[int]]:
    """What the forward pass of each real step leaves for the backward pass, without dropout."""
    trainer = make(memory={"checkpoint_every": 1, "checkpoint_keep": keep})
    trainer.model.eval()
    kept: dict[Phase, set[int]] = {phase: set() for phase in Phase}

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with Ledger(model.parameters()) as ledger:
            loss = gpt_loss(model, batch)
        if torch.is_grad_enabled():
            kept[trainer.current_phase].add(ledger.spent().left_bytes)
        return loss

    trainer._loss._loss_fn = loss_fn
    run(trainer, data())
    return kept


def test_correct_steps_keep_products_and_full_steps_inputs_only_by_phase():
    inputs, products, by_phase = (kept_by_phase(keep) for keep in ("inputs", "products", "by_phase"))
    assert by_phase[Phase.WARMUP] == by_phase[Phase.FULL] == inputs[Phase.FULL] == inputs[Phase.CORRECT]
    assert by_phase[Phase.CORRECT] == products[Phase.FULL] == products[Phase.CORRECT]
    (few,), (many,) = by_phase[Phase.FULL], by_phase[Phase.CORRECT]
    assert many > 1.5 * few
    assert not by_phase[Phase.PREDICT]


def test_a_run_with_every_option_resumes_to_the_same_bits(tmp_path):
    memory = {
        "optimizer_bits": 8, "precision": "adaptive", "predict_int8": True, "checkpoint_keep": "by_phase", **WHERE,
    }  # fmt: skip
    whole = make(memory=memory)
    run(whole, data()[:19])
    whole.save(tmp_path / "checkpoint")
    expected = run(whole, data()[19:])
    resumed = make(memory=memory)
    resumed.load(tmp_path / "checkpoint")
    assert run(resumed, data()[19:]) == expected
    assert resumed.fingerprint() == whole.fingerprint()


def state_pointers(trainer: HybridTrainer) -> set[int]:
    states = trainer._training.optimizer.state.values()
    return {value.data_ptr() for state in states for value in state.values() if isinstance(value, Tensor)}


@pytest.mark.parametrize("forecaster", ["line_fit", "momentum"])
def test_while_a_jump_is_tried_the_states_are_in_host_memory_and_gradients_are_gone(forecaster):
    trainer = make(memory={"predict_states": "leave"}, forecaster=forecaster)
    seen: list[tuple[set[int], set[int], bool]] = []
    before: set[int] = set()

    @contextmanager
    def probing() -> Iterator[None]:
        grads = any(parameter.grad is not None for parameter in trainer.model.parameters())
        seen.append((before & state_pointers(trainer), _snapshot_pointers(trainer) & state_pointers(trainer), grads))
        yield

    trainer.jumps._probing = probing
    for batch in data():
        before = state_pointers(trainer)
        trainer.step(batch)
        assert not state_pointers(trainer) & _snapshot_pointers(trainer)
    assert seen
    for on_device, in_snapshot, has_gradients in seen:
        assert not on_device and in_snapshot and not has_gradients


@pytest.mark.parametrize(("step_seconds", "stays"), [(1e9, False), (0.0, True)])
def test_states_leave_where_fetching_them_is_short_beside_what_is_foreseen(step_seconds, stays):
    trainer = make()
    run(trainer, data()[:2])
    optimizer = trainer._training.optimizer
    saved = {"optimizer": deepcopy(optimizer.state_dict())}
    memory = PredictMemory(trainer._training, MemoryConfig(predict_states="auto"), lambda: step_seconds, everything)
    before = state_pointers(trainer)
    stayed = []
    for _ in range(3):
        with memory.trying(saved, 10):
            stayed.append(state_pointers(trainer) == before)
        before = state_pointers(trainer)
    assert stayed == [False, stays, stays]  # the first time they leave, to be timed
    values = {"stayed": optimizer.state_dict(), "saved": saved["optimizer"]}
    assert_close(values["stayed"]["state"], values["saved"]["state"], rtol=0, atol=0)


def test_momentum_is_read_from_wherever_the_states_are():
    ended = []
    for where in ("stay", "leave", "auto"):
        trainer = make(memory={"predict_states": where}, forecaster="momentum")
        losses = run(trainer, data())
        assert trainer.statistics().jumps_accepted + trainer.statistics().jumps_refused
        ended.append((losses, trainer.fingerprint()))
    assert ended[0] == ended[1] == ended[2]


def _snapshot_pointers(trainer: HybridTrainer) -> set[int]:
    if not trainer._undo.taken:
        return set()
    states = trainer._undo.tree()["optimizer"]["state"].values()
    return {value.data_ptr() for state in states for value in state.values() if isinstance(value, Tensor)}


def test_an_error_in_a_probe_brings_the_states_back():
    trainer = make(memory={"predict_states": "leave", "predict_int8": True})
    batches = data()
    while trainer.current_phase is not Phase.PREDICT:
        trainer.step(batches.pop(0))
    before = trainer.fingerprint()
    loss_fn, trainer._loss._loss_fn = trainer._loss._loss_fn, lambda model, batch: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        trainer.step(batches[0])
    assert trainer.fingerprint() == before
    trainer._loss._loss_fn = loss_fn
    trainer.step(batches[0])


def test_a_probe_computes_nothing_again_and_sends_nothing(monkeypatch):
    trainer = make(memory={"checkpoint_every": 1, "offload_activations": True, "predict_int8": True})
    calls: list[str] = []
    monkeypatch.setattr(recompute, "checkpointed", _noted(recompute.checkpointed, "recompute", calls))
    monkeypatch.setattr(HostTensors, "send", _noted(HostTensors.send, "send", calls))
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 512)
    batches = data()
    trainer.step(batches[0])
    assert {"recompute", "send"} == set(calls)
    calls.clear()
    trainer.jumps._probe(batches[:2])
    assert calls == []


def _noted(function: Any, name: str, calls: list[str]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return noted


def test_the_table_is_what_is_followed(monkeypatch):
    assert {phase: means.recompute for phase, means in TABLE.items()} == {
        Phase.WARMUP: "inputs", Phase.FULL: "inputs", Phase.PREDICT: None, Phase.CORRECT: "products",
    }  # fmt: skip
    monkeypatch.setitem(TABLE, Phase.PREDICT, phases_module.Means())
    memory = MemoryConfig(predict_int8=True, predict_states="leave")
    trainer = make()
    closed = PredictMemory(trainer._training, memory, leaves=everything)
    run(trainer, data()[:1])
    kind = type(trainer.model.get_submodule("head"))
    pointers = state_pointers(trainer)
    with closed.trying({"optimizer": trainer._training.optimizer.state_dict()}, 1), closed.probing():
        assert type(trainer.model.get_submodule("head")) is kind and state_pointers(trainer) == pointers
    monkeypatch.setitem(TABLE, Phase.FULL, phases_module.Means())
    phases_module.arrange_blocks(trainer.model, MemoryConfig(checkpoint_every=1, offload_activations=True))
    assert all("forward" not in block.__dict__ for block in trainer.model.get_submodule("blocks").children())
