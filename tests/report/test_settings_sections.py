"""Settings on the page."""

from __future__ import annotations

from hybridtrainer.report.settings_sections import settings_section


def test_what_differs_is_in_sight_and_everything_is_on_demand():
    section = settings_section({"a": {"lr": "1", "seed": "0"}, "b": {"lr": "2", "seed": "0"}})
    assert [list(row) for row in section.tables[0].rows] == [["lr", "1", "2"]]
    assert len(section.folded[0].rows) == 2


def test_equal_settings_and_missing_ones_are_said():
    assert "the same" in settings_section({"a": {"lr": "1"}, "b": {"lr": "1"}}).texts[0]
    missing = settings_section({"a": {"lr": "1"}, "b": {}})
    assert missing.texts == ["Not recorded for b."] and missing.folded[0].columns == ["setting", "value"]
    assert settings_section({"a": {}}).folded == ()
