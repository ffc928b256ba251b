"""Where kernels run in tests: on the GPU, or in Triton's interpreter on a machine without one (see conftest.py)."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
