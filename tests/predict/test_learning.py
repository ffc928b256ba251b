"""A model at work reads and writes only memory that stays where it is: what was recorded once can be repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridtrainer.predict import learning, steady
from hybridtrainer.predict.gates import Model
from hybridtrainer.predict.learners import TRAINING, Kind, make_model
from hybridtrainer.predict.learning import LEAST_TICKS, Learner
from hybridtrainer.predict.replay import Replay
from hybridtrainer.tree import fingerprint, pack, unpack

FEATURES, HORIZONS, EXPERTS = 64, 2, 4
KINDS: tuple[Kind, ...] = ("rssm", "mlp", "linear")


def learner_of(kind: Kind, seed: int = 0, device: str = "cpu") -> Learner:
    generator = torch.Generator().manual_seed(seed)
    model = make_model(kind, (1, 3), EXPERTS, generator, device, parameters=0)
    assert model is not None
    latent = model.latent()
    shape = (0, 0) if latent is None else (len(latent), latent.shape[1])
    replay = Replay(FEATURES, HORIZONS, EXPERTS, shape, device)
    return Learner(model, TRAINING[kind], replay, generator, device)


def follow(learner: Learner, first: int, last: int) -> list[list[float]]:
    """Ticks whose outcome depends on their features; what the model says of each."""
    said = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(1000 + number)
        features = torch.randn(FEATURES, generator=generator)
        experts = torch.tensor([2.0, -2.0, 0.0, 1.0]) + 0.1 * torch.randn(HORIZONS, EXPERTS, generator=generator)
        weights = torch.rand(HORIZONS, EXPERTS, generator=generator).softmax(-1)
        tick, told = learner.take(features.to(learner.replay.features.device), experts, weights)
        assert tick == number
        said.append([value for part in told() for value in part.flatten().tolist()])
        for horizon in range(HORIZONS):
            learner.replay.resolve(tick, horizon, 2.0 if features[0] > 0 else -2.0)
        learner.replay.resolve_jump(tick, 0.5, 1.0)
    return said


class Tape(TorchDispatchMode):
    """In place of a CUDA graph: what torch is asked to do is written down, and done again on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        assert "_local_scalar_dense" not in str(func), "the host would wait for the device"
        self.done.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def taped(repeated: steady.Repeated) -> Tape:
    """The computation, run once while it is written down."""
    tape = Tape()
    with tape:
        repeated._work()
    return tape


class Sgd(torch.optim.SGD):
    """Unlike Adam on a CPU it counts no steps in Python, which a recording would not do again."""

    def __init__(self, weights: Any, lr: float, weight_decay: float, capturable: bool) -> None:
        super().__init__(weights, lr=lr, weight_decay=weight_decay)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_recorded_of_a_tick_says_the_same_at_every_later_one_to_the_bit(kind, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", Sgd)
    monkeypatch.setattr(learning, "LEAST_TICKS", 12)
    stepped, repeated = learner_of(kind), learner_of(kind)
    follow(stepped, 0, 33)
    follow(repeated, 0, 32)
    tapes: dict[int, Tape] = {}

    def call(self: steady.Repeated) -> None:
        if id(self) in tapes:
            tapes[id(self)].replay()
        else:
            tapes[id(self)] = taped(self)

    with monkeypatch.context() as patched:
        patched.setattr(steady.Repeated, "__call__", call)
        follow(repeated, 32, 33)  # one at which all of them learn
        assert len(tapes) == 3
        assert fingerprint(repeated.state()) == fingerprint(stepped.state())
        said = follow(repeated, 33, 57)
    assert said == follow(stepped, 33, 57)
    assert fingerprint(repeated.state()) == fingerprint(stepped.state())
    assert all(tape.done for tape in tapes.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_learner_goes_on_to_the_bit_and_records_anew(kind):
    one, other = learner_of(kind), learner_of(kind, seed=9)
    follow(one, 0, 45)
    tensors, document = pack(one.state() | {"random": one._generator.get_state()})
    state = unpack(document, {name: tensor.clone() for name, tensor in tensors.items()}.__getitem__)
    state["optimizer"]["param_groups"][0]["capturable"] = True  # as it would come from a GPU
    other._repeated[1]._runs = 99
    other.restore(state)
    other._generator.set_state(state["random"])
    assert other._repeated[1]._runs == 0
    assert follow(other, 45, 60) == follow(one, 45, 60)
    assert fingerprint(other.state()) == fingerprint(one.state())


def test_nothing_is_learned_before_there_are_ticks_to_learn_from():
    learner = learner_of("linear")
    before = learner.model.weights()["last"].clone()
    follow(learner, 0, LEAST_TICKS)
    assert torch.equal(learner.model.weights()["last"], before)
    follow(learner, LEAST_TICKS, LEAST_TICKS + 1)
    assert not torch.equal(learner.model.weights()["last"], before)


def said_alone(model: Model) -> list[float]:
    return [value for part in model.correction() for value in part.flatten().tolist()]


def test_what_arrives_is_what_the_model_says():
    learner = learner_of("mlp")
    assert follow(learner, 0, 40)[-1] == said_alone(learner.model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_graphs_say_what_the_steps_say_to_the_bit(kind, monkeypatch):
    repeated = learner_of(kind, device="cuda")
    said = follow(repeated, 0, 120)
    assert all(each.is_recorded for each in repeated._repeated)
    monkeypatch.setattr(steady, "RUNS_BEFORE", 10**9)
    stepped = learner_of(kind, device="cuda")
    assert said == follow(stepped, 0, 120)
    assert fingerprint(repeated.state()) == fingerprint(stepped.state())
