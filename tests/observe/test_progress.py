"""What a person sees: lines in time, a bar in a terminal, nothing when asked for nothing."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from rich.console import Console

from hybridtrainer.errors import ModelError
from hybridtrainer.fit import ProgressMode
from hybridtrainer.observe.progress import (
    LINE_SECONDS,
    MODES,
    REFRESH_SECONDS,
    Bar,
    Lines,
    NotebookLine,
    Silence,
    Unbreakable,
    in_notebook,
    make_progress,
)
from hybridtrainer.records import JumpRecord, LossForecast, MemoryUse, Phase, PhaseChange, StepResult


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines(name: str = "run") -> tuple[Lines, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return Lines(name, stream, clock), clock, stream


def step(number: int, loss: float = 2.5) -> StepResult:
    return StepResult(number, Phase.FULL, loss, 0, None, 0.1, "")


JUMP = JumpRecord(3, 15, "line_fit", 0.9, "kept", "because")
CHANGE = PhaseChange(3, Phase.WARMUP, Phase.FULL, "because")
FINAL = LossForecast(3, 600, 1.934, 1.881, 2.011)
MEMORY = MemoryUse(3, Phase.FULL, 1288490189, None, None)


def test_a_line_appears_every_few_seconds_and_not_for_every_step():
    progress, clock, stream = lines()
    progress.start(0, 1000)
    for number in range(1, 101):
        clock.now += LINE_SECONDS / 20
        progress.record(step(number))
    shown = stream.getvalue().splitlines()
    assert len(shown) == 5
    assert [line.split()[2] for line in shown] == ["20/1000", "40/1000", "60/1000", "80/1000", "100/1000"]


def test_a_line_says_where_the_run_is_and_how_long_it_will_take():
    progress, clock, stream = lines("mine")
    progress.start(0, 100)
    clock.now += 30
    progress.record(step(25))
    assert stream.getvalue() == "mine: step 25/100  full     loss 2.5000  1:30 left\n"


def test_the_time_left_of_a_resumed_run_is_judged_by_its_own_steps():
    progress, clock, stream = lines()
    progress.start(900, 1000)
    clock.now += 20
    progress.record(step(910))  # ten steps in twenty seconds: ninety more in three minutes
    assert "3:00 left" in stream.getvalue()


def test_the_last_step_is_always_shown():
    progress, _, stream = lines()
    progress.start(0, 3)
    for number in (1, 2, 3):
        progress.record(step(number))
    assert stream.getvalue() == "run: step 3/3  full     loss 2.5000  0:00 left\n"


def test_jumps_and_phase_changes_print_no_line():
    progress, clock, stream = lines()
    progress.start(0, 100)
    clock.now += 1000
    progress.record(JUMP)
    progress.record(CHANGE)
    progress.stop()
    assert stream.getvalue() == ""


def test_a_step_that_went_back_and_a_loss_that_is_no_number_are_shown():
    progress, clock, stream = lines()
    progress.start(50, 100)
    clock.now += 20
    progress.record(step(40, math.nan))  # rolled back to before this process began
    assert "step 40/100" in stream.getvalue() and "loss nan" in stream.getvalue()


def test_a_message_is_printed_at_once_and_as_it_is():
    progress, _, stream = lines("[b]run[/b]")
    progress.message("saved to [red]/tmp/x[/red] :fire: {loss}")
    assert stream.getvalue() == "[b]run[/b]: saved to [red]/tmp/x[/red] :fire: {loss}\n"


def test_lines_go_to_standard_error(capsys):
    Lines("run").message("hello")
    assert capsys.readouterr() == ("", "run: hello\n")


def test_the_bar_shows_a_message_as_it_is(capsys):
    bar = Bar("run")
    bar.message("saved to [red]/tmp/x[/red] :fire: 12")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip() == "saved to [red]/tmp/x[/red] :fire: 12"


def test_the_bar_shows_its_name_as_it_is(capsys):
    bar = Bar("[red]run[/red]")
    bar.start(0, 10)
    bar.record(step(5))
    bar.stop()
    assert "[red]run[/red]" in capsys.readouterr().err


def test_the_bar_shows_step_phase_loss_and_kept_jumps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    bar = Bar("mine")
    bar.start(3, 10)
    bar.record(JUMP)
    bar.record(JumpRecord(3, 15, "line_fit", 0.9, "refused", "because"))
    bar.record(CHANGE)
    bar.record(step(5, 1.25))
    bar.stop()
    shown = capsys.readouterr().err
    for part in ("mine", "5/10", "full", "loss 1.2500", "jumps 1"):
        assert part in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "stream", "kind"),
    [
        ("off", Terminal(), Silence),
        ("lines", Terminal(), Lines),
        ("bar", io.StringIO(), Bar),
        ("auto", io.StringIO(), Lines),
        ("auto", Terminal(), Bar),
        ("notebook", Terminal(), NotebookLine),
    ],
)
def test_the_display_fits_the_mode_and_the_terminal(monkeypatch, mode, stream, kind):
    monkeypatch.setattr(sys, "stderr", stream)
    assert type(make_progress(mode, "run")) is kind


@pytest.mark.parametrize("mode", ["off", "lines", "bar", "notebook"])
def test_every_display_takes_every_record(mode, capsys):
    progress: Any = make_progress(mode, "run")
    progress.start(0, 3)
    for record in (step(1), JUMP, CHANGE, FINAL, MEMORY, step(2, math.nan), step(3)):
        progress.record(record)
    progress.message("hello")
    progress.stop()
    assert ("hello" in "".join(capsys.readouterr())) is (mode != "off")


def test_lines_tell_forecast_and_memory():
    progress, clock, stream = lines("mine")
    progress.start(0, 600)
    progress.record(FINAL)
    progress.record(MEMORY)
    clock.now += 30
    progress.record(step(100))
    assert stream.getvalue() == (
        "mine: step 100/600  full     loss 2.5000  final 1.93 (1.88-2.01)  1.2 GiB  2:30 left\n"
    )


def drawn(width: int, name: str = "training", final: LossForecast = FINAL) -> list[str]:
    """The bar of a run in full swing as a terminal of `width` columns shows it at last."""
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, width=width, force_terminal=False, color_system=None)
    bar = Bar(name, console, clock)
    bar.start(0, 600)
    for record in (final, MEMORY, JUMP):
        bar.record(record)
    clock.now += 60.0
    bar.record(step(120, 1.9312))
    bar.stop()
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 80, 100, 200])
@pytest.mark.parametrize("name", ["training", "hybrid"])
def test_the_bar_is_one_line_at_any_width(width, name):
    (line,) = drawn(width, name)
    assert len(line) <= width
    for part in (name, "120/600", "loss 1.9312", "4:00 left"):
        assert part in line
    assert ("final 1.93 (1.88-2.01)" in line) is (width >= 80)
    assert ("jumps 1" in line and "1.2 GiB" in line) is (width >= 100)
    assert "\u2501" in line


def test_the_interval_of_a_small_loss_fits_into_80_columns_too():
    (line,) = drawn(80, final=LossForecast(3, 600, 0.7471, 0.5122, 0.9019))
    assert "final 0.747 (0.512-0.902)" in line and "left" in line


def test_a_bar_with_a_name_longer_than_the_terminal_stays_in_it():
    assert all(len(line) <= 50 for line in drawn(50, "x" * 120))


def test_the_bar_is_drawn_twice_a_second_and_by_no_thread(monkeypatch):
    import threading

    before = threading.active_count()
    clock = Clock()
    bar = Bar("run", Console(file=io.StringIO(), width=80), clock)
    draws = []
    monkeypatch.setattr(bar._bar, "refresh", lambda: draws.append(clock.now))
    bar.start(0, 1000)
    assert threading.active_count() == before
    draws.clear()
    for number in range(1, 101):
        clock.now += REFRESH_SECONDS / 10
        bar.record(step(number))
    bar.stop()
    assert 9 <= len(draws) <= 12


def notebook_line(name: str = "run") -> tuple[NotebookLine, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return NotebookLine(name, stream, clock), clock, stream


def screen(text: str) -> list[str]:
    """What a notebook shows: after a carriage return the line is written over."""
    shown = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown.append("".join(cells).rstrip())
    return shown


def test_in_a_notebook_one_line_is_rewritten_in_place():
    progress, clock, stream = notebook_line()
    progress.start(0, 100)
    for number in range(1, 101):
        clock.now += REFRESH_SECONDS / 4
        progress.record(step(number, 100.0 / number))
    progress.stop()
    assert screen(stream.getvalue()) == ["run: 100/100  full     loss 1.0000  0:00 left", ""]
    assert stream.getvalue().count("\r") in (26, 27)


def test_in_a_notebook_a_message_has_a_line_of_its_own():
    progress, clock, stream = notebook_line()
    progress.message("resumed")
    progress.start(0, 100)
    clock.now += 10
    progress.record(step(50))
    progress.message("ok")
    clock.now += 10
    progress.record(step(100))
    progress.stop()
    assert screen(stream.getvalue()) == [
        "run: resumed",
        "run: ok",
        "run: 100/100  full     loss 2.5000  0:00 left",
        "",
    ]


def test_a_notebook_is_known_by_its_kernel(monkeypatch):
    assert not in_notebook()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not in_notebook()  # IPython in a terminal
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    assert in_notebook()
    assert type(make_progress("auto")) is NotebookLine
    shell = SimpleNamespace()
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()


def test_looking_for_a_notebook_imports_nothing():
    script = (
        "import sys; from hybridtrainer.observe.progress import in_notebook; "
        "print(in_notebook(), [name for name in ('IPython', 'ipykernel', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False []", done.stderr


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, text: str) -> int:
        self.calls += 1
        raise BrokenPipeError("nobody reads any more")

    def flush(self) -> None:
        raise BrokenPipeError("nobody reads any more")


def test_a_display_that_nobody_reads_any_more_falls_silent():
    stream = Broken()
    shown = Unbreakable(Lines("run", stream))  # type: ignore[arg-type]
    shown.start(0, 10)
    for _ in range(3):
        shown.message("hello")
    shown.stop()
    assert stream.calls == 1


@pytest.mark.parametrize("mode", ["nonsense", "", "Bar"])
def test_a_display_that_there_is_not_is_refused(mode):
    with pytest.raises(ModelError, match="Choose from auto, bar, lines, notebook, off"):
        make_progress(mode)
    assert get_args(ProgressMode) == MODES
