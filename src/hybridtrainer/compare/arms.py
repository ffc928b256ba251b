"""The arms of a comparison: which configurations are trained against each other, and what they must share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridtrainer.config import MAX_RUN_NAME, RunConfig, is_run_name
from hybridtrainer.config_conflicts import without_jumps
from hybridtrainer.errors import ConfigError, Problem

EVALUATIONS = 50  # in a run: enough to see when a target was reached

# An arm may differ from another in anything but what the metric is measured on.
SHARED = ("data", "model.context", "train.batch_size", "train.eval_batches")


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: Names its folders too.
        role: A baseline is what challengers are judged against.
        config: The run, but for its seed and folder.
        variant: What tuning has made of it; names its folders too.
        asked_interval: Steps between evaluations as configured; a comparison may evaluate more often.
    """

    name: str
    role: Literal["baseline", "challenger"]
    config: RunConfig
    variant: str = ""
    asked_interval: int = 0

    def settings(self) -> dict[str, Any]:
        """The configuration as plain values, without what differs from trial to trial."""
        return self.config.model_dump(mode="json", exclude={"seed", "run"})


def plain_and_hybrid(config: RunConfig) -> list[Arm]:
    """Plain training, plain training read out from averaged weights, and what `config` says.

    Raises:
        ConfigError: if the configuration is plain training itself.
    """
    if config.predict == "off":
        problem = Problem("predict", 'is "off", so hybrid would be plain.', "Remove it, or name two configurations.")
        raise ConfigError("The comparison", [problem])
    asked = config.train.eval_interval
    config = evaluated_alike([config])[0]
    unread = {key: RunConfig.model_fields[key].default for key in ("depth", "dynamics", "horizon", "sample_weights")}
    off = {"predict": "off", "memory": without_jumps(config.memory)} | unread
    last = {"readout": "last", "readout_decay": RunConfig.model_fields["readout_decay"].default}
    return [
        Arm("plain", "baseline", config.model_copy(update=off | last), asked_interval=asked),
        Arm(
            "plain-averaged", "baseline", config.model_copy(update=off | {"readout": "averaged"}), asked_interval=asked
        ),
        Arm("hybrid", "challenger", config, asked_interval=asked),
    ]


def named_arms(configs: Sequence[tuple[str, RunConfig]]) -> list[Arm]:
    """Any configurations; the first is the baseline.

    Raises:
        ConfigError: if there are fewer than two, names repeat or cannot name a folder, or data differ.
    """
    names = [name for name, _ in configs]
    problems = [Problem(name, "cannot be the name of an arm.") for name in names if not _names_folder(name)]
    problems += [Problem(name, "names two arms.") for name in sorted(set(names)) if names.count(name) > 1]
    if len(configs) < 2:
        problems.append(Problem("arms", "are fewer than two."))
    for name, config in configs[1:]:
        for key in SHARED:
            problems += [
                Problem(where, f"is {ours} in {name} and {first} in {names[0]}: they must be equal.")
                for where, first, ours in differences(_value(configs[0][1], key), _value(config, key), key)
            ]
    if problems:
        raise ConfigError("The comparison", problems)
    alike = evaluated_alike([config for _, config in configs])
    return [
        Arm(name, "challenger" if index else "baseline", config, asked_interval=configs[index][1].train.eval_interval)
        for index, (name, config) in enumerate(zip(names, alike, strict=True))
    ]


def evaluated_alike(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The same runs with at least `EVALUATIONS` evaluations each, all at the same interval.

    An arm that is evaluated more often would be seen to reach a target sooner.
    """
    interval = max(1, min(min(c.train.eval_interval, c.train.steps // EVALUATIONS) for c in configs))
    return [
        config.model_copy(update={"train": config.train.model_copy(update={"eval_interval": interval}), "keep_last": 1})
        for config in configs
    ]


def differences(one: Any, other: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Every key at which two trees of plain values differ, with both values; None for a key that is not there.

    >>> differences({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}})
    [('b.c', 2, 4)]
    """
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [(where, one, other)]
    keys = dict.fromkeys((*one, *other))
    return [
        found
        for key in keys
        for found in differences(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
    ]


def _names_folder(name: str) -> bool:
    return is_run_name(name) and len(name) <= MAX_RUN_NAME // 2


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value.model_dump() if hasattr(value, "model_dump") else value
