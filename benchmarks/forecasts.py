"""How good forecasts of the training loss are 5, 20 and 50 steps ahead, beside persistence, a line and a power law.

The losses of eight recorded runs (digits, Fashion-MNIST, the standard library's source and tinyshakespeare, each at a
constant and at a cosine rate, with the settings of the tasks of these names) are fed to the dynamics model step by
step, as the trainer does it. Every five steps from the hundredth on its forecasts are taken down. What is forecast is
the mean loss of the last 5, 10 and 25 of the next 5, 20 and 50 steps. The others, each in the variant that is best on
average over all runs, known only afterwards:

    persistence   the mean of the newest losses stays
    linear trend  the line through the newest losses goes on
    power law     c + a t^-b goes on, fitted by least squares to the newest share of all losses

Runs are read from tests/predict/data; `--record` trains them again first (about ten minutes on one core; needs
HYBRIDTRAINER_TEST_DATA for two of the four data sets).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_io import load_config
from hybridtrainer.predict.curves import HORIZONS, target_window
from hybridtrainer.predict.dynamics import Dynamics
from hybridtrainer.predict.features import StepSigns
from hybridtrainer.predict.learners import Kind
from hybridtrainer.predict.moments import moment_sizes
from hybridtrainer.tasks import build_task

TRACES = Path(__file__).parent.parent / "tests" / "predict" / "data"
STEPS = {"digits": 600, "fashion-mnist-small": 1200, "stdlib-gpt": 600, "text": 600}
DATA = {"fashion-mnist-small": "fashion-mnist", "text": "tinyshakespeare/input.txt"}
RATES = ("constant", "cosine")
FIRST, EVERY = 100, 5  # steps: from when on, and how often forecasts are judged
DRAWS, BLOCK = 2000, 10  # of the bootstrap; neighbouring forecasts resemble each other, so they are drawn in blocks


def record(task: str, rate: str, seed: int = 0) -> Tensor:
    """Trains without prediction; loss, gradient norm, rate and sizes of the moments of each step."""
    steps = STEPS[task]
    settings = ['predict="off"', f"seed={seed}", f'schedule.name="{rate}"', "save_interval=1000000"]
    settings += [f"train.steps={steps}", f"train.eval_interval={steps}"]
    if task in DATA:
        settings.append(f'data.path="{Path(os.environ["HYBRIDTRAINER_TEST_DATA"]) / DATA[task]}"')
    built = build_task(load_config(task, settings))
    rows: list[list[float]] = []
    while len(rows) < steps:
        for batch in built.loader:
            now = float(built.trainer.optimizer.param_groups[0]["lr"])
            result = built.trainer.step(batch)
            rows.append([result.loss, result.grad_norm or 0.0, now, *moment_sizes(built.trainer.optimizer).tolist()])
            if len(rows) == steps:
                break
    return torch.tensor(rows)


def signs(trace: Tensor) -> list[StepSigns]:
    """What the model is told of each step of a recorded run; the coming rates are known, the coming losses are not."""
    rates = [*trace[:, 2].tolist(), *[trace[-1, 2].item()] * max(HORIZONS)]
    told = []
    for index, (loss, norm, rate, first, second) in enumerate(trace.tolist()):
        clock = index + 1
        ahead = [math.fsum(rates[clock : clock + h]) / h for h in HORIZONS]
        in_phase = clock if clock <= FIRST else clock - FIRST
        told.append(
            StepSigns(loss, norm, rate, first, second, float(clock <= FIRST), 0.0, in_phase, clock, clock, *ahead)
        )
    return told


class Judged(NamedTuple):
    """Forecasts of one run, each (ticks, horizons); NaN where the run ended before the target."""

    came: Tensor
    said: Tensor
    low: Tensor
    high: Tensor
    milliseconds: float
    calibration_error: float


def came(losses: Tensor, clock: int) -> list[float]:
    """What forecasts made at this clock were about."""
    return [
        losses[clock + h - target_window(h) : clock + h].mean().item() if clock + h <= len(losses) else math.nan
        for h in HORIZONS
    ]


def judge(trace: Tensor, kind: Kind, parameters: int = 0, residuals: bool = False) -> Judged:
    """Feeds a run to the model, step by step."""
    dynamics = Dynamics(kind, parameters=parameters, residuals=residuals)
    losses = trace[:, 0].double()
    rows: list[list[list[float]]] = []
    spent = 0.0
    for step in signs(trace):
        began = time.process_time()  # what others do on the machine is not counted
        dynamics.observe(step)
        spent += time.process_time() - began
        clock = int(step.clock)
        if clock >= FIRST and clock % EVERY == 0:
            told = dynamics.forecasts()
            rows.append([came(losses, clock), *([getattr(f, part) for f in told] for part in ("loss", "low", "high"))])
    table = torch.tensor(rows, dtype=torch.float64)
    error = dynamics.calibration_error()
    happened, said, low, high = table.unbind(1)
    took = 1000 * spent / len(trace)
    return Judged(happened, said, low, high, took, math.nan if error is None else error)


def persistence(losses: Tensor, clock: int, horizon: int, window: float) -> float:
    """The mean of the newest losses; of as many as the target has where the window is 0."""
    return losses[clock - (int(window) or target_window(horizon)) : clock].mean().item()


def line(losses: Tensor, clock: int, horizon: int, window: float) -> float:
    """The line through the newest losses."""
    steps = torch.arange(int(min(window, clock)), dtype=torch.float64)
    newest = losses[clock - len(steps) : clock]
    centred = steps - steps.mean()
    slope = (centred * newest).sum() / centred.square().sum()
    return (newest.mean() + slope * (len(steps) - 1 + _middle(horizon) - steps.mean())).item()


def power_law(losses: Tensor, clock: int, horizon: int, share: float) -> float:
    """c + a t^-b, with the b that fits best."""
    first = int(clock * (1 - share))
    steps, newest = torch.arange(first + 1, clock + 1, dtype=torch.float64), losses[first:clock]
    best = (math.inf, 0.0)
    for power in (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0):
        basis = (steps / clock) ** -power
        centred = basis - basis.mean()
        factor = (centred * newest).sum() / centred.square().sum()
        misfit = (newest - newest.mean() - factor * centred).square().sum().item()
        value = newest.mean() + factor * ((1 + _middle(horizon) / clock) ** -power - basis.mean())
        best = min(best, (misfit, value.item()))
    return best[1]


def _middle(horizon: int) -> float:
    return horizon - (target_window(horizon) - 1) / 2


SIMPLE: dict[str, tuple[Callable[[Tensor, int, int, float], float], tuple[float, ...]]] = {
    "persistence": (persistence, (0, 10, 25, 50)),
    "linear trend": (line, (25, 50, 100, 200)),
    "power law": (power_law, (1.0, 0.8, 0.6, 0.4, 0.3)),
}


def simple_forecasts(trace: Tensor, name: str, variant: float) -> Tensor:
    """What a simple forecaster says wherever the model is judged, (ticks, horizons)."""
    losses = trace[:, 0].double()
    forecast, _ = SIMPLE[name]
    clocks = range(FIRST, len(losses) + 1, EVERY)
    return torch.tensor(
        [[forecast(losses, clock, h, variant) for h in HORIZONS] for clock in clocks], dtype=torch.float64
    )


def best_variant(traces: dict[str, Tensor], name: str) -> float:
    """The variant with the smallest errors, relative to the first, on average over runs and horizons."""

    def relative(variant: float) -> float:
        errors = [error(simple_forecasts(trace, name, variant), trace) for trace in traces.values()]
        return statistics.fmean(float(each.log().mean()) for each in errors)

    return min(SIMPLE[name][1], key=relative)


def targets(trace: Tensor) -> Tensor:
    """What came, wherever the model is judged."""
    losses = trace[:, 0].double()
    return torch.tensor([came(losses, clock) for clock in range(FIRST, len(losses) + 1, EVERY)], dtype=torch.float64)


def error(said: Tensor, trace: Tensor) -> Tensor:
    """Mean absolute error at each horizon."""
    return (said - targets(trace)).abs().nanmean(0)


def interval_of_ratio(one: Tensor, other: Tensor) -> tuple[float, float]:
    """90% interval of the ratio of two mean errors, by a bootstrap of blocks of neighbouring forecasts."""
    known = torch.isfinite(one) & torch.isfinite(other)
    one, other = one[known], other[known]
    generator = torch.Generator().manual_seed(0)
    count = -(-len(one) // BLOCK)
    starts = torch.randint(0, max(1, len(one) - BLOCK + 1), (DRAWS, count), generator=generator)
    places = (starts[..., None] + torch.arange(BLOCK)).flatten(1).clamp(max=len(one) - 1)
    ratios = one[places].mean(1) / other[places].mean(1)
    low, high = ratios.quantile(torch.tensor([0.05, 0.95], dtype=ratios.dtype)).tolist()
    return low, high


def coverage(judged: Judged) -> list[float]:
    """What share of the 90% intervals held, at each horizon."""
    held = (judged.low <= judged.came) & (judged.came <= judged.high)
    return [held[torch.isfinite(judged.came[:, q]), q].double().mean().item() for q in range(len(HORIZONS))]


def compare(trace: Tensor, judged: Judged, variants: dict[str, float]) -> dict[str, Any]:
    """One run's figures, by horizon."""
    errors = (judged.said - judged.came).abs()
    row: dict[str, Any] = {"model": errors.nanmean(0).tolist(), "coverage": coverage(judged)}
    for name, variant in variants.items():
        others = (simple_forecasts(trace, name, variant) - judged.came).abs()
        row[name] = others.nanmean(0).tolist()
        row[f"ratio to {name}"] = (errors.nanmean(0) / others.nanmean(0)).tolist()
        row[f"90% interval of the ratio to {name}"] = [
            interval_of_ratio(errors[:, q], others[:, q]) for q in range(len(HORIZONS))
        ]
    return row | {"calibration_error": judged.calibration_error, "milliseconds_per_step": judged.milliseconds}


