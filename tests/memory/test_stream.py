"""A streamed model is the model: the same numbers as on a device that holds it whole."""

from __future__ import annotations

import mmap
import random
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.memory.support import (
    DEVICES,
    LLAMA,
    SMALL,
    Run,
    batches,
    build,
    deterministic,
    failing_block,
    plain,
    same,
    streamed,
    train,
    weights_of,
)
from torch import nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import MemoryBudgetError, ModelError, TornStepError
from hybridtrainer.memory import stream as module
from hybridtrainer.memory.arena import RESERVE_BYTES
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.lanes import LANES, Lane, make_lanes
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.slots import Ring
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, GPTConfig, build_gpt, gpt_loss

STEPS = 20


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2, tied, dropout", "llama"])
@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"max_gpu_blocks": 1},
        {"max_gpu_blocks": 2},
        {"max_gpu_blocks": 99},
        {"offload_activations": True},
        {"clipping": "exact"},
        {"clipping": "exact", "max_gpu_blocks": 1, "offload_activations": True},
    ],
    ids=str,
)
def test_fp32_equals_adamw_bit_for_bit(device, config, memory):
    data = batches(STEPS, device)
    expected = train(*plain(build(config), device), data)
    assert same(train(*streamed(MemoryConfig(mode="fp32", **memory), device, build(config)), data), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_exact_clipping_and_accumulation_equal_adamw_bit_for_bit(device):
    data = batches(STEPS, device)
    expected = train(*plain(build(), device), data, accumulate=2, clip=0.5)
    memory = MemoryConfig(mode="fp32", clipping="exact")
    found = train(*streamed(memory, device, clip_norm=0.5), data, accumulate=2)
    assert same(found, expected)
    assert not same(train(*streamed(memory, device), data, accumulate=2), expected)  # the clipping matters


def test_groups_and_schedulers_work_as_with_any_optimizer():
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        return [{"params": matrices, "lr": 1e-3}, {"params": vectors, "weight_decay": 0.0}]

    def run(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return train(model, optimizer, batches(STEPS), scheduler=scheduler)

    model, other = build(), build()
    _, adamw = plain(model, groups=groups(model))
    expected = run(adamw, model)
    _, optimizer = streamed(MemoryConfig(mode="fp32"), model=other, param_groups=groups(other))
    assert same(run(optimizer, other), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_how_vectors_are_grouped_changes_no_bit_while_their_settings_are_the_same(device):
    def run(model: GPT, groups: Any) -> Any:
        return train(*streamed(MemoryConfig(mode="split8"), device, model, param_groups=groups), batches(5, device))

    def groups(model: GPT, **settings: float) -> list[dict[str, Any]]:
        """Some vectors of one block apart from all the rest."""
        names = [name for name, each in model.named_parameters() if each.dim() < 2 and name.startswith("blocks.1")]
        rest = [each for name, each in model.named_parameters() if name not in names[::2]]
        return [{"params": rest}, {"params": [model.get_parameter(name) for name in names[::2]], **settings}]

    model, other, third = build(), build(), build()
    expected = run(model, None)
    assert same(expected, run(other, groups(other)))
    assert not same(expected, run(third, groups(third, lr=1e-2)))


def test_frozen_parameters_stay_and_the_rest_equals_adamw():
    def frozen(model: GPT) -> GPT:
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        model.embedding.requires_grad_(False)
        model.get_parameter("blocks.3.mlp.up.weight").requires_grad_(False)
        return model

    model = frozen(build(LLAMA))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = train(*plain(model, groups=[{"params": trainable}]), batches(STEPS))
    assert same(train(*streamed(MemoryConfig(mode="fp32"), model=frozen(build(LLAMA))), batches(STEPS)), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clipping", ["fused", "exact"])
@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_slow_copies_poisoned_slots_and_packed_weights_change_no_bit(monkeypatch, device, clipping, steps):
    memory = MemoryConfig(mode="split8", clipping=clipping, max_gpu_blocks=2, offload_activations=True)
    data = batches(steps, device, samples=2)

    def run(pack: bool) -> Run:
        model, optimizer = streamed(memory, device, build(LLAMA))
        return train(model, optimizer, data, scheduler=_KeepHalfWay(optimizer.engine, steps, pack))

    expected = run(pack=False)
    draw, delayed = random.Random(3), set()

    def dawdle(lane: Lane) -> None:
        delayed.add(lane)
        if device == "cuda":
            torch.cuda._sleep(int(draw.random() * 200_000))
        elif draw.random() < 0.2:
            time.sleep(draw.random() / 1000)

    monkeypatch.setattr(module, "make_lanes", partial(make_lanes, delay=dawdle))
    monkeypatch.setattr(module, "Ring", partial(Ring, poison=True))
    assert same(run(pack=True), expected)
    assert delayed == set(LANES)


class _KeepHalfWay:
    """First all blocks pass; half-way, while copies are on their way, some begin to stay and others to be packed."""

    def __init__(self, engine: Engine, steps: int, pack: bool) -> None:
        self._engine, self._half, self._pack = engine, steps // 2, pack

    def step(self) -> None:
        self._half -= 1
        if self._half == 0:
            rings = self._engine.rings
            small = len(rings.states.pinned)
            wanted = 2 * rings.weights.slot_bytes + 2 * rings.states.slot_bytes
            self._engine.keep_on_device(wanted)
            if self._pack:
                rings.weights.pack()
            assert rings.weights.pinned and len(rings.states.pinned) > small


@pytest.mark.parametrize(
    "mode", ["factored", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("split8", "sr8", "sr4"))]
)
def test_every_mode_learns(mode):
    data = batches(1) * 40
    found = train(*streamed(MemoryConfig(mode=mode), model=build(LLAMA)), data)
    assert found.losses[-1] < 0.6 * found.losses[0]


def test_the_model_is_unchanged_by_streaming_it():
    model, data = build(LLAMA), batches(1)[0]
    expected, names = gpt_loss(model, data), list(model.state_dict())
    _, optimizer = streamed(MemoryConfig(mode="fp32"), model=model)
    assert torch.equal(gpt_loss(model, data), expected)
    assert list(model.state_dict()) == names
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        assert torch.equal(gpt_loss(model, data), expected)
        assert torch.equal(gpt_loss(model, data), expected)


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_gradient_that_is_not_finite_changes_nothing_from_its_block_on(clipping):
    model = build(LLAMA)
    _, optimizer = streamed(MemoryConfig(mode="split8", clipping=clipping), model=model)
    before = weights_of(model, optimizer)
    states = [state["v"].clone() for state in optimizer.state.values()]
    hidden = model.blocks[2].register_forward_hook(lambda *args: _Poison.apply(args[2]))
    gpt_loss(model, batches(1)[0]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    hidden.remove()
    after = weights_of(model, optimizer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    later = ("blocks.3", "blocks.4", "norm", "head")
    assert all(name.startswith(later) for name in changed)
    assert bool(changed) == (clipping == "fused")
    assert {int(unit.steps) for unit in optimizer.engine.blocks[:3]} == {0}
    unchanged = [torch.equal(one, state["v"]) for one, state in zip(states, optimizer.state.values(), strict=True)]
    assert all(unchanged) == (clipping == "exact")
    found = train(model, optimizer, batches(1) * 10)
    assert found.losses[-1] < found.losses[0]


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


def test_a_loss_that_is_not_finite_changes_nothing():
    model, optimizer = streamed(MemoryConfig(mode="split8"))
    before = weights_of(model, optimizer)
    loss = gpt_loss(model, batches(1)[0]).mean() * float("inf")
    optimizer.updates.watch_loss(loss)
    loss.backward()
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model, optimizer).items())


@pytest.mark.parametrize("where", ["forward", "gradients"])
def test_a_block_without_memory_is_tried_again_in_smaller_parts(monkeypatch, where):
    data = batches(3)
    expected = train(*streamed(MemoryConfig(mode="fp32", split=4), model=build(LLAMA)), data)
    original = getattr(Body, where)

    def hungry(self: Body, *args: Any) -> Any:
        if args[-1] > 2:
            raise torch.OutOfMemoryError("injected")
        return original(self, *args)

    monkeypatch.setattr(Body, where, hungry)
    model, optimizer = streamed(MemoryConfig(mode="fp32"), model=build(LLAMA))
    with pytest.warns(UserWarning, match="2 samples are computed at a time"):
        found = train(model, optimizer, data)
    assert optimizer.engine.chunks.split == 4
    if where == "forward":
        assert same(found, expected)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


def test_memory_that_does_not_suffice_for_one_sample_says_what_to_do(monkeypatch):
    def hungry(*_: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(Body, "gradients", hungry)
    model, _ = streamed(MemoryConfig(mode="fp32"), model=build(LLAMA))
    with pytest.warns(UserWarning, match="at a time"), pytest.raises(torch.OutOfMemoryError) as raised:
        gpt_loss(model, batches(1)[0]).mean().backward()
    assert "memory.max_gpu_blocks" in "".join(raised.value.__notes__)


def test_a_step_that_fails_half_way_is_not_saved(monkeypatch):
    model, optimizer = streamed(MemoryConfig(mode="fp32"), model=build(LLAMA))
    with failing_block(monkeypatch, 3), pytest.raises(RuntimeError, match="cosmic"):
        gpt_loss(model, batches(1)[0]).mean().backward()
    with pytest.raises(TornStepError, match="between two steps"):
        optimizer.state_dict()
    optimizer.forget()
    assert optimizer.state_dict()["state"]


def test_two_backward_passes_in_a_fused_step_are_refused():
    model, _ = streamed(MemoryConfig(mode="fp32"), model=build(LLAMA))
    gpt_loss(model, batches(1)[0]).mean().backward()
    with pytest.raises(ModelError, match='clipping="exact"'):
        gpt_loss(model, batches(1)[0]).mean().backward()


def test_weights_that_somebody_writes_are_fetched_anew():
    model, optimizer = streamed(MemoryConfig(mode="fp32", max_gpu_blocks=99), model=build(LLAMA))
    data = batches(1)[0]
    gpt_loss(model, data)
    other = build(LLAMA, seed=5)
    expected = gpt_loss(other, data)
    optimizer.settle()
    model.load_state_dict(other.state_dict())
    assert torch.equal(gpt_loss(model, data), expected)


def test_a_model_on_the_meta_device_is_filled_where_it_lives():
    model, _ = streamed(MemoryConfig(mode="fp32"), model=build_gpt("nano", device="meta"))
    assert isinstance(model, GPT)
    torch.manual_seed(0)
    model.initialize_()
    torch.manual_seed(0)
    expected = build_gpt("nano")
    torch.manual_seed(0)
    expected.initialize_()
    data = batches(1)[0]
    assert torch.equal(gpt_loss(model, data), gpt_loss(expected, data))


def test_host_memory_that_is_too_small_is_said_before_any_is_taken():
    with pytest.raises(MemoryBudgetError, match=r"need \d+\.\d+ MiB .* 1\.0 MiB are allowed by `memory.ram`"):
        streamed(MemoryConfig(mode="split8", ram="1MB"))
    with pytest.raises(MemoryBudgetError, match="are available"):
        streamed(MemoryConfig(mode="split8"), model=build_gpt("llama-50b", device="meta"))


@pytest.mark.parametrize(("ram", "there"), [("37GB", 99), (None, 37)], ids=["little allowed", "little there"])
def test_host_memory_that_is_too_small_leaves_the_model_as_it_was(monkeypatch, ram, there):
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("memory was taken"))
    memory = psutil.virtual_memory()._replace(available=RESERVE_BYTES + there * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    model = build_gpt("llama-7b", device="meta")
    before, attributes = dict(model.named_parameters()), [set(vars(module)) for module in model.modules()]
    with pytest.raises(MemoryBudgetError, match=r"need 37\.36 GiB of host memory and 37\.00 GiB"):
        stream(model, MemoryConfig(mode="split8", ram=ram), "cpu")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter and parameter.is_meta for name, parameter in before.items())
    assert [set(vars(module)) for module in model.modules()] == attributes  # no optimizer, no forward of ours


@pytest.mark.parametrize(("mode", "clipping"), [("fp32", "fused"), ("split8", "exact")])
def test_the_host_memory_that_is_said_to_be_needed_is_what_weights_and_states_take(monkeypatch, mode, clipping):
    def start(ram: str | None) -> tuple[GPT, StreamedOptimizer]:
        with torch.device("meta"):
            model = GPT(GPTConfig("llama", 6, 384, 6, vocabulary=256, context=16, tied=False))
        _, optimizer = streamed(MemoryConfig(mode=mode, clipping=clipping, ram=ram), model=model)
        return model, optimizer

    original, mapped = mmap.mmap, []

    def watched(number: int, nbytes: int, **kinds: int) -> mmap.mmap:
        mapped.append(nbytes)
        return original(number, nbytes, **kinds)

    monkeypatch.setattr(mmap, "mmap", watched)
    with pytest.raises(MemoryBudgetError) as raised:
        start("1MB")
    assert mapped == []
    ((said, unit),) = re.findall(r"need (\d+\.\d+) ([MG]iB)", str(raised.value))
    model, optimizer = start(None)
    (taken,) = mapped
    assert float(said) * {"MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(taken, rel=0.1)
    model.initialize_()
    train(model, optimizer, batches(1, samples=2))
    assert resident_bytes(optimizer.engine.blocks[0].weights.shown.data_ptr()) >= 0.9 * taken  # none of it in vain
    with pytest.raises(MemoryBudgetError):
        start(f"{0.99 * taken / 2**20:.3f}MB")
    start(f"{1.01 * taken / 2**20:.3f}MB")


def resident_bytes(pointer: int) -> int:
    """What the system has really given to the mapping in which the pointer is; mappings side by side are one."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, _, stop = name.partition("-")
            inside = int(start, 16) <= pointer < int(stop, 16)
        elif inside and name == "Rss:":
            return int(values[0]) * 1024
    raise AssertionError("no such mapping")


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ModelError, match=r"nothing was planned yet.*plan\(model"):
        streamed(MemoryConfig(vram="8GB"))
    with pytest.raises(ModelError, match="resident"):
        streamed(MemoryConfig())
    with pytest.raises(ModelError, match="repeat"):
        streamed(MemoryConfig(mode="fp32"), model=nn.Linear(3, 3))
    model, _ = streamed(MemoryConfig(mode="fp32"))
    with pytest.raises(ModelError, match="already"):
        streamed(MemoryConfig(mode="fp32"), model=model)
    with pytest.raises(ModelError, match="in no group"):
        other = build()
        streamed(MemoryConfig(mode="fp32"), model=other, param_groups=[{"params": [other.embedding.weight]}])
    with pytest.raises(ModelError, match="not the model's"):
        streamed(MemoryConfig(mode="fp32"), param_groups=[{"params": [nn.Parameter(torch.zeros(2))]}])


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen2"])
@pytest.mark.parametrize("device", DEVICES)
def test_hugging_face_decoders_equal_themselves(name, device):
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    if name == "GPT2":
        sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32}
    else:
        sizes |= {"intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": name == "Qwen2"}
    config = getattr(transformers, f"{name}Config")(**sizes)

    def build_one() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(
            transformers, f"{name}{'LMHead' if name == 'GPT2' else 'ForCausalLM'}{'Model' if name == 'GPT2' else ''}"
        )(config)
        return model.train()

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    data = batches(STEPS, device)
    expected = train(*plain(build_one(), device), data, loss_of=loss_of)
    found = train(*streamed(MemoryConfig(mode="fp32"), device, build_one()), data, loss_of=loss_of)
    assert same(found, expected)


def test_a_split_batch_gives_the_same_gradients_up_to_rounding():
    data = batches(3)
    with deterministic():
        expected = train(*streamed(MemoryConfig(mode="fp32"), model=build(LLAMA)), data)
        found = train(*streamed(MemoryConfig(mode="fp32", split=3), model=build(LLAMA)), data)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


class _WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x.square().mean()


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_WithAuxiliary() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            x, auxiliary = layer(x)
            total = total + auxiliary
        return x.square().mean() + total


def test_results_that_are_not_of_single_samples_forbid_a_split_and_nothing_else():
    x = torch.randn(4, 3, 8)
    expected = build_stack()(x)
    model, _ = streamed(MemoryConfig(mode="fp32"), model=build_stack())
    assert torch.equal(model(x), expected)
    model, _ = streamed(MemoryConfig(mode="fp32", split=2), model=build_stack())
    with pytest.raises(ModelError, match=r"memory.split = 1"):
        model(x)


def build_stack() -> nn.Module:
    torch.manual_seed(0)
    return _Stack()


def test_a_buffer_without_values_is_refused():
    with torch.device("meta"):
        model = build_stack()
        model.register_buffer("table", torch.zeros(3))
    with pytest.raises(ModelError, match="what it held is lost"):
        streamed(MemoryConfig(mode="fp32"), model=model)
    assert all(parameter.is_meta for parameter in model.parameters())  # nothing was moved
