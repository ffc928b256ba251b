"""How every verb answers: text or JSON, and errors as a message and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from hybridtrainer.cli_answer import reported
from hybridtrainer.errors import ConfigError, DataError, ModelError, Problem


def test_a_result_is_printed_for_people(capsys):
    with reported(False) as answer:
        answer({"steps": 3}, "three steps")
    assert capsys.readouterr() == ("three steps\n", "")


def test_a_result_is_one_json_object(capsys):
    with reported(True) as answer:
        answer({"steps": 3, "run": Path("runs/a")}, "three steps")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"steps": 3, "run": "runs/a"}
    assert err == ""


@pytest.mark.parametrize("kind", [ModelError, DataError])
def test_an_error_of_ours_is_a_message_and_its_exit_code(capsys, kind):
    with pytest.raises(typer.Exit) as ended, reported(False):
        error = kind("It is broken.", "Mend it.")
        error.add_note("It was old.")
        raise error
    assert ended.value.exit_code == kind.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: It is broken.") and "Mend it." in err
    assert "       It was old." in err


def test_an_error_of_ours_is_one_json_object(capsys):
    with pytest.raises(typer.Exit) as ended, reported(True):
        raise ModelError("It is broken.", "Mend it.")
    assert ended.value.exit_code == ModelError.exit_code
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"type": "ModelError", "what": "It is broken.", "remedy": "Mend it."}}
    assert err == ""


def test_every_problem_of_a_configuration_is_in_the_json(capsys):
    problems = [Problem(**dict.fromkeys(Problem._fields, word)) for word in ("one", "two")]
    with pytest.raises(typer.Exit), reported(True):
        raise ConfigError("a file", problems)
    content = json.loads(capsys.readouterr().out)["error"]
    assert content["problems"] == [dict.fromkeys(Problem._fields, word) for word in ("one", "two")]


def test_other_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError), reported(True):
        raise ZeroDivisionError
