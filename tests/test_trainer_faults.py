"""What must hold when something goes wrong inside a step."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import EAGER, SETUPS, Setup, gpt_setup
from tests.test_trainer import wrong
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import DivergenceError, HookError, LossError
from hybridtrainer.phases import horizon, policy
from hybridtrainer.predict.baselines import Forecast, Past
from hybridtrainer.records import JumpRecord, Phase, PhaseChange, StepResult
from hybridtrainer.trainer import HybridTrainer

COUNTERS = ("standing",)  # the phase machine counts failures; nothing else may change
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Saboteur:
    """A loss function that misbehaves when told to."""

    def __init__(self, setup: Setup) -> None:
        self.honest = setup.loss_fn
        self.fault: Callable[[Tensor], Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.honest(model, batch)
        return loss if self.fault is None else self.fault(loss)


def sabotaged(kind: str = "gpt", **settings: Any) -> tuple[HybridTrainer, Saboteur, list[Any]]:
    setup = SETUPS[kind]()
    saboteur = Saboteur(setup)
    setup.loss_fn = saboteur
    return setup.trainer(settings=EAGER | settings), saboteur, setup.batches


def run_until(trainer: HybridTrainer, batches: list[Any], phase: Phase) -> list[Any]:
    """Steps until the next one would be in `phase`; returns the batches that are left."""
    for index, batch in enumerate(batches):
        if trainer.current_phase is phase:
            return batches[index:]
        trainer.step(batch)
    pytest.fail(f"{phase} was never reached")


def without_counters(trainer: HybridTrainer) -> dict[str, str]:
    return {part: digest for part, digest in trainer.fingerprint().items() if part not in (*COUNTERS, "all")}


def steps(trainer: HybridTrainer, batches: list[Any], seed: int = 1) -> list[StepResult]:
    """Steps from a fixed random state, so that two trainers can be compared although they share generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    return [trainer.step(batch) for batch in batches]


def updated_parts(trainer: HybridTrainer) -> dict[str, str]:
    fingerprint = trainer.fingerprint()
    return {part: fingerprint[part] for part in ("parameters", "buffers", "optimizer")}


def poison_gradient(loss: Tensor) -> Tensor:
    """A finite loss with a gradient that is not."""
    return loss + (loss - loss.detach()).mul(0).sqrt().sum().mul(1.0)


# NaN and Inf ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.FULL, Phase.CORRECT])
@pytest.mark.parametrize("value", list(BAD))
def test_a_loss_that_is_not_finite_never_reaches_weights_moments_or_buffers(kind, phase, value):
    trainer, saboteur, batches = sabotaged(kind)
    left = run_until(trainer, batches, phase)
    before = updated_parts(trainer)
    undo = trainer.state()["undo"]
    saboteur.fault = lambda loss: loss * BAD[value]
    result = trainer.step(left[0])
    assert result.skipped and value in result.reason
    if phase is Phase.CORRECT:  # the jump is to blame: everything returns to the moment before it
        assert undo is not None
        assert trainer.statistics().jumps_rolled_back == 1
    else:
        assert updated_parts(trainer) == before
    saboteur.fault = None
    assert not trainer.step(left[1]).skipped  # training goes on


@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.FULL, Phase.CORRECT])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(phase):
    trainer, saboteur, batches = sabotaged()
    left = run_until(trainer, batches, phase)
    before = updated_parts(trainer)
    saboteur.fault = poison_gradient
    result = trainer.step(left[0])
    assert result.skipped and torch.isfinite(torch.tensor(result.loss))
    if phase is not Phase.CORRECT:
        assert updated_parts(trainer) == before


def test_a_probe_that_is_not_finite_refuses_the_jump_and_changes_nothing():
    trainer, saboteur, batches = sabotaged()
    saboteur.fault = lambda loss: loss * float("nan") if not torch.is_grad_enabled() else loss
    results = steps(trainer, batches[:60])
    refused = [result for result in results if "refused" in result.reason]
    assert refused and all(result.phase is Phase.FULL for result in refused)
    twin, _, _ = sabotaged(predict="off")
    assert [result.loss for result in results] == [result.loss for result in steps(twin, batches[:60])]
    assert updated_parts(trainer) == updated_parts(twin)


