"""What tests must not depend on: a GPU, how many run side by side, and whether they run in the background."""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which asks when a kernel is declared
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
