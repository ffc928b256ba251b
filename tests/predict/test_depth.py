"""Models that begin short: what is computed, what they become, and that a run with them resumes exactly."""

from __future__ import annotations

import math
import pickle
from copy import deepcopy
from itertools import islice
from typing import Any

import pytest
import torch
from tests.support import CONTEXT, EAGER, text_splits
from torch import Tensor, nn

from hybridtrainer import HybridTrainer, HybridTrainerConfig, MemoryConfig, ranks, stream
from hybridtrainer.blocks import find_blocks
from hybridtrainer.config import DepthConfig
from hybridtrainer.errors import ConfigError, GpuMemoryError, ModelError
from hybridtrainer.memory.low_bit import LowBitAdamW
from hybridtrainer.models.cnn import build_cnn
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.predict import depth as depth_module
from hybridtrainer.predict.depth import Depth, make_depth
from hybridtrainer.records import Notice, Phase, PhaseChange

BLOCKS, STEPS = 6, 20
SHAPE = GPTConfig("gpt2", BLOCKS, 32, 2, vocabulary=256, context=CONTEXT)


def build(blocks: int = BLOCKS) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig("gpt2", blocks, 32, 2, vocabulary=256, context=CONTEXT))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


def make(model: nn.Module | None = None, optimizer: Any = None, **settings: Any) -> HybridTrainer:
    model = model or build()
    options: dict[str, Any] = {"predict": ["depth"], "depth": {"share": 0.34, "until": 0.4}, **settings}
    optimizer = optimizer or optimizer_of(model)
    return HybridTrainer(model, optimizer, gpt_loss, HybridTrainerConfig(**options), clip_norm=1.0)


def batches(count: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    text = text_splits().train
    return [torch.stack([text[int(i)] for i in torch.randint(0, len(text), (4,), generator=generator)])
            for _ in range(count)]  # fmt: skip


DATA = batches()


@pytest.fixture(autouse=True)
def _short_runs_may_grow(monkeypatch):
    monkeypatch.setattr(depth_module, "LEAST_STEPS", 10)


def run(trainer: HybridTrainer, data: list[Tensor] = DATA, end: int | None = STEPS) -> list[float]:
    trainer.expect_end(end)
    return [trainer.step(batch).loss for batch in data]


def copy_in(shallow: GPT, deep: GPT, order: str) -> None:
    """What growth should make of a deep model, written out."""
    source = {"stack": [0, 1, 0, 1, 0, 1], "repeat": [0, 0, 0, 1, 1, 1]}[order]
    for block, number in zip(deep.blocks, source, strict=True):
        block.load_state_dict(shallow.blocks[number].state_dict())
    for name in ("embedding", "positions", "norm"):
        getattr(deep, name).load_state_dict(getattr(shallow, name).state_dict())


@pytest.mark.parametrize("order", ["stack", "repeat"])
def test_a_short_model_trains_like_one_of_so_many_blocks_and_goes_on_as_its_copies(order):
    shallow, deep = build(), build()
    shallow.blocks = nn.ModuleList(shallow.blocks[:2])
    first = optimizer_of(shallow)
    plain = HybridTrainer(shallow, first, gpt_loss, HybridTrainerConfig(predict="off"), clip_norm=1.0)
    expected = run(plain, DATA[:8])
    copy_in(shallow, deep, order)
    second = optimizer_of(deep)
    numbers = {"stack": [0, 1, 0, 1, 0, 1], "repeat": [0, 0, 0, 1, 1, 1]}[order]
    assert deep.positions is not None
    assert shallow.positions is not None
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (deep.embedding, shallow.embedding),
        (deep.positions, shallow.positions),
        (deep.norm, shallow.norm),
    ]
    pairs += [(block, shallow.blocks[number]) for block, number in zip(deep.blocks, numbers, strict=True)]
    for own, trained in pairs:
        for mine, theirs in zip(own.parameters(), trained.parameters(), strict=True):
            second.state[mine] = deepcopy(first.state[theirs])
    expected += run(HybridTrainer(deep, second, gpt_loss, HybridTrainerConfig(predict="off"), clip_norm=1.0), DATA[8:])

    trainer = make(depth={"share": 0.34, "until": 0.4, "order": order})
    assert run(trainer) == expected
    for name, value in deep.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