def test_three_bad_steps_in_a_row_stop_the_run_with_the_weights_as_they_were():
    trainer, saboteur, batches = sabotaged()
    for batch in batches[:10]:
        trainer.step(batch)
    before = updated_parts(trainer)
    saboteur.fault = lambda loss: loss * float("nan")
    trainer.step(batches[10])
    trainer.step(batches[11])
    with pytest.raises(DivergenceError, match="3 steps in a row"):
        trainer.step(batches[12])
    assert updated_parts(trainer) == before
    saboteur.fault = None
    assert not trainer.step(batches[13]).skipped


def test_bad_steps_that_are_not_in_a_row_do_not_stop_the_run():
    trainer, saboteur, batches = sabotaged(predict="off")
    for index, batch in enumerate(batches[:30]):
        saboteur.fault = (lambda loss: loss * float("nan")) if index % 3 else None
        trainer.step(batch)
    assert trainer.statistics().skipped_updates == 20


def test_a_scaler_that_cannot_recover_counts_as_bad():
    setup = gpt_setup()
    saboteur = Saboteur(setup)
    setup.loss_fn = saboteur
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer = setup.trainer(settings={"predict": "off", "memory": {"precision": "fp16"}}, scaler=scaler)
    saboteur.fault = poison_gradient
    with pytest.raises(DivergenceError):
        for batch in setup.batches[:10]:
            trainer.step(batch)


# Forecasts --------------------------------------------------------------------------------------------------------


def forecast_of(coefficients: Tensor, past: Past, horizon: int, **changes: Any) -> Forecast:
    values: dict[str, Any] = {"denoise": torch.zeros_like(past.tau), "momentum_time": None} | changes
    return Forecast("test", horizon, coefficients, confidence=1.0, norm_ratio=1.0, **values)


MALFORMED: dict[str, Callable[[Past, int, Tensor], Forecast]] = {
    "nan": lambda past, h, ahead: forecast_of(past.tau * float("nan"), past, h),
    "inf": lambda past, h, ahead: forecast_of(past.tau * float("inf"), past, h),
    "one group too few": lambda past, h, ahead: forecast_of(past.tau[:-1], past, h),
    "one window too many": lambda past, h, ahead: forecast_of(torch.cat([past.tau, past.tau], 1), past, h),
    "no dimension": lambda past, h, ahead: forecast_of(torch.tensor(0.0), past, h),
    "nan denoise": lambda past, h, ahead: forecast_of(past.tau, past, h, denoise=past.tau * float("nan")),
    "nan momentum": lambda past, h, ahead: forecast_of(past.tau, past, h, momentum_time=ahead * float("nan")),
    "momentum shape": lambda past, h, ahead: forecast_of(past.tau, past, h, momentum_time=past.tau),
}


@pytest.mark.parametrize("kind", list(MALFORMED))
def test_a_malformed_forecast_is_refused_before_a_weight_is_touched(kind):
    trainer, _, batches = sabotaged()
    twin, _, _ = sabotaged(predict="off")
    trainer.jumps.forecaster = MALFORMED[kind]
    refusals = []
    trainer.listeners.append(lambda record: refusals.append(record) if isinstance(record, JumpRecord) else None)
    results = steps(trainer, batches[:60])
    assert [result.loss for result in results] == [result.loss for result in steps(twin, batches[:60])]
    assert refusals and all(record.verdict == "refused" for record in refusals)
    assert updated_parts(trainer) == updated_parts(twin)


def far_away(past: Past, horizon: int, ahead: Tensor) -> Forecast:
    return forecast_of(torch.full_like(past.tau, 1e4), past, horizon)


def test_a_jump_that_explodes_at_once_is_refused_by_the_probe_and_undone_exactly():
    trainer, _, batches = sabotaged(confidence_threshold=0.1)
    trainer.jumps.forecaster = far_away
    left = run_until(trainer, batches, Phase.PREDICT)
    before, seen = without_counters(trainer), []

    def look(state: HybridTrainer, batch: Any) -> None:
        seen.append(without_counters(state))

    trainer.hooks.add(type("Look", (), {"before_forward": staticmethod(look)})())
    result = trainer.step(left[0])
    assert "refused" in result.reason
    assert seen == [before]  # at the first real forward pass every bit is as before the jump


def until_trusted(trainer: HybridTrainer, batches: list[Any]) -> list[Any]:
    """Steps until the next one would be a jump without a probe; returns the batches that are left."""
    for index, batch in enumerate(batches):
        state = policy.PolicyState.from_tree(trainer.state()["standing"]["policy"])
        if state.phase is Phase.PREDICT and not state.needs_probe:
            return batches[index:]
        trainer.step(batch)
    pytest.fail("no jump was trusted")


