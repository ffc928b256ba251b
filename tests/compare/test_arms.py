"""Which arms are compared, and what they must share."""

from __future__ import annotations

import pytest
from tests.compare.support import config

from hybridtrainer.compare.arms import EVALUATIONS, differences, evaluated_alike, named_arms, plain_and_hybrid
from hybridtrainer.config_conflicts import conflicts
from hybridtrainer.errors import ConfigError


def test_a_configuration_is_compared_with_plain_training_and_with_its_averaged_read_out():
    arms = plain_and_hybrid(config(predict="auto"))
    assert [(arm.name, arm.role, arm.config.predict, arm.config.readout) for arm in arms] == [
        ("plain", "baseline", "off", "last"),
        ("plain-averaged", "baseline", "off", "averaged"),
        ("hybrid", "challenger", "auto", "auto"),
    ]


def test_plain_arms_have_no_settings_that_only_jumps_read():
    memory = {"predict_int8": True, "checkpoint_every": 2, "checkpoint_keep": "by_phase"}
    *plain, hybrid = plain_and_hybrid(config(predict="auto", model={"name": "nano"}, data={}, memory=memory))
    assert [conflicts(arm.config) for arm in (*plain, hybrid)] == [[], [], []]
    assert hybrid.config.memory.predict_int8 and hybrid.config.memory.checkpoint_keep == "by_phase"


def test_plain_arms_do_not_have_what_only_a_growing_model_reads():
    growing = {"model": {"name": "nano"}, "data": {}, "depth": {"share": 0.5}, "dynamics": "mlp", "horizon": "linucb"}
    *plain, hybrid = plain_and_hybrid(config(predict=["depth", "jumps"], **growing))
    assert not any(conflicts(arm.config) for arm in (*plain, hybrid))
    assert hybrid.config.depth.share == 0.5


def test_plain_arms_do_not_have_what_only_samples_that_are_left_out_read():
    *plain, hybrid = plain_and_hybrid(config(predict=["samples"], sample_weights=True))
    assert not any(conflicts(arm.config) for arm in (*plain, hybrid))
    assert hybrid.config.sample_weights


def test_an_averaged_hybrid_meets_a_plain_arm_that_is_not():
    arms = plain_and_hybrid(config(predict="auto", readout="averaged", readout_decay=0.9))
    assert [(arm.config.readout, arm.config.readout_decay) for arm in arms] == [
        ("last", 0.99),
        ("averaged", 0.9),
        ("averaged", 0.9),
    ]


def test_plain_training_cannot_be_compared_with_itself():
    with pytest.raises(ConfigError, match="hybrid would be plain"):
        plain_and_hybrid(config())


def test_of_several_configurations_the_first_is_the_baseline():
    arms = named_arms([("a", config()), ("b", config(predict="auto")), ("c", config(seed=3))])
    assert [(arm.name, arm.role) for arm in arms] == [("a", "baseline"), ("b", "challenger"), ("c", "challenger")]
    assert arms[0].settings() == arms[2].settings()  # seeds are the comparison's


def test_arms_with_different_data_are_refused_with_every_difference():
    other = config(
        data={"source": "digits", "validation_share": 0.1},
        train={"steps": 60, "batch_size": 8, "eval_interval": 2, "eval_batches": 2},
    )
    with pytest.raises(ConfigError) as refused:
        named_arms([("a", config()), ("b", other)])
    assert [problem.key for problem in refused.value.problems] == ["data.validation_share", "train.batch_size"]
    assert "data.validation_share: is 0.1 in b and 0.2 in a: they must be equal." in str(refused.value)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "../b"), ("a",), ("a", "x" * 80)])
def test_names_that_cannot_be_used_are_refused(names):
    with pytest.raises(ConfigError):
        named_arms([(name, config()) for name in names])


def test_a_run_is_evaluated_often_enough_to_see_a_target():
    slow = config(train={"steps": 1000, "eval_interval": 500, "batch_size": 16})
    assert evaluated_alike([slow])[0].train.eval_interval == 1000 // EVALUATIONS
    assert evaluated_alike([config(train={"steps": 3})])[0].train.eval_interval == 1


def test_arms_know_the_interval_that_was_asked_for():
    train = {"steps": 1000, "eval_interval": 500, "batch_size": 16, "eval_batches": 2}
    slow, quick = config(predict="auto", train=train), config(train=train | {"eval_interval": 100})
    assert [arm.asked_interval for arm in plain_and_hybrid(slow)] == [500] * 3
    assert [arm.asked_interval for arm in named_arms([("a", slow), ("b", quick)])] == [500, 100]


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, [("a.c", 2, 3)]),
        ({"a": {"b": 1}}, {}, [("a", {"b": 1}, None)]),
        ({"a": 1}, {"a": 2, "b": {"c": 1}}, [("a", 1, 2), ("b", None, {"c": 1})]),
    ],
)
def test_differences_are_named_by_their_key(one, other, found):
    assert differences(one, other, "") == found


def test_all_arms_are_evaluated_alike():
    """Or the one that is evaluated more often would be seen to reach the target sooner."""
    short = config(train={"steps": 200, "eval_interval": 100, "batch_size": 16, "eval_batches": 2})
    long = config(train={"steps": 1000, "eval_interval": 500, "batch_size": 16, "eval_batches": 2})
    assert {arm.config.train.eval_interval for arm in named_arms([("a", long), ("b", short)])} == {4}
    assert len({arm.config.train.eval_interval for arm in plain_and_hybrid(config(predict="auto"))}) == 1