def test_it_grows_once_and_the_log_says_when():
    trainer, told = make(), []
    trainer.listeners.append(
        lambda record: told.append((record.step, record.text)) if isinstance(record, Notice) else None
    )
    run(trainer)
    assert told == [(8, "grown from 2 to 6 blocks, by stack")]
    assert set(trainer.statistics().worth_seconds) == {"depth"}


def test_where_nobody_has_said_it_grows_by_the_rules_for_the_tokens_of_its_steps(monkeypatch):
    asked: list[tuple[int, int, int]] = []

    def rule(end: int, parameters: int, tokens: int) -> int:
        asked.append((end, parameters, tokens))
        return 7

    monkeypatch.setattr(depth_module, "growth_step", rule)
    trainer = make(predict=["depth"], depth={})
    trainer.expect_end(STEPS)
    short = []
    for batch in DATA[:10]:
        trainer.step(batch)
        short.append(trainer.depth.is_short)
    assert short == [True] * 6 + [False] * 4
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert set(asked) == {(STEPS, count, DATA[0].numel())}


def test_one_long_batch_does_not_make_a_model_grow(monkeypatch):
    asked: list[float] = []

    def rule(end: int, _: int, tokens: float) -> int:
        asked.append(tokens)
        return end

    monkeypatch.setattr(depth_module, "growth_step", rule)
    trainer = make(predict=["depth"], depth={})
    trainer.expect_end(STEPS)
    for batch in (DATA[0][:, :5], DATA[1], DATA[2][:, :5]):
        trainer.step(batch)
    short, long = DATA[0][:, :5].numel(), DATA[1].numel()
    assert asked == [short, (short + long) / 2, (2 * short + long) / 3]


def test_without_a_known_end_it_grows_after_warmup():
    trainer, told = make(warmup_steps=5), []
    trainer.listeners.append(lambda record: told.append(record.step) if isinstance(record, Notice) else None)
    run(trainer, end=None)
    assert told == [5]


def test_while_short_the_other_blocks_are_not_computed_and_keep_their_weights():
    model = build()
    before = deepcopy(model.blocks[3].state_dict())
    trainer = make(model)
    calls: list[int] = []
    for number, block in enumerate(model.blocks):
        next(block.children()).register_forward_hook(lambda *_, number=number: calls.append(number))
    trainer.expect_end(STEPS)
    result = trainer.step(DATA[0])
    assert calls == [0, 1]
    assert all(torch.equal(value, before[name]) for name, value in model.blocks[3].state_dict().items())
    assert not any(parameter in trainer.optimizer.state for parameter in model.blocks[3].parameters())
    assert result.backward_samples == result.forward_samples == 1  # 4 samples in a third of the blocks


@pytest.mark.parametrize("every", [1, 2])
def test_with_blocks_that_are_computed_again_it_is_the_same(every):
    assert run(make(memory=MemoryConfig(checkpoint_every=every))) == run(make())


def test_low_bit_moments_are_copied_too():
    model = build()
    trainer = make(model, LowBitAdamW(model.parameters(), lr=2e-3, bits=8), memory={"optimizer_bits": 8})
    run(trainer)
    states = trainer.optimizer.state
    assert all(parameter in states for parameter in model.parameters())


def test_averages_and_alarms_begin_anew():
    trainer = make(readout="averaged", readout_decay=0.9)
    run(trainer, DATA[:8])
    first = trainer.evaluate(DATA[:2])
    deep = deepcopy(trainer.model.state_dict())
    with trainer.read_out():
        assert all(torch.equal(value, deep[name]) for name, value in trainer.model.state_dict().items())
    run(trainer, DATA[8:])
    assert trainer.evaluate(DATA[:2]) != first
    assert trainer._at.watch.losses
    assert len(trainer._at.watch.losses) <= STEPS - 8