@pytest.mark.parametrize("kind", list(MALFORMED))
def test_a_malformed_forecast_is_refused_where_jumps_are_trusted_too(kind):
    trainer, _, batches = sabotaged()
    left = until_trusted(trainer, batches)
    trainer.jumps.forecaster, before, seen = MALFORMED[kind], without_counters(trainer), []
    look = type("Look", (), {"before_forward": staticmethod(lambda state, _: seen.append(without_counters(state)))})
    trainer.hooks.add(look())
    result = trainer.step(left[0])
    assert result.reason.startswith("jump refused: the forecast's")
    assert seen == [before]


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_a_trusted_jump_that_explodes_at_once_is_rolled_back_at_the_next_step_exactly(kind):
    trainer, _, batches = sabotaged(kind, trust_radius=1e6)
    left = until_trusted(trainer, batches)
    trainer.jumps.forecaster, before, clock = far_away, without_counters(trainer), trainer.step_count
    assert trainer.step(left[0]).phase is Phase.PREDICT
    result = trainer.step(left[1])
    assert "rolled back" in result.reason
    assert without_counters(trainer) == before and trainer.step_count == clock


@pytest.mark.parametrize("later", [1, 2])
@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_a_loss_that_explodes_some_steps_after_a_jump_rolls_back_exactly(kind, later):
    setup = SETUPS[kind]()
    saboteur = Saboteur(setup)
    trainer = HybridTrainer(
        setup.model,
        setup.optimizer,
        saboteur,
        HybridTrainerConfig(**EAGER),
        probe_batches=setup.probes,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.999),
    )
    dataset = list(setup.batches)
    loader = trainer.loader(dataset, 1, shuffle=False, collate=lambda samples: samples[0])
    batches = iter(loader)
    while True:
        before, phase, clock = without_counters(trainer), trainer.current_phase, trainer.step_count
        standing = trainer.state()["standing"]
        result = trainer.step(next(batches))
        if phase is Phase.PREDICT and result.predicted:
            break
    for _ in range(later - 1):
        trainer.step(next(batches))
    saboteur.fault = lambda loss: loss + 100
    result = trainer.step(next(batches))
    saboteur.fault = None
    assert result.phase is Phase.CORRECT and "rolled back" in result.reason
    after = trainer.state()["standing"]
    assert trainer.step_count == clock
    assert without_counters(trainer) == before
    for part in ("watch", "clock", "data"):
        assert after[part] == standing[part]
    assert trainer.current_phase is Phase.FULL
    # The same batch comes again, now as a real step.
    assert torch.equal(
        torch.as_tensor(next(batches)[0] if kind == "cnn" else next(batches)),
        torch.as_tensor(
            dataset[standing["data"]["position"]["batch"]][0]
            if kind == "cnn"
            else dataset[standing["data"]["position"]["batch"]]
        ),
    )


def test_a_forecaster_that_is_always_wrong_is_switched_off_and_costs_nothing_afterwards():
    trainer, _, batches = sabotaged(confidence_threshold=0.1, max_failures=3)
    twin, _, _ = sabotaged(predict="off")
    trainer.jumps.forecaster = wrong
    results = steps(trainer, batches)
    assert [result.loss for result in results] == [result.loss for result in steps(twin, batches)]
    statistics = trainer.statistics()
    assert statistics.jumps_refused == 3
    assert trainer.current_phase is Phase.FULL
    assert updated_parts(trainer) == updated_parts(twin)


def test_a_forecaster_that_fools_the_probe_is_rolled_back_and_switched_off(monkeypatch):
    monkeypatch.setattr(horizon, "probed_worth", lambda *given: horizon.Worth(given[3], "fooled"))
    setup = gpt_setup()
    saboteur = Saboteur(setup)
    trainer = HybridTrainer(
        setup.model,
        setup.optimizer,
        saboteur,
        HybridTrainerConfig(**EAGER | {"max_failures": 3}),
        probe_batches=setup.probes,
    )
    # Every jump passes its probe, and training sees a disaster after it.
    loader = trainer.loader(setup.batches, 1, shuffle=False, collate=lambda samples: samples[0])
    batches = iter(loader)
    losses: list[float] = []
    torch.manual_seed(1)
    while len(losses) < 150:
        saboteur.fault = (lambda loss: loss + 50) if trainer.current_phase is Phase.CORRECT else None
        result = trainer.step(next(batches))
        if result.phase in (Phase.WARMUP, Phase.FULL):
            losses.append(result.loss)
    statistics = trainer.statistics()
    assert statistics.jumps_rolled_back == 3
    twin, _, batches_again = sabotaged(predict="off")
    assert losses == [result.loss for result in steps(twin, batches_again[:150])]
    assert updated_parts(trainer) == updated_parts(twin)


