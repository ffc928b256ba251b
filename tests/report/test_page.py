"""The report as a file: what is refused, what is overwritten, how large it is, and that it needs nothing."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.report.making import make_comparison, make_run, records, write_log

import hybridtrainer
from hybridtrainer import disk
from hybridtrainer.errors import RunFolderError
from hybridtrainer.report import write_report
from hybridtrainer.report.page import LARGEST_BYTES


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "mine", 200)


def test_the_report_of_one_folder_is_in_it_and_that_of_several_is_here(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_report([run]) == run / "report.html"
    other = make_run(tmp_path / "runs" / "other", 100)
    assert write_report([run, other]) == Path("report.html")
    assert write_report([run, run]) == run / "report.html"
    page = Path("report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<h1>mine and other</h1>" in page


def test_runs_and_comparisons_can_be_in_one_report(run, tmp_path):
    page = write_report([run, make_comparison(tmp_path / "cmp")], tmp_path / "r.html").read_text()
    assert page.index("1.32 times as fast") < page.index("mine finished at step 200")
    assert page.index("Speed and quality") < page.index("Time by phase")


def test_the_policy_allows_the_style_and_the_script_by_hash_and_nothing_else(run):
    page = write_report([run]).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    for name, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy[1]
    assert policy[1].startswith("default-src 'none';") and "unsafe" not in policy[1]


def test_nothing_in_the_page_leads_out_of_it(run, tmp_path):
    page = write_report([run, make_comparison(tmp_path / "cmp")], tmp_path / "r.html").read_text()
    script_free = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "http:" not in script_free and "https:" not in script_free and "//" not in script_free
    assert not re.search(r"url\(|@import|\bstyle=|\bon\w+=|src=", script_free)
    # The one address in the script is the name of the SVG namespace, which nothing is loaded from.
    assert re.findall(r"https?://[^\"']*", page) == ["http://www.w3.org/2000/svg"]


def test_the_whole_way_from_the_command_line_imports_no_torch(run):
    script = "import sys\nfrom hybridtrainer.cli import app\napp(sys.argv[1:], standalone_mode=False)\n"
    script += "assert 'torch' not in sys.modules and 'hybridtrainer.trainer' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", script, "report", str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "kB" in done.stdout, done.stderr


def test_the_report_knows_no_trainer():
    folder = Path(hybridtrainer.__file__).parent / "report"
    observed = {
        f"observe.{name}" for name in ("runlog", "outlook", "snapshots", "profile_summary", "against_plan", "plan_file")
    }
    allowed = {"report", "errors", "records", "disk", "sizes", *observed}
    for path in folder.glob("*.py"):
        for line in path.read_text().splitlines():
            if found := re.match(r"\s*from hybridtrainer(?:\.([\w.]+))? import (.*)", line):
                module = found[1] or found[2].split(",")[-1].strip()
                assert any(module == name or module.startswith(f"{name}.") for name in allowed), f"{path.name}: {line}"
            assert "torch" not in line or not line.strip().startswith(("import", "from"))


@pytest.mark.slow
def test_a_run_of_a_hundred_thousand_steps_stays_small(tmp_path):
    path = write_report([make_run(tmp_path / "long", 100_000)])
    assert path.stat().st_size < 500_000


def test_twenty_runs_at_once_stay_under_a_megabyte(tmp_path):
    folders = [make_run(tmp_path / f"run-{n}", 30_000 if n == 0 else 1500, seed=n) for n in range(20)]
    path = write_report(folders, tmp_path / "r.html")
    page = path.read_text()
    assert path.stat().st_size < LARGEST_BYTES
    assert all(f"run-{n} finished" in page for n in range(20))


def test_sixty_runs_have_no_room_for_charts_of_their_own_and_still_have_a_report(tmp_path):
    folders = [make_run(tmp_path / f"run-{n}", 400, seed=n) for n in range(60)]
    path = write_report(folders, tmp_path / "r.html")
    page = path.read_text()
    assert path.stat().st_size < LARGEST_BYTES and "run-59 finished" in page
    assert "no room for charts of single runs" in page


def test_texts_without_end_do_not_make_the_page_large(tmp_path):
    folder = make_run(tmp_path / "run", 60)
    errors = [{"v": 1, "kind": "error", "step": n, "error": "x" * 100_000} for n in range(200)]
    write_log(folder, [*records(60), *errors])
    (folder / "config.toml").write_text("".join(f'key{n} = "{"v" * 1000}"\n' for n in range(3000)))
    assert write_report([folder]).stat().st_size < LARGEST_BYTES


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: root / "nowhere", "is not there"),
        (lambda root: root / "a-file", "is a file"),
        (lambda root: root / "empty", "neither a log.jsonl nor a result.json"),
        (lambda root: root / "runs", "Did you mean"),
        (lambda root: root / "no-log", "is empty"),
        (lambda root: root / "bad-result", "is damaged"),
    ],
)
def test_bad_input_is_refused_with_what_to_do_and_nothing_is_written(run, tmp_path, make, said):
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-log").mkdir()
    (tmp_path / "no-log" / "log.jsonl").touch()
    (tmp_path / "bad-result").mkdir()
    (tmp_path / "bad-result" / "result.json").write_text("{")
    before = everything(tmp_path)
    with pytest.raises(RunFolderError, match=said) as caught:
        write_report([run, make(tmp_path)], tmp_path / "r.html")
    assert caught.value.exit_code == 5 and caught.value.remedy
    assert everything(tmp_path) == before


def test_a_comparison_that_is_not_finished_says_how_to_go_on(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "compare.json").write_text("{}")
    with pytest.raises(RunFolderError, match="is a comparison that is not finished") as caught:
        write_report([tmp_path / "mine"])
    assert "hybridtrainer compare CONFIG... --run mine" in caught.value.remedy


def test_tables_that_may_not_fit_say_that_they_scroll(run):
    page = write_report([run]).read_text()
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "no-repeat local" in style and ".hint.widest { display: block; }" in style
    tables = re.findall(
        r'(<p class="hint[ a-z]*">[^<]*scroll[^<]*</p>\s*)?<div class="scroll"[^>]*>(.*?)</table>', page, re.DOTALL
    )
    assert {bool(hint) == (table.count("<th") - table.count("<thead") > 2) for hint, table in tables} == {True}
    assert any(hint for hint, _ in tables) and not all(hint for hint, _ in tables)


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(RunFolderError):
        write_report([tmp_path / "a"])


def test_nothing_to_report_on_is_refused():
    with pytest.raises(RunFolderError, match="nothing to report"):
        write_report([])


def test_only_reports_are_overwritten_unless_forced(run, tmp_path):
    mine = tmp_path / "mine.html"
    mine.write_text("<h1>my own page</h1>")
    with pytest.raises(RunFolderError, match="no report of hybridtrainer") as caught:
        write_report([run], mine)
    assert "--force" in caught.value.remedy and mine.read_text() == "<h1>my own page</h1>"
    write_report([run], mine, force=True)
    first = mine.stat().st_ino
    write_report([run], mine)
    assert mine.stat().st_ino != first  # replaced as a whole, not written over


@pytest.mark.parametrize("name", ["log.jsonl", "config.toml"])
def test_what_the_report_is_made_from_is_not_overwritten_even_by_force(run, name):
    before = everything(run)
    with pytest.raises(RunFolderError, match="made from"):
        write_report([run], run / name, force=True)
    assert everything(run) == before


def test_a_target_that_cannot_be_written_is_refused(run, tmp_path):
    with pytest.raises(RunFolderError, match="is a folder"):
        write_report([run], tmp_path)
    with pytest.raises(RunFolderError, match="is not there"):
        write_report([run], tmp_path / "no" / "r.html")
    with pytest.raises(RunFolderError, match="NUL"):
        write_report([run], tmp_path / "a\0b")
    with pytest.raises(RunFolderError, match="cannot be used"):
        write_report([run], tmp_path / ("x" * 300))
    with pytest.raises(RunFolderError, match="not a plain file"):
        write_report([run], Path(os.devnull))


@pytest.mark.parametrize("fails", ["write_durably", "rename_durably"])
def test_a_failing_disk_leaves_the_old_report_and_no_draft(run, monkeypatch, fails):
    old = write_report([run]).read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, fails, fail)
    with pytest.raises(RunFolderError, match="No space left"):
        write_report([run])
    assert (run / "report.html").read_bytes() == old
    assert not list(run.glob(".*draft"))


def test_values_that_are_not_finite_anywhere_leave_gaps_and_no_crash(tmp_path):
    content = []
    for at, record in enumerate(records(200)):
        odd: Any = ("nan", "inf", None, float("nan"), [], "text")[at % 6]
        fields = {key: odd for key in record if at % 7 == 0 and key not in ("v", "kind")}
        content.append({**record, **fields})
    page = write_report([write_log(tmp_path / "odd", content)]).read_text()
    drawn = "".join(re.findall(r'points="[^"]*"', page))
    assert "nan" not in drawn and "inf" not in drawn