@pytest.mark.parametrize("at", [3, 7, 8, 9, 15])
def test_a_run_resumes_exactly(at, tmp_path):
    whole = make(readout="averaged")
    expected = run(whole)
    half = make(readout="averaged")
    run(half, DATA[:at])
    half.save(tmp_path / "half")
    other = make(readout="averaged")
    other.load(tmp_path / "half")
    assert run(other, DATA[at:]) == expected[at:]
    assert other.fingerprint() == whole.fingerprint()


def test_a_checkpoint_of_another_growth_is_refused(tmp_path):
    trainer = make()
    run(trainer, DATA[:3])
    trainer.save(tmp_path / "own")
    with pytest.raises(Exception, match=r"depth\.until|another setup"):
        make(depth={"share": 0.34, "until": 0.5}).load(tmp_path / "own")


def test_blocks_that_return_more_than_a_hidden_state_pass_on_what_they_would():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden: Tensor, *, scale: float = 1.0) -> tuple[Tensor, float]:
            return hidden + self.linear(hidden), scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(4))

        def forward(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden, scale = block(hidden, scale=2.0)
                assert scale == 2.0
            return hidden

    model = Model()
    linears = [next(block.children()) for block in model.blocks]
    depth = Depth(list(model.blocks), 1, DepthConfig())
    x = torch.randn(2, 4)
    short = model(x)
    assert torch.equal(short, x + linears[0](x))
    optimizer = optimizer_of(model)
    depth.grow(optimizer, depth.new_states(optimizer))
    assert torch.equal(next(linears[3].parameters()), next(linears[0].parameters()))
    assert not torch.equal(model(x), short)


def test_what_cannot_grow_is_refused():
    with pytest.raises(ModelError, match="blocks"):
        make_depth(build_cnn("cnn-small"), HybridTrainerConfig(predict=["depth"]))
    with pytest.raises(ModelError, match="are all"):
        make(build(2), depth={"share": 0.9})
    with pytest.raises((ModelError, ConfigError), match="not read without"):
        make(predict="off")


def test_a_short_model_has_two_blocks_where_it_has_more_than_two():
    assert make(build(4), depth={}).depth.share == 0.5
    assert make(build(2), depth={}).depth.share == 0.5
    assert make(build(6), depth={"share": 0.5}).depth.share == 0.5


def streamed(mode: Any, clipping: Any, slots: int = 2, **settings: Any) -> HybridTrainer:
    memory = MemoryConfig(mode=mode, clipping=clipping, max_gpu_blocks=slots)
    model = stream(build(), memory, "cpu", lr=2e-3, weight_decay=0.1, betas=(0.9, 0.999))
    options: dict[str, Any] = {"predict": ["depth"], "depth": {"share": 0.34, "until": 0.4}, **settings}
    return HybridTrainer(model, None, gpt_loss, HybridTrainerConfig(**options), clip_norm=1.0)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_streamed_model_grows_like_one_that_fits_bit_for_bit(slots):
    model = build()
    resident = make(model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, foreach=False))
    trainer = streamed("fp32", "exact", slots)
    assert run(trainer) == run(resident)
    trainer.state()  # brings everything home
    for (name, one), other in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_blocks_that_a_short_streamed_model_does_not_compute_are_not_fetched():
    trainer = streamed("split8", "fused", 3)
    trainer.expect_end(STEPS)
    fetched: set[int] = set()
    ring: Any = trainer.optimizer.engine.rings.weights  # type: ignore[attr-defined]
    own = ring._fetch
    ring._fetch = lambda key, keep: (fetched.add(key), own(key, keep))[1]  # type: ignore[func-returns-value]
    trainer.step(DATA[0])
    trainer.step(DATA[1])
    assert fetched == {0, 1}
    for batch in DATA[2:9]:
        trainer.step(batch)
    assert fetched == set(range(BLOCKS))


