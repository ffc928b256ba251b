"""What each kind of foresight is worth against tuned plain arms: `compare`, seeds side by side, results kept.

    python -m benchmarks.foresight --tasks fashion-mnist mnist --seeds 5 --device cuda --workers 15

The folder in the variable HYBRIDTRAINER_TEST_DATA has the data sets. The plain arms have the rates that
`benchmarks.tune_tasks` found; the others take them over untuned. Tasks that begin with "tune" train what was trained
before (`benchmarks.finetune`, which needs the extra hf); their base is made first. Every seed is a process of its own,
in which the arms take turns, so that whatever else the machine does slows all of them alike.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.finetune import SETTINGS, Trained, base_weights, build_tuning, part_of_text
from benchmarks.record import RESULTS, write_result
from hybridtrainer.named_tasks import NAMED_TASKS

DATA = "HYBRIDTRAINER_TEST_DATA"
Settings = dict[str, Any]
Role = Literal["baseline", "challenger"]


@dataclass(frozen=True)
class Study:
    """Arms on one task.

    Attributes:
        task: The named task they start from.
        arms: What each changes of it; the first baseline gives the target where there is none.
        folder: Of the data, in the folder of all data.
        target: The metric to reach; the median of the first baseline at 90% of its run where it is None.
        changes: What all arms change of the task.
        trained: What of a model is trained that was trained before; None for one that begins anew.
        tokenizer: Folder of the tokenizer, in the folder of all data; bytes where it is empty.
    """

    task: str
    arms: dict[str, tuple[Role, Settings]]
    folder: str = ""
    target: float | None = None
    changes: Settings | None = None
    trained: Trained | None = None
    tokenizer: str = ""


def _plain(**changes: Any) -> tuple[Role, Settings]:
    return "baseline", {"predict": "off"} | changes


def _images(task: str, folder: str, *left_out: str, **changes: Any) -> Study:
    """Constant and decayed rates, averaged read-out; samples foreseen besides; and whatever "auto" uses."""
    arms: dict[str, tuple[Role, Settings]] = {
        "averaged": _plain(readout="averaged"),
        "constant": _plain(),
        "cosine": _plain(schedule={"name": "cosine"}),
        "samples": ("challenger", {"predict": ["samples"], "readout": "averaged"}),
        "auto": ("challenger", {}),
    }
    arms = {name: arm for name, arm in arms.items() if name not in left_out}
    return Study(task, arms, folder, NAMED_TASKS[task].target, changes=changes)


def _text(task: str, compute: float, folder: str = "", **changes: Any) -> Study:
    """A tuned cosine, the same at the compute of the arm that grows, and whatever "auto" uses: it grows."""
    steps = changes.get("train", {}).get("steps") or NAMED_TASKS[task].settings["train"]["steps"]
    arms: dict[str, tuple[Role, Settings]] = {
        "cosine": _plain(),
        "cosine-short": _plain(train={"steps": round(compute * steps)}),
        "auto": ("challenger", {}),
    }
    return Study(task, arms, folder, changes=changes)


def _jumps(task: str, folder: str = "", **changes: Any) -> Study:
    """The plain arm as it was tuned, and jumps besides, named, with both presets."""
    arms: dict[str, tuple[Role, Settings]] = {
        "plain": _plain(),
        "conservative": ("challenger", {"predict": ["jumps"], "preset": "conservative"}),
        "aggressive": ("challenger", {"predict": ["jumps"], "preset": "aggressive"}),
    }
    return Study(task, arms, folder, changes=changes)


def _large(rates: dict[str, float]) -> Study:
    """GPT-2 124M from scratch with GPT-2's own tokens: cosines with these rates, and "auto" with that of the first."""
    arms = {name: _plain(optimizer={"lr": rate}) for name, rate in rates.items()}
    if "cosine" in rates:
        arms["auto"] = ("challenger", {"optimizer": {"lr": rates["cosine"]}})
    return Study("text", arms, "wikitext-2", changes=LARGE, tokenizer="gpt2-bpe")


def _moments(task: str, folder: str = "", **changes: Any) -> Study:
    """When to grow, from how much, and in which order."""
    arms: dict[str, tuple[Role, Settings]] = {"cosine": _plain()}
    for share, until, order in itertools.product((0.25, 0.5), (0.25, 0.4, 0.55, 0.7), ("stack", "repeat")):
        if order == "stack" or until == 0.4:
            depth = {"share": share, "until": until, "order": order}
            arms[f"{order}-{share:g}-{until:g}"] = "challenger", {"predict": ["depth"], "depth": depth}
    return Study(task, arms, folder, changes=changes)


