"""Reports as a real browser sees them: no complaint, no request, values on hover, and markup that stays text."""

from __future__ import annotations

import pytest
from tests.report.browsing import Browser, find_browser
from tests.report.making import make_comparison, make_run
from tests.report.test_markup import PAYLOADS, can_be_a_name, result_with, run_with

from hybridtrainer.report import write_report

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")

READOUT = "[...document.querySelectorAll('output')].filter(o => !o.hidden).map(o => o.textContent).join()"
MIDDLE = "(() => { const c = document.querySelectorAll('svg.chart')[%d]; c.scrollIntoView({block: 'center'});" \
    " const b = c.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(params=["run", "comparison", "several"])
def page(request, tmp_path):
    run = make_run(tmp_path / "run", 300)
    if request.param == "run":
        return write_report([run])
    comparison = make_comparison(tmp_path / "cmp")
    if request.param == "comparison":
        return write_report([comparison])
    return write_report([run, make_run(tmp_path / "other", 200, seed=1), comparison], tmp_path / "report.html")


def test_a_report_loads_without_complaint_and_asks_for_nothing(browser, page):
    browser.open(page)
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.ask("performance.getEntriesByType('resource').length") == 0
    assert browser.ask("getComputedStyle(document.querySelector('.verdict')).borderLeftStyle") == "solid"


def test_pointer_and_keyboard_show_values_in_every_chart(browser, page):
    browser.open(page)
    charts = browser.ask("document.querySelectorAll('svg.chart').length")
    assert charts >= 4
    for at in range(charts):
        x, y = browser.ask(MIDDLE % at)
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert any(char.isdigit() for char in browser.ask(READOUT)), f"chart {at} shows nothing"
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.ask(READOUT) == ""
    browser.ask("document.querySelector('svg.chart').focus()")
    seen = set()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        seen.add(browser.ask(READOUT))
    assert len(seen) >= 2 and all(any(char.isdigit() for char in text) for text in seen)
    assert browser.complaints() == []


def test_what_is_shown_on_hover_is_a_value_of_the_run(browser, tmp_path):
    browser.open(write_report([make_run(tmp_path / "mine", 300)]))
    x, y = browser.ask(MIDDLE % 1)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    name, _, rest = browser.ask(READOUT).partition(": ")
    value, _, place = rest.partition(" at step ")
    assert name.startswith("mine") and 1.5 < float(value) < 5.5 and 50 < float(place) < 250


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(browser, page, scheme):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(page)
    colours = browser.ask(
        "['color', 'backgroundColor'].map(n => getComputedStyle(document.body)[n].match(/\\d+/g).map(Number))"
    )
    ink, paper = (sum(colour[:3]) for colour in colours)
    assert (ink < paper) == (scheme == "light") and abs(ink - paper) > 450


def test_a_phone_needs_no_sideways_scrolling(browser, page):
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    browser.open(page)
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    sizes = browser.ask(
        "[...document.querySelectorAll('svg.chart text:not(.inside)')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(sizes) > 10  # readable without zooming
    cut_off = browser.ask(
        "[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth && "
        "s.querySelectorAll('th').length > 2).map(s => getComputedStyle(s.previousElementSibling).display)"
    )
    assert cut_off and set(cut_off) == {"block"}  # each says that it scrolls
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_markup_stays_text_for_a_real_parser(browser, tmp_path):
    def elements(text, folder):
        run = run_with(folder, text, can_be_a_name(text))
        path = write_report([run, make_comparison(folder / "cmp", result_with(text))], folder / "report.html")
        browser.open(path)
        assert browser.complaints() == [] and browser.requests() == [path.resolve().as_uri()]
        return browser.ask(
            "[...document.querySelectorAll('*')].map(e => e.tagName + [...e.attributes].map(a => a.name)).join()"
        )

    harmless = elements("harmless", tmp_path / "harmless")
    for at, payload in enumerate(PAYLOADS[::4]):
        assert elements(payload, tmp_path / str(at)) == harmless, payload
