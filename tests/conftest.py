"""One thread a test process, so that results do not depend on how many run beside it."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
