"""A chart on its own is a whole file: well-formed, with its own style, and nothing from anywhere."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

import pytest
from tests.report.making import make_run

from hybridtrainer.errors import RunFolderError
from hybridtrainer.report import draw_losses

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def folders(tmp_path):
    return [make_run(tmp_path / "plain & simple", 120), make_run(tmp_path / "hybrid", 120)]


def test_a_picture_of_runs_is_one_file_with_style_legend_and_lines(folders):
    root = ElementTree.fromstring(draw_losses(folders).svg)
    assert root.tag == f"{SVG}svg"
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words[:2] == ["plain & simple", "hybrid"]
    assert {"warmup", "full", "predict"} <= set(words)
    assert len(list(root.iter(f"{SVG}polyline"))) >= 2
    style = root.find(f"{SVG}style")
    assert style is not None and ".phase-predict" in (style.text or "")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", draw_losses(folders).svg)


def test_a_picture_is_over_time_or_over_steps(folders):
    assert "Loss over training time" in draw_losses(folders).svg
    assert "Loss over steps" in draw_losses([str(folders[0])], by_time=False).svg


def test_a_notebook_shows_it_as_an_image(folders):
    picture = draw_losses(folders)
    shown = picture._repr_html_()
    found = re.fullmatch(r'<img alt="chart" src="data:image/svg\+xml;base64,([\w+/=]+)" width="720">', shown)
    assert found is not None and base64.b64decode(found.group(1)).decode() == picture.svg
    assert repr(picture) == "Picture()"


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="nothing to draw"):
        draw_losses([])
    with pytest.raises(RunFolderError, match="log"):
        draw_losses([tmp_path])
