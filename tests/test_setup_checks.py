"""What fits together is accepted in silence; what does not is refused before anything is trained."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.memory.support import build
from tests.support import gpt_setup, tiny_gpt
from torch import nn
from torch.optim import lr_scheduler

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.low_bit import LowBitAdamW
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.setup_checks import checked_setup
from hybridtrainer.trainer import HybridTrainer


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def check(model: Any = None, optimizer: Any = "sgd", **options: Any) -> None:
    model = net() if model is None else model
    if optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {
        "scheduler": None,
        "scaler": None,
        "clip_norm": None,
        "accumulate": 1,
        "probe_batches": None,
        "config": HybridTrainerConfig(),
    }
    checked_setup(model, optimizer, **(given | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 1.0},
        {"clip_norm": float("inf")},
        {"accumulate": 4},
        {"probe_batches": [1]},
        {"scaler": torch.amp.GradScaler("cpu")},
    ],
)
def test_a_sound_setup_passes_without_a_word(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(**options)


def test_frozen_and_tied_parameters_are_no_problem():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, optimizer)


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (lambda x: x, torch.optim.SGD(net().parameters()), "The model is a function, not an nn.Module"),
        (net(), None, "The optimizer is None, not a torch optimizer"),
        (net(), "adam", "The optimizer is a str"),
        (net(), net().parameters(), "The optimizer is a generator"),
        (nn.ReLU(), torch.optim.SGD(net().parameters()), "has no parameters"),
        (net().requires_grad_(False), torch.optim.SGD(net().parameters()), "only frozen parameters"),
        (net(), torch.optim.SGD(net().parameters()), "holds 4 of 4 parameters that are not the model's"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, optimizer, words):
    with pytest.raises(ModelError, match=words):
        check(model, optimizer)


def test_one_parameter_that_is_not_the_models_is_refused():
    model = net()
    with pytest.raises(ModelError, match="holds 1 of 5 parameters"):
        check(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))]))


def test_an_optimizer_made_before_the_model_was_replaced_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0] = nn.Linear(3, 4)  # type: ignore[operator]
    with pytest.raises(ModelError, match="holds 2 of 4 parameters"):
        check(model, optimizer)


def test_a_model_without_memory_is_refused():
    with torch.device("meta"):
        model = net()
    with pytest.raises(ModelError, match="meta device"):
        check(model)


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused():
    model = net()
    with pytest.raises(ModelError, match="LBFGS"):
        check(model, torch.optim.LBFGS(model.parameters()))


def test_a_scheduler_must_be_resumable_and_drive_this_optimizer():
    class Bare:
        def step(self) -> None: ...

    with pytest.raises(ModelError, match="no state_dict and no load_state_dict"):
        check(scheduler=Bare())
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ModelError, match="another optimizer"):
        check(scheduler=lr_scheduler.StepLR(other, 1))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 2)]
    for scheduler in (lr_scheduler.ReduceLROnPlateau(optimizer), lr_scheduler.SequentialLR(optimizer, parts, [2])):
        check(model, optimizer, scheduler=scheduler)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaler": True}, "The scaler is a bool"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": 2.0}, "accumulate is 2.0"),
        ({"accumulate": True}, "accumulate is True"),
        ({"probe_batches": []}, "probe_batches is empty"),
        (
            {"config": HybridTrainerConfig(memory=MemoryConfig(vram="8GB"))},
            r"only `hybridtrainer train` settles.*plan\(",
        ),
    ],
)
def test_options_out_of_range_are_refused_with_their_value(options, words):
    with pytest.raises(ModelError, match=words):
        check(**options)


WITH_MOMENTUM: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, momentum=0.9),
    torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
]  # fmt: skip
WITHOUT: list[Any] = [
    torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.Adadelta,
    torch.optim.ASGD, torch.optim.Rprop,
]  # fmt: skip


@pytest.mark.parametrize("make", WITH_MOMENTUM)
def test_the_momentum_forecaster_accepts_optimizers_that_keep_momentum(make):
    model = net()
    check(model, make(model.parameters()), config=HybridTrainerConfig(forecaster="momentum"))


@pytest.mark.parametrize("make", WITHOUT, ids=lambda make: make.__name__)
def test_the_momentum_forecaster_refuses_optimizers_that_keep_none(make):
    model = net()
    optimizer = make(model.parameters(), lr=0.01)
    with pytest.raises(ModelError, match=f"{type(optimizer).__name__} as given keeps none"):
        check(model, optimizer, config=HybridTrainerConfig(forecaster="momentum"))
    check(model, optimizer)


def test_momentum_in_some_groups_only_is_refused_for_the_momentum_forecaster():
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "momentum": 0.9}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(ModelError, match="keeps none"):
        check(model, optimizer, config=HybridTrainerConfig(forecaster="momentum"))


def test_trainable_parameters_outside_the_optimizer_are_warned_of_by_name():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"^4 trainable parameters .* 1\.weight, 1\.bias, 2\.weight, \.\.\."):
        check(model, optimizer)
    model[2].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"^2 trainable parameters .* 1\.weight, 1\.bias\. Freeze"):
        check(model, optimizer)


def test_parameters_without_a_shape_and_groups_without_a_rate_are_said_so():
    lazy = nn.LazyLinear(3)
    with pytest.raises(ModelError, match="without a shape"):
        HybridTrainer(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(ModelError, match="no learning rate"):
        HybridTrainer(layer, optimizer, lambda model, batch: model(batch).mean())


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"optimizer_bits": 8}, r"optimizer_bits is 8, and SGD keeps 32 bits.*LowBitAdamW\(..., bits=8\)"),
        ({"predict_int8": True}, 'predict_int8 is set, and predict = "off"'),
        ({"predict_states": "leave"}, 'predict_states is set, and predict = "off"'),
        ({"checkpoint_keep": "products"}, "checkpoint_keep is not read without memory.checkpoint_every"),
        ({"mode": "resident", "vram": "8GB"}, "memory.vram is set, and only a streamed model"),
        ({"ram": "8GB"}, "memory.ram is set, and only a streamed model"),
        ({"split": 2}, "memory.split is set, and only a streamed model"),
        ({"clipping": "exact"}, "memory.clipping is set, and only a streamed model"),
        ({"pack_weights": False}, "memory.pack_weights is set, and only a streamed model"),
        ({"checkpoint_every": 1, "checkpoint_keep": "by_phase"}, "there are no Correct steps"),
    ],
)
def test_an_option_of_resident_models_that_nothing_would_follow_is_refused(memory, words):
    with pytest.raises(ModelError, match=words):
        check(config=HybridTrainerConfig(predict="off", memory=memory))


def test_an_optimizer_of_as_many_bits_as_configured_passes():
    model = net()
    for bits in (8, 4):
        check(model, LowBitAdamW(model.parameters(), bits=bits), config=HybridTrainerConfig())
    with pytest.raises(ModelError, match="optimizer_bits is 4, and LowBitAdamW keeps 8 bits"):
        check(
            model,
            LowBitAdamW(model.parameters(), bits=8),
            config=HybridTrainerConfig(memory=MemoryConfig(optimizer_bits=4)),
        )


def test_arithmetic_that_follows_the_loss_needs_weights_of_32_bits():
    config = HybridTrainerConfig(memory=MemoryConfig(precision="adaptive"))
    check(config=config)
    with pytest.raises(ModelError, match="16-bit weights"):
        check(net().to(torch.bfloat16), config=config)


@pytest.mark.parametrize(
    "memory",
    [
        {"optimizer_bits": 8},
        {"predict_int8": True},
        {"predict_states": "leave"},
        {"checkpoint_keep": "products"},
        {"precision": "adaptive"},
        {"offload_activations": True},
        {"split": 2},
        {"vram": "8GB", "mode": "resident"},
    ],
    ids=str,
)
def test_a_streamed_model_refuses_what_is_for_resident_ones_or_comes_too_late(memory):
    model = stream(build(), MemoryConfig(mode="split8"), "cpu")
    with pytest.raises(ModelError, match=next(iter(memory))):
        check(model, None, config=HybridTrainerConfig(memory=memory))


def test_a_streamed_model_divides_its_blocks_whatever_retry_smaller_says():
    model = stream(tiny_gpt(), MemoryConfig(mode="fp32"), "cpu")
    config = HybridTrainerConfig(memory=MemoryConfig(mode="fp32", retry_smaller=False))
    with pytest.raises(ModelError, match="always divided"):
        HybridTrainer(model, None, gpt_loss, config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": {"predict": "off"}}, "config is a dict"),
        ({"config": "conservative"}, "config is a str"),
        ({"loss_fn": None}, "loss_fn is None"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        (
            {"probe_batches": (torch.ones(2, 3), torch.ones(2))},
            "probe_batches is a tuple of tensors, which is one batch",
        ),
        ({"probe_batches": 5}, "probe_batches is a int"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_when_the_trainer_is_made(options, words):
    model = net()
    given: dict[str, Any] = {"loss_fn": lambda model, batch: model(batch).mean()}
    with pytest.raises(ModelError, match=words):
        HybridTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **(given | options))


@pytest.mark.parametrize("end", [0, -3, 1.5, True, "80"])
def test_an_end_that_is_none_is_refused(end):
    trainer = gpt_setup(count=1).trainer()
    with pytest.raises(ModelError, match="cannot end at step"):
        trainer.expect_end(end)
    assert trainer._end_step is None
