"""Compares in a folder and kills itself, as by `kill -9`, after so many steps: python -m ... FOLDER STEPS."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.compare.support import Clock, arm

from hybridtrainer.compare.audit import compare
from hybridtrainer.compare.options import Options
from hybridtrainer.config import RunConfig
from hybridtrainer.observe.progress import Silence


def main(folder: str, steps: int) -> None:
    made = 0

    def fatal(config: RunConfig) -> float:
        nonlocal made
        made += 1
        if made == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    build = Clock(pytest.MonkeyPatch()).build(fatal)
    arms = [arm("plain", "baseline"), arm("other", readout="averaged")]
    compare(arms, Path(folder), Options(seeds=2), Silence(), build)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
