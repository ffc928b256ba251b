"""The order of options: precision for memory only, resident unless streaming is much faster, the plainest of equals."""

from __future__ import annotations

from typing import Any

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.ranking import Option, ranked


def option(mode: str, seconds: float | None = None, compute: float | None = None, **settings: Any) -> Option:
    memory = MemoryConfig.model_validate({"mode": mode, **settings})
    return Option(memory, Estimate({"weights": 1}, {}, 1, seconds, seconds if compute is None else compute))


def order(*options: Option) -> list[tuple[str, int]]:
    return [(each.memory.mode, each.memory.checkpoint_every or each.memory.split) for each in ranked(options)]


def test_modes_come_most_exact_first_however_fast():
    found = ranked([option("factored", 1.0), option("sr4", 2.0), option("sr8", 3.0), option("split8", 4.0)])
    assert [each.memory.mode for each in found] == ["split8", "sr8", "sr4", "factored"]


def test_a_model_that_fits_whole_stays_however_fast_others_are():
    assert order(option("split8", 0.1), option("resident", 1.0))[0][0] == "resident"


def test_blocks_are_computed_again_where_they_are_unless_streaming_is_much_faster():
    again = option("resident", 1.0, checkpoint_every=2)
    assert order(option("split8", 0.9), again)[0] == ("resident", 2)
    assert order(option("split8", 0.6), again)[0] == ("split8", 1)
    assert order(option("sr8", 0.1), again)[0] == ("resident", 2)


def test_moments_are_rounded_only_where_that_is_much_faster_or_nothing_else_fits():
    exact, coded = option("resident", 1.0, checkpoint_every=2), option("resident", 0.9, optimizer_bits=8)
    assert ranked([coded, exact])[0] is exact
    assert ranked([option("resident", 0.6, optimizer_bits=8), exact])[0].memory.optimizer_bits == 8
    assert ranked([coded, option("split8", 1.0)])[0] is coded
    assert ranked([option("resident", 0.1, optimizer_bits=4), coded, option("sr8", 0.1)])[0] is coded
    assert ranked([option("resident", 0.1, optimizer_bits=4), option("sr8", 0.5)])[0].memory.mode == "sr8"


def test_without_seconds_resident_comes_first_and_keeps_all_where_it_fits():
    found = order(option("split8"), option("resident", checkpoint_every=2), option("resident"))
    assert found == [("resident", 1), ("resident", 2), ("split8", 1)]


def test_of_those_about_as_fast_the_plainest_is_taken():
    assert order(option("split8", 1.0, split=4), option("split8", 1.005))[0] == ("split8", 1)
    assert order(option("split8", 1.0, split=4), option("split8", 1.2))[0] == ("split8", 4)


def test_activations_of_a_resident_model_leave_only_where_nothing_else_fits():
    away, again = option("resident", 0.5, offload_activations=True), option("resident", 1.0, checkpoint_every=1)
    assert ranked([away, again])[0] is again
    assert ranked([away, option("split8", 0.9)])[0].memory.mode == "split8"
    assert ranked([away, option("sr8", 0.1)])[0] is away


def test_what_is_cheap_is_computed_again_before_whole_blocks_where_that_is_known_to_be_faster():
    cheap: dict[str, Any] = {"checkpoint_every": 1, "checkpoint_keep": "products"}

    def kept(*seconds: float | None) -> str:
        products = Option(MemoryConfig.model_validate(cheap), Estimate({"weights": 2}, {}, 1, seconds[0], seconds[0]))
        return ranked([option("resident", seconds[1], checkpoint_every=1), products])[0].memory.checkpoint_keep

    assert kept(1.0, 1.1) == "products"
    assert kept(1.1, 1.0) == kept(1.0, 1.001) == kept(None, None) == "inputs"
    assert ranked([option("split8"), option("resident", optimizer_bits=8, **cheap)])[0].memory.mode == "resident"


def test_one_slot_is_a_last_resort():
    one, three = option("split8", 1.0, max_gpu_blocks=1), option("split8", 1.5, offload_activations=True)
    assert ranked([one, three])[0] is three


def test_one_of_each_mode_and_place_of_the_activations_comes_before_all_others():
    found = ranked(
        [option("split8", 1.0 + part, split=1 + part, offload_activations=part > 1) for part in range(4)]
        + [option("resident", 2.0, checkpoint_every=every) for every in (0, 1, 2)]
    )
    kinds = [(each.memory.mode, each.memory.offload_activations or each.memory.checkpoint_every > 0) for each in found]
    assert len(set(kinds[:4])) == 4
    assert len(found) == 7


def test_of_one_mode_alone_the_others_follow():
    assert order(option("factored", 1.2, split=2), option("factored", 1.0)) == [("factored", 1), ("factored", 2)]
