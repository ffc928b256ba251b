"""What the 64 numbers say, on series for which one knows it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridtrainer.kernels.feature_reference import COLUMNS, LENGTH, LIMIT, NAMES, features


def ring(count: int, seed: int = 0) -> Tensor:
    """As a run of so many steps leaves it behind: noisy, falling losses, a rate that falls, phases, errors."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(LENGTH, len(COLUMNS))
    for step in range(max(0, count - LENGTH), count):
        noise = torch.randn(5, generator=generator)
        rate = 1e-3 * math.cos(step / 1000)
        rows[step % LENGTH] = torch.tensor(
            [
                2 + 3 / (1 + step) ** 0.5 + 0.1 * noise[0], 1.5 * math.exp(0.3 * noise[1]), rate,
                1e-3 * math.exp(0.1 * noise[2]), 1e-2 * math.exp(0.1 * noise[3]), float(step < 100), 0.0, step % 20,
                step % 50, step + 1, rate, 0.9 * rate, 0.8 * rate, noise[4], 0.5, -0.5,
            ]
        )  # fmt: skip
    return rows


def named(rows: Tensor, count: int) -> dict[str, float]:
    return dict(zip(NAMES, features(rows, count).tolist(), strict=True))


def steady(count: int = LENGTH, **columns: Tensor) -> Tensor:
    rows = ring(LENGTH)
    for name, values in columns.items():
        rows[:, COLUMNS.index(name)] = values
    return rows[:count] if count < LENGTH else rows


def test_there_are_64_names_and_none_twice():
    assert len(NAMES) == 64 == len(set(NAMES))


def test_everything_is_finite_from_the_first_step_on_and_for_losses_that_never_change():
    for count in (1, 2, 3, 10, 255, 256, 257, 1000):
        found = features(ring(count), count)
        assert torch.isfinite(found).all() and found.abs().max() <= LIMIT
    assert torch.isfinite(features(torch.zeros(LENGTH, len(COLUMNS)), LENGTH)).all()


def test_loss_features_do_not_depend_on_the_units_of_the_loss():
    rows = ring(LENGTH)
    other = rows.clone()
    other[:, 0] *= 1000
    about_loss = [index for index, name in enumerate(NAMES) if name.startswith("loss")]
    torch.testing.assert_close(
        features(rows, LENGTH)[about_loss], features(other, LENGTH)[about_loss], rtol=1e-3, atol=1e-3
    )


def test_a_falling_line_has_a_trend_of_its_fall_over_the_window_in_spreads():
    noise = 0.1 * torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(64)  # around any line of a multiple of 4 steps
    found = named(steady(loss=5 - 0.001 * torch.arange(256.0) + noise), 256)
    spread = 0.1 + 1e-3 * 4.76  # the floor is a share of the level
    assert abs(found["loss_trend_64"] - -0.064 / spread) < 0.02
    assert abs(found["loss_trend_256"] - -0.256 / spread) < 0.02
    assert abs(found["loss_level_256"] - (256 - 32) / 2 * 0.001 / spread) < 0.02
    assert abs(math.exp(found["loss_spread_128"]) - 0.1 / spread) < 0.01


def test_percentiles_are_ranks_of_the_newest_losses():
    losses = torch.cat(
        [torch.full((192,), 9.0), torch.randperm(64, generator=torch.Generator().manual_seed(1)).float()]
    )
    rows = steady(loss=losses)
    found = named(rows, 256)
    apart = found["loss_p90_64"] - found["loss_p10_64"]
    middle = found["loss_p50_64"] - found["loss_p10_64"]
    assert abs(middle / apart - (32 - 6) / (57 - 6)) < 1e-3  # ranks 6, 32 and 57 of 0..63


def test_rates_are_told_against_the_peak_and_against_what_is_to_come():
    found = named(steady(rate=torch.linspace(2.0, 1.0, 256), rate_ahead_50=torch.full((256,), 0.5)), 256)
    assert abs(found["rate_of_peak"] - math.log(0.5)) < 1e-4
    assert abs(found["rate_ahead_50"] - math.log(0.5)) < 1e-4
    assert found["rate_falling"] < 0


def test_norms_that_move_with_the_loss_are_seen_to():
    rows = ring(LENGTH)
    rows[:, 1] = torch.exp(rows[:, 0])
    assert named(rows, LENGTH)["norm_loss_correlation"] > 0.99


def test_the_newest_row_is_found_wherever_it_is_in_the_ring():
    rows = ring(1000)
    again = torch.roll(rows, 56, dims=0)
    assert torch.equal(features(rows, 1000), features(again, 1056))
