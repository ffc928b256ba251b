from __future__ import annotations

import torch
from torch import nn

from hybridtrainer.predict.moments import moment_sizes


def stepped(optimizer_of):
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model.parameters())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def test_sizes_of_adams_moments_are_root_mean_squares():
    optimizer = stepped(lambda p: torch.optim.AdamW(p, lr=1e-3))
    first = torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])
    second = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
    expected = torch.stack([first.square().mean().sqrt(), second.mean().sqrt()])
    torch.testing.assert_close(moment_sizes(optimizer), expected)


def test_what_an_optimizer_does_not_keep_has_size_0():
    plain = stepped(lambda p: torch.optim.SGD(p, lr=1e-3))
    assert moment_sizes(plain).tolist() == [0.0, 0.0]
    first, second = moment_sizes(stepped(lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))).tolist()
    assert first > 0 and second == 0


def test_before_the_first_step_sizes_are_0():
    assert moment_sizes(torch.optim.AdamW(nn.Linear(2, 2).parameters())).tolist() == [0.0, 0.0]
