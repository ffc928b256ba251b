"""What is said when GPU memory has run out: where, plan beside measurement, and what would help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import gpt_setup

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import GpuMemoryError
from hybridtrainer.memory.post_mortem import in_a_block, mark
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.planning import post_mortem
from hybridtrainer.planning.post_mortem import A_STEP, PostMortem
from hybridtrainer.real_step import FORWARD
from hybridtrainer.records import Phase
from hybridtrainer.sizes import as_size
from hybridtrainer.smaller_step import Division, NothingSmaller
from hybridtrainer.state import Training

SETUP = gpt_setup(count=1)
TORCH_SAYS = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.28 GiB is free. "
    "Process 464 has 66.00 MiB memory in use. Including non-PyTorch memory, this process has 6.66 GiB memory in use. "
    "4.80 GiB allowed; Of the allocated memory 4.70 GiB is allocated by PyTorch, and 30.30 MiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation.\nSee the docs."
)


def make(training: Training | None = None) -> PostMortem:
    training = training or Training(SETUP.model, SETUP.optimizer, None, None)
    return PostMortem(training, gpt_loss, HybridTrainerConfig(), accumulate=1, has_probes=True)


def test_it_names_place_phase_step_module_and_why_it_went_no_further():
    error = NothingSmaller(TORCH_SAYS, FORWARD, "blocks.1.mlp", "that was one sample at a time", Division(8))
    told = make().told(error, "a step", Phase.CORRECT, 41, SETUP.batches)
    assert isinstance(told, GpuMemoryError)
    assert told.what.startswith(
        "Out of GPU memory in the forward pass, in `blocks.1.mlp` (phase correct, after step 41): CUDA out of memory. "
        "Tried to allocate 3.00 GiB. It was not divided further: that was one sample at a time. Planned were "
    )
    assert told.remedy.startswith("What takes less, the cheapest first:\n  ")


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        (str(TORCH_SAYS), "CUDA out of memory. Tried to allocate 3.00 GiB."),
        (f"on rank 1: {TORCH_SAYS}", "on rank 1: CUDA out of memory. Tried to allocate 3.00 GiB."),
        ("HIP out of memory. Tried to allocate 512 bytes. GPU 0", "HIP out of memory. Tried to allocate 512 bytes."),
        ("a card of another kind has no room. " * 20, f"{('a card of another kind has no room. ' * 20)[:200]}."),
        ("no room\nfor more lines", "no room."),
        ("", "torch says no more."),
    ],
    ids=["cuda", "another rank", "bytes", "unknown and long", "lines", "nothing"],
)
def test_of_torchs_message_it_quotes_what_was_tried_to_allocate(message, quoted):
    error = torch.OutOfMemoryError(message)
    told = make().told(error, "a save", Phase.FULL, 3)
    assert f"after step 3): {quoted} Plans are of training steps" in str(told)


def test_the_plan_stands_beside_what_was_measured(monkeypatch):
    text = str(make().told(TORCH_SAYS, "a step", Phase.FULL, 3, SETUP.batches))
    assert "activations " in text and "What was in use is not known on this device." in text
    monkeypatch.setattr(post_mortem, "device_bytes", lambda device: (5 << 30, 7 << 30))
    text = str(make().told(TORCH_SAYS, "a step", Phase.FULL, 3, SETUP.batches))
    assert "Measured: 5.00 GiB in tensors now, 7.00 GiB reserved at most." in text


def test_what_is_no_step_or_cannot_be_rehearsed_has_no_plan_and_the_message_says_which():
    assert "Plans are of training steps, and this was none." in str(make().told(TORCH_SAYS, "a save", Phase.FULL, 3))
    assert "A plan cannot be made" in str(make().told(TORCH_SAYS, "a step", Phase.FULL, 3, ["no tensor"]))


def test_the_plan_is_for_the_part_that_was_computed():
    def activations(parts: int) -> float:
        error = NothingSmaller(TORCH_SAYS, FORWARD, "", "", Division(parts))
        text = str(make().told(error, "a step", Phase.FULL, 3, SETUP.batches))
        return float(text.partition("activations ")[2].partition(" MiB")[0])

    assert activations(1) > 1.5 * activations(4) > 0


def test_averages_of_the_weights_are_planned_and_can_be_done_without():
    text = str(make().told(TORCH_SAYS, "a step", Phase.FULL, 3, SETUP.batches))
    nbytes = 2 * sum(parameter.nbytes for parameter in SETUP.model.parameters())
    assert f"averages {as_size(nbytes)}" in text
    assert f'readout = "last": saves {as_size(nbytes)}, no average of the weights is read out' in text
    without = PostMortem(
        Training(SETUP.model, SETUP.optimizer, None, None), gpt_loss, HybridTrainerConfig(), 1, has_probes=False
    )
    assert "average" not in str(without.told(TORCH_SAYS, "a step", Phase.FULL, 3, SETUP.batches))


def test_other_errors_are_left_alone():
    mine = ZeroDivisionError("mine")
    assert make().told(mine, "a step", Phase.FULL, 3) is mine
    with pytest.raises(ZeroDivisionError), make().explained("a step", Phase.FULL, 3):
        raise mine


def test_a_streamed_model_is_explained_by_its_own_settings():
    memory = MemoryConfig(mode="split8", max_gpu_blocks=2)
    model = stream(gpt_setup(dropout=0.0, count=1).model, memory, "cpu", lr=1e-3)
    streamed = make(Training(model, model.optimizer, None, None))  # type: ignore[arg-type]
    error = torch.OutOfMemoryError("CUDA out of memory.")
    mark(error, in_a_block("the backward pass of a block", divisible=True, split=1))
    told = streamed.told(error, A_STEP, Phase.FULL, 3, SETUP.batches)
    assert isinstance(told, GpuMemoryError)
    assert told.what.startswith(
        "Out of GPU memory in the backward pass of a block (phase full, after step 3): CUDA out of memory. It was not "
        "divided further: that was one sample at a time. Planned were "
    )
    assert "memory.max_gpu_blocks = 1: saves " in told.remedy and "checkpoint_every" not in told.remedy
    elsewhere = streamed.told(torch.OutOfMemoryError("else"), "an evaluation", Phase.FULL, 3)
    assert str(elsewhere).startswith("Out of GPU memory in an evaluation (phase full, after step 3): else. ")


def test_the_error_comes_from_torchs_and_its_frames_hold_nothing():
    def hungry() -> None:
        held: Any = torch.zeros(3)
        raise torch.OutOfMemoryError(f"no room beside {held.numel()}")

    with pytest.raises(GpuMemoryError) as raised, make().explained("a save", Phase.FULL, 3):
        hungry()
    cause = raised.value.__cause__
    assert isinstance(cause, torch.OutOfMemoryError) and cause.__traceback__ is not None
    assert str(cause) == "no room beside 3"
    last = cause.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    assert last.tb_frame.f_code.co_name == "hungry" and "held" not in last.tb_frame.f_locals


def test_what_a_phase_keeps_is_what_is_planned_and_advised_on():
    memory = MemoryConfig(checkpoint_every=1, checkpoint_keep="by_phase")
    training = Training(SETUP.model, SETUP.optimizer, None, None)
    failed = PostMortem(training, gpt_loss, HybridTrainerConfig(memory=memory), accumulate=1, has_probes=True)
    advice = 'memory.checkpoint_keep = "inputs"'
    assert advice in str(failed.told(TORCH_SAYS, FORWARD, Phase.CORRECT, 3, SETUP.batches))
    assert advice not in str(failed.told(TORCH_SAYS, FORWARD, Phase.FULL, 3, SETUP.batches))
