"""When a short model grows by itself: late in short runs, by the published rule in runs of very many tokens."""

from __future__ import annotations

import pytest

from hybridtrainer.predict.growth import LATEST, growth_step, published_tokens


@pytest.mark.parametrize(
    ("parameters", "tokens", "billions"), [(7e9, 2e12, 11.11), (8e9, 15e12, 6.58), (13e9, 2e12, 15.84)]
)
def test_the_rule_grows_models_of_billions_after_some_billion_tokens(parameters, tokens, billions):
    assert published_tokens(int(parameters), tokens) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("tokens", [0, 1, 4096])
def test_a_short_run_grows_at_a_share_of_it(tokens):
    assert growth_step(1000, 124_000_000, tokens) == LATEST * 1000
    assert growth_step(3, 10, tokens) == 2  # nothing is too small


def test_the_more_tokens_a_run_has_for_each_parameter_the_sooner_it_grows():
    moments = [growth_step(steps, 124_000_000, 1 << 19) / steps for steps in (1_000, 40_000, 100_000, 1_000_000)]
    assert moments[0] == LATEST
    assert moments == sorted(moments, reverse=True)
    assert moments[-1] < 0.02
