"""Lightning with HybridTrainer in it: off it is the plain trainer, on it is the native loop."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.making import (
    ALL_PHASES,
    PHASES,
    log_of,
    phases_in,
    same,
    statistics,
    timeless,
    weights,
)
from tests.support import gpt_setup
from torch import Tensor
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from hybridtrainer.config import HybridTrainerConfig  # noqa: E402
from hybridtrainer.errors import CorruptCheckpointError, ForeignCheckpointError, LossError  # noqa: E402
from hybridtrainer.integrations.lightning import HybridStrategy  # noqa: E402
from hybridtrainer.models.gpt import GPT, GPTConfig  # noqa: E402
from hybridtrainer.phases import divergence  # noqa: E402
from hybridtrainer.predict import depth  # noqa: E402
from hybridtrainer.report.page import write_report  # noqa: E402
from hybridtrainer.trainer import HybridTrainer  # noqa: E402

OFF = HybridTrainerConfig(predict="off")
ON = HybridTrainerConfig(**ALL_PHASES)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A small GPT on source text."""

    def __init__(self, interval: str = "step", dropout: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        self.setup_ = [gpt_setup(count=1, dropout=dropout, seed=seed)]
        self.gpt, self.interval = self.setup_[0].model, interval
        self.seen_gradients = 0
        self.seen_losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.setup_[0].loss_fn(self.gpt, batch).mean()
        self.log("train_loss", loss, on_step=True)
        return {"loss": loss, "index": batch_idx}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.setup_[0].loss_fn(self.gpt, batch).mean())

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen_losses.append(float(loss))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert any(parameter.grad is not None for parameter in self.parameters())
        self.seen_gradients += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.6, 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class Losses(pl.Callback):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.told: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            self.told.append(float(outputs["loss"]))


def batches(count: int) -> Any:
    return gpt_setup(count=count).batches


def train(folder: Path, strategy: Any = "auto", **changes: Any) -> Any:
    resume, module = changes.pop("resume", None), changes.pop("module", None) or Module()
    data, shuffle = changes.pop("data", None) or batches(20), changes.pop("shuffle", True)
    usual = {
        "max_steps": 30, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": str(folder),
        "num_sanity_val_steps": 0,
    }  # fmt: skip
    pl.seed_everything(3, verbose=False)
    losses = Losses()
    callbacks = [losses, *changes.pop("callbacks", [])]
    loaders = [
        DataLoader(each, batch_size=None, shuffle=at == 0 and shuffle) for at, each in enumerate((data, data[:3]))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(strategy=strategy, callbacks=callbacks, **(usual | changes))
        trainer.fit(module, *loaders, ckpt_path=resume)
    trainer.losses = losses.told
    return trainer


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_steps": 200}, marks=pytest.mark.slow),
        {"gradient_clip_val": 0.3, "precision": "bf16-mixed"},
        {"accumulate_grad_batches": 3, "max_steps": 15},
        pytest.param({"max_steps": -1, "max_epochs": 2, "module": "epoch"}, marks=pytest.mark.slow),
    ],
    ids=["200 steps", "clipped, bf16", "accumulation that does not divide the data", "a schedule of epochs"],
)
def test_off_it_is_the_plain_trainer_bit_for_bit(tmp_path, changes):
    interval = changes.get("module", "step")
    runs = [
        train(tmp_path / str(at), strategy, **(changes | {"module": Module(interval)}))
        for at, strategy in enumerate(("auto", HybridStrategy(OFF, "cpu")))
    ]
    plain, hybrid = runs
    assert same(weights(plain.lightning_module), weights(hybrid.lightning_module))
    assert plain.global_step == hybrid.global_step
    assert plain.callback_metrics == hybrid.callback_metrics
    assert plain.lightning_module.seen_gradients == hybrid.lightning_module.seen_gradients
    assert plain.lightning_module.seen_losses == hybrid.lightning_module.seen_losses
    if "accumulate_grad_batches" not in changes:
        assert plain.losses == hybrid.losses
    rates = [run.optimizers[0].param_groups[0]["lr"] for run in runs]
    assert rates[0] == rates[1] < 3e-3


