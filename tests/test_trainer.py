"""The algorithm as a whole: what prediction off means, what refusing means, what each phase does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support import EAGER, SETUPS, Setup, assert_same_tensors, gpt_setup, parameters_of
from torch import Tensor

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import DataError
from hybridtrainer.predict.baselines import Forecast, Past
from hybridtrainer.records import JumpRecord, Phase, PhaseChange, StepResult
from hybridtrainer.trainer import HybridTrainer

CLIP = 1.0


def plain_loop(setup: Setup, steps: int) -> list[float]:
    """What a person would write by hand."""
    losses = []
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, T_max=steps)
    for batch in setup.batches[:steps]:
        loss = setup.loss_fn(setup.model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(setup.model.parameters(), CLIP)
        setup.optimizer.step()
        scheduler.step()
        setup.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hybrid_loop(setup: Setup, steps: int, forecaster: Any = None, **settings: Any) -> tuple[list[float], HybridTrainer]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, T_max=steps)
    trainer = setup.trainer(settings=settings, scheduler=scheduler, clip_norm=CLIP)
    if forecaster is not None:
        trainer.jumps.forecaster = forecaster
    torch.manual_seed(1)
    return [trainer.step(batch).loss for batch in setup.batches[:steps]], trainer


def wrong(past: Past, horizon: int, ahead: Tensor) -> Forecast:
    """Sure of itself, and always in the worst direction: back, and far."""
    back = torch.full_like(past.tau, -50.0)
    return Forecast("wrong", horizon, back, torch.zeros_like(back), None, 1.0, 50.0)


@pytest.mark.parametrize("model", ["gpt", "cnn"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_prediction_off_equals_a_plain_loop_bit_for_bit(model, optimizer):
    by_hand, ours = SETUPS[model](optimizer), SETUPS[model](optimizer)
    torch.manual_seed(1)
    expected = plain_loop(by_hand, 200)
    losses, _ = hybrid_loop(ours, 200, predict="off")
    assert losses == expected
    assert_same_tensors(parameters_of(ours.model), parameters_of(by_hand.model))
    assert_same_tensors(dict(ours.model.named_buffers()), dict(by_hand.model.named_buffers()))


@pytest.mark.parametrize("model", ["gpt", "cnn"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_refusing_every_jump_equals_a_plain_loop_bit_for_bit(model, optimizer):
    by_hand, ours = SETUPS[model](optimizer), SETUPS[model](optimizer)
    torch.manual_seed(1)
    expected = plain_loop(by_hand, 200)
    settings = EAGER | {"confidence_threshold": 0.01}
    losses, trainer = hybrid_loop(ours, 200, forecaster=wrong, **settings)
    assert trainer.statistics().jumps_refused > 5
    assert losses == expected
    assert_same_tensors(parameters_of(ours.model), parameters_of(by_hand.model))
    assert_same_tensors(dict(ours.model.named_buffers()), dict(by_hand.model.named_buffers()))


def run_eagerly(steps: int = 120, **options: Any) -> tuple[HybridTrainer, list[Any]]:
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER | options.pop("settings", {}), **options)
    records: list[Any] = []
    trainer.listeners.append(records.append)
    batches = iter(setup.batches)
    while trainer.step_count < steps:
        trainer.step(next(batches))
    return trainer, records


def test_a_run_goes_through_all_four_phases_and_says_why():
    trainer, records = run_eagerly()
    phases = {record.phase for record in records if isinstance(record, StepResult)}
    assert phases == set(Phase)
    changes = [record for record in records if isinstance(record, PhaseChange)]
    assert all(change.reason for change in changes)
    order = [changes[0].before] + [change.after for change in changes]
    assert order[:4] == [Phase.WARMUP, Phase.FULL, Phase.PREDICT, order[3]]
    for before, after in pairwise(changes):
        assert before.after is after.before
    assert trainer.statistics().jumps_kept >= 1


def test_an_accepted_jump_moves_clock_and_schedule_by_what_it_is_worth():
    setup = gpt_setup()
    scheduler = torch.optim.lr_scheduler.LinearLR(setup.optimizer, 1.0, 0.1, total_iters=1000)
    trainer = setup.trainer(settings=EAGER, scheduler=scheduler)
    jumps = []
    for batch in setup.batches[:100]:
        before = trainer.step_count
        result = trainer.step(batch)
        if result.predicted:
            jumps.append(result)
            assert result.phase is Phase.PREDICT
            assert trainer.step_count - before == result.predicted
        assert scheduler.last_epoch == trainer.step_count
    assert jumps
    real_steps = next(iter(setup.optimizer.state.values()))["step"].item()
    assert real_steps == 100 - len(jumps)  # bias correction counts real steps only


def test_a_jump_displaces_the_weights_and_touches_no_optimizer_state():
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)
    for batch in setup.batches:
        weights = parameters_of(setup.model)
        moments = [state["exp_avg"].clone() for state in setup.optimizer.state.values()]
        if trainer.step(batch).predicted:
            break
    else:
        pytest.fail("no jump was accepted")
    assert any(not torch.equal(weights[name], p) for name, p in setup.model.named_parameters())
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, setup.optimizer.state.values(), strict=True))
    assert all(parameter.grad is None for parameter in setup.model.parameters())


def test_no_jump_goes_beyond_the_end_of_the_run():
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)
    trainer.expect_end(70)
    batches = iter(setup.batches)
    last = None
    while trainer.step_count < 70:
        last = trainer.step(next(batches))
    assert trainer.step_count == 70
    assert last is not None and not last.predicted  # a jump is always followed by its correction


@pytest.mark.parametrize("predict", ["auto", ["jumps"]])
@pytest.mark.parametrize("end_known", [True, False])
def test_under_a_falling_rate_auto_is_plain_training_and_only_named_jumps_are_tried(predict, end_known):
    setup, twin = gpt_setup(), gpt_setup()
    trainers = []
    for each, settings in ((setup, EAGER | {"predict": predict}), (twin, {"predict": "off"})):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(each.optimizer, T_max=80)
        trainers.append(each.trainer(settings=settings, scheduler=scheduler))
    reason = trainers[0].expect_end(80) if end_known else ""
    losses = []
    for trainer in trainers:
        torch.manual_seed(1)
        losses.append([trainer.step(batch).loss for batch in setup.batches[:80]])
    statistics = trainers[0].statistics()
    if predict == "auto":
        assert ("the learning rate will fall to 0% of its peak" in reason) is end_known
        assert list(statistics.declined.values()) == [1]
        assert losses[0] == losses[1]
    else:
        assert reason == ""
        assert statistics.jumps_accepted > 0


def test_a_rate_that_stays_or_an_end_that_nobody_knows_switches_nothing_off():
    trainer = gpt_setup().trainer(settings=EAGER | {"predict": "auto"})
    assert trainer.expect_end(80) == ""
    assert trainer.expect_end(None) == ""
    assert not trainer.state()["standing"]["policy"]["off"]


def test_statistics_add_up():
    trainer, records = run_eagerly()
    stats = trainer.statistics()
    steps = [record for record in records if isinstance(record, StepResult)]
    jumps = [record for record in records if isinstance(record, JumpRecord)]
    assert stats.steps == trainer.step_count
    assert stats.real_steps == sum(not step.predicted for step in steps)
    assert stats.foreseen_steps == stats.steps - stats.real_steps  # nothing was rolled back
    assert stats.jumps_rolled_back == 0
    assert stats.jumps_accepted == sum(jump.verdict == "accepted" for jump in jumps)
    assert stats.backward_reduction == pytest.approx(stats.foreseen_steps / stats.steps)
    assert sum(stats.seconds_by_phase.values()) == pytest.approx(sum(step.seconds for step in steps))
    assert all(stats.seconds_by_phase[phase] > 0 for phase in Phase)


def test_accumulated_micro_batches_equal_a_plain_accumulating_loop():
    by_hand, ours = gpt_setup(), gpt_setup()
    torch.manual_seed(1)
    expected = []
    for i in range(0, 60, 3):
        total = torch.zeros(())
        for batch in by_hand.batches[i : i + 3]:
            loss = by_hand.loss_fn(by_hand.model, batch).mean() / 3
            loss.backward()
            total = total + loss.detach()
        by_hand.optimizer.step()
        by_hand.optimizer.zero_grad()
        expected.append(float(total))
    torch.manual_seed(1)
    trainer = ours.trainer(accumulate=3)
    assert [trainer.step(ours.batches[i : i + 3]).loss for i in range(0, 60, 3)] == expected
    assert_same_tensors(parameters_of(ours.model), parameters_of(by_hand.model))
    with pytest.raises(DataError, match="3 micro-batches"):
        trainer.step(ours.batches[0])


@pytest.mark.parametrize(
    "optimizer", ["sgd", "momentum", "adam", "adamw", "adafactor", "rmsprop", "adagrad", "nadam", "adamax", "radam"]
)
def test_jumps_work_with_any_optimizer(optimizer):
    setup = gpt_setup(optimizer)
    trainer = setup.trainer(settings=EAGER)
    for batch in setup.batches[:100]:
        trainer.step(batch)
    stats = trainer.statistics()
    assert stats.jumps_accepted + stats.jumps_refused > 0
    assert all(torch.isfinite(parameter).all() for parameter in setup.model.parameters())


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamax"])
def test_the_momentum_forecaster_tries_jumps_without_windows_in_them(optimizer):
    setup = gpt_setup(optimizer)
    trainer = setup.trainer(settings=EAGER | {"forecaster": "momentum"})
    records: list[Any] = []
    trainer.listeners.append(records.append)
    for batch in setup.batches[:60]:
        trainer.step(batch)
    tried = [r for r in records if isinstance(r, JumpRecord) and r.probe_after is not None]
    assert tried and all(jump.forecaster == "momentum" for jump in tried)
    assert any(jump.probe_before != jump.probe_after for jump in tried)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_learned_coefficients_learn_from_every_window_and_resume_exactly(optimizer, tmp_path):
    def trainer_of() -> tuple[Setup, HybridTrainer]:
        setup = gpt_setup(optimizer)
        return setup, setup.trainer(settings=EAGER | {"forecaster": "learned"})

    setup, trainer = trainer_of()
    records: list[Any] = []
    trainer.listeners.append(records.append)
    for batch in setup.batches[:45]:
        trainer.step(batch)
    assert trainer.jumps.history.open_steps  # in the middle of a window
    trainer.save(tmp_path / "checkpoint")
    expected = [trainer.step(batch).loss for batch in setup.batches[45:80]]
    again = trainer_of()[1]
    again.load(tmp_path / "checkpoint")
    assert [again.step(batch).loss for batch in setup.batches[45:80]] == expected
    assert again.fingerprint() == trainer.fingerprint()
    assert trainer.jumps.fit is not None and trainer.jumps.fit.error < 10
    tried = [r for r in records if isinstance(r, JumpRecord) and r.probe_after is not None]
    assert tried and all(jump.forecaster == "learned" for jump in tried)


def test_parameter_groups_frozen_and_tied_weights_are_handled_once():
    torch.manual_seed(0)
    setup = gpt_setup()
    model = setup.model
    frozen = model.get_parameter("blocks.0.mlp.up.weight").requires_grad_(False)
    before = frozen.detach().clone()
    decayed = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 3e-3}, {"params": others, "lr": 1e-3}])
    trainer = replace(setup, optimizer=optimizer).trainer(settings=EAGER)
    groups = trainer.jumps.history.weights.groups
    counted = [parameter for group in groups for parameter in group.parameters]
    assert len(counted) == len({id(parameter) for parameter in counted})  # the tied head is the embedding
    assert all(parameter is not frozen for parameter in counted)
    assert {group.lr_group for group in groups} == {0, 1}
    for batch in setup.batches[:100]:
        trainer.step(batch)
    assert trainer.statistics().jumps_accepted
    assert torch.equal(frozen, before)
    assert model.get_parameter("embedding.weight") is model.get_submodule("head").weight


def test_bf16_autocast_trains_and_jumps():
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER | {"memory": {"precision": "bf16"}})
    losses = [trainer.step(batch).loss for batch in setup.batches[:100]]
    assert losses[-1] < losses[0] - 1
    assert trainer.statistics().jumps_accepted


def test_fp16_makes_its_own_scaler_and_survives_overflows():
    setup = gpt_setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows until it has come down
    trainer = setup.trainer(settings=EAGER | {"memory": {"precision": "fp16"}}, scaler=scaler)
    results = [trainer.step(batch) for batch in setup.batches[:100]]
    overflowed = [result for result in results if result.skipped]
    assert 3 < len(overflowed) < 40
    assert results[-1].loss < results[0].loss - 1
    automatic = gpt_setup().trainer(settings={"memory": {"precision": "fp16"}})
    assert automatic.state()["scaler"]["scale"] == 65536.0


def test_fp16_with_scaler_equals_a_plain_amp_loop_bit_for_bit():
    by_hand, ours = gpt_setup(), gpt_setup()
    torch.manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    expected = []
    for batch in by_hand.batches[:60]:
        with torch.autocast("cpu", torch.float16):
            loss = by_hand.loss_fn(by_hand.model, batch)
        loss = loss.mean()
        scaler.scale(loss).backward()
        scaler.unscale_(by_hand.optimizer)
        torch.nn.utils.clip_grad_norm_(by_hand.model.parameters(), CLIP)
        scaler.step(by_hand.optimizer)
        scaler.update()
        by_hand.optimizer.zero_grad()
        expected.append(loss.item())
    torch.manual_seed(1)
    own = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    trainer = ours.trainer(settings={"predict": "off", "memory": {"precision": "fp16"}}, scaler=own, clip_norm=CLIP)
    assert [trainer.step(batch).loss for batch in ours.batches[:60]] == expected
    assert_same_tensors(parameters_of(ours.model), parameters_of(by_hand.model))


def test_without_probe_batches_the_arriving_batch_is_the_probe():
    setup = gpt_setup()
    seen: list[Tensor] = []
    counts: set[tuple[bool, int]] = set()  # whether it was a jump, and how often the batch was seen

    def watching(model, batch):
        seen.append(batch)
        return setup.loss_fn(model, batch)

    trainer = HybridTrainer(setup.model, setup.optimizer, watching, HybridTrainerConfig(**EAGER))
    for batch in setup.batches[:100]:
        seen.clear()
        result = trainer.step(batch)
        assert all(one is batch for one in seen)
        counts.add((bool(result.predicted), len(seen)))
    assert {(True, 2), (True, 0), (False, 1)} <= counts <= {(True, 2), (True, 0), (False, 1), (False, 3)}


def test_evaluation_leaves_no_trace():
    setup = SETUPS["cnn"]()
    trainer = setup.trainer()
    for batch in setup.batches[:5]:
        trainer.step(batch)
    before = trainer.fingerprint()
    first = trainer.evaluate(setup.probes)
    assert trainer.evaluate(setup.probes) == first
    assert trainer.fingerprint() == before
    assert setup.model.training


def test_samples_computed_are_counted_probes_and_roll_backs_included():
    setup = gpt_setup()
    trainer = setup.trainer(settings=EAGER)
    results = [trainer.step(batch) for batch in setup.batches]
    size = len(setup.batches[0])
    probed = sum(map(len, trainer._probes or ()))
    for result in results:
        assert result.backward_samples == (0 if result.predicted else size)
        assert result.forward_samples - result.backward_samples in (0, 2 * (probed or size))
    counted = trainer.statistics()
    assert any(result.forward_samples > result.backward_samples for result in results)
    assert counted.backward_samples == counted.real_steps * size
    assert counted.forward_samples == sum(result.forward_samples for result in results)
