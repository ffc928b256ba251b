"""Configurations from files and the command line: what is read, and what is said about mistakes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from hybridtrainer.config import PRESETS, HybridTrainerConfig, RunConfig
from hybridtrainer.config_io import commented_toml, load_config, parse_config, to_toml, write_config
from hybridtrainer.errors import ConfigError, Problem, RunFolderError


def problems_of(source: Any, *overrides: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse_config(source) if isinstance(source, dict) else load_config(source, overrides)
    found = {problem.key: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return found


def written(folder: Path, text: str | bytes, name: str = "run.toml") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_no_file_and_no_override_give_the_defaults():
    assert load_config(None) == RunConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'seed = 7\n[optimizer]\nlr = 0.01\nbetas = [0.8, 0.9]\n[memory]\nprecision = "bf16"\n'),
        (
            "run.json",
            '{"seed": 7, "optimizer": {"lr": 0.01, "betas": [0.8, 0.9]}, "memory": {"precision": "bf16"}}',
        ),
    ],
)
def test_toml_and_json_say_the_same(tmp_path, name, text):
    expected = RunConfig.model_validate(
        {"seed": 7, "optimizer": {"lr": 0.01, "betas": (0.8, 0.9)}, "memory": {"precision": "bf16"}}
    )
    assert load_config(written(tmp_path, text, name)) == expected


def test_every_mistake_is_named_at_once_with_its_key():
    found = problems_of(
        {
            "warmup_step": 5,
            "full_steps": 0,
            "preset": "agressive",
            "memory": {"precision": "bf61"},
            "optimizer": {"lr": "fast", "beta": [0.9, 0.95], "betas": [0.9]},
            "data": {"source": "text"},
            "train": {"stepz": 3, "clip_norm": -1.0},
            "runn": {},
        }
    )
    assert set(found) == {
        "warmup_step", "full_steps", "preset", "memory.precision", "optimizer.lr", "optimizer.beta", "optimizer.betas",
        "data.path", "train.stepz", "train.clip_norm", "runn",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "key", "meant"),
    [
        ({"warmup_step": 5}, "warmup_step", "warmup_steps"),
        ({"train": {"stepz": 5}}, "train.stepz", "steps"),
        ({"optimiser": {}}, "optimiser", "optimizer"),
        ({"lr": 0.1}, "lr", "optimizer.lr"),
        ({"steps": 5}, "steps", "train.steps"),
        ({"train": {"lr": 0.1}}, "train.lr", "optimizer.lr"),
        ({"batchsize": 4}, "batchsize", "train.batch_size"),
        ({"memory": {"precison": "bf16"}}, "memory.precison", "precision"),
        ({"optimizer": {"name": "adanw"}}, "optimizer.name", "adamw"),
        ({"memory": {"precision": "fp23"}}, "memory.precision", "fp32"),
        ({"preset": "agressive"}, "preset", "aggressive"),
        ({"forecaster": "persistance"}, "forecaster", "persistence"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(source, key, meant):
    assert problems_of(source)[key].suggestion == f"Did you mean {meant}?"


def test_a_word_like_no_other_gets_no_suggestion():
    assert problems_of({"xyzzy": 1})["xyzzy"].suggestion is None


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ({"seed": "one"}, "seed", "is 'one', and should be a valid integer"),
        ({"seed": 1.5}, "seed", "is 1.5"),
        ({"seed": True}, "seed", "is True"),
        ({"train": {"batch_size": 0}}, "train.batch_size", "greater than or equal to 1"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name", "is 'lion', not one of sgd, adam, adamw, adafactor"),
        ({"optimizer": {"betas": [0.1, 0.2, 0.3]}}, "optimizer.betas", "wrong number of values"),
        ({"optimizer": {"betas": [0.1, "x"]}}, "optimizer.betas", "is 'x'"),
        ({"hooks": ["a", 2]}, "hooks", "is 2"),
        ({"predict": "on"}, "predict", "is 'on', not one of off, auto"),
        ({"predict": ["jump"]}, "predict", "jumps"),
        ({"train": 5}, "train", "is 5"),
        ({"train": {"clip_norm": "big"}}, "train.clip_norm", "is 'big'"),
        ({"seed": list(range(1000))}, "seed", "..."),
    ],
)
def test_a_wrong_value_is_shown_with_what_it_should_be(source, key, words):
    found = problems_of(source)
    assert set(found) == {key}
    assert words in found[key].message
    assert len(found[key].message) < 200


@pytest.mark.parametrize("preset", [["aggressive"], {"x": 1}, 3, None])
def test_a_preset_that_is_no_word_is_a_mistake_like_any_other(preset):
    assert set(problems_of({"preset": preset, "seed": -1})) == {"preset", "seed"}


def test_a_preset_gives_way_to_what_is_written_beside_it():
    config = parse_config({"preset": "aggressive", "max_predict_steps": 20})
    assert config.confidence_threshold == 0.55
    assert config.max_predict_steps == 20


def test_conflicts_show_beside_mistakes_elsewhere():
    found = problems_of({"seed": -1, "schedule": {"final_ratio": 0.5}})
    assert set(found) == {"seed", "schedule.final_ratio"}


def test_a_mistake_does_not_cause_a_second_complaint_about_the_same_key():
    # Taken out for being wrong, `data.path` must not then be missed.
    assert set(problems_of({"data": {"source": "text", "path": 5}})) == {"data.path"}


@pytest.mark.parametrize("unknown", ["e", "steps"])
def test_an_unknown_key_hides_no_conflict_that_happens_to_contain_its_letters(unknown):
    found = problems_of({unknown: 1, "schedule": {"name": "cosine"}, "train": {"steps": 10}})
    assert set(found) == {unknown, "schedule.warmup_steps"}


def test_the_given_settings_are_left_as_they_were():
    given_settings = {"preset": "aggressive", "train": {"steps": 3, "oops": 1}}
    kept = json.loads(json.dumps(given_settings))
    problems_of(given_settings)
    assert given_settings == kept


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("broken.toml", b"seed = = 1", "cannot be parsed"),
        ("twice.toml", b"seed = 1\nseed = 2", "cannot be parsed"),
        ("broken.json", b'{"seed": 1', "cannot be parsed"),
        ("empty.json", b"", "cannot be parsed"),
        ("list.json", b"[1, 2]", "must hold a table"),
        ("number.json", b"3", "must hold a table"),
        ("binary.toml", bytes(range(256)), "is not UTF-8 text"),
        ("binary.json", b"\x89PNG\r\n\x1a\n\0\0", "is not UTF-8 text"),
        ("latin.toml", 'name = "Zürich"'.encode("latin-1"), "is not UTF-8 text"),
        ("wide.toml", "seed = 1".encode("utf-16"), "is not UTF-8 text"),
        ("nul.toml", b"\0\0\0\0", "cannot be parsed"),
        ("digits.toml", b"seed = " + b"1" * 5000, "cannot be parsed"),
        ("digits.json", b'{"seed": ' + b"1" * 5000 + b"}", "cannot be parsed"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused_by_name(tmp_path, name, content, words):
    file = written(tmp_path, content, name)
    found = problems_of(file)
    assert set(found) == {"file"}
    assert words in found["file"].message
    with pytest.raises(ConfigError, match=name):
        load_config(file)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "No such file" in problems_of(tmp_path / "none.toml")["file"].message
    assert "directory" in problems_of(tmp_path)["file"].message


def test_an_empty_toml_file_is_the_defaults(tmp_path):
    assert load_config(written(tmp_path, "")) == RunConfig()


@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ('{"a": ', "}"), ('[{"a": ', "}]")], ids=["lists", "tables", "both"]
)
def test_deeply_nested_json_is_a_mistake_and_no_crash(tmp_path, opening, closing):
    # What the reader still takes may be too deep for what comes after it, so the depths near its limit are all tried.
    for depth in [1, 100, *range(300, 1001, 4), *range(950, 1001), 100_000]:
        text = '{"seed": ' + opening * depth + "1" + closing * depth + "}"
        assert set(problems_of(written(tmp_path, text, "deep.json"))) <= {"seed", "file"}, depth


@pytest.mark.parametrize("depth", [10, 100, 1000, 5000])
def test_deeply_nested_toml_is_a_mistake_and_no_crash(tmp_path, depth):
    assert set(problems_of(written(tmp_path, f"seed = {'[' * depth}{']' * depth}"))) <= {"seed", "file"}
    assert set(problems_of(written(tmp_path, ".".join(["a"] * depth) + " = 1"))) <= {"a", "file"}


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("seed=7", None, "seed", 7),
        ("seed = 7", None, "seed", 7),
        ("confidence_threshold=0.5", None, "confidence_threshold", 0.5),
        ("confidence_threshold=1", None, "confidence_threshold", 1.0),
        ("predict=off", None, "predict", "off"),
        ('predict=["jumps"]', None, "predict", ["jumps"]),
        ("optimizer.lr=1e-2", "optimizer", "lr", 1e-2),
        ("optimizer.name=sgd", "optimizer", "name", "sgd"),
        ('optimizer.name="sgd"', "optimizer", "name", "sgd"),
        ("optimizer.name = 'sgd'", "optimizer", "name", "sgd"),
        ("optimizer.betas=[0.5, 0.6]", "optimizer", "betas", (0.5, 0.6)),
        ("memory.precision=bf16", "memory", "precision", "bf16"),
        ("memory={precision='bf16'}", "memory", "precision", "bf16"),
        ("run.name=a-b_c.d", "run", "name", "a-b_c.d"),
        ("run.folder=/tmp/x y=z", "run", "folder", "/tmp/x y=z"),
        ('run.name="7"', "run", "name", "7"),
    ],
)
def test_overrides_set_values_of_every_type(override, section, key, value):
    config = load_config(None, [override])
    holder = config if section is None else getattr(config, section)
    assert getattr(holder, key) == value
    assert type(getattr(holder, key)) is type(value)


def test_overrides_win_over_the_file_and_the_last_over_the_first(tmp_path):
    file = written(tmp_path, "seed = 1\n[train]\nsteps = 5\nbatch_size = 2\n")
    config = load_config(file, ["train.steps=6", "seed=2", "seed=3"])
    assert (config.seed, config.train.steps, config.train.batch_size) == (3, 6, 2)
    assert load_config(None, ["preset=aggressive"]).confidence_threshold == 0.55


@pytest.mark.parametrize("override", ["", "seed", "=3", ".seed=3", "train.=3", "train..steps=3", "a.b", " . =1"])
def test_an_override_without_a_key_or_a_value_is_refused(override):
    assert "section.key=value" in problems_of(None, override)[override].message


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=", "seed"),
        ("seed=abc", "seed"),
        ("seed=1.5", "seed"),
        ("seed=nan", "seed"),
        ("optimizer.lr=inf", "optimizer.lr"),
        ("train.steps=true", "train.steps"),
        ("run.name=7", "run.name"),
        ("run.name=2024-01-01", "run.name"),
        ("optimizer.lr.x=1", "optimizer.lr"),
        ("optimzer.lr=1", "optimzer"),
        ("seed=" + "1" * 5000, "seed"),
        ("seed=" + "[" * 5000, "seed"),
        (".".join(["a"] * 2000) + "=1", "a"),
        ("preset=x", "preset"),
        ("preset.x=1", "preset"),
    ],
)
def test_a_wrong_override_is_named_by_its_key(override, key):
    assert set(problems_of(None, override)) == {key}


def test_an_override_cannot_carry_a_second_setting():
    assert set(problems_of(None, "seed=1\nwarmup_steps=2")) == {"seed"}


def test_an_override_into_a_value_says_so(tmp_path):
    file = written(tmp_path, "seed = 1\n")
    found = problems_of(file, "seed.x=2", "train.steps=0", "what")
    assert found["seed.x"].message == "seed is a value, not a section."
    assert set(found) == {"seed.x", "train.steps", "what"}


def choices(model: Any, name: str) -> Any:
    return st.sampled_from(get_args(model.model_fields[name].annotation))


def fractions(low: float, high: float, **options: Any) -> Any:
    return st.floats(low, high, allow_nan=False, **options)


positive = fractions(0, 1e300, exclude_min=True)


@st.composite
def run_configs(draw: Any) -> RunConfig:
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    some = {
        "model": {
            "name": choices(sections["model"], "name"),
            "context": st.integers(2, 10**6),
            "dropout": fractions(0, 1, exclude_max=True),
            "batch_norm": st.booleans(),
        },
        "data": {
            "path": st.none() | st.text(),
            "tokenizer": st.text(),
            "validation_share": fractions(0, 0.5, exclude_min=True, exclude_max=True),
        },
        "optimizer": {
            "name": choices(sections["optimizer"], "name"),
            "lr": positive,
            "betas": st.tuples(fractions(0, 0.999), fractions(0, 0.999)),
        },
        "train": {"steps": st.integers(1, 2**70), "clip_norm": positive},
        "run": {"folder": st.text(), "name": st.text()},
        "memory": {"precision": choices(sections["memory"], "precision")},
        "seed": st.integers(0, 2**63 - 1),
        "confidence_threshold": fractions(0, 1),
        "divergence_sigma": positive,
        "predict": st.sampled_from(
            ["off", "auto", [], ["jumps"], ["jumps", "jumps"], ["samples"], ["jumps", "samples"]]
        ),
        "hooks": st.lists(st.text()),
    }
    plain = {
        name: st.fixed_dictionaries({}, optional=part) if isinstance(part, dict) else part
        for name, part in some.items()
    }
    return RunConfig.model_validate(draw(st.fixed_dictionaries({}, optional=plain)))


@settings(deadline=None, max_examples=60)
@given(run_configs())
def test_writing_and_reading_toml_gives_an_equal_configuration(config):
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config


def test_memory_settings_that_are_left_to_be_planned_stay_left_out():
    config = parse_config({"memory": {"vram": "8GB", "split": 1}})
    again = parse_config(tomllib.loads(to_toml(config)))
    assert again == config
    assert again.memory.model_fields_set == {"mode", "vram", "split"}


def test_no_clipping_survives_writing_and_reading():
    config = parse_config({"train": {"clip_norm": None}})
    assert config.train.clip_norm is None
    assert parse_config(tomllib.loads(to_toml(config))) == config


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 10**9), positive, st.text(st.characters(exclude_characters="\0")), st.lists(st.text(), max_size=3)
)
def test_an_override_written_as_toml_sets_exactly_that_value(steps, lr, path, hooks):
    wanted = {"train.steps": steps, "optimizer.lr": lr, "run.folder": path, "hooks": hooks}
    overrides = [f"{key}={tomli_w.dumps({'v': value}, indent=0).partition('=')[2]}" for key, value in wanted.items()]
    config = load_config(None, overrides)
    assert (config.train.steps, config.optimizer.lr, config.run.folder, config.hooks) == (steps, lr, path, hooks)


def test_a_trainer_configuration_can_be_written_too():
    config = HybridTrainerConfig.aggressive(seed=3, predict=["jumps"])
    assert HybridTrainerConfig.model_validate(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_the_commented_file_is_the_defaults_of_its_preset(tmp_path, preset):
    text = commented_toml(preset)
    assert load_config(written(tmp_path, text)) == parse_config({"preset": preset})


def all_fields(model: type[BaseModel]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += all_fields(inner)
        else:
            found.append((name, field.description))
    return found


def test_the_commented_file_has_every_key_and_every_explanation():
    lines = commented_toml().splitlines()
    fields = all_fields(RunConfig)
    assert len(fields) > 40
    for name, description in fields:
        assert any(line.startswith((f"{name} =", f"# {name} =")) for line in lines), name
        assert description is None or f"# {description}" in lines


def test_a_commented_file_of_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="preset"):
        commented_toml("reckless")


def test_a_new_file_takes_no_other_ones_place_unless_asked(tmp_path):
    path = tmp_path / "new.toml"
    assert f"hybridtrainer train {path}" in write_config(path, "one")
    with pytest.raises(RunFolderError, match=r"is there already\. Use --force"):
        write_config(path, "two")
    assert path.read_text() == "one"
    write_config(path, "two", force=True)
    assert path.read_text() == "two"
    for wrong in (tmp_path, tmp_path / "none" / "new.toml"):
        with pytest.raises(RunFolderError, match="cannot be written"):
            write_config(wrong, "three", force=True)
