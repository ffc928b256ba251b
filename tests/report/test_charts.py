"""Line charts."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hybridtrainer.report.charts import Band, Chart, Interval, Mark, Series, draw

EVERYTHING = Chart(
    "key", "A chart", "step", "loss", "step",
    series=[Series("a", [(0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 2.0)], 0)],
    marks=[Mark(1.0, 2.0, "here: 2", "dot", "s0")],
    intervals=[Interval("90%", [(0.0, 1.0, 2.0), (3.0, 1.0, 2.0)], "s1")],
    bands=[Band(0.0, 3.0, "phase-full")], strips=[(0, [Band(0.0, 1.0, "phase-full"), Band(1.0, 3.0, "phase-predict")])],
    rules=[(1.5, "target 1.5")], links=[(2.0, 1.0, 2.0, "kept")],
)  # fmt: skip


def test_a_chart_is_sound_named_and_described():
    svg, note = draw(EVERYTHING)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-labelledby") == "key-title key-desc" and root.get("viewBox")
    assert [child.get("id") for child in root[:2]] == ["key-title", "key-desc"]
    assert note == ""
    texts = {element.text for element in root.iter("text")}
    assert {"loss", "step", "0", "3"} <= texts


def test_a_gap_breaks_the_line():
    root = ElementTree.fromstring(draw(EVERYTHING)[0])
    assert [line.get("points") for line in root.iter("polyline")] == ["0,1 0,1", "2,3 3,2"]


def test_every_line_mark_and_rule_has_a_name_without_script():
    root = ElementTree.fromstring(draw(EVERYTHING)[0])
    assert {"a", "here: 2", "90%", "target 1.5", "full", "predict"} <= {title.text for title in root.iter("title")}


def test_points_are_values_of_the_data_and_the_transform_puts_them_in_the_plot():
    root = ElementTree.fromstring(draw(EVERYTHING)[0])
    plot = next(group for group in root.iter("g") if group.get("class") == "plot")
    numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", plot.get("transform", ""))]
    assert 0 <= numbers[0] * 3.0 + numbers[4] <= 560
    assert 0 <= numbers[3] * 3.0 + numbers[5] <= 250


def test_outliers_are_cut_off_and_said():
    points = [(float(x), 1.0 + x % 7 / 10) for x in range(200)]
    points[50] = (50.0, 1e6)
    chart = Chart("k", "t", "x", "y", "step", series=[Series("a", points, 0)])
    assert draw(chart)[1] == "1 value far outside the others is cut off at the edge."


def test_a_few_marks_beside_a_long_line_are_all_in_sight():
    line = [(float(x), 1.0 + x % 7 / 1000) for x in range(2000)]
    marks = [Mark(x * 100.0, 2.0 + x, "m", "dot", "s0") for x in range(8)]
    assert (
        draw(Chart("k", "t", "x", "y", "step", series=[Series("a", line, 0)], marks=marks))[0].count("<title>m<") == 8
    )


def test_a_chart_of_nothing_is_still_a_chart():
    for series in ((), [Series("a", [], 0)], [Series("a", [(0.0, None)], 0)], [Series("a", [(0.0, 0.0)], 0)]):
        root = ElementTree.fromstring(draw(Chart("k", "t", "x", "y", "step", series=series))[0])
        assert {"x", "y"} <= {text.text for text in root.iter("text")}


def test_a_rule_widens_the_axis_no_further_than_to_itself():
    marks = [Mark(float(x), -0.01 * x, "m", "dot", "s0") for x in range(1, 4)]
    svg, _ = draw(Chart("k", "t", "x", "y", "step", marks=marks, rules=[(0.0, "no change")], zero=True))
    labels = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert "0.000" in labels and "-0.5" not in labels and "0.4" not in labels
