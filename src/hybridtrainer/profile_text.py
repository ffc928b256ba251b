"""A memory profile in words: by phase and component, beside its plan, with peaks and spikes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from hybridtrainer.observe.against_plan import result_text
from hybridtrainer.observe.profile_summary import ProfileReport
from hybridtrainer.observe.snapshots import COMPONENTS
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.records import PlanResult

MIB = 1 << 20
SHOWN_SPIKES = 10
NOTHING = "unavailable"


def profile_text(report: ProfileReport, plan: Estimate | str, against: PlanResult | None = None) -> str:
    """All of a profile for people.

    Args:
        report: What was measured.
        plan: What a plan says of the same settings, or why there is none.
        against: The plan beside what was taken in all; None where there is none.
    """
    lines = [
        f"{report.steps} steps in {report.seconds:.1f} s ({_rate(report)}), {report.device}",
        f"in use at the start {_mib(report.initial_bytes)}, at the end {_mib(report.final_bytes)}",
        *_peak(report),
        "",
        *_phases(report),
        "",
        *_plan(report, plan),
        "",
        *([result_text(against), ""] if against is not None else []),
        *_spikes(report),
    ]
    return "\n".join(lines)


def planned_and_measured(report: ProfileReport, plan: Estimate) -> dict[str, tuple[int, int]]:
    """Bytes at the peak by component, as planned and as measured; in all is what torch takes from the GPU.

    What a plan has as workspace, fragments and averages is not told apart from activations in a measurement.
    """
    parts = report.phases[report.peak_phase].components if report.peak_phase is not None else {}
    whole = report.reserved_peak_bytes or 0
    known = ("weights", "optimizer states", "gradients")
    rows = {name: (plan.gpu.get(name, 0), parts.get(name, 0)) for name in known}
    rest = tuple(total - sum(row[side] for row in rows.values()) for side, total in enumerate((plan.gpu_bytes, whole)))
    rows["activations and other"] = (rest[0], rest[1])
    return rows | {"in all": (plan.gpu_bytes, whole)}


def _rate(report: ProfileReport) -> str:
    return "no time" if report.steps_per_second is None else f"{report.steps_per_second:.2f} a second"


def _peak(report: ProfileReport) -> Iterator[str]:
    if report.peak_bytes is None:
        yield f"peak {NOTHING}: the system does not say what is in use"
        return
    yield f"peak {_mib(report.peak_bytes)} at step {report.peak_step}, {report.peak_phase}"
    if report.reserved_peak_bytes is not None:
        yield f"most that torch took from the GPU {_mib(report.reserved_peak_bytes)}"
    if report.utilization is not None:
        yield f"{report.utilization:.1%} of {_mib(report.limit_bytes)} at most"


def _phases(report: ProfileReport) -> Iterator[str]:
    names = [short for short in COMPONENTS.values() if any(short in use.components for use in report.phases.values())]
    head = f"{'MiB by phase':14}{'steps':>7}{'mean':>10}{'max':>10}{'min':>10}"
    yield head + "".join(f"{name:>{_width(name)}}" for name in names)
    for phase, use in report.phases.items():
        figures = (use.mean_bytes, use.max_bytes, use.min_bytes)
        row = f"{phase:14}{use.steps:>7}" + "".join(f"{figure / MIB:>10,.1f}" for figure in figures)
        yield row + "".join(f"{use.components.get(name, 0) / MIB:>{_width(name)},.1f}" for name in names)
    yield "Of each step the peak counts; components are those of the highest."


def _width(name: str) -> int:
    return max(10, len(name) + 2)


def _plan(report: ProfileReport, plan: Estimate | str) -> Iterator[str]:
    if isinstance(plan, str):
        yield f"No plan beside it: {plan}."
        return
    yield f"{'MiB':24}{'planned':>12}{'measured':>12}"
    for name, (planned, measured) in planned_and_measured(report, plan).items():
        ratio = f"{planned / measured - 1:+9.1%}" if measured else ""
        yield f"{name:24}{planned / MIB:>12,.1f}{measured / MIB:>12,.1f}{ratio}"


def _spikes(report: ProfileReport) -> Iterator[str]:
    if not report.spike_count:
        yield f"No step was {_mib(report.spike_bytes)} or more above the one before."
        return
    yield f"{report.spike_count} steps were {_mib(report.spike_bytes)} or more above the one before:"
    for spike in report.spikes[:SHOWN_SPIKES]:
        yield f"  step {spike.step:<6} {spike.phase:10} +{_mib(spike.delta_bytes)} to {_mib(spike.peak_bytes)}"
    if report.spike_count > SHOWN_SPIKES:
        yield f"  and {report.spike_count - SHOWN_SPIKES} more"


def _mib(nbytes: int | None) -> str:
    return NOTHING if nbytes is None else f"{nbytes / MIB:,.1f} MiB"


def as_data(report: ProfileReport, plan: Estimate | str, against: PlanResult | None = None) -> Mapping[str, object]:
    """The same for JSON."""
    found = report.to_dict() | {"against_plan": None if against is None else asdict(against)}
    if isinstance(plan, str):
        return found | {"plan": None, "no_plan": plan}
    rows = planned_and_measured(report, plan)
    return found | {"plan": {name: {"planned": a, "measured": b} for name, (a, b) in rows.items()}}