@pytest.mark.parametrize(("mode", "clipping", "moments"), [("split8", "fused", (5, 12)), ("sr4", "exact", (8,))])
def test_a_streamed_run_that_grows_resumes_exactly(mode, clipping, moments, tmp_path):
    whole = streamed(mode, clipping)
    expected = run(whole)
    for at in moments:
        half = streamed(mode, clipping)
        run(half, DATA[:at])
        half.save(tmp_path / f"half{at}")
        other = streamed(mode, clipping)
        other.load(tmp_path / f"half{at}")
        assert run(other, DATA[at:]) == expected[at:], at
        assert other.fingerprint() == whole.fingerprint(), at


def test_jumps_begin_when_the_model_has_grown(tmp_path):
    settings: dict[str, Any] = {**EAGER, "predict": ["depth", "jumps"], "depth": {"until": 0.2}}
    data = batches(120)
    whole, changes = make(**settings), []
    whole.listeners.append(lambda record: changes.append(record) if isinstance(record, PhaseChange) else None)
    expected = [whole.step(batch).loss for batch in data] if whole.expect_end(120) is not None else []
    jumps = [result for result in changes if result.after is Phase.PREDICT]
    assert jumps
    assert (changes[0].step, changes[0].after) == (24 + 12, Phase.FULL)  # a warmup of its own
    assert min(change.step for change in jumps) > 36
    short = make(**settings)
    short.expect_end(120)
    short.step(data[0])
    assert not short.jumps.history.is_open
    half = make(**settings)
    half.expect_end(120)
    for batch in data[:80]:
        half.step(batch)
    half.save(tmp_path / "half")
    other = make(**settings)
    other.load(tmp_path / "half")
    other.expect_end(120)
    assert [other.step(batch).loss for batch in data[80:]] == expected[80:]


def test_with_auto_a_model_from_scratch_begins_short_and_one_that_has_learned_does_not():
    told: list[str] = []

    def auto(model: GPT, end: int | None = STEPS) -> HybridTrainer:
        trainer = make(model, predict="auto", depth={"until": 0.4})
        trainer.listeners.append(lambda record: told.append(record.text) if isinstance(record, Notice) else None)
        trainer.expect_end(end)
        return trainer

    fresh = build()
    trainer = auto(fresh)
    assert not trainer.depth.is_short
    trainer.step(DATA[0])
    assert trainer.depth.is_short
    assert told.pop().startswith("the model begins short: of 6 blocks 2 have a loss of 5.")
    assert run(auto(build())) == run(make(predict=["depth"], depth={"until": 0.4}))
    told.clear()

    trainer = auto(fresh := build())
    losses = iter([1.0, 1.06])  # of the whole model, and of the short one
    said = trainer.depth.decide(STEPS, DATA[:1], lambda: (trainer._loss_on(DATA[:1]), next(losses))[1])
    assert "know something already" in said
    assert not trainer.depth.is_short
    assert not any("forward" in block.__dict__ for block in fresh.blocks)
    assert run(trainer) == run(make(predict="off", depth={}))

    trainer = auto(build(), end=None)
    trainer.step(DATA[0])
    assert not trainer.depth.is_short
    assert told[-1] == "no depth forecast: nobody knows where the run ends"


@pytest.mark.parametrize("losses", [(1.0, math.nan), (math.nan, 1.0), (1.0, math.inf)])
def test_with_auto_losses_that_are_no_numbers_leave_the_model_whole(losses):
    trainer = make(predict="auto", depth={})
    found = iter(losses)
    said = trainer.depth.decide(STEPS, DATA[:1], lambda: (trainer._loss_on(DATA[:1]), next(found))[1])
    assert "a loss of" in said
    assert not trainer.depth.is_short


