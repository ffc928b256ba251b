"""One thing that must happen before the first parallel computation, so that runs can be repeated bit for bit."""

from __future__ import annotations

import torch


def settle_vector_math() -> None:
    """Makes the first call into MKL's vector math from one thread.

    Where two threads make it at once, one of them may compute that call in low accuracy: a relative error of 1e-4 in
    half of a square root, in about one process of fifteen (torch 2.13, MKL 2024.2, two threads; docs/LOG.md). In an
    optimizer that is a different run. A first call of one element, made by one thread, prevents it.
    """
    one = torch.ones(1)
    for function in (torch.sqrt, torch.exp, torch.log, torch.tanh, torch.erf, torch.sin, torch.cos):
        function(one)
