"""What is said when GPU memory has run out in a streamed model: where, remedies with their prices, and once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory import post_mortem
from hybridtrainer.memory.post_mortem import BEGINNING, Place, explained, in_a_block, module_in, place_of

PLACES = {
    "block": in_a_block(post_mortem.FORWARD_OF_A_BLOCK, divisible=True, split=8),
    "block with dropout": in_a_block(post_mortem.BACKWARD_OF_A_BLOCK, divisible=False, split=2),
    "update": post_mortem.IN_AN_UPDATE,
    "save": post_mortem.ON_THE_WAY_HOME,
    "elsewhere": post_mortem.OUTSIDE_THE_BLOCKS,
}
NEAR, FAR = Place("near", "", "Do this."), Place("far", "", "Do that.")


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_every_note_names_settings_that_exist_with_their_price_in_brackets(place):
    note = place.note
    assert note.startswith(BEGINNING)
    named = [part.split()[0].removesuffix("`") for part in note.split("`memory.")[1:]]
    assert named
    assert set(named) <= set(MemoryConfig.model_fields)
    assert place.advice.count("(") >= len(named)


def test_what_draws_random_numbers_is_to_be_divided_twice_as_finely_as_it_was():
    assert "`memory.split = 4` from the start" in PLACES["block with dropout"].note
    assert "memory.split" not in PLACES["block"].note  # one sample at a time was tried


def test_place_and_note_are_added_to_the_error_that_torch_has_raised():
    error = torch.OutOfMemoryError("injected")
    with pytest.raises(torch.OutOfMemoryError) as raised, explained(NEAR):
        raise error
    assert raised.value is error
    assert place_of(error) == NEAR
    assert error.__notes__ == [f"{BEGINNING}in near. Do this."]


def test_only_whoever_is_nearest_says_what_to_do():
    with pytest.raises(torch.OutOfMemoryError) as raised, explained(FAR), explained(NEAR):
        error = torch.OutOfMemoryError("injected")
        error.add_note("The head is large.")  # somebody who does not know how the model is streamed
        raise error
    assert place_of(raised.value) == NEAR
    assert raised.value.__notes__ == ["The head is large.", NEAR.note]


def test_other_errors_get_no_note():
    with pytest.raises(RuntimeError, match="else") as raised, explained(NEAR):
        raise RuntimeError("else")
    assert place_of(raised.value) is None
    assert not hasattr(raised.value, "__notes__")


class _Hungry(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(f"no room for {len(x)}")


def test_the_innermost_module_that_was_computing_is_named():
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), _Hungry()))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(torch.zeros(2))
    assert module_in(raised.value, model) == "1.1"
    assert module_in(raised.value, nn.Linear(1, 1)) == ""
