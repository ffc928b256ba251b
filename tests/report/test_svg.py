"""SVG elements as safe markup."""

from __future__ import annotations

from itertools import pairwise

from hybridtrainer.report.svg import colour, dash, marker, tag, title


def test_texts_and_attributes_are_escaped():
    element = tag("text", '<b>&"', class_='"><script>', x=1.0)
    assert str(element) == '<text class="&#34;&gt;&lt;script&gt;" x="1">&lt;b&gt;&amp;&#34;</text>'
    assert "<script" not in str(title("</title><script>"))


def test_elements_nest_without_escaping_each_other():
    assert str(tag("g", tag("line", x1=0.5, x2=None), class_="a")) == '<g class="a"><line x1="0.5"/></g>'


def test_no_two_of_the_first_28_series_look_alike_and_neighbours_differ_in_dashes():
    looks = [(colour(index), dash(index)) for index in range(28)]
    assert len(set(looks)) == 28
    assert all(one[1] != other[1] for one, other in pairwise(looks[:7]))


def test_every_shape_of_a_marker_says_its_value():
    for shape in ("dot", "square", "triangle", "diamond", "cross"):
        assert "<title>here: 5</title>" in str(marker(shape, 1, 2, 4, "here: 5", "s0"))
