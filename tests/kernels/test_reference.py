"""The reference updates: fp32 is torch's AdamW, the others follow it, and nothing moves where it must not."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.making import FORMATS, clones, gradients, hyper, no, one, parameter, same_bits, yes

from hybridtrainer.kernels import reference
from hybridtrainer.kernels.formats import CODES, Format
from hybridtrainer.kernels.reference import read, update_, write_
from hybridtrainer.kernels.rounding import decode

ALL_FORMATS = pytest.mark.parametrize("kind", FORMATS)


@pytest.mark.parametrize("elements", [1, 7, 256, 5000])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fp32_is_torchs_adamw_bit_for_bit(elements, weight_decay):
    weight, state = parameter("fp32", (elements,))
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW(
        [theirs], betas=(0.9, 0.99), eps=1e-7, weight_decay=weight_decay, foreach=False, fused=False
    )
    for step in range(1, 21):
        lr = 1e-2 / step
        theirs.grad = gradients(elements, step, dtype=torch.float32)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        now = hyper(step, lr=lr, beta2=0.99, eps=1e-7, weight_decay=weight_decay)
        update_("fp32", weight, state, theirs.grad, now, one(), yes())
        assert same_bits(weight, theirs.detach())
    assert same_bits(state["m"], optimizer.state[theirs]["exp_avg"])
    assert same_bits(state["v"], optimizer.state[theirs]["exp_avg_sq"])


def test_split32_is_adamw_up_to_the_rounding_of_fp32():
    exact, split = parameter("fp32", (5000,)), parameter("split32", (5000,))
    for step in range(1, 21):
        update_("fp32", *exact, gradients(5000, step), hyper(step), one(), yes())
        update_("split32", *split, gradients(5000, step), hyper(step), one(), yes())
    torch.testing.assert_close(read("split32", *split), exact[0], rtol=1e-5, atol=1e-6)


def final_loss(kind: Format, steps: int = 400) -> float:
    """Linear regression of 5000 weights on noisy data, which no weights fit exactly."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(400, 50, generator=generator)
    y = x @ torch.randn(50, 100, generator=generator) + 0.3 * torch.randn(400, 100, generator=generator)
    weight, state = parameter(kind, (50, 100))
    losses = []
    for step in range(1, steps + 1):
        model = read(kind, weight, state).view(50, 100).requires_grad_()
        loss = (x @ model - y).square().mean()
        loss.backward()
        lr = 0.05 * (1 - (step - 1) / steps)
        assert model.grad is not None
        update_(kind, weight, state, model.grad, hyper(step, lr=lr, weight_decay=0.0), one(), yes())
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.slow
def test_formats_of_few_bits_learn_what_fp32_learns():
    losses = {kind: final_loss(kind) for kind in FORMATS}
    best = losses["fp32"]
    assert best < 0.082  # from about 100; least squares reaches 0.079
    assert losses["split32"] == pytest.approx(best, rel=1e-4)
    assert losses["split8"] == pytest.approx(best, rel=0.002)
    assert losses["sr8"] == pytest.approx(best, rel=0.01)
    assert losses["sr4"] == pytest.approx(best, rel=0.01)
    assert losses["factored"] < best * 1.01


def test_weights_rounded_to_the_nearest_would_learn_nothing_more_from_small_steps():
    weight, state = parameter("sr8", (64, 64))
    weight.fill_(1.0)
    step_size = 2.0**-12  # a sixteenth of half the gap between bf16 below 1
    for step in range(1, 65):
        now = hyper(step, lr=step_size, weight_decay=0.0)
        update_("sr8", weight, state, torch.ones(4096), now, one(), yes())
        assert bool(((weight.float() - step_size).to(torch.bfloat16) == weight).all())
    assert float(weight.float().mean()) == pytest.approx(1 - 64 * step_size, abs=2e-4)


@ALL_FORMATS
def test_where_not_ok_every_bit_stays(kind):
    weight, state = parameter(kind, (50, 100))
    update_(kind, weight, state, gradients(5000, 1), hyper(1), one(), yes())
    before, state_before = weight.clone(), clones(state)
    update_(kind, weight, state, torch.full((5000,), float("nan")), hyper(2), one() * float("inf"), no())
    assert same_bits(weight, before)
    assert all(same_bits(state[name], state_before[name]) for name in state)


@ALL_FORMATS
def test_the_scale_is_multiplied_onto_the_gradient(kind):
    scaled, plain = parameter(kind, (50, 100)), parameter(kind, (50, 100))
    for step in (1, 2):
        gradient = gradients(5000, step)
        update_(kind, *scaled, gradient, hyper(step), one() * 0.25, yes())
        update_(kind, *plain, gradient * 0.25, hyper(step), one(), yes())
    assert same_bits(scaled[0], plain[0])
    assert all(same_bits(scaled[1][name], plain[1][name]) for name in plain[1])


