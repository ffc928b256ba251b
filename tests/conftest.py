"""What tests must not depend on: how many run side by side, and whether they run in the background."""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
