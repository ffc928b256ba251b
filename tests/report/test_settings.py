"""Settings as rows, and the small files of a run folder."""

from __future__ import annotations

from hybridtrainer.report.settings import differing, flat, read_json, read_toml, side_by_side


def test_a_missing_file_is_nothing_and_a_damaged_one_is_said(tmp_path):
    assert read_toml(tmp_path / "config.toml") == ({}, "")
    (tmp_path / "config.toml").write_text("a = [")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "config.toml is damaged" in read_toml(tmp_path / "config.toml")[1]
    for name in ("list.json", "bytes.json", "deep.json"):
        content, fault = read_json(tmp_path / name)
        assert content == {} and f"{name} is damaged" in fault
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read" in read_json(tmp_path / "folder.json")[1]


def test_nested_settings_become_names_with_dots():
    assert flat({"a": {"b": {"c": 1}, "d": None}, "e": "x", "f": {}}) == {
        "a.b.c": "1", "a.d": "null", "e": "x", "f": "{}",
    }  # fmt: skip


def test_only_what_differs_is_listed_and_a_missing_name_differs():
    columns = [{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]
    assert differing(columns) == {"b": ["2", "3"], "c": [None, "4"]}
    assert list(side_by_side(columns)) == ["a", "b", "c"]