def test_with_auto_several_ranks_begin_with_the_whole_model(monkeypatch):
    assert make_depth(build(), HybridTrainerConfig()).is_open
    monkeypatch.setattr(ranks, "count", lambda: 2)
    assert not make_depth(build(), HybridTrainerConfig()).is_open


@pytest.mark.parametrize("change", ["few", "frozen", "none"])
def test_with_auto_a_model_that_cannot_grow_trains_as_it_is(change):
    model: nn.Module = build(3 if change == "few" else BLOCKS)
    if change == "frozen":
        next(model.blocks[2].parameters()).requires_grad_(False)  # type: ignore[union-attr,index]
    if change == "none":
        model = build_cnn("cnn-small")
    assert not make_depth(model, HybridTrainerConfig()).is_open
    assert not make_depth(model, HybridTrainerConfig()).is_short


def test_with_auto_a_trained_model_does_not_begin_short_but_a_checkpoint_may_say_that_it_is(tmp_path):
    first = make(predict="auto", depth={})
    run(first, DATA[:3])
    first.save(tmp_path / "short")
    model = build()
    model.load_state_dict(first.model.state_dict())  # as others do, before the rest of the state
    depth = make_depth(model, HybridTrainerConfig(), optimizer_of(model))
    assert not depth.is_open
    assert not depth.is_short
    other = make(model, predict="auto", depth={})
    other.load(tmp_path / "short")
    assert run(other, DATA[3:]) == run(first, DATA[3:])


def test_with_auto_blocks_stay_recomputed():
    every = MemoryConfig(checkpoint_every=2)
    named = run(make(memory=every, depth={"until": 0.4}))
    model = build()
    trainer = make(model, predict="auto", memory=every, depth={"until": 0.4})
    calls: list[int] = []
    for number, block in enumerate(model.blocks):
        next(block.children()).register_forward_hook(lambda *_, number=number: calls.append(number))
    losses = run(trainer, DATA[:1])
    probes, step = [*range(BLOCKS), 0, 1], [0, 1, 0, 1]  # of the whole model and the short one; forward and again
    assert calls == probes + step
    assert losses + run(trainer, DATA[1:]) == named


