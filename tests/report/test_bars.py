"""Stacked bars and forest charts."""

from __future__ import annotations

from xml.etree import ElementTree

from hybridtrainer.report.bars import Part, Words, forest, stacked


def test_each_part_has_its_share_of_the_width_and_says_its_size():
    parts = [Part("warmup", 1.0, "phase-warmup", "1 s"), Part("full", 3.0, "phase-full", "3 s (75%)")]
    root = ElementTree.fromstring(stacked("k", "t", "time (s)", [("a", parts, "4 s")]))
    bars = [bar for bar in root.iter("rect") if "bar" in bar.get("class", "")]
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert abs(widths[1] / widths[0] - 3) < 0.01
    assert [bar[0].text for bar in bars] == ["a: warmup 1 s", "a: full 3 s (75%)"]
    assert "3 s (75%)" in {text.text for text in root.iter("text")}


def test_a_bar_of_nothing_is_still_a_chart():
    nothing: list[tuple[str, list[Part], str]] = [("a", [], "0 s"), ("b", [], "0 s")]
    for rows in ([], nothing):
        root = ElementTree.fromstring(stacked("k", "t", "time", rows))
        texts = {text.text for text in root.iter("text")}
        assert {"time", *(label for label, _, _ in rows)} <= texts
        assert not [bar for bar in root.iter("rect") if "bar" in bar.get("class", "")]


def test_a_forest_has_a_mark_for_each_value_and_says_where_there_is_none():
    svg = forest("k", "t", "times as fast", [("seed 0", 1.2), ("seed 1", None)], (1.2, 1.1, 1.3), "s0")
    root = ElementTree.fromstring(svg)
    titles = {title.text for title in root.iter("title")}
    assert {"seed 0: 1.200", "mean 1.200, 95% interval 1.100 to 1.300", "no difference"} <= titles
    assert "no value" in {text.text for text in root.iter("text")}


def test_a_forest_without_interval_or_mean_says_so():
    few = forest("k", "t", "x", [("seed 0", 1.2)], (1.2, None, None), "s0")
    assert "whisker" not in few and "diamond" in few
    none = forest("k", "t", "x", [("seed 0", None)], (None, None, None), "s0")
    assert "no value for any seed" in none


def test_a_forest_of_ratios_says_what_its_last_row_and_its_gaps_are():
    words = Words("average run", "target not reached", "never")
    svg = forest("k", "t", "x", [("seed 0", 1.2), ("seed 1", None)], (1.2, 0.0, 1.3), "s0", 1.0, words)
    root = ElementTree.fromstring(svg)
    assert {"average run", "target not reached"} <= {text.text for text in root.iter("text")}
    assert "average run 1.200, 95% interval never to 1.300" in {title.text for title in root.iter("title")}
