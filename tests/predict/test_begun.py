from __future__ import annotations

import numpy as np
import torch

from hybridtrainer.predict.begun import Begun, corrected, on_its_way
from hybridtrainer.predict.curves import Experts
from hybridtrainer.predict.gates import Correction


def begun(gates: list[list[float]], gain: list[float]) -> Begun:
    """Two simple forecasts of one horizon, 1 and 3, that count alike; a word from each member."""
    said = Correction(torch.tensor(gates)[:, None], torch.zeros(len(gates), 1), torch.tensor(gain))
    losses, half, level = np.array([[1.0, 3.0]]), np.full((1, 2), 0.5), np.array([2.0])
    return Begun(0, 10, Experts(losses, 0.1), half, level, level / 2, on_its_way(said))


def test_members_that_say_nothing_change_nothing():
    loss, scale, gain = corrected(begun([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]))
    assert loss.item() == 2 and scale.item() == 1 and gain == 0


def test_what_members_say_is_averaged_and_their_quarrel_widens_the_scale():
    loss, scale, gain = corrected(begun([[40.0, 0.0], [0.0, 40.0]], [0.5, -0.1]))
    torch.testing.assert_close(loss.item(), 2.0)
    torch.testing.assert_close(scale.item(), 2.0**0.5)
    torch.testing.assert_close(gain, 0.2)