def test_a_scale_too_small_to_be_squared_scales_a_factored_moment_all_the_same():
    weight, state = parameter("factored", (50, 100))
    update_("factored", weight, state, torch.full((5000,), 1e15), hyper(1, beta2=0.5), one() * 1e-25, yes())
    for name, length in (("rows", 50), ("columns", 100)):
        torch.testing.assert_close(state[name], torch.full((length,), 0.5e-20), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", FORMATS[1:])
@pytest.mark.parametrize("elements", [1, 255, 256, 257, 5000])
def test_every_size_is_updated_to_its_last_element(kind, elements):
    weight, state = parameter(kind, (1, elements))
    before = read(kind, weight, state)
    update_(kind, weight, state, torch.ones(elements), hyper(1, lr=0.5), one(), yes())
    assert bool((read(kind, weight, state) != before).all())


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_pieces_give_what_the_whole_gives(monkeypatch, kind):
    results = []
    for piece in (1 << 20, 512):
        monkeypatch.setattr(reference, "PIECE_ELEMENTS", piece)
        weight, state = parameter(kind, (25, 199))
        for step in (1, 2, 3):
            update_(kind, weight, state, gradients(4975, step), hyper(step), one(), yes())
        results.append((weight, state))
    (whole, whole_state), (pieces, pieces_state) = results
    if kind == "factored":  # its sum of squares is added up in another order
        torch.testing.assert_close(whole, pieces, rtol=0.01, atol=0)
    else:
        assert same_bits(whole, pieces)
    assert all(same_bits(whole_state[name], pieces_state[name]) for name in whole_state)


@pytest.mark.parametrize("kind", ["split8", "sr8", "sr4"])
def test_coded_moments_are_those_of_adam_on_average(kind):
    codes, elements = CODES[kind], 4096
    weight, state = parameter(kind, (64, 64))
    gradient = gradients(elements, 1, dtype=torch.float32)
    update_(kind, weight, state, gradient, hyper(1), one(), yes())
    if codes.bits == 8:
        v = decode(state["v"], state["v_scale"], codes.second_top, 4, codes.block)
        m = decode(state["m"], state["m_scale"], codes.first_top, 2, codes.block)
        assert float(v.sum()) == pytest.approx(float(1e-3 * gradient.square().sum()), rel=0.01)
        torch.testing.assert_close(m, 0.1 * gradient, rtol=0.1, atol=2e-4)
    assert int((state["v"] == 0).sum()) == 0


def test_factored_is_adafactor_without_momentum():
    height, width, now = 6, 8, hyper(1, lr=0.1)
    weight, state = parameter("factored", (height, width))
    rows, columns = torch.zeros(height), torch.zeros(width)
    for step in (1, 2, 3):
        now = hyper(step, lr=0.1)
        gradient, before = gradients(48, step, dtype=torch.float32), weight.float()
        update_("factored", weight, state, gradient, now, one(), yes())
        square = gradient.view(height, width).square() + 1e-30
        rows = now.beta2 * rows + (1 - now.beta2) * square.mean(1)
        columns = now.beta2 * columns + (1 - now.beta2) * square.mean(0)
        bias = 1 - now.beta2**step
        v = torch.outer(rows / bias, columns / bias) / (rows / bias).mean()
        u = gradient.view(height, width) / (v.sqrt() + now.eps)
        u = u / max(1.0, float(u.square().mean().sqrt()))
        expected = before * (1 - now.lr * now.weight_decay) - now.lr * u.view(-1)
        torch.testing.assert_close(state["rows"], rows)
        torch.testing.assert_close(state["columns"], columns)
        torch.testing.assert_close(weight.float(), expected, rtol=2**-7, atol=1e-6)  # one of the two nearest bf16


@ALL_FORMATS
def test_what_is_written_is_read_and_moments_stay(kind):
    weight, state = parameter(kind, (50, 100))
    update_(kind, weight, state, gradients(5000, 1), hyper(1), one(), yes())
    before = clones(state)
    values = torch.randn(5000, generator=torch.Generator().manual_seed(9))
    write_(kind, weight, state, values)
    kept = kind in ("fp32", "split32", "split8", "full8", "full4")
    assert same_bits(read(kind, weight, state), values if kept else values.to(torch.bfloat16).float())
    assert all(same_bits(state[name], before[name]) for name in state if name != "low")
    read(kind, weight, state).zero_()
    assert bool(weight.any())  # what is read is a copy


def test_an_update_depends_on_its_arguments_alone_and_every_step_rounds_anew():
    def run(**changes: float) -> torch.Tensor:
        weight, state = parameter("sr8", (64, 64))
        torch.manual_seed(torch.seed())
        update_("sr8", weight, state, gradients(4096, 1), hyper(**changes), one(), yes())  # type: ignore[arg-type]
        return weight

    assert same_bits(run(), run())
    assert all(not torch.equal(run(), run(**change)) for change in ({"seed": 4}, {"tensor": 8}))