# Errors of the user's own code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_forward_or_backward_arrives_as_it_was_and_leaves_the_last_state(phase, where):
    trainer, saboteur, batches = sabotaged("cnn")
    left = run_until(trainer, batches, phase)
    before = trainer.fingerprint()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            torch.rand(3), random.random()
            if where == "forward":
                raise ZeroDivisionError("mine")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("mine")

    saboteur.fault = Broken.apply
    if phase is Phase.PREDICT and where == "backward":
        saboteur.fault = lambda loss: Broken.apply(loss) if torch.is_grad_enabled() else loss * float("nan")
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.step(left[0])
    assert trainer.fingerprint() == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())
    saboteur.fault = None
    trainer.step(left[0])


def test_an_error_with_a_scaler_can_be_followed_by_another_step():
    setup = gpt_setup()
    saboteur = Saboteur(setup)
    setup.loss_fn = saboteur
    trainer = setup.trainer(settings={"predict": "off", "memory": {"precision": "fp16"}})

    def explode(trainer: HybridTrainer) -> None:
        if armed:
            raise KeyError("after unscale")

    armed = False
    trainer.hooks.add(type("Explode", (), {"after_backward": staticmethod(explode)})())
    trainer.step(setup.batches[0])
    before, armed = trainer.fingerprint(), True
    with pytest.raises(HookError):
        trainer.step(setup.batches[1])
    assert trainer.fingerprint() == before
    armed = False
    trainer.step(setup.batches[1])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: loss.mean().item(), "float"),
        (lambda loss: None, "NoneType"),
        (lambda loss: (loss, 1), "tuple"),
        (lambda loss: loss[:, None] * torch.ones(3), r"shape \(8, 3\)"),
        (lambda loss: loss[:0], r"shape \(0,\)"),
        (lambda loss: loss.detach(), "no trainable weight"),
        (lambda loss: loss.detach().long(), "int64"),
    ],
)
def test_a_loss_fn_that_returns_no_loss_is_told_what_to_return(returned, message):
    trainer, saboteur, batches = sabotaged()
    trainer.step(batches[0])
    before = trainer.fingerprint()
    saboteur.fault = returned
    with pytest.raises(LossError, match=message):
        trainer.step(batches[1])
    assert trainer.fingerprint() == before


def test_a_schedule_that_ends_leaves_a_completed_step():
    setup = gpt_setup()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, 1e-3, total_steps=50)
    trainer = setup.trainer(settings=EAGER, scheduler=scheduler)
    with pytest.raises(ValueError, match="50"):
        for batch in setup.batches:
            trainer.step(batch)
    real = next(iter(setup.optimizer.state.values()))["step"].item()
    assert trainer.step_count == 51 == trainer.statistics().foreseen_steps + real  # no jump ran over the end


# Hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", ["before_step", "before_forward", "after_backward", "before_jump", "after_jump", "on_phase_change"]
)
@pytest.mark.parametrize("policy", ["skip", pytest.param("disable", marks=pytest.mark.slow)])
def test_a_failing_hook_leaves_the_run_as_it_would_be_without_it(event, policy):
    trainer, _, batches = sabotaged()
    twin, _, _ = sabotaged()

    def fail(*arguments: Any) -> None:
        torch.rand(5), random.random()
        raise RuntimeError("hook trouble")

    trainer.hooks.add(type("Trouble", (), {event: staticmethod(fail)})(), policy=policy, name="trouble")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(trainer, batches[:60])
    before = trainer.fingerprint()
    steps(twin, batches[:60])
    assert any("trouble" in str(warning.message) and event in str(warning.message) for warning in caught)
    assert (len(caught) == 1) == (policy == "disable")
    assert before == twin.fingerprint()


