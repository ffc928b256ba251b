"""What snapshots amount to: peaks, spikes, memory by phase and component. Takes them in one by one and keeps none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridtrainer.observe.snapshots import COMPONENTS, Snapshot

SPIKE_BYTES = 100 << 20
MOST_SPIKES = 200


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose peak was well above that of the step before it.

    Attributes:
        step: The clock.
        phase: The phase of the step.
        delta_bytes: By how much.
        peak_bytes: Up to where.
        made: How many steps had been made, this one included; the clock counts others after a jump.
    """

    step: int
    phase: str
    delta_bytes: int
    peak_bytes: int
    made: int


@dataclass(slots=True)
class PhaseUse:
    """Peaks of the steps of one phase.

    Attributes:
        steps: How many snapshots.
        seconds: From the snapshot before to that of each step.
        mean_bytes: Mean of the steps' peaks.
        max_bytes: The highest of them.
        min_bytes: The lowest.
        components: What the highest is made of; empty where that is not known.
    """

    steps: int = 0
    seconds: float = 0.0
    mean_bytes: float = 0.0
    max_bytes: int = 0
    min_bytes: int = 0
    components: dict[str, int] = field(default_factory=dict)

    def take(self, peak_bytes: int, seconds: float, snapshot: Snapshot) -> None:
        """Takes in one step."""
        self.steps += 1
        self.seconds += seconds
        self.mean_bytes += (peak_bytes - self.mean_bytes) / self.steps
        self.min_bytes = peak_bytes if self.steps == 1 else min(self.min_bytes, peak_bytes)
        if self.steps == 1 or peak_bytes > self.max_bytes:
            self.max_bytes = peak_bytes
            known = {name: getattr(snapshot, column) for column, name in COMPONENTS.items()}
            self.components = {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class ProfileReport:
    """What a profiler has seen.

    Attributes:
        device: Whose memory it is.
        steps: How many snapshots.
        seconds: From the start to the last of them.
        steps_per_second: Of the two.
        initial_bytes: In use at the start; None where the system does not say.
        final_bytes: In use after the last step.
        peak_bytes: The highest peak of a step.
        peak_step: At which step of the clock it was.
        peak_phase: In which phase.
        reserved_peak_bytes: Most that torch has taken from the GPU; None on a CPU.
        limit_bytes: What there is: the card's memory, the budget of the run, or the machine's memory.
        utilization: The peak's share of it: of what torch has taken on a GPU.
        phases: By phase, in order of their first step.
        spike_bytes: From which rise on a step is a spike.
        spikes: The first 200 of them.
        spike_count: How many there were.
    """

    device: str
    steps: int
    seconds: float
    steps_per_second: float | None
    initial_bytes: int | None
    final_bytes: int | None
    peak_bytes: int | None
    peak_step: int | None
    peak_phase: str | None
    reserved_peak_bytes: int | None
    limit_bytes: int | None
    utilization: float | None
    phases: dict[str, PhaseUse]
    spike_bytes: int
    spikes: list[Spike]
    spike_count: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Summary:
    """Takes in snapshots and says what they amount to.

    Args:
        initial_bytes: In use before the first step; None where that is not known.
        limit_bytes: What there is.
        device: Whose memory it is.
        spike_bytes: From which rise on a step is a spike.
    """

    def __init__(
        self,
        initial_bytes: int | None = None,
        limit_bytes: int | None = None,
        device: str = "",
        spike_bytes: int = SPIKE_BYTES,
    ) -> None:
        self._initial, self._limit, self._device, self._spike_bytes = initial_bytes, limit_bytes, device, spike_bytes
        self._phases: dict[str, PhaseUse] = {}
        self._spikes: list[Spike] = []
        self._spike_count = self._steps = 0
        self._seconds = 0.0
        self._last_peak = initial_bytes
        self._last: Snapshot | None = None
        self._peak: Snapshot | None = None
        self._reserved: int | None = None

    def take(self, snapshot: Snapshot) -> None:
        """Takes in the next step."""
        before = self._last.seconds if self._last is not None else 0.0
        # A resumed run counts from 0 again.
        seconds = snapshot.seconds - before if snapshot.seconds >= before else snapshot.seconds
        self._last = snapshot
        self._seconds += seconds
        self._steps += 1
        if snapshot.reserved_bytes is not None:
            self._reserved = max(self._reserved or 0, snapshot.reserved_bytes)
        peak = snapshot.peak_bytes
        if peak is None:
            return
        self._phases.setdefault(snapshot.phase, PhaseUse()).take(peak, seconds, snapshot)
        if self._peak is None or peak > (self._peak.peak_bytes or 0):
            self._peak = snapshot
        if self._last_peak is not None and peak - self._last_peak >= self._spike_bytes:
            self._spike_count += 1
            if len(self._spikes) < MOST_SPIKES:
                self._spikes.append(Spike(snapshot.step, snapshot.phase, peak - self._last_peak, peak, self._steps))
        self._last_peak = peak

    def report(self) -> ProfileReport:
        """What the snapshots so far amount to."""
        last, top = self._last, self._peak
        seconds = self._seconds
        peak = top.peak_bytes if top is not None else None
        filled = self._reserved if self._reserved is not None else peak
        return ProfileReport(
            device=self._device,
            steps=self._steps,
            seconds=seconds,
            steps_per_second=self._steps / seconds if seconds > 0 else None,
            initial_bytes=self._initial,
            final_bytes=last.used_bytes if last is not None else self._initial,
            peak_bytes=peak,
            peak_step=top.step if top is not None else None,
            peak_phase=top.phase if top is not None else None,
            reserved_peak_bytes=self._reserved,
            limit_bytes=self._limit,
            utilization=filled / self._limit if filled is not None and self._limit else None,
            phases=dict(self._phases),
            spike_bytes=self._spike_bytes,
            spikes=list(self._spikes),
            spike_count=self._spike_count,
        )


def summarize(snapshots: Iterable[Snapshot], spike_bytes: int = SPIKE_BYTES) -> ProfileReport:
    """What the snapshots of a file amount to."""
    summary = Summary(spike_bytes=spike_bytes)
    for snapshot in snapshots:
        summary.take(snapshot)
    return summary.report()