def _later(task: str, *moments: float) -> Study:
    """Whatever "auto" uses, grown at each of these moments."""
    arms: dict[str, tuple[Role, Settings]] = {"cosine": _plain()}
    arms |= {f"auto-{until:g}": ("challenger", {"depth": {"until": until}}) for until in moments}
    return Study(task, arms)


def _rates(task: str, folder: str, **changes: Any) -> Study:
    """Which learning rate the cosine is best with."""
    lr = NAMED_TASKS[task].settings["optimizer"]["lr"]
    arms = {f"rate-{factor:g}": _plain(optimizer={"lr": factor * lr}) for factor in (0.25, 0.5, 1.0, 2.0)}
    return Study(task, arms, folder, changes=changes)


def _tuning(trained: Trained, text: str, cosine: float, constant: float, *left_out: str) -> Study:
    """A cosine and an averaged constant rate, each with the rate it is best with; "auto" with both; single kinds."""
    steady: Settings = {"optimizer": {"lr": constant}, "schedule": {"name": "constant"}}
    arms: dict[str, tuple[Role, Settings]] = {
        "cosine": _plain(optimizer={"lr": cosine}),
        "averaged": _plain(readout="averaged", **steady),
        "auto": ("challenger", steady),
        "auto-cosine": ("challenger", {"optimizer": {"lr": cosine}}),
        "samples": ("challenger", {"predict": ["samples"], "readout": "averaged"} | steady),
        "jumps": ("challenger", {"predict": ["jumps"], "readout": "averaged", "preset": "conservative"} | steady),
    }
    arms = {name: arm for name, arm in arms.items() if name not in left_out}
    return Study("text", arms, text, changes=SETTINGS, trained=trained)


LARGE: Settings = {
    "model": {"name": "gpt2-124m", "context": 512},
    "train": {"batch_size": 8, "steps": 1000, "eval_interval": 50, "eval_batches": 16},
    "schedule": {"name": "cosine", "warmup_steps": 50},
    "memory": {"precision": "bf16"},
    "save_interval": 1000,  # a checkpoint takes as long as some thirty steps
}
FOR_A_CPU: Settings = {"steps": 3000, "eval_interval": 60, "eval_batches": 79}
MINI: Settings = {"model": {"name": "mini"}, "train": {"steps": 1500, "eval_interval": 30}}
STUDIES: dict[str, Study] = {
    "fashion-mnist": _images("fashion-mnist", "fashion-mnist"),
    "fashion-mnist-small": _images("fashion-mnist-small", "fashion-mnist", "constant"),
    "fashion-mnist-cpu": _images(
        "fashion-mnist-small",
        "fashion-mnist",
        "constant",
        train=FOR_A_CPU | {"steps": 6000, "eval_interval": 120},
        memory={"precision": "bf16"},
    ),
    "mnist": _images("mnist", "mnist", "cosine"),
    "stdlib-gpt": _text("stdlib-gpt", 0.725),
    "wikitext-2": _text("text", 0.5875, "wikitext-2", **MINI, optimizer={"lr": 2e-3}),
    "gpt2-124m": _large({"cosine": 5e-4}),
    "rates-124m": _large({"rate-0.5": 2.5e-4, "rate-2": 1e-3}),
    "jumps-mnist": _jumps("mnist", "mnist", model={"name": "cnn-small"}, train=FOR_A_CPU),
    "jumps-fashion-mnist": _jumps("fashion-mnist-small", "fashion-mnist", train=FOR_A_CPU),
    "jumps-stdlib": _jumps("stdlib-gpt"),
    "rates-wikitext": _rates("text", "wikitext-2", **MINI),
    "moments-stdlib": _moments("stdlib-gpt"),
    "moments-wikitext": _moments("text", "wikitext-2", **MINI),
    "later-stdlib": _later("stdlib-gpt", 0.55, 0.65, 0.75),
    "tune-shakespeare": _tuning("full", "tinyshakespeare", 1e-3, 2e-3),
    "tune-shakespeare-lora": _tuning("lora", "tinyshakespeare", 16e-3, 8e-3, "samples", "jumps"),
    "tune-wikitext": _tuning("full", "wikitext-2", 2.5e-4, 5e-4, "samples", "jumps"),
    "tune-wikitext-lora": _tuning("lora", "wikitext-2", 32e-3, 8e-3, "samples", "jumps"),
}


def merged(base: Settings, *changes: Settings) -> Settings:
    """Sections are merged, values replaced."""
    made = deepcopy(base)
    for change in changes:
        for key, value in change.items():
            made[key] = made[key] | value if isinstance(value, dict) and key in made else deepcopy(value)
    return made