@pytest.mark.parametrize(
    "event", ["before_step", "before_forward", "after_backward", "before_jump", "after_jump", "on_phase_change"]
)
def test_a_hook_that_stops_the_run_leaves_a_completed_step(event):
    trainer, _, batches = sabotaged()
    twin, _, _ = sabotaged()
    armed = False

    def fail(*arguments: Any) -> None:
        if armed:
            raise RuntimeError("stop")

    trainer.hooks.add(type("Stop", (), {event: staticmethod(fail)})())
    steps(trainer, batches[:20])
    armed = True
    made = 20
    with pytest.raises(HookError, match=f"Stop failed in {event}"):
        for batch in batches[20:60]:
            trainer.step(batch)
            made += 1
    after = trainer.fingerprint()
    completed = event in ("after_jump", "on_phase_change")  # these hear of a step once it is complete
    steps(twin, batches[: made + completed])
    assert after == twin.fingerprint()


def test_hooks_hear_of_everything_in_order():
    trainer, _, batches = sabotaged()
    heard: list[str] = []

    class Listener:
        def before_step(self, trainer, batch):
            heard.append("before_step")

        def before_forward(self, trainer, batch):
            heard.append("before_forward")

        def after_backward(self, trainer):
            assert all(p.grad is not None for p in trainer.model.parameters())
            heard.append("after_backward")

        def before_jump(self, trainer, forecast):
            assert isinstance(forecast, Forecast)
            heard.append("before_jump")

        def after_jump(self, trainer, record):
            heard.append(f"after_jump {record.verdict}")

        def on_phase_change(self, trainer, change):
            heard.append(f"{change.before} to {change.after}")

    trainer.hooks.add(Listener())
    results: list[StepResult] = [trainer.step(batch) for batch in batches[:60]]
    jump = next(index for index, event in enumerate(heard) if event == "after_jump accepted")
    assert heard[jump - 3 : jump + 1] == ["before_step", "before_jump", "predict to correct", "after_jump accepted"]
    assert heard.count("before_step") == 60
    assert heard.count("before_forward") == sum(not result.predicted for result in results)


@pytest.mark.parametrize("kind", [JumpRecord, PhaseChange, StepResult])
def test_a_listener_that_raises_leaves_a_completed_step(kind):
    trainer, _, batches = sabotaged()
    twin, _, _ = sabotaged()

    def complain(record: object) -> None:
        if isinstance(record, kind) and trainer.step_count > 12:
            raise OSError("the disk is full")

    trainer.listeners.append(complain)
    torch.manual_seed(1)
    expected = []
    for batch in batches[:60]:
        twin.step(batch)
        expected.append(twin.fingerprint())
    torch.manual_seed(1)
    found, failed = [], 0
    for batch in batches[:60]:
        try:
            trainer.step(batch)
        except OSError:
            failed += 1
        found.append(trainer.fingerprint())
    assert failed
    assert found == expected


class Counting(torch.nn.Module):
    """Keeps state where torch does not look: a buffer made anew in forward, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


def test_buffers_made_anew_and_extra_state_are_put_back_too():
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = HybridTrainer(model, optimizer, lambda model, x: model(x).square().mean(), HybridTrainerConfig(**EAGER))
    trainer.step(torch.ones(8, 4))
    before = trainer.fingerprint()
    trainer.evaluate([torch.full((8, 4), 5.0)])
    assert trainer.fingerprint() == before
    trainer.step(torch.full((8, 4), torch.nan))
    assert torch.isfinite(model.mean).all()
    assert model.calls == 1


def test_hooks_hear_of_a_divergence():
    heard: list[BaseException] = []

    class Listener:
        def on_error(self, trainer: HybridTrainer, error: BaseException) -> None:
            heard.append(error)

    trainer, saboteur, batches = sabotaged()
    trainer.hooks.add(Listener())
    saboteur.fault = lambda loss: loss * torch.nan
    with pytest.raises(DivergenceError) as raised:
        for batch in batches:
            trainer.step(batch)
    assert heard == [raised.value]


def test_a_jump_whose_last_part_fails_is_undone_whole(monkeypatch):
    trainer, _, batches = sabotaged()
    rest = run_until(trainer, batches, Phase.PREDICT)
    before, opened = trainer.fingerprint(), trainer.jumps.history.open
    raised: list[bool] = []

    def fails_once() -> None:
        if not raised:
            raised.append(True)
            raise MemoryError("no room for a window")
        opened()

    monkeypatch.setattr(trainer.jumps.history, "open", fails_once)
    with pytest.raises(MemoryError, match="no room"):
        for batch in rest:
            trainer.step(batch)
            before = trainer.fingerprint() if not raised else before
    assert raised and trainer.fingerprint() == before
    trainer.step(rest[0])
