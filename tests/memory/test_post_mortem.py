"""What is said when GPU memory has run out: remedies, each with its price, and once."""

from __future__ import annotations

import pytest
import torch

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory import post_mortem
from hybridtrainer.memory.post_mortem import BEGINNING, explained, in_a_block

NOTES = {
    "block": in_a_block(divisible=True, split=8),
    "block with dropout": in_a_block(divisible=False, split=2),
    "update": post_mortem.IN_AN_UPDATE,
    "save": post_mortem.ON_THE_WAY_HOME,
    "elsewhere": post_mortem.OUTSIDE_THE_BLOCKS,
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_every_note_names_settings_that_exist_with_their_price_in_brackets(note):
    assert note.startswith(BEGINNING)
    named = [part.split()[0].removesuffix("`") for part in note.split("`memory.")[1:]]
    assert named
    assert set(named) <= set(MemoryConfig.model_fields)
    assert note.count("(") >= len(named)


def test_what_draws_random_numbers_is_to_be_divided_twice_as_finely_as_it_was():
    assert "`memory.split = 4` from the start" in NOTES["block with dropout"]
    assert "memory.split" not in NOTES["block"]  # one sample at a time was tried


def test_the_note_is_added_to_the_error_that_torch_has_raised():
    error = torch.OutOfMemoryError("injected")
    with pytest.raises(torch.OutOfMemoryError) as raised, explained(f"{BEGINNING}somewhere."):
        raise error
    assert raised.value is error
    assert error.__notes__ == [f"{BEGINNING}somewhere."]


def test_only_whoever_is_nearest_says_what_to_do():
    with pytest.raises(torch.OutOfMemoryError) as raised, explained(f"{BEGINNING}far."), explained(f"{BEGINNING}near."):
        error = torch.OutOfMemoryError("injected")
        error.add_note("The head is large.")  # somebody who does not know how the model is streamed
        raise error
    assert raised.value.__notes__ == ["The head is large.", f"{BEGINNING}near."]


def test_other_errors_get_no_note():
    with pytest.raises(RuntimeError, match="else") as raised, explained(f"{BEGINNING}somewhere."):
        raise RuntimeError("else")
    assert not hasattr(raised.value, "__notes__")
