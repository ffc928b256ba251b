"""The driver: missing, hanging, talking nonsense. It is never waited for, and what it does not say is None."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridtrainer.memory import driver as module
from hybridtrainer.memory.driver import INTERVAL_SECONDS, PATIENCE_SECONDS, Ask, CardUse, Driver, asking

GOOD = CardUse(3 << 30, 16 << 30)
UUID = "GPU-1234"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def settled(ask: Ask) -> CardUse | None:
    """What a driver that has had time to answer says."""
    driver = Driver(ask)
    driver.latest()
    join_threads()
    return driver.latest()


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "gpu-memory":
            thread.join(10)


def answered(driver: Driver) -> CardUse | None:
    """What it says, once it says something."""
    for _ in range(2000):
        use = driver.latest()
        if use is not None:
            return use
        time.sleep(0.005)
    return None


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def nvml(answer: object) -> SimpleNamespace:
    def memory(handle: str) -> object:
        assert handle == f"card {UUID}"
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: f"card {uuid}", nvmlDeviceGetMemoryInfo=memory
    )


def program(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_answer_is_told():
    assert settled(lambda: GOOD) == GOOD


@pytest.mark.parametrize(
    "nonsense", [CardUse(0, 16 << 30), CardUse(-5, 16 << 30), CardUse(17 << 30, 16 << 30), CardUse(0, 0), None]
)
def test_nonsense_is_none_and_never_nought(nonsense):
    assert settled(lambda: nonsense) is None


def test_whatever_is_raised_is_no_answer():
    def ask() -> CardUse:
        raise RuntimeError("the driver has fallen off the bus")

    assert settled(ask) is None


def test_a_driver_that_hangs_is_never_waited_for_and_is_unavailable_after_two_seconds():
    assert PATIENCE_SECONDS == 2.0
    clock, hung = Clock(), threading.Event()
    asked = []

    def ask() -> CardUse | None:
        asked.append(clock.now)
        if len(asked) == 2:
            hung.wait(30)
        return GOOD

    driver = Driver(ask, clock)
    assert answered(driver) == GOOD
    clock.now += INTERVAL_SECONDS
    assert driver.latest() == GOOD  # asked again; until it has had its time the last answer holds
    clock.now += PATIENCE_SECONDS
    assert driver.latest() == GOOD
    clock.now += 0.1
    assert driver.latest() is None
    clock.now += 3600
    assert driver.latest() is None
    assert len(asked) == 2  # no further thread is left hanging
    hung.set()
    assert answered(driver) == GOOD


def test_the_driver_is_asked_again_after_a_while_and_not_before():
    clock, asked = Clock(), []

    def ask() -> CardUse:
        asked.append(1)
        return GOOD

    driver = Driver(ask, clock)
    for _ in range(5):
        assert answered(driver) == GOOD
    assert len(asked) == 1
    clock.now += INTERVAL_SECONDS
    assert answered(driver) == GOOD
    join_threads()
    assert len(asked) == 2


def test_nvml_is_asked_for_the_card_by_its_uuid(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(SimpleNamespace(used=3 << 30, total=16 << 30)))
    assert settled(asking(UUID)) == GOOD


def test_an_error_of_nvml_is_no_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(RuntimeError("unknown error")))
    monkeypatch.setattr(module, "_nvidia_smi", lambda uuid: pytest.fail("NVML is there, and it is asked"))
    assert settled(asking(UUID)) is None


def test_nvidia_smi_is_asked_where_nvml_has_no_library(monkeypatch, tmp_path):
    def fail() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    program(tmp_path, f'test "$1" = "--id={UUID}" && echo "3072, 16384"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert settled(asking(UUID)) == GOOD


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    "script",
    ["echo [N/A], [N/A]", "echo '0, 16384'", "echo", "echo 3072", "exit 9", "head -c 500 /dev/urandom", "kill -9 $$"],
)
def test_what_nvidia_smi_should_not_say_is_no_answer(monkeypatch, tmp_path, script):
    program(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert settled(asking(UUID)) is None


@pytest.mark.usefixtures("no_nvml")
def test_a_program_that_hangs_is_ended(monkeypatch, tmp_path):
    program(tmp_path, "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    ask = module._nvidia_smi(UUID)
    assert ask is not None
    with pytest.raises(subprocess.TimeoutExpired):
        ask()


@pytest.mark.usefixtures("no_nvml")
def test_with_neither_there_is_no_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert settled(asking(UUID)) is None
