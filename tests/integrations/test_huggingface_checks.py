"""What is refused before training begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hybridtrainer.errors import CorruptCheckpointError, ModelError
from hybridtrainer.integrations.huggingface_checks import newest_whole, require_known, require_possible, to_resume

USUAL: dict[str, Any] = {"world_size": 1, "n_gpu": 1, "auto_find_batch_size": False, "optim": "adamw_torch"}


def host(**changes: Any) -> Any:
    flags = {name: changes.pop(name, False) for name in ("is_deepspeed_enabled", "is_fsdp_enabled")}
    return SimpleNamespace(args=SimpleNamespace(**(USUAL | changes)), model=nn.Linear(1, 1), **flags)


def test_usual_arguments_pass():
    require_possible(host())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 2}, "several devices"),
        ({"n_gpu": 2}, "several devices"),
        ({"is_deepspeed_enabled": True}, "several devices"),
        ({"is_fsdp_enabled": True}, "several devices"),
        ({"auto_find_batch_size": True}, "begin the run anew"),
        ({"optim": "adalomo"}, "updates weights in the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "updates weights in the backward pass"),
    ],
)
def test_what_cannot_be_followed_is_refused(changes, words):
    with pytest.raises(ModelError, match=words):
        require_possible(host(**changes))


def test_a_trainer_of_another_build_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Mixin:
        def a_method_of_another_version(self) -> None: ...

    with pytest.raises(ModelError, match="has no a_method_of_another_version"):
        require_known(type("Mine", (Mixin, transformers.Trainer), {}), Mixin)
    with pytest.raises(ModelError, match="behind the mixin"):
        require_known(Mixin, Mixin)


def test_a_training_step_that_nobody_calls_is_named():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    mixin = type("Mixin", (), {})
    own = type("Own", (transformers.Trainer,), {"training_step": lambda self, model, inputs: None})
    with pytest.warns(UserWarning, match="Own has a training_step of its own"):
        require_known(type("Mine", (mixin, own), {}), mixin)


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    for name, text in (("9", "{}"), ("10", "{}"), ("11", '{"cut'), ("12", None), ("best", "{}")):
        (tmp_path / f"checkpoint-{name}").mkdir()
        if text is not None:
            (tmp_path / f"checkpoint-{name}" / "trainer_state.json").write_text(text)
    with pytest.warns(UserWarning, match="checkpoint-1[12] was not written to its end"):
        assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-10")
    assert newest_whole(tmp_path / "checkpoint-9") is None


def test_where_no_checkpoint_is_whole_that_is_said(tmp_path):
    assert to_resume(True, tmp_path) is True  # none at all: the Trainer says so itself
    (tmp_path / "checkpoint-5").mkdir()
    with (
        pytest.warns(UserWarning, match=r"trainer_state\.json is not there"),
        pytest.raises(CorruptCheckpointError, match=r"none to go on from.*without resume_from_checkpoint"),
    ):
        to_resume(True, tmp_path)
    assert to_resume(str(tmp_path / "checkpoint-5"), tmp_path)  # not ours: its own affair
    assert to_resume(None, tmp_path) is None


def test_random_states_must_be_there_where_our_state_is(tmp_path):
    made = tmp_path / "checkpoint-5"
    (made / "hybridtrainer").mkdir(parents=True)
    (made / "trainer_state.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"rng_state\.pth is not there"):
        to_resume(str(made), tmp_path)
