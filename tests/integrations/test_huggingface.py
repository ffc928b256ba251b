"""Hugging Face's Trainer with HybridTrainer in it: off it is the plain one, on it is the native loop."""

from __future__ import annotations

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
    tiny,
    weights,
    windows,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from hybridtrainer.checkpoint import read_checkpoint  # noqa: E402
from hybridtrainer.config import HybridTrainerConfig  # noqa: E402
from hybridtrainer.config_memory import MemoryConfig  # noqa: E402
from hybridtrainer.errors import CorruptCheckpointError, ForeignCheckpointError, ModelError  # noqa: E402
from hybridtrainer.integrations.huggingface import HybridTrainerMixin, Trainer  # noqa: E402
from hybridtrainer.memory.stream import stream  # noqa: E402
from hybridtrainer.phases import divergence  # noqa: E402
from hybridtrainer.predict import depth  # noqa: E402
from hybridtrainer.report.page import write_report  # noqa: E402
from hybridtrainer.trainer import HybridTrainer  # noqa: E402

OFF = HybridTrainerConfig(predict="off")
ON = HybridTrainerConfig(**ALL_PHASES)


def arguments(folder: Path, **changes: Any) -> Any:
    usual = {
        "output_dir": str(folder), "max_steps": 30, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "seed": 1, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**(usual | changes))