@pytest.mark.parametrize("error", [ValueError("odd"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [0, 1])
def test_where_a_probe_fails_the_model_is_whole_and_training_goes_on(error, after):
    model = build()
    trainer = make(model, predict="auto", memory=MemoryConfig(checkpoint_every=2), depth={})
    trainer.expect_end(STEPS)
    own, made = trainer._loss_on, []

    def failing(batches: Any) -> float:
        made.append(1)
        if len(made) == 1 + after:
            raise error
        return own(batches)

    trainer._loss_on = failing  # type: ignore[method-assign]
    if isinstance(error, Exception):
        expected = run(make(predict="off", depth={}, memory=MemoryConfig(checkpoint_every=2)))
        assert run(trainer) == expected
        return
    with pytest.raises(KeyboardInterrupt):
        trainer.step(DATA[0])
    assert not trainer.depth.is_short
    assert run(trainer) == run(make(predict=["depth"], depth={}))  # as if nothing had happened


def test_an_error_in_the_first_step_leaves_everything_to_be_decided_again():
    class Fails:
        def before_step(self, trainer: Any, batch: Any) -> None:
            if not failed:
                failed.append(1)
                raise ValueError("first")

    failed: list[int] = []
    settings: dict[str, Any] = {**EAGER, "predict": "auto", "warmup_steps": 0, "depth": {"until": 0.4}}
    plain = make(**settings)
    trainer = HybridTrainer(
        model := build(), optimizer_of(model), gpt_loss, HybridTrainerConfig(**settings), clip_norm=1.0, hooks=[Fails()]
    )
    trainer.expect_end(STEPS)
    with pytest.raises(Exception, match="first"):
        trainer.step(DATA[0])
    assert run(trainer) == run(plain)
    assert trainer.fingerprint()["history"] == plain.fingerprint()["history"]
    assert trainer.fingerprint()["standing"] == plain.fingerprint()["standing"]


@pytest.mark.parametrize("every", [0, 3])
def test_with_auto_a_run_resumes_exactly_from_its_first_state_on(every, tmp_path):
    settings: dict[str, Any] = {"predict": "auto", "depth": {"until": 0.4}, "memory": {"checkpoint_every": every}}
    whole = make(**settings)
    whole.save(tmp_path / "0")
    expected = run(whole, DATA[:5])
    whole.save(tmp_path / "5")
    expected += run(whole, DATA[5:])
    for at in (0, 5):
        for other in (make(**settings), whole):
            other.load(tmp_path / str(at))
            assert run(other, DATA[at:]) == expected[at:], at


def test_a_short_checkpoint_is_refused_where_blocks_are_not_trained(tmp_path):
    short = make(predict="auto", depth={})
    run(short, DATA[:2])
    short.save(tmp_path / "short")
    model = build()
    next(model.blocks[3].parameters()).requires_grad_(False)
    other = make(model, predict="auto", depth={})
    before = other.fingerprint()
    with pytest.raises(Exception, match=r"yet to grow|another setup"):
        other.load(tmp_path / "short")
    assert other.fingerprint() == before


class Attentive(nn.Linear):
    """By its name a part of a transformer."""


class Stack(nn.Module):
    """Blocks that are used in some way of their own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.LayerNorm(8), Attentive(8, 8)) for _ in range(6)]
        self.blocks, self.head, self.way = nn.ModuleList(layers), nn.Linear(8, 1), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "parallel":
            x = torch.stack([block(x) for block in self.blocks]).mean(0)
        elif self.way == "never":
            x = x + sum(block[1](block[0](x)) for block in self.blocks)  # type: ignore[index]
        elif self.way == "reversed":
            for block in reversed(self.blocks):
                x = block(x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("way", "is_short"), [("chain", True), ("parallel", False), ("never", False), ("reversed", False)]
)
def test_with_auto_only_blocks_that_follow_each_other_are_foreseen(way, is_short):
    torch.manual_seed(0)
    model = Stack(way)
    config = HybridTrainerConfig(depth=DepthConfig(until=0.5))
    trainer = HybridTrainer(model, optimizer_of(model), lambda m, x: (m(x) - 1).square().mean(), config)
    trainer.expect_end(40)
    trainer.step(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))
    assert trainer.depth.is_short is is_short


def test_with_auto_stacks_that_are_no_transformers_are_left_as_they_are():
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(6)))
    assert not make_depth(model, HybridTrainerConfig()).is_open


def test_without_memory_for_its_states_a_model_stays_short_and_can_be_saved(monkeypatch, tmp_path):
    trainer, expected = make(), run(make())
    losses = run(trainer, DATA[:7])

    def full(_: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(GpuMemoryError, match="growth"):
        patch.setattr(depth_module, "deepcopy", full)
        trainer.step(DATA[7])
    assert trainer.depth.is_short
    trainer.save(tmp_path / "short")
    assert trainer.step_count == 8
    other = make()
    other.load(tmp_path / "short")
    assert run(other, DATA[8:9])[0] == pytest.approx(expected[8], rel=0.05)  # a step later than it would have been
    assert not other.depth.is_short
    assert losses == expected[:7]


def test_with_auto_a_run_of_a_few_steps_does_not_grow():
    trainer = make(predict="auto", depth={})
    trainer.expect_end(5)
    trainer.step(DATA[0])
    assert not trainer.depth.is_short


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_decoders_of_hugging_face_grow(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64, "n_positions": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    trainer = HybridTrainer(model, optimizer, loss_fn, HybridTrainerConfig())
    losses = run(trainer, DATA[:1], end=12)
    assert trainer.depth.is_short
    losses += run(trainer, DATA[1:12], end=12)
    assert not trainer.depth.is_short
    first, third = (block for number, block in enumerate(find_blocks(model).modules) if number in (0, 2))
    assert losses[-1] < losses[0]
    assert len(optimizer.state) == len(list(model.parameters()))
    steps = {float(optimizer.state[parameter]["step"]) for parameter in (*first.parameters(), *third.parameters())}
    assert steps == {12.0}


def test_a_model_that_does_not_grow_is_left_alone():
    model = build()
    own = model.blocks[0].forward
    depth = make_depth(model, HybridTrainerConfig())
    assert model.blocks[0].forward == own
    assert (depth.is_short, depth.share, depth.is_due(10**9, 1, DATA[:1])) == (False, 1.0, False)
    assert list(islice(model.parameters(), 1))


def test_a_grown_model_is_as_it_was_made_and_can_be_copied():
    model = build()
    run(make(model))
    assert not any("forward" in block.__dict__ for block in model.blocks)
    twin = pickle.loads(pickle.dumps(deepcopy(model)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert bool(twin(DATA[0][:, :-1]).any())


def test_another_trainer_finds_the_whole_model():
    model = build()
    whole = model(DATA[0][:, :-1])
    make(model)
    assert not torch.equal(model(DATA[0][:, :-1]), whole)
    make(model, predict="off", depth={})
    assert torch.equal(model(DATA[0][:, :-1]), whole)
    trainer = make(model)
    assert trainer.depth.is_short
    assert not torch.equal(model(DATA[0][:, :-1]), whole)


def test_another_trainer_finds_the_whole_model_under_recomputed_blocks():
    model = build()
    whole = model(DATA[0][:, :-1])
    recomputed = MemoryConfig(checkpoint_every=2)
    make(model, memory=recomputed)
    trainer = make(model, memory=recomputed)
    assert run(trainer) == run(make(memory=recomputed))
    make(model, memory=recomputed)
    make(model, predict="off", depth={}, memory=recomputed)
    model.load_state_dict(build().state_dict())
    assert torch.equal(model(DATA[0][:, :-1]), whole)


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("settings", [{"predict": "off"}, {"predict": "auto"}])
def test_another_trainer_does_not_go_on_with_a_model_of_which_half_is_trained(settings, every, tmp_path):
    model, memory = build(), MemoryConfig(checkpoint_every=every)
    first = make(model, memory=memory)
    run(first, DATA[:3])
    first.save(tmp_path / "short")
    short = model(DATA[0][:, :-1])
    second = make(model, depth={}, memory=memory, **settings)
    with pytest.raises(ModelError, match="another trainer has trained 2 of its 6 blocks"):
        second.step(DATA[3])
    assert torch.equal(model(DATA[0][:, :-1]), short)
    third = make(model, memory=memory)  # as the first one: it may, and it finds the same blocks
    assert torch.equal(model(DATA[0][:, :-1]), short)
    third.load(tmp_path / "short")
    assert run(third, DATA[3:]) == run(make(memory=memory))[3:]
    make(model, depth={}, memory=memory, **settings).step(DATA[0])  # it has grown


def test_a_checkpoint_settles_what_another_trainer_has_left(tmp_path):
    whole = make(predict="off", depth={})
    run(whole, DATA[:2])
    whole.save(tmp_path / "whole")
    model = build()
    run(make(model), DATA[:2])
    other = make(model, predict="off", depth={})
    other.load(tmp_path / "whole")
    assert run(other, DATA[2:]) == run(whole, DATA[2:])


def test_a_streamed_model_that_another_trainer_has_left_short_is_whole_after_a_load(tmp_path):
    trainer = streamed("fp32", "exact")
    trainer.save(tmp_path / "first")
    run(trainer, DATA[:2])
    options: dict[str, Any] = {"predict": "off", "memory": trainer.config.memory}
    other = HybridTrainer(trainer.model, None, gpt_loss, HybridTrainerConfig(**options), clip_norm=1.0)
    with pytest.raises(ModelError, match="The model is short"):
        other.step(DATA[0])
    fresh = HybridTrainer(streamed("fp32", "exact").model, None, gpt_loss, HybridTrainerConfig(**options))
    fresh.save(tmp_path / "whole")
    expected = fresh.step(DATA[0]).loss
    last = HybridTrainer(trainer.model, None, gpt_loss, HybridTrainerConfig(**options))
    last.load(tmp_path / "whole")
    engine: Any = last.optimizer.engine  # type: ignore[attr-defined]
    assert engine.depth == BLOCKS  # so many are fetched ahead
    assert last.step(DATA[0]).loss == expected


@pytest.mark.parametrize("memory", [{}, {"checkpoint_every": 2}, {"checkpoint_every": 1, "offload_activations": True}])
@pytest.mark.parametrize("way", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_copy_of_a_short_model_is_short_and_has_blocks_of_its_own(way, memory):
    model = build()
    trainer = make(model, memory=memory)
    run(trainer, DATA[:3])
    tokens = DATA[0][:, :-1]
    short = model(tokens)
    twin = way(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(tokens), short)
    run(trainer, DATA[3:])
    assert torch.equal(twin(tokens), short)
    with pytest.raises(ModelError, match="The model is short"):
        make(twin, predict="off", depth={}).step(DATA[0])


@pytest.mark.parametrize("order", ["stack", "repeat"])
def test_the_weights_of_a_short_model_alone_are_those_that_growth_would_give_it(order):
    model = build()
    trainer = make(model, depth={"share": 0.34, "until": 0.4, "order": order})
    run(trainer, DATA[:7])
    before = deepcopy(model.state_dict())
    foreseen = trainer.depth.foreseen(model, trainer.optimizer)
    assert foreseen is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    states = trainer.depth.new_states(trainer.optimizer)
    trainer.depth.grow(trainer.optimizer, states)
    assert all(torch.equal(value, foreseen[name]) for name, value in model.state_dict().items())
    assert trainer.depth.foreseen(model, trainer.optimizer) is None


def test_buffers_and_what_is_frozen_stay():
    model = build()
    for number, block in enumerate(model.blocks):
        block.register_buffer("number", torch.full((number + 1,), number))
    model.blocks[4].requires_grad_(False)
    frozen = deepcopy(model.blocks[4].state_dict())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainer = make(model, torch.optim.AdamW(trainable, lr=2e-3))
    run(trainer)
    assert [int(buffer[0]) for buffer in model.buffers()] == list(range(BLOCKS))
    assert all(torch.equal(value, frozen[name]) for name, value in model.blocks[4].state_dict().items())
    trainer.optimizer.state_dict()


def test_states_in_lists_are_copied_too():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    depth = Depth(list(model.blocks), 1, DepthConfig())
    for parameter in model.blocks[0].parameters():
        optimizer.state[parameter] = {"history": [torch.zeros(1)]}
    depth.grow(optimizer, depth.new_states(optimizer))
    mine, theirs = (next(model.blocks[number].parameters()) for number in (0, 3))
    assert optimizer.state[mine]["history"][0] is not optimizer.state[theirs]["history"][0]


def test_a_bad_step_is_no_time_to_grow():
    trainer = make()
    run(trainer, DATA[:6])
    bad: Any = lambda model, batch: gpt_loss(model, batch) * float("nan")  # noqa: E731
    good, trainer._loss._loss_fn = trainer._loss._loss_fn, bad
    trainer.step(DATA[6])
    trainer.step(DATA[7])
    assert trainer.depth.is_short
    trainer._loss._loss_fn = good
    trainer.step(DATA[8])
    assert not trainer.depth.is_short


@pytest.mark.parametrize("every", [0, 1])
def test_a_grown_run_can_go_back_to_a_checkpoint_of_the_short_one(every, tmp_path):
    trainer = make(memory=MemoryConfig(checkpoint_every=every))
    first = run(trainer, DATA[:4])
    trainer.save(tmp_path / "short")
    then = run(trainer, DATA[4:])
    trainer.load(tmp_path / "short")
    assert run(trainer, DATA[4:]) == then
    assert len(first + then) == STEPS
