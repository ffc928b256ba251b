"""Markup in names, reasons, errors and settings stays text: fault 23."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.report.making import make_comparison, make_run, records, result, write_log

from hybridtrainer.report import write_report
from hybridtrainer.report.values import plain

PAYLOADS = [
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>", "</svg><svg/onload=alert(1)>", "<svg><script>alert(1)</script></svg>",
    "</title><script>alert(1)</script>", "</style><script>alert(1)</script>", "</desc></svg><img src=x>",
    "\"><img src=x onerror=alert(1)>", "'><img src=x onerror=alert(1)>", "` onmouseover=alert(1) x=`",
    "\" onmouseover=\"alert(1)", "' onfocus='alert(1)' autofocus='", "\" style=\"background:url(//evil.example)",
    "<iframe src=//evil.example>", "<object data=//evil.example>", "<embed src=//evil.example>",
    "<link rel=stylesheet href=//evil.example/a.css>", "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>", "<form action=//evil.example><input type=submit>",
    "<a href=javascript:alert(1)>x</a>", "javascript:alert(1)", "JaVaScRiPt:alert(1)",
    "data:text/html,<script>1</script>",
    "<!-- comment", "-->", "<![CDATA[ <b>", "]]>", "<?php echo 1 ?>", "<?xml version='1.0'?>", "<!DOCTYPE x>",
    "{{ 7 * 7 }}", "{% for x in y %}", "{{ ''.__class__.__mro__ }}", "{# comment #}", "${7*7}", "#{7*7}",
    "}</style><b>", "body{display:none}", "@import url(//evil.example);", "expression(alert(1))", "\\3c script\\3e",
    "&lt;script&gt;", "&#60;b&#62;", "&amp;lt;", "&", "<", "<b", "<b/", "</", "<textarea>", "<plaintext>", "<noscript>",
    "<template>", "<math><mi xlink:href=//evil.example>", "<use href=//evil.example#x>", "<foreignObject><b>",
    "<animate onbegin=alert(1)>", "<set attributeName=href to=javascript:1>", "<details open ontoggle=alert(1)>",
    "\u202e<b>\u2066", "\uff1cscript\uff1e", "<\u200bscript>", "<scr\x00ipt>", "\ufeff<b>", "<b>\u2028", "%3Cscript%3E",
]  # fmt: skip


class Shape(HTMLParser):
    """The elements of a page with their attributes, texts left out."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.values: list[str] = []
        self.other: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "data", "xlink:href")]
        self.values += [value or "" for name, value in attrs if (tag, name) != ("meta", "content")]

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.other.append(data)

    def handle_decl(self, decl: str) -> None:
        self.other.append(decl)

    def unknown_decl(self, data: str) -> None:
        self.other.append(data)

    def handle_pi(self, data: str) -> None:
        self.other.append(data)


def run_with(root: Path, text: str, as_name: bool) -> Path:
    """A run whose every text is `text`, its folder's name too where the file system allows it."""
    name = text if as_name else "run"
    content: list[dict[str, Any]] = []
    for record in records(150):
        for key in ("reason", "forecaster", "text"):
            if key in record:
                record[key] = text
        if record["kind"] == "evaluation":
            record[text] = record.pop("accuracy")
        content.append(record)
    content += [{"v": 1, "kind": "error", "step": 150, "error": text}, {"v": 1, "kind": "end", "status": text}]
    content += [{"v": 1, "kind": "jump", "step": 140, "verdict": text, "reason": text, "probe_before": 1.0,
                 "probe_after": 2.0}]  # fmt: skip
    folder = write_log(root / name, content)
    (folder / "config.toml").write_text(f"{json.dumps(text)} = {json.dumps(text)}\n".replace("\\u0000", "0"))
    (folder / "environment.json").write_text(json.dumps({text: text, "list": [text]}))
    (folder / "statistics.json").write_text(json.dumps({"declined": {text: 1}, "worth_seconds": {text: 1.0}}))
    return folder


def result_with(text: str) -> dict[str, Any]:
    """A result whose every text is `text`."""
    content = result(
        seeds=2, name=text, headline=text, warnings=[text], metric={"name": text, "higher_is_better": True}
    )
    content["target"]["origin"] = text
    arms = list(content["arms"].values())
    content["arms"] = {text: arms[0], f"{text} 2": arms[1]}
    for arm in arms:
        arm["role"], arm["config"] = text, {text: {text: text}}
        for trial in arm["trials"]:
            trial |= {"folder": text, "status": text, "reason": text}
    settings = {text: text}
    candidate = {"settings": settings, "final": 1.0, "seconds_to_target": None, "status": text}
    content["tuning"] = {"budget": 1, "arms": {text: {"chosen": settings, "candidates": [candidate]}}}
    for versus in content["comparisons"]:
        versus |= {"arm": f"{text} 2", "baseline": text, "verdict": text, "sentence": text}
    content["environment"] = {text: text}
    return content


def can_be_a_name(text: str) -> bool:
    return "/" not in text and "\0" not in text and text not in (".", "..")


def page_with(root: Path, text: str) -> Shape:
    one = run_with(root, text, can_be_a_name(text))
    two = make_run(root / "two" / "second", 60)
    three = make_comparison(root / "cmp", result_with(text))
    return Shape(write_report([one, two, three], root / "report.html").read_text())


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    return page_with(tmp_path_factory.mktemp("harmless"), "harmless")


def test_there_are_enough_different_payloads():
    assert len(set(PAYLOADS)) >= 50


@pytest.mark.parametrize("payload", PAYLOADS)
def test_markup_adds_no_element_no_attribute_and_no_link(payload, tmp_path, harmless):
    shape = page_with(tmp_path, payload)
    assert shape.elements == harmless.elements
    assert shape.other == harmless.other == ["DOCTYPE html"]
    assert all(link.startswith("#part-") for link in shape.links)
    assert not any(mark in value for value in shape.values for mark in (":", "//", "<", "javascript"))
    assert shape.text.count(plain(payload)) > 20, "the text is not shown as it is"


def test_nobody_elses_texts_are_attributes(harmless):
    assert not any("harmless" in value for value in harmless.values)