@pytest.mark.slow
def test_two_hundred_steps_visit_all_phases_and_are_those_of_the_native_loop(tmp_path):
    data = batches(200)
    options: dict[str, Any] = {"data": data, "shuffle": False, "max_steps": 200, "val_check_interval": 150}
    module = Module("epoch", dropout=0.0)
    trainer = train(tmp_path, HybridStrategy(ON, "cpu"), module=module, **options)
    log = log_of(tmp_path / "hybridtrainer")
    assert phases_in(log) == PHASES
    assert trainer.strategy.hybrid.step_count >= 200 > trainer.global_step

    other = Module("epoch", dropout=0.0)
    parts = other.configure_optimizers()
    native = HybridTrainer(
        other,
        parts["optimizer"],
        lambda model, batch: model.setup_[0].loss_fn(model.gpt, batch).mean(),
        ON,
    )
    native.fit(data, 200, run_dir=tmp_path / "native", progress="off")
    kinds = ("step", "jump", "phase")
    assert timeless(log, *kinds) == timeless(log_of(tmp_path / "native"), *kinds)
    assert same(weights(module), weights(other))
    evaluations = timeless(log, "evaluation")
    assert evaluations[0].keys() >= {"step", "loss", "forward_samples"}
    assert evaluations[-1]["step"] == trainer.strategy.hybrid.step_count  # though the epoch was cut short
    assert statistics(tmp_path / "hybridtrainer").keys() == statistics(tmp_path / "native").keys()
    write_report([tmp_path / "hybridtrainer"], tmp_path / "report.html")


def test_what_is_rolled_back_is_made_again_until_the_schedule_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "not_recovered", lambda *_: "as this test wants it")
    trainer = train(tmp_path, HybridStrategy(ON, "cpu"), max_steps=-1, max_epochs=3)
    steps = timeless(log_of(tmp_path / "hybridtrainer"), "step")
    assert any(step["reason"].startswith("rolled back") for step in steps)
    assert trainer.strategy.hybrid.step_count == 60 < trainer.global_step == len(steps)


@pytest.mark.parametrize(
    "after_epoch", [pytest.param(True, marks=pytest.mark.slow), False], ids=["after the epoch", "after its validation"]
)
def test_a_run_resumed_from_an_epochs_end_is_the_uninterrupted_one(tmp_path, after_epoch):
    def saving(folder: Path) -> Any:
        when = {"save_top_k": -1, "save_on_train_epoch_end": after_epoch}
        return pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", **when)

    changes: dict[str, Any] = {"max_steps": 60, "enable_checkpointing": True, "data": batches(7)}
    whole = train(tmp_path / "run", HybridStrategy(ON, "cpu"), callbacks=[saving(tmp_path / "kept")], **changes)
    log = timeless(log_of(tmp_path / "run" / "hybridtrainer"), "step", "jump", "phase")
    by_phase = {}
    for file in sorted((tmp_path / "kept").glob("*.ckpt"))[:-1]:
        document = json.loads(torch.load(file, weights_only=False)["hybridtrainer"]["document"])
        by_phase[document["standing"]["policy"]["phase"]] = file
    assert by_phase.keys() >= {"warmup", "full", "correct"}, by_phase  # in Correct there is a copy to return to
    for file in by_phase.values():
        folder = shutil.copytree(tmp_path / "run", tmp_path / file.stem)
        again = train(
            folder,
            HybridStrategy(ON, "cpu"),
            module=Module(seed=5),
            resume=str(file),
            callbacks=[saving(tmp_path / "other")],
            **changes,
        )
        assert same(weights(whole.lightning_module), weights(again.lightning_module)), file
        assert whole.strategy.hybrid.fingerprint() == again.strategy.hybrid.fingerprint(), file
        assert timeless(log_of(folder / "hybridtrainer"), "step", "jump", "phase") == log, file


def test_a_training_step_may_leave_out_the_index_but_not_the_loss(tmp_path):
    class WithoutIndex(Module):
        def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
            return None if self.trainer.global_step == 40 else self.setup_[0].loss_fn(self.gpt, batch).mean()

    strategy = HybridStrategy(ON, "cpu", probe_batches=batches(2))
    with pytest.raises(LossError, match="training_step returned None"):
        train(tmp_path, strategy, module=WithoutIndex(), max_steps=60)
    assert strategy.hybrid.statistics().jumps_accepted


def test_a_checkpoint_of_another_strategy_is_refused(tmp_path):
    trainer = train(tmp_path, max_steps=4)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ForeignCheckpointError, match="another strategy"):
        train(tmp_path, HybridStrategy(ON, "cpu"), resume=str(tmp_path / "plain.ckpt"))


def test_a_checkpoint_that_was_not_written_to_its_end_is_refused_by_name(tmp_path):
    trainer = train(tmp_path, HybridStrategy(OFF, "cpu"), max_steps=4)
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "cut.ckpt").read_bytes()[:-100])
    with pytest.raises(CorruptCheckpointError, match=r"cut\.ckpt is cut short"):
        train(tmp_path, HybridStrategy(OFF, "cpu"), resume=str(tmp_path / "cut.ckpt"))