def train(folder: Path, hybrid: Any = None, data: Any = None, **changes: Any) -> Any:
    """A run of Hugging Face's own Trainer, or of ours where there are settings for it."""
    resume, options = changes.pop("resume", None), changes.pop("options", {})
    model, init_scale = changes.pop("model", None) or tiny(), changes.pop("init_scale", None)
    kind = transformers.Trainer if hybrid is None else Trainer
    if hybrid is not None:
        options["hybrid"] = hybrid
    trainer = kind(model, arguments(folder, **changes), train_dataset=windows(160) if data is None else data, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    if init_scale is not None:  # Accelerate makes a scaler on GPUs only
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        trainer.accelerator.native_amp = True
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class WithoutLength(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Data that nobody knows the length of."""

    def __iter__(self) -> Any:
        return iter(windows(26))


def told(trainer: Any) -> list[dict[str, Any]]:
    """What Hugging Face has logged, without times."""
    names = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime")
    unstable = (*names, "eval_samples_per_second", "eval_steps_per_second")
    return [{name: value for name, value in each.items() if name not in unstable} for each in trainer.state.log_history]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 200},
        {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "lr_scheduler_type": "cosine"},
        {"bf16": True, "max_grad_norm": 0.1, "warmup_steps": 5, "lr_scheduler_type": "linear"},
        pytest.param(
            {"max_grad_norm": 0.0, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2,
             "weight_decay": 0.1},
            marks=pytest.mark.slow,
        ),
        {"eval_strategy": "steps", "eval_steps": 7, "lr_scheduler_type": "reduce_lr_on_plateau",
         "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}, "metric_for_best_model": "loss"},
        {"data": WithoutLength(), "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 12},
    ],
    ids=["200 steps", "accumulation that does not divide the data", "bf16", "unclipped", "a schedule of metrics",
         "data without a length that end within a step"],
)  # fmt: skip
def test_off_it_is_the_plain_trainer_bit_for_bit(tmp_path, changes):
    options = {"eval_dataset": windows(8, first=500)}
    plain = train(tmp_path / "plain", **changes, options=dict(options))
    hybrid = train(tmp_path / "hybrid", OFF, **changes, options=dict(options))
    assert same(weights(plain.model), weights(hybrid.model))
    assert told(plain) == told(hybrid)
    assert plain.state.global_step == hybrid.state.global_step == changes.get("max_steps", 30)


@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("adamw_torch_fused", marks=pytest.mark.slow)])
def test_where_a_scaler_withholds_updates_the_schedule_waits_where_the_plain_trainers_does(tmp_path, optim):
    changes = {
        "init_scale": 2.0**20,
        "lr_scheduler_type": "linear",
        "max_steps": 12,
        "optim": optim,
        "fp16": True,
    }
    plain, hybrid = train(tmp_path / "plain", **changes), train(tmp_path / "hybrid", OFF, **changes)
    assert plain.accelerator.scaler.get_scale() == hybrid.accelerator.scaler.get_scale() < 2.0**20
    rates = [[each["learning_rate"] for each in told(one)[:-1]] for one in (plain, hybrid)]
    assert rates[0] == rates[1]
    assert (rates[0][0] == rates[0][1]) == (optim == "adamw_torch")
    assert same(weights(plain.model), weights(hybrid.model))


def test_a_loss_function_of_the_users_own_is_followed(tmp_path):
    def loss_of(outputs, labels, num_items_in_batch):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    changes = {"gradient_accumulation_steps": 2, "options": {"compute_loss_func": loss_of}, "max_steps": 8}
    plain, hybrid = train(tmp_path / "plain", **changes), train(tmp_path / "hybrid", OFF, **changes)
    assert same(weights(plain.model), weights(hybrid.model))
    assert told(plain) == told(hybrid)


@pytest.mark.slow
def test_two_hundred_steps_visit_all_phases_and_are_those_of_the_native_loop(tmp_path):
    data = windows(800)
    order = torch.randperm(800, generator=torch.Generator().manual_seed(5)).tolist()
    data = [data[number] for number in order]
    trainer = train(
        tmp_path / "hf",
        ON,
        data,
        model=tiny("llama"),  # without dropout: what is drawn at random is drawn in another order
        max_steps=200,
        max_grad_norm=1.0,
        weight_decay=0.0,
        train_sampling_strategy="sequential",
    )
    log = log_of(tmp_path / "hf" / "hybridtrainer")
    assert phases_in(log) == PHASES
    assert trainer.hybrid.step_count >= 200 > trainer.state.global_step
    assert trainer.state.max_steps == trainer.state.global_step

    model = tiny("llama")
    optimizer = transformers.Trainer(model, arguments(tmp_path / "unused")).create_optimizer()
    targets = torch.tensor(4 * 32)
    native = HybridTrainer(
        model, optimizer, lambda model, batch: model(**batch, num_items_in_batch=targets).loss, ON, clip_norm=1.0
    )
    batches = [
        {name: torch.stack([piece[name] for piece in data[at : at + 4]]) for name in data[0]}
        for at in range(0, len(data), 4)
    ]
    native.fit(batches, 200, run_dir=tmp_path / "native", progress="off")
    kinds = ("step", "jump", "phase")
    assert timeless(log, *kinds) == timeless(log_of(tmp_path / "native"), *kinds)
    assert same(weights(trainer.model), weights(model))
    assert {record["kind"] for record in log} == {record["kind"] for record in log_of(tmp_path / "native")} - {
        "checkpoint"
    }
    ours, theirs = (statistics(folder) for folder in (tmp_path / "hf" / "hybridtrainer", tmp_path / "native"))
    assert ours.keys() == theirs.keys()
    assert (ours["real_steps"], ours["jumps_kept"]) == (theirs["real_steps"], theirs["jumps_kept"])
    page = tmp_path / "report.html"
    write_report([tmp_path / "hf" / "hybridtrainer"], page)
    assert "predict" in page.read_text().lower()


def test_what_is_rolled_back_is_made_again_until_the_schedule_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "not_recovered", lambda *_: "as this test wants it")
    changes = {"max_steps": 60, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 2e-3}}
    trainer = train(tmp_path, ON, windows(120), **changes)  # two epochs
    steps = timeless(log_of(tmp_path / "hybridtrainer"), "step")
    assert any(step["reason"].startswith("rolled back") for step in steps)
    assert trainer.hybrid.step_count == 60
    assert trainer.hybrid.optimizer.param_groups[0]["lr"] == pytest.approx(2e-3)
    assert trainer.state.global_step == trainer.state.max_steps == len(steps) > 60
    assert trainer.state.num_train_epochs == 2


def test_a_second_call_goes_on_as_that_of_the_plain_trainer_and_has_a_log_of_its_own(tmp_path):
    runs = [train(tmp_path / "plain", max_steps=8), train(tmp_path / "hybrid", OFF, max_steps=8)]
    for run in runs:
        torch.manual_seed(5)
        run.train()
    assert same(*(weights(run.model) for run in runs))
    assert [
        len(timeless(log_of(tmp_path / "hybrid" / name), "step")) for name in ("hybridtrainer", "hybridtrainer-2")
    ] == [8, 8]


def test_data_sets_tokenizers_and_schedulers_of_ones_own_are_taken(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    source = Path(pytest.__file__).read_text()
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([source], vocab_size=256, special_tokens=["<end>"], show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<end>", pad_token="<end>"
    )
    texts = datasets.Dataset.from_dict({"text": [line for line in source.splitlines() if len(line) > 20][:60]})
    data = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns="text")
    runs = []
    for hybrid in (None, OFF):
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        options = {
            "data_collator": transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
            "processing_class": tokenizer,
            "optimizers": (optimizer, scheduler),
        }
        changes = {"gradient_accumulation_steps": 2, "max_steps": 8, "save_strategy": "steps", "save_steps": 8}
        runs.append(train(tmp_path / str(hybrid is None), hybrid, data, model=model, options=options, **changes))
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    assert same(*(weights(run.model) for run in runs))
    assert (tmp_path / "False" / "checkpoint-8" / "tokenizer.json").exists()


def test_a_run_resumed_from_any_phase_is_the_uninterrupted_one(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 3, "max_steps": 45, "gradient_accumulation_steps": 2,
               "per_device_train_batch_size": 2}  # fmt: skip
    whole = train(tmp_path / "run", ON, **changes)
    log = timeless(log_of(tmp_path / "run" / "hybridtrainer"), "step", "jump", "phase")
    by_phase = {}
    made = sorted((tmp_path / "run").glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    for folder in made[:-1]:
        state = read_checkpoint(folder / "hybridtrainer").state()
        by_phase[str(state["standing"]["policy"]["phase"])] = folder
        assert "parameters" not in state
        assert "optimizer" not in state
    assert len(by_phase) >= 3, by_phase
    for phase, folder in by_phase.items():
        torch.manual_seed(99)
        again = train(tmp_path / "run", ON, model=tiny(seed=7), resume=str(folder), **changes)
        assert same(weights(whole.model), weights(again.model)), phase
        assert whole.hybrid.fingerprint() == again.hybrid.fingerprint(), phase
        assert timeless(log_of(tmp_path / "run" / "hybridtrainer"), "step", "jump", "phase") == log, phase


def test_a_run_that_is_resumed_at_its_end_makes_no_step(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    whole = train(tmp_path, ON, **changes)
    again = train(tmp_path, ON, model=tiny(seed=7), resume=True, **changes)
    assert again.state.global_step == again.hybrid.step_count == 10
    assert same(weights(whole.model), weights(again.model))


def test_a_run_that_was_killed_while_it_saved_goes_on_from_the_checkpoint_before(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    whole = train(tmp_path, ON, **changes)
    for name in ("trainer_state.json", "rng_state.pth", "optimizer.pt"):  # the Trainer writes these last
        (tmp_path / "checkpoint-10" / name).unlink()
    with pytest.warns(UserWarning, match="passed over"):
        again = train(tmp_path, ON, model=tiny(seed=7), resume=True, **changes)
    assert same(weights(whole.model), weights(again.model))


def test_what_is_cut_short_in_a_checkpoint_is_refused_by_name_or_passed_over(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    train(tmp_path, ON, **changes)
    made = tmp_path / "checkpoint-4"
    for name in ("optimizer.pt", "scheduler.pt", "model.safetensors", "trainer_state.json", "rng_state.pth"):
        whole = (made / name).read_bytes()
        (made / name).write_bytes(whole[:-100])
        with pytest.raises(CorruptCheckpointError, match=f"checkpoint-4/{name} is"):
            train(tmp_path, ON, resume=str(made), **changes)
        (made / name).write_bytes(whole)
    (made / "rng_state.pth").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rng_state\.pth is not there"):
        train(tmp_path, ON, resume=str(made), **changes)
    with pytest.warns(UserWarning, match="checkpoint-4 was not written to its end"):
        assert train(tmp_path, ON, resume=True, **changes).state.global_step == 4
    assert (made / "rng_state.pth").exists()  # made again, from checkpoint-2


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    train(tmp_path, **changes)
    with pytest.raises(ForeignCheckpointError, match="no state of HybridTrainer"):
        train(tmp_path, ON, resume=str(tmp_path / "checkpoint-5"), **changes)


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "qwen2"))])
def test_a_streamed_model_trains_in_it_and_resumes(tmp_path, kind):
    memory = MemoryConfig(mode="split8", clipping="exact")

    def streamed(seed: int) -> Any:
        return stream(tiny(kind, seed), memory, "cpu", lr=3e-3, weight_decay=0.0)

    config = HybridTrainerConfig(**ALL_PHASES, memory=memory)
    changes = {"save_strategy": "steps", "save_steps": 37, "max_steps": 50, "gradient_accumulation_steps": 2}
    whole = train(tmp_path, config, model=streamed(0), **changes)
    assert phases_in(log_of(tmp_path / "hybridtrainer")) == PHASES
    again = train(tmp_path, config, model=streamed(5), resume=str(tmp_path / "checkpoint-37"), **changes)
    assert whole.hybrid.fingerprint() == again.hybrid.fingerprint()
    assert not (tmp_path / "checkpoint-37" / "optimizer.pt").exists()
    whole.save_model(str(tmp_path / "final"))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(read.get_parameter(name).float(), parameter.float()), name


def test_a_callback_that_ends_the_run_within_a_step_ends_it_before_that_step(tmp_path):
    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    changes = {"gradient_accumulation_steps": 3, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    runs = [
        train(tmp_path / str(at), hybrid, options={"callbacks": [Stop()]}, **changes)
        for at, hybrid in enumerate((None, OFF))
    ]
    assert [run.state.global_step for run in runs] == [4, 4]
    assert runs[1].hybrid.step_count == 4
    assert same(*(weights(run.model) for run in runs))


def test_a_streamed_model_makes_no_step_that_the_trainer_does_not_count(tmp_path):
    memory = MemoryConfig(mode="split8", clipping="exact")
    config = HybridTrainerConfig(predict="off", memory=memory)
    changes = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 10}
    model = stream(tiny(), memory, "cpu", lr=3e-3, weight_decay=0.0)
    trainer = train(tmp_path / "streamed", config, WithoutLength(), model=model, **changes)  # 13 micro-batches
    plain = train(tmp_path / "plain", None, WithoutLength(), **changes)
    assert trainer.state.global_step == plain.state.global_step == trainer.hybrid.step_count == 10
    assert [each["step"] for each in told(trainer)] == [each["step"] for each in told(plain)]
    assert trainer.state.epoch == plain.state.epoch


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size"), ({"learning_rate": 1e-3}, "streamed with lr=0.003")],
)
def test_arguments_that_would_be_ignored_are_refused(tmp_path, changes, words):
    model = stream(tiny(), MemoryConfig(mode="split8"), "cpu", lr=3e-3, weight_decay=0.0)
    with pytest.raises(ModelError, match=words):
        train(tmp_path, OFF, model=model, **changes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"save_interval": 10}, "save_interval is set"),
        ({"predict": ["samples"]}, "needs a loader"),
        ({"memory": {"precision": "bf16"}}, "chooses the precision"),
    ],
)
def test_settings_that_the_host_has_are_refused(tmp_path, settings, words):
    with pytest.raises(ModelError, match=words):
        train(tmp_path, HybridTrainerConfig(**settings))


def test_a_mixin_in_the_wrong_place_says_so(tmp_path):
    class Wrong(transformers.Trainer, HybridTrainerMixin):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            HybridTrainerMixin.__init__(self, *args, **kwargs)

    with pytest.raises(ModelError, match="Name the mixin first"):
        Wrong(tiny(), arguments(tmp_path))


def test_the_averaged_read_out_is_what_evaluations_see(tmp_path):
    options = {"eval_dataset": windows(8, first=500)}
    changes = {"eval_strategy": "steps", "eval_steps": 10, "options": options}
    last = train(tmp_path / "last", OFF, **changes)
    averaged = train(tmp_path / "averaged", HybridTrainerConfig(predict="off", readout="averaged"), **changes)
    assert same(weights(last.model), weights(averaged.model))
    losses = [[each["eval_loss"] for each in told(one) if "eval_loss" in each] for one in (last, averaged)]
    assert losses[0] != losses[1]
    (records,) = [timeless(log_of(tmp_path / "averaged" / "hybridtrainer"), "evaluation")]
    assert [record["loss"] for record in records] == losses[1]


DEEP = {"gpt2": {"n_layer": 6}, "llama": {"num_hidden_layers": 6}}
GROWING = HybridTrainerConfig(predict="auto", warmup_steps=5)


@pytest.fixture
def _short_runs_may_grow(monkeypatch):
    monkeypatch.setattr(depth, "LEAST_STEPS", 20)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow), "streamed"])
@pytest.mark.usefixtures("_short_runs_may_grow")
def test_a_model_from_scratch_grows_and_resumes_from_before_and_after_that(tmp_path, kind):
    def made(seed: int = 0) -> Any:
        name = "llama" if kind == "streamed" else kind
        model = tiny(name, seed, **DEEP[name])
        return stream(model, memory, "cpu", lr=3e-3, weight_decay=0.0) if kind == "streamed" else model

    memory = MemoryConfig(mode="split8", clipping="exact") if kind == "streamed" else MemoryConfig()
    settings = GROWING.model_copy(update={"memory": memory})
    changes = {"save_strategy": "steps", "save_steps": 8, "max_steps": 32}
    whole = train(tmp_path, settings, model=made(), **changes)
    said = [record["text"] for record in timeless(log_of(tmp_path / "hybridtrainer"), "notice")]
    assert any(text.startswith("the model begins short: of 6 blocks 2") for text in said), said
    assert "grown from 2 to 6 blocks, by stack" in said
    for at, is_short in ((8, True), (16, True), (24, False)):
        state = read_checkpoint(tmp_path / f"checkpoint-{at}" / "hybridtrainer").state()
        assert (state["depth"]["short"], "parameters" in state) == (is_short, is_short)
        again = train(tmp_path, settings, model=made(7), resume=str(tmp_path / f"checkpoint-{at}"), **changes)
        assert whole.hybrid.fingerprint() == again.hybrid.fingerprint(), at


@pytest.mark.usefixtures("_short_runs_may_grow")
def test_a_growing_run_is_that_of_the_native_loop(tmp_path):
    data = windows(128)
    trainer = train(
        tmp_path / "hf", GROWING, data, model=tiny("llama", **DEEP["llama"]), max_steps=32, max_grad_norm=1.0,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    model = tiny("llama", **DEEP["llama"])
    optimizer = transformers.Trainer(model, arguments(tmp_path / "unused")).create_optimizer()
    targets = torch.tensor(4 * 32)
    native = HybridTrainer(
        model, optimizer, lambda model, batch: model(**batch, num_items_in_batch=targets).loss, GROWING, clip_norm=1.0
    )
    batches = [
        {name: torch.stack([piece[name] for piece in data[at : at + 4]]) for name in data[0]}
        for at in range(0, len(data), 4)
    ]
    native.fit(batches, 32, run_dir=tmp_path / "native", progress="off")
    kinds = ("step", "jump", "phase", "notice", "forecast")
    ours = timeless(log_of(tmp_path / "native"), *kinds)
    assert timeless(log_of(tmp_path / "hf" / "hybridtrainer"), *kinds) == ours
    assert any("grown" in record.get("text", "") for record in ours)
    assert same(weights(trainer.model), weights(model))


@pytest.mark.usefixtures("_short_runs_may_grow")
def test_weights_saved_while_a_model_is_short_can_be_used_alone(tmp_path):
    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 12

    model = tiny("llama", **DEEP["llama"])
    fresh = weights(model)
    options = {"callbacks": [Stop()], "eval_dataset": windows(8, first=500)}
    changes = {"save_strategy": "steps", "save_steps": 6, "max_steps": 40, "eval_strategy": "steps", "eval_steps": 6}
    trainer = train(tmp_path / "run", GROWING, model=model, options=options, **changes)
    assert trainer.hybrid.depth.is_short
    log = log_of(tmp_path / "run" / "hybridtrainer")
    assert "before the model has grown" in [record["text"] for record in log if record["kind"] == "notice"][-1]
    short = trainer.evaluate()["eval_loss"]
    assert short == [record["loss"] for record in log if record["kind"] == "evaluation"][-1]
    assert same(
        {name: value for name, value in weights(model).items() if ".layers.5." in name},
        {name: value for name, value in fresh.items() if ".layers.5." in name},
    )
    trainer.save_model(str(tmp_path / "kept"))
    for folder in (tmp_path / "kept", tmp_path / "run" / "checkpoint-12"):
        read = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for number in range(6):
            assert same(weights(read.model.layers[number]), weights(model.model.layers[number % 2])), number
    with pytest.raises(ModelError, match="another trainer has trained 2 of its 6 blocks"):
        trainer.train()


@pytest.mark.usefixtures("_short_runs_may_grow")
def test_the_best_model_of_a_run_that_never_grew_has_all_blocks(tmp_path):
    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 12

    changes = {"save_strategy": "steps", "save_steps": 6, "max_steps": 40, "eval_strategy": "steps", "eval_steps": 6,
               "load_best_model_at_end": True}  # fmt: skip
    options = {"callbacks": [Stop()], "eval_dataset": windows(8, first=500)}
    trainer = train(tmp_path, GROWING, model=tiny("llama", **DEEP["llama"]), options=options, **changes)
    read = transformers.AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint).eval()
    batch = torch.stack([piece["input_ids"] for piece in windows(4)])
    assert torch.equal(trainer.model.eval()(batch).logits, read(batch).logits)


def test_what_is_saved_at_the_end_is_what_evaluations_see(tmp_path):
    settings = HybridTrainerConfig(predict="off", readout="averaged")
    options = {"eval_dataset": windows(8, first=500)}
    trainer = train(
        tmp_path, settings, model=tiny(dropout=0.0), options=dict(options), save_strategy="steps", save_steps=30
    )
    trainer.save_model(str(tmp_path / "kept"))
    evaluated = trainer.evaluate()["eval_loss"]
    losses = []
    for folder in ("kept", "checkpoint-30"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        losses.append(transformers.Trainer(model, trainer.args, **options).evaluate()["eval_loss"])
    assert losses[0] == evaluated != losses[1]


def test_after_the_best_model_is_loaded_evaluations_see_that(tmp_path):
    settings = HybridTrainerConfig(predict="off", readout="averaged")
    changes = {"save_strategy": "steps", "save_steps": 10, "eval_strategy": "steps", "eval_steps": 10}
    options = {"eval_dataset": windows(8, first=500)}
    trainer = train(tmp_path, settings, options=dict(options), load_best_model_at_end=True, **changes)
    read = transformers.AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    plain = transformers.Trainer(read, trainer.args, **options)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
