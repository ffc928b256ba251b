"""Compares in a folder and kills itself, as by `kill -9`, after so many steps: python -m ... FOLDER STEPS."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compare.support import Clock, arm

from hybridtrainer.compare.audit import compare
from hybridtrainer.compare.options import Options
from hybridtrainer.config import RunConfig
from hybridtrainer.observe.progress import Silence
from hybridtrainer.tasks import Task


def main(folder: str, steps: int) -> None:
    clock, made = Clock(pytest.MonkeyPatch()), 0

    def build(config: RunConfig) -> Task:
        task = clock.build()(config)
        step = task.trainer.step

        def fatal(batch: Any) -> Any:
            nonlocal made
            made += 1
            if made == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(batch)

        task.trainer.step = fatal  # type: ignore[method-assign]
        return task

    arms = [arm("plain", "baseline"), arm("other", readout="averaged")]
    compare(arms, Path(folder), Options(seeds=2), Silence(), build)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
