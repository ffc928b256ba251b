"""From a configuration to a trainer: nothing a user can set is ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import BaseModel
from tests.support import tiny_gpt
from tests.test_trainer import wrong

from hybridtrainer import tasks
from hybridtrainer.config import HybridTrainerConfig, RunConfig
from hybridtrainer.config_io import load_config, parse_config, to_toml
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ConfigError, ModelError
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.models.language import language_loss
from hybridtrainer.observe import trackers
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.run_folder import run_path
from hybridtrainer.tasks import build_optimizer, build_schedule, build_task, choose_device


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    return {"source": "text", "path": str(tmp_path / "text.txt")}


def config_of(data: dict[str, Any], **settings: Any) -> RunConfig:
    return parse_config({"data": data, "train": {"batch_size": 4, "steps": 20}, "model": {"context": 16}, **settings})


def test_the_same_configuration_builds_the_same_run(text_file):
    one, other = build_task(config_of(text_file)), build_task(config_of(text_file))
    assert one.trainer.fingerprint() == other.trainer.fingerprint()
    assert torch.equal(next(iter(one.loader)), next(iter(other.loader)))
    different = build_task(config_of(text_file, seed=1))
    assert different.trainer.fingerprint()["parameters"] != one.trainer.fingerprint()["parameters"]
    assert not torch.equal(next(iter(different.loader)), next(iter(one.loader)))


def test_a_streamed_model_is_never_there_twice_and_depends_on_the_seed_alone(text_file, monkeypatch):
    devices = []

    def watched(*args: Any, device: str, **options: Any) -> Any:
        devices.append(device)
        return build_gpt(*args, device=device, **options)

    monkeypatch.setattr(tasks, "build_gpt", watched)
    config = config_of(text_file, memory={"mode": "split8"}, predict="off")
    one, same, other = (build_task(config.model_copy(update={"seed": seed})).trainer.model for seed in (1, 1, 2))
    assert devices == ["meta"] * 3
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name])
        if value.dim() > 1:
            assert 0.001 < float(value.float().std()) < 0.04
            assert not torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize(("vram", "mode"), [("2GB", "resident"), ("0.072GB", "split8")])
def test_a_budget_alone_is_planned_at_the_start_kept_and_not_planned_again(
    text_file, tmp_path, vram, mode, monkeypatch
):
    config = config_of(text_file, memory={"vram": vram, "ram": "8GB"})
    task = build_task(config)
    assert task.config.memory.mode == mode
    task.fit(tmp_path / "run", "off", pause_at=2, config_text=to_toml(task.config))
    kept = load_config(tmp_path / "run" / "config.toml")
    assert kept == task.config == task.trainer.config
    (planned,) = [r["text"] for r in read_log(tmp_path / "run" / "log.jsonl") if "planned" in r.get("text", "")]
    assert f"planned: {mode}" in planned
    monkeypatch.setattr(tasks, "settle_memory", lambda *_: pytest.fail("planned again"))
    result = build_task(kept).fit(tmp_path / "run", "off", resume=True, pause_at=4)
    assert result.steps == 4


def test_a_plan_does_not_change_what_is_drawn(text_file):
    planned = build_task(config_of(text_file, memory={"vram": "2GB"}))
    told = build_task(config_of(text_file))
    assert planned.config == told.config
    assert planned.trainer.fingerprint() == told.trainer.fingerprint()


def test_logits_of_a_large_vocabulary_never_exist_whole(text_file, monkeypatch):
    whole = build_task(config_of(text_file)).trainer
    monkeypatch.setattr(tasks, "WHOLE_LOGITS", 255)
    seen = []
    monkeypatch.setattr(tasks, "language_loss", lambda *args: seen.append(1) or language_loss(*args))  # type: ignore[func-returns-value]
    tiled = build_task(config_of(text_file)).trainer
    batch = torch.randint(0, 256, (4, 17))
    assert tiled.step(batch).loss == pytest.approx(whole.step(batch).loss, abs=1e-5)
    assert seen


def test_probe_and_validation_batches_are_not_trained_on(text_file):
    task = build_task(config_of(text_file))
    splits = [task.loader.dataset, task.trainer._probes, task.validation]
    assert splits[1] and splits[2]
    train = task.loader.dataset.tokens  # type: ignore[attr-defined]
    assert len(train) == int(300 * 42 * (1 - 0.05 - 0.02))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("adafactor", torch.optim.Adafactor),
    ],
)
def test_every_optimizer_decays_matrices_only(name, kind):
    optimizer = build_optimizer(tiny_gpt(), parse_config({"optimizer": {"name": name, "lr": 0.5}}).optimizer)
    assert isinstance(optimizer, kind)
    matrices, vectors = optimizer.param_groups
    assert matrices["weight_decay"] == 0.1 and vectors["weight_decay"] == 0.0
    assert all(parameter.dim() > 1 for parameter in matrices["params"])
    assert all(parameter.dim() <= 1 for parameter in vectors["params"])
    assert float(matrices["lr"]) == 0.5


@pytest.mark.parametrize(
    ("name", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_the_schedule_rises_then_falls_to_its_final_ratio(name, middle, end):
    settings: dict[str, Any] = {"name": name, "warmup_steps": 10}
    if name != "constant":
        settings["final_ratio"] = 0.1
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, parse_config({"schedule": settings}).schedule, steps=110)
    rates = []
    for _ in range(111):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[60] == pytest.approx(middle) and rates[110] == pytest.approx(end)


def test_a_missing_gpu_is_said_so():
    if torch.cuda.is_available():
        assert choose_device("auto").type == "cuda"
        return
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ModelError, match="torch finds none here"):
        choose_device("cuda")


class Reads:
    """Remembers which settings were read, whatever section they are in."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def watch(self, section: BaseModel, path: str = "") -> Any:
        reads = self

        class Watched:
            def __getattr__(self, name: str) -> Any:
                if name == "jumps_allowed":  # it reads settings itself
                    return lambda: HybridTrainerConfig.jumps_allowed(self)  # type: ignore[arg-type]
                value = getattr(section, name)
                if name in type(section).model_fields:
                    reads.seen.add(path + name)
                    if isinstance(value, BaseModel):
                        return reads.watch(value, f"{path}{name}.")
                return value

        return Watched()


