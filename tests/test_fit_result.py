"""How a run ended, before anything has happened."""

from __future__ import annotations

from hybridtrainer.fit_result import FitResult


def test_two_results_share_no_list():
    one, other = FitResult(), FitResult()
    one.evaluations.append({"step": 1})
    assert other.evaluations == []
    assert (one.status, one.signal, one.steps, one.last) == ("finished", None, 0, None)