def stored() -> dict[str, Tensor]:
    """The recorded runs by name."""
    return {path.stem: load_file(path)["steps"] for path in sorted(TRACES.glob("*.safetensors"))}


def ablation(traces: dict[str, Tensor], kinds: dict[str, tuple[Kind, int, bool]]) -> dict[str, Any]:
    """Every kind of model on every run: error relative to the blend alone, geometric mean over runs, and coverage."""
    found: dict[str, Any] = {}
    plain: dict[str, Tensor] = {}
    for name, (kind, parameters, residuals) in kinds.items():
        results = {run: judge(trace, kind, parameters, residuals) for run, trace in traces.items()}
        errors = {run: (result.said - result.came).abs().nanmean(0) for run, result in results.items()}
        plain = plain or errors
        relative = torch.stack([errors[run] / plain[run] for run in traces])
        found[name] = {
            "error_relative_to_blend": relative.log().mean(0).exp().tolist(),
            "worst_run": relative.max(0).values.tolist(),
            "coverage": torch.tensor([coverage(result) for result in results.values()]).mean(0).tolist(),
            "milliseconds_per_step": statistics.median(result.milliseconds for result in results.values()),
        }
        print(f"{name:12} {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="train the runs again first")
    parser.add_argument("--kind", default="mlp", help="which model: rssm, mlp, linear, blend")
    parser.add_argument("--no-ablation", action="store_true", help="leave out the comparison of all kinds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.record:
        for task in STEPS:
            for rate in RATES:
                save_file({"steps": record(task, rate)}, TRACES / f"{task}-{rate}.safetensors")
    traces = stored()
    variants = {name: best_variant(traces, name) for name in SIMPLE}
    runs = {name: compare(trace, judge(trace, arguments.kind), variants) for name, trace in traces.items()}
    content: dict[str, Any] = {"horizons": HORIZONS, "kind": arguments.kind, "variants": variants, "runs": runs}
    for name, row in runs.items():
        ratios = "  ".join(f"{each} " + " ".join(f"{x:.3f}" for x in row[f"ratio to {each}"]) for each in SIMPLE)
        print(f"{name:32} {ratios}  coverage {' '.join(f'{x:.2f}' for x in row['coverage'])}")
    if not arguments.no_ablation:
        kinds: dict[str, tuple[Kind, int, bool]] = {
            "blend": ("blend", 0, False), "linear": ("linear", 0, False), "mlp": ("mlp", 0, False),
            "mlp residuals": ("mlp", 0, True), "rssm small": ("rssm", 0, False), "rssm full": ("rssm", 10**8, False),
        }  # fmt: skip
        content["ablation"] = ablation(traces, kinds)
    print(f"written to {write_result('forecasts', content, arguments.out)}")


if __name__ == "__main__":
    main()
