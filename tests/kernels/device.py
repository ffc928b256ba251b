"""Where kernels run in tests: on the GPU, or in Triton's interpreter on a machine without one.

Import this before Triton: it decides when a kernel is declared whether it will be interpreted.
"""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
