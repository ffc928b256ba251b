"""What tests must not depend on: a GPU, how many run side by side, and whether they run in the background."""

from __future__ import annotations

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which asks when a kernel is declared
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A test file that cannot be imported is a failure.

    `--doctest-ignore-import-errors`, there for modules whose optional package is missing, would let it pass as skipped.
    """
    if report.skipped and report.nodeid.startswith("tests/") and "unable to import module" in str(report.longrepr):
        raise pytest.UsageError(f"{report.nodeid} cannot be imported.")
