"""kill -9, power loss, a full disk: at every single write, sync and rename of a save."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import crash_driver
from tests.disk_faults import Disk, count_calls, intercepted, nothing, write_image

from hybridtrainer.errors import SaveError
from hybridtrainer.tree import fingerprint

ROOT = Path(__file__).parent.parent
OLD, NEW = (fingerprint(crash_driver.state(step))["all"] for step in (1, 2))


def test_kill_at_every_disk_call_leaves_the_old_or_the_new_checkpoint():
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash_driver"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, outcome in json.loads(done.stdout).items():
        assert outcome["problems"] == [], name
        assert outcome["cases"] > 2 * 30
        assert outcome["survivors"]["old"] > 10 and outcome["survivors"]["new"] > 2
        assert {"write", "fsync", "rename"} <= set(outcome["calls"])


def saved(root: Path) -> str:
    return fingerprint(crash_driver.load_store(root))["all"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_an_error_at_any_disk_call_never_passes_for_success(tmp_path, code):
    crash_driver.prepare_store(tmp_path / "count")
    calls = count_calls(lambda: crash_driver.store(tmp_path / "count").save(crash_driver.state(2), 2))
    failures = 0
    for number in range(len(calls)):
        root = tmp_path / str(number)
        crash_driver.prepare_store(root)

        def fail(at: int, name: str, arguments: tuple[Any, ...], number: int = number) -> None:
            if at == number:
                raise OSError(code, os.strerror(code))

        with intercepted(fail, nothing):
            message = ""
            try:
                crash_driver.store(root).save(crash_driver.state(2), 2)
            except SaveError as error:
                message = str(error)
        failures += bool(message)
        assert os.strerror(code) in message if message else saved(root) == NEW
        assert saved(root) in (OLD, NEW)
        assert crash_driver.tidy_store(root) == []
    assert failures > 15


def test_a_disk_that_stays_full_loses_nothing(tmp_path):
    crash_driver.prepare_store(tmp_path / "run")

    def full(at: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(3):
        with intercepted(full, nothing), pytest.raises(SaveError, match="No space left"):
            crash_driver.store(tmp_path / "run").save(crash_driver.state(2), 2)
    assert saved(tmp_path / "run") == OLD
    assert crash_driver.names(tmp_path / "run" / "checkpoints") == ["000001-step-1"]


@pytest.mark.parametrize("eager_names", [False, True])
def test_power_loss_after_any_disk_call_leaves_the_old_or_the_new_checkpoint(tmp_path, eager_names):
    root = tmp_path / "run"
    crash_driver.prepare_store(root)
    disk = Disk(eager_names)
    disk.load(root)
    calls: list[str] = []
    images: list[dict[Path, bytes | None]] = []

    def after(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        disk.apply(name, arguments)
        calls.append(name)
        images.append(disk.image())

    with intercepted(nothing, after):
        crash_driver.store(root).save(crash_driver.state(2), 2)
    outcomes = []
    for index, image in enumerate(images):
        write_image(image, root, tmp_path / f"image-{index}")
        newest = crash_driver.store(tmp_path / f"image-{index}").newest()
        assert newest is not None, f"after call {index} ({calls[index]}) nothing can be loaded"
        outcomes.append(fingerprint(newest.state())["all"])
    assert outcomes[0] == OLD and outcomes[-1] == NEW
    published = outcomes.index(NEW)
    assert outcomes == [OLD] * published + [NEW] * (len(outcomes) - published)