def arm_settings(study: Study, device: str, kept: Path) -> Iterator[tuple[str, Role, Settings]]:
    common: Settings = {"train": {"device": device}, "preset": "default"}
    if study.trained:
        common["data"] = {"path": str(part_of_text(Path(os.environ[DATA]), study.folder, kept))}
    elif study.folder:
        common["data"] = {"path": str(Path(os.environ[DATA]) / study.folder)}
        if study.tokenizer:
            common["data"]["tokenizer"] = str(Path(os.environ[DATA]) / study.tokenizer)
    for name, (role, changes) in study.arms.items():
        yield name, role, merged(NAMED_TASKS[study.task].settings, study.changes or {}, common, changes)


def compare_seeds(name: str, folder: Path, first_seed: int, seeds: int, device: str, kept: Path) -> dict[str, Any]:
    """Trains what is not in the folder yet, and judges; `kept` has the base of models that were trained before."""
    import torch

    from hybridtrainer.compare.arms import Arm, evaluated_alike
    from hybridtrainer.compare.audit import compare
    from hybridtrainer.compare.options import Options
    from hybridtrainer.config import RunConfig
    from hybridtrainer.config_io import parse_config
    from hybridtrainer.observe.progress import make_progress
    from hybridtrainer.tasks import Task, build_task

    torch.set_num_threads(1)
    study = STUDIES[name]
    named = [(arm, role, parse_config(settings)) for arm, role, settings in arm_settings(study, device, kept)]
    alike = evaluated_alike([config for _, _, config in named])
    arms = [Arm(arm, role, config) for (arm, role, _), config in zip(named, alike, strict=True)]
    options = Options(seeds, first_seed, study.target)

    def build(config: RunConfig) -> Task:
        return build_tuning(config, kept, study.trained) if study.trained else build_task(config)

    return compare(arms, folder, options, make_progress("off", name), build)


def gather(folder: Path, seeds: int) -> Path:
    """One folder with the trials of all seeds, as if they had been made there."""
    whole = folder / "all"
    for seed in range(seeds):
        for trial in (folder / f"seed{seed}" / "trials").iterdir():
            shutil.copytree(trial, whole / "trials" / trial.name, dirs_exist_ok=True)
    return whole


def short(result: dict[str, Any]) -> dict[str, Any]:
    """What came out, without the curves of single runs and the settings that are in this file."""
    kept = {key: result[key] for key in ("headline", "warnings", "metric", "target", "tolerance", "seeds")}
    kept |= {"comparisons": result["comparisons"], "arms": {}}
    for name, arm in result["arms"].items():
        trials = [{key: trial[key] for key in trial if key not in ("curve", "folder")} for trial in arm["trials"]]
        kept["arms"][name] = {"role": arm["role"], "average": arm["average"], "trials": trials}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["stdlib-gpt"], choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/foresight"), help="where runs are kept")
    parser.add_argument("--one", type=int, help="train this seed of the first task in this process")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if DATA not in os.environ and any(STUDIES[name].folder for name in arguments.tasks):
        parser.error(f"the variable {DATA} does not say where the data are")
    if arguments.one is not None:
        name = arguments.tasks[0]
        compare_seeds(
            name, arguments.runs / name / f"seed{arguments.one}", arguments.one, 1, arguments.device, arguments.runs
        )
        return
    if any(STUDIES[name].trained for name in arguments.tasks):
        base_weights(arguments.runs)

    def train(job: tuple[str, int]) -> int:
        name, seed = job
        command = [sys.executable, "-m", "benchmarks.foresight", "--tasks", name, "--one", str(seed)]
        return subprocess.run(
            [*command, "--device", arguments.device, "--runs", str(arguments.runs)], check=False
        ).returncode

    with ThreadPoolExecutor(arguments.workers) as pool:
        jobs = {name: [pool.submit(train, (name, seed)) for seed in range(arguments.seeds)] for name in arguments.tasks}
        for name, waiting in jobs.items():
            if any(job.result() for job in waiting):
                print(f"{name}: a process failed, no result", flush=True)
                continue
            folder = gather(arguments.runs / name, arguments.seeds)
            result = short(compare_seeds(name, folder, 0, arguments.seeds, arguments.device, arguments.runs))
            write_result(f"foresight_{name.replace('-', '_')}", result, arguments.out)
            print(told(name, result), flush=True)


def told(name: str, result: dict[str, Any]) -> str:
    """What came out, for people."""
    lines = [f"\n{name}, target {result['target']['value']:.4g}"]
    lines += [f"  {row['sentence']}" for row in result["comparisons"]]
    for arm, found in result["arms"].items():
        finals = " ".join(f"{trial['final']:.4f}" for trial in found["trials"] if trial["final"] is not None)
        moment = found["average"]
        reached = f"{moment['step']:.0f} steps, {moment['seconds']:.1f} s to target" if moment else "target not reached"
        lines.append(f"  {arm:16} {reached}; final {finals}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
