"""What snapshots amount to."""

from __future__ import annotations

import json

from tests.observe.test_snapshots import snapshot

from hybridtrainer.observe.profile_summary import MOST_SPIKES, Spike, Summary, summarize


def test_mean_most_and_least_by_phase_with_the_components_of_the_highest():
    summary = Summary(initial_bytes=50, limit_bytes=1000)
    for step, phase, peak in [(1, "warmup", 100), (2, "full", 300), (3, "full", 500), (4, "full", 100)]:
        summary.take(snapshot(step, phase, peak))
    report = summary.report()
    full = report.phases["full"]
    assert list(report.phases) == ["warmup", "full"]
    assert (full.steps, full.mean_bytes, full.max_bytes, full.min_bytes, full.seconds) == (3, 300, 500, 100, 3.0)
    assert full.components == {
        "weights": 10, "optimizer states": 20, "gradients": 10, "activations and other": 460,
    }  # fmt: skip
    assert (report.initial_bytes, report.final_bytes) == (50, 100)
    assert (report.peak_bytes, report.peak_step, report.peak_phase) == (500, 3, "full")
    assert (report.utilization, report.seconds, report.steps_per_second) == (0.5, 4.0, 1.0)
    json.dumps(report.to_dict())


def test_a_rise_from_the_step_before_is_a_spike_with_step_and_phase():
    summary = Summary(initial_bytes=0, spike_bytes=100)
    for step, peak in [(1, 99), (5, 199), (6, 298), (7, 100), (8, 260)]:
        summary.take(snapshot(step, peak=peak))
    report = summary.report()
    assert report.spikes == [Spike(5, "full", 100, 199, 2), Spike(8, "full", 160, 260, 5)]
    assert report.spike_count == 2


def test_spikes_are_all_counted_and_the_first_are_kept():
    report = summarize([snapshot(step, peak=(step % 2) << 30) for step in range(1000)])
    assert (len(report.spikes), report.spike_count) == (MOST_SPIKES, 500)


def test_what_is_not_known_is_left_out_and_not_nought():
    report = summarize([snapshot(1, peak=None), snapshot(2, peak=100), snapshot(3, peak=None)])
    assert (report.steps, report.phases["full"].steps) == (3, 1)
    assert (report.initial_bytes, report.final_bytes, report.utilization) == (None, None, None)
    empty = summarize([snapshot(1, peak=None)])
    assert (empty.peak_bytes, empty.peak_step, empty.phases) == (None, None, {})


def test_nothing_seen_is_a_report_too():
    report = summarize([])
    assert (report.steps, report.steps_per_second, report.peak_bytes) == (0, None, None)


def test_a_resumed_runs_time_goes_on():
    report = summarize([snapshot(1, seconds=10.0), snapshot(2, seconds=12.0), snapshot(3, seconds=3.0)])
    assert report.seconds == 15.0