def test_a_trainer_on_the_cpu_stays_there_where_there_is_a_gpu(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        strategy = HybridStrategy(OFF)
    assert strategy.root_device == torch.device("cuda:0")
    train(tmp_path, strategy, max_steps=1)
    assert strategy.hybrid.step_count == 1 and strategy.root_device == torch.device("cpu")


def test_an_epoch_that_is_left_within_a_step_takes_its_batches_with_it(tmp_path):
    class Leaving(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    plain, hybrid = (  # without dropout: for batches that make no step, only the plain run draws random numbers
        train(
            tmp_path / str(at),
            strategy,
            module=Leaving(dropout=0.0),
            accumulate_grad_batches=3,
            max_steps=-1,
            max_epochs=3,
        )
        for at, strategy in enumerate(("auto", HybridStrategy(OFF, "cpu")))
    )
    assert plain.global_step == hybrid.global_step == 3
    assert same(weights(plain.lightning_module), weights(hybrid.lightning_module))


def test_steps_that_an_epoch_has_left_out_are_not_made_later(tmp_path):
    class Leaving(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    def go(**changes: Any) -> Any:
        saving = pl.callbacks.ModelCheckpoint(tmp_path / "kept", filename="{epoch}", save_top_k=-1)
        changes = {"max_steps": -1, "max_epochs": 3, "enable_checkpointing": True, "callbacks": [saving]} | changes
        return train(tmp_path, HybridStrategy(HybridTrainerConfig(), "cpu"), module=Leaving(), **changes)

    assert (go().global_step, go(max_steps=12).global_step) == (15, 12)  # in Warmup, so without a jump
    again = go(resume=str(tmp_path / "kept" / "epoch=1.ckpt"))
    assert (again.global_step, again.strategy.hybrid.step_count) == (15, 15)


def test_the_averaged_read_out_is_what_validation_sees(tmp_path):
    settings = HybridTrainerConfig(predict="off", readout="averaged")
    last = train(tmp_path / "last", HybridStrategy(OFF, "cpu"), check_val_every_n_epoch=1)
    averaged = train(tmp_path / "averaged", HybridStrategy(settings, "cpu"), check_val_every_n_epoch=1)
    assert same(weights(last.lightning_module), weights(averaged.lightning_module))
    assert last.callback_metrics["val_loss"] != averaged.callback_metrics["val_loss"]


class Deep(Module):
    """One with enough blocks to begin with a few of them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__("epoch", dropout=0.0)
        torch.manual_seed(seed)
        self.gpt = GPT(GPTConfig("llama", 6, 32, 2, vocabulary=256, context=64))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_a_model_from_scratch_grows_resumes_from_before_and_after_that_and_its_files_can_be_used_alone(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(depth, "LEAST_STEPS", 20)
    settings = HybridTrainerConfig(predict="auto", warmup_steps=5)
    data = batches(8)

    def saving(folder: Path) -> Any:
        return pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)

    changes: dict[str, Any] = {"max_steps": 32, "enable_checkpointing": True, "data": data, "shuffle": False}
    run = tmp_path / "run"
    whole = train(run, HybridStrategy(settings, "cpu"), module=Deep(), callbacks=[saving(tmp_path / "kept")], **changes)
    said = [record["text"] for record in timeless(log_of(run / "hybridtrainer"), "notice")]
    assert any(text.startswith("the model begins short: of 6 blocks 2") for text in said), said
    assert "grown from 2 to 6 blocks, by stack" in said
    for epoch, is_short in ((0, True), (1, True), (2, False)):
        file = tmp_path / "kept" / f"epoch={epoch}.ckpt"
        kept = torch.load(file, weights_only=False)
        assert json.loads(kept["hybridtrainer"]["document"])["depth"]["short"] is is_short
        last, source = (
            {name.split(f".{number}.")[1]: value for name, value in kept["state_dict"].items() if f".{number}." in name}
            for number in (5, 1)
        )
        assert same(last, source) == is_short
        again = train(
            shutil.copytree(run, tmp_path / str(epoch)),
            HybridStrategy(settings, "cpu"),
            module=Deep(5),
            resume=str(file),
            callbacks=[saving(tmp_path / "other")],
            **changes,
        )
        assert whole.strategy.hybrid.fingerprint() == again.strategy.hybrid.fingerprint(), epoch

    other = Deep()
    native = HybridTrainer(
        other,
        other.configure_optimizers(),
        lambda model, batch: model.setup_[0].loss_fn(model.gpt, batch).mean(),
        settings,
    )
    native.fit(data, 32, run_dir=tmp_path / "native", progress="off")
    kinds = ("step", "jump", "phase", "notice", "forecast")
    assert timeless(log_of(run / "hybridtrainer"), *kinds) == timeless(log_of(tmp_path / "native"), *kinds)
    assert same(weights(whole.lightning_module), weights(other))