def all_fields(model: type[BaseModel], path: str = "") -> set[str]:
    names: set[str] = set()
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names |= all_fields(inner, f"{path}{name}.")
        else:
            names.add(path + name)
    return names


def test_no_setting_is_accepted_and_then_ignored(text_file, tmp_path):
    """Runs everything a configuration can lead to, and finds the fields that nothing has read."""
    reads = Reads()
    eager: dict[str, Any] = {
        "warmup_steps": 10,
        "full_steps": 5,
        "confidence_threshold": 0.0,
        "waste_limit": 1.0,
        "lasting_share": 1.0,
        "recovery_steps": 1,
    }
    eager |= {"predict": ["jumps"]}  # under a schedule that falls
    text = config_of(text_file, schedule={"name": "cosine", "warmup_steps": 2}, **eager)
    text = text.model_copy(update={"train": text.train.model_copy(update={"steps": 60})})
    images = parse_config(
        {
            "data": {"source": "digits"},
            "model": {"name": "cnn"},
            "train": {"steps": 3},
            "optimizer": {"name": "sgd", "momentum": 0.5},
            "readout": "averaged",
        }
    )
    streamed = text.model_copy(update={"memory": MemoryConfig(mode="split8", vram="4GB", ram="1GB"), "predict": "off"})
    recomputed = text.model_copy(update={"memory": MemoryConfig(checkpoint_every=1)})
    short = text.train.model_copy(update={"steps": 10})
    grown = text.model_copy(update={"predict": ["depth", "samples"], "train": short})
    for number, config in enumerate([text, text, images, streamed, recomputed, grown]):
        watched = reads.watch(config)
        task = build_task(watched)
        if number == 1:
            task.trainer.jumps.forecaster = wrong
        task.fit(tmp_path / f"run-{number}", "off")
        run_path(watched.run.folder, watched.run.name)  # what the command line does with them
    assert all_fields(RunConfig) - reads.seen == set()


def test_configured_trackers_follow_the_run_or_are_refused_before_it_begins(text_file, tmp_path, monkeypatch):
    class Seen:
        def __init__(self, package: Any, folder: Any, resumed_at: int | None) -> None:
            self.kinds: set[str] = set()
            made.append((resumed_at, self))

        def write(self, kind: str, fields: Any) -> None:
            self.kinds.add(kind)

        def close(self) -> None: ...

    made: list[tuple[int | None, Seen]] = []
    monkeypatch.setitem(trackers.MAKERS, "wandb", (lambda: None, Seen))
    config = config_of(text_file, run={"trackers": ["wandb"]})
    build_task(config).fit(tmp_path / "run", "off", pause_at=10)
    build_task(config).fit(tmp_path / "run", "off", resume=True)
    assert [resumed_at for resumed_at, _ in made] == [None, 10]
    assert all({"step", "memory", "end"} <= tracker.kinds for _, tracker in made)
    build_task(config).fit(None, "off")  # no log, nothing to follow
    assert len(made) == 2

    def missing() -> None:
        raise ImportError("No module named 'wandb'")

    monkeypatch.setitem(trackers.MAKERS, "wandb", (missing, Seen))
    with pytest.raises(ModelError, match=r"\.\[track\]"):
        build_task(config).fit(tmp_path / "other", "off")
    assert not (tmp_path / "other").exists()


def test_a_tracker_that_is_unknown_or_named_twice_is_refused(text_file):
    for wanted, problem in ((["mlflow"], "run.trackers"), (["wandb", "wandb"], "names a tracker twice")):
        with pytest.raises(ConfigError, match=problem):
            config_of(text_file, run={"trackers": wanted})
