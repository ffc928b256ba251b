"""What jumps are worth part by part: learned coefficients against constant ones, models, peers, and two controls.

    python -m benchmarks.ablations --tasks digits fashion-mnist-small stdlib-gpt --seeds 3

All arms of a seed are trained in turns in one process, at a constant rate (`stdlib-gpt-cosine` besides), with jumps
named, because "auto" would not make them everywhere. Losses are compared at equal clock; what is saved is steps and
time. Controls: a random direction as long as the jump, and a larger rate instead of jumps. Peers: a line fitted to the
weights, outer momentum, averaged weights and Schedule-Free. Rates are not tuned for any arm.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.record import RESULTS, write_result
from benchmarks.schedule_free import ScheduleFreeAdamW, settings_of
from hybridtrainer.config_io import load_config
from hybridtrainer.models.cnn import image_loss
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.predict.baselines import Forecast
from hybridtrainer.predict.coefficients import Fit
from hybridtrainer.tasks import Task, build_task
from hybridtrainer.trainer import HybridTrainer

EVALUATIONS = 20
DATA = "HYBRIDTRAINER_TEST_DATA"


class Case(NamedTuple):
    """A task at a length that a CPU can train often."""

    task: str
    steps: int
    settings: tuple[str, ...] = ('schedule.name="constant"',)
    folder: str = ""


CASES: dict[str, Case] = {
    "digits": Case("digits", 600),
    "fashion-mnist-small": Case("fashion-mnist-small", 800, folder="fashion-mnist"),
    "stdlib-gpt": Case("stdlib-gpt", 400, ('schedule.name="constant"', "optimizer.lr=2e-3")),
    "stdlib-gpt-cosine": Case("stdlib-gpt", 400, ()),
}


def random_direction(trainer: HybridTrainer) -> None:
    """Every group goes as far as the forecast says, and anywhere."""
    history = trainer.jumps.history

    def displace_(forecast: Forecast) -> None:
        # The same forecast is displaced by twice, in the probe and in the jump, and must go the same way.
        seed = int(forecast.coefficients.abs().sum().item() * 1e9) % (1 << 31)
        generator = torch.Generator().manual_seed(seed)
        elements = [0] * len(history.weights.groups)
        for bucket in history.weights.buckets:
            elements[bucket.group] += bucket.elements
        for bucket in history.weights.buckets:
            row = forecast.coefficients[bucket.group]
            length = math.sqrt(max(float(row @ history.gram[bucket.group] @ row), 0.0))
            noise = torch.randn(bucket.elements, generator=generator)
            bucket.add_(noise * (length / math.sqrt(elements[bucket.group])))

    trainer.jumps._displace_ = displace_  # type: ignore[method-assign]


def _jumps(*settings: str) -> tuple[str, ...]:
    return ('predict=["jumps"]', 'preset="conservative"', *settings)


LEARNED = 'forecaster="learned"'
ARMS: dict[str, tuple[tuple[str, ...], Callable[[HybridTrainer], None] | None]] = {
    "plain": (('predict="off"',), None),
    "averaged": (('predict="off"', 'readout="averaged"'), None),
    "larger rate": (('predict="off"',), None),  # 1.5 times, set below
    "schedule-free": (('predict="off"',), None),  # its own loop, below
    "constant: most confident": (_jumps(), None),
    "constant: line fit": (_jumps('forecaster="line_fit"'), None),
    "constant: outer momentum": (_jumps('forecaster="outer_momentum"'), None),
    "learned": (_jumps(LEARNED), None),
    "learned, linear": (_jumps(LEARNED, 'dynamics="linear"'), None),
    "learned, mlp": (_jumps(LEARNED, 'dynamics="mlp"'), None),
    "learned, rssm": (_jumps(LEARNED, 'dynamics="rssm"'), None),
    "learned, rssm, residuals": (_jumps(LEARNED, 'dynamics="rssm"', "residuals=true"), None),
    "learned, linucb": (_jumps(LEARNED, 'horizon="linucb"'), None),
    "random direction": (_jumps(), random_direction),
}
LARGER = 1.5


def build(case: Case, arm: str, seed: int) -> Task:
    settings = [*case.settings, *ARMS[arm][0], f"seed={seed}", "save_interval=1000000", f"train.steps={case.steps}"]
    settings += [f"train.eval_interval={case.steps // EVALUATIONS}", "train.eval_batches=12"]
    if case.folder:
        settings.append(f'data.path="{Path(os.environ[DATA]) / case.folder}"')
    config = load_config(case.task, settings)
    if arm == "larger rate":
        config = load_config(case.task, [*settings, f"optimizer.lr={LARGER * config.optimizer.lr}"])
    built = build_task(config)
    if (alter := ARMS[arm][1]) is not None:
        alter(built.trainer)
    return built


def schedule_free(built: Task) -> tuple[list[float], float]:
    """Losses of the evaluations, and seconds of training, with an optimizer that the trainer does not know."""
    model, steps = built.trainer.model, built.config.train.steps
    loss_fn = image_loss if built.metrics else gpt_loss
    optimizer = ScheduleFreeAdamW(model.parameters(), **settings_of(built.trainer.optimizer), warmup=steps // 20)
    clip, losses, seconds, made = built.config.train.clip_norm, [], 0.0, 0
    while made < steps:
        for batch in islice(built.loader, steps - made):
            began = time.perf_counter()
            loss_fn(model, batch).mean().backward()  # type: ignore[no-untyped-call]
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            seconds += time.perf_counter() - began
            made += 1
            if made % built.config.train.eval_interval == 0:
                optimizer.swap()
                with torch.no_grad():
                    found = [loss_fn(model.eval(), each).mean().item() for each in built.validation]
                losses.append(statistics.fmean(found))
                optimizer.swap()
                model.train()
    return losses, seconds


def run(case: Case, arm: str, seed: int) -> dict[str, Any]:
    built = build(case, arm, seed)
    if arm == "schedule-free":
        losses, seconds = schedule_free(built)
        return {"losses": losses, "seconds": seconds, "real_steps": built.config.train.steps}
    fits: list[Fit] = []
    jumps, close = built.trainer.jumps, built.trainer.jumps.close_window

    def closed() -> str:
        said = close()
        if jumps.fit is not None:
            fits.append(jumps.fit)
        return said

    jumps.close_window = closed  # type: ignore[method-assign]
    result = built.fit(None, "off")
    counted = built.trainer.statistics()
    by_step = {evaluation["step"]: evaluation["loss"] for evaluation in result.evaluations}  # the last at each clock
    return {
        "losses": [by_step[step] for step in sorted(by_step)],
        "seconds": result.training_seconds,
        "real_steps": counted.real_steps,
        "kept": counted.jumps_kept,
        "refused": counted.jumps_refused,
        "rolled_back": counted.jumps_rolled_back,
        "window_error": statistics.fmean(fit.error for fit in fits) if fits else None,
    }


def final(found: dict[str, Any]) -> float:
    """One evaluation of a noisy run says little; the mean of the last three is steadier."""
    return statistics.fmean(found["losses"][-3:])


def summed_up(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each arm the ratios to plain, seed by seed: geometric mean, lowest and highest."""
    made = {}
    for arm, found in runs.items():
        pairs = list(zip(found, runs["plain"], strict=True))
        losses = [final(one) / final(plain) for one, plain in pairs]
        errors = [one["window_error"] for one in found if one.get("window_error") is not None]
        made[arm] = {
            "loss": math.exp(statistics.fmean(map(math.log, losses))),
            "lowest": min(losses),
            "highest": max(losses),
            "seconds": math.exp(statistics.fmean(math.log(a["seconds"] / b["seconds"]) for a, b in pairs)),
            "backward_passes": statistics.fmean(a["real_steps"] / b["real_steps"] for a, b in pairs),
            "kept": statistics.fmean(one.get("kept", 0) for one in found),
            "rolled_back": statistics.fmean(one.get("rolled_back", 0) for one in found),
            "diverged": sum(not math.isfinite(final(one)) for one in found),
            "window_error": statistics.fmean(errors) if errors else None,
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits"], choices=list(CASES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="plain is always there")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--name", default="ablations", help="of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missing = [name for name in arguments.tasks if CASES[name].folder and DATA not in os.environ]
    if missing:
        parser.error(f"the variable {DATA} does not say where the data of {', '.join(missing)} are")
    arms = ["plain", *(arm for arm in arguments.arms if arm != "plain")]
    tasks: dict[str, Any] = {}
    for name in arguments.tasks:
        case = CASES[name]
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for seed in range(arguments.seeds):
            for arm in arms:
                runs[arm].append(run(case, arm, seed))
                print(f"{name} {seed} {arm}: {final(runs[arm][-1]):.4f}, {runs[arm][-1]['seconds']:.1f} s", flush=True)
        tasks[name] = {"steps": case.steps, "arms": summed_up(runs), "runs": runs}
        write_result(arguments.name, {"seeds": arguments.seeds, "tasks": tasks}, arguments.out)
        print(f"\n{name}, {case.steps} steps on the clock, {arguments.seeds} seeds, ratios to plain")
        print(
            f"{'arm':28}{'loss':>8}{'from':>8}{'to':>8}{'time':>8}{'backward':>10}{'kept':>7}{'undone':>8}{'window':>8}"
        )
        for arm, row in tasks[name]["arms"].items():
            error = f"{row['window_error']:8.3f}" if row["window_error"] is not None else ""
            print(
                f"{arm:28}{row['loss']:8.3f}{row['lowest']:8.3f}{row['highest']:8.3f}{row['seconds']:8.2f}"
                f"{row['backward_passes']:10.3f}{row['kept']:7.1f}{row['rolled_back']:8.1f}{error}"
            )


if __name__ == "__main__":
    main()
