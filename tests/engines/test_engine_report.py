"""What is logged of something long, for those who watch no bar."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from engines import report
from engines.report import Logged


def test_long_phases_are_logged_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After 2 s of silence first, then every 5 s; short ones are not. Who has to wait
    for another process is told so at once."""
    clock = SimpleNamespace(now_ns=0)
    clock.monotonic_ns = lambda: clock.now_ns
    monkeypatch.setattr(report, "time", clock)
    logged = Logged("resnet")
    phases = [("reading", 4), ("waiting", 1), ("building", 20), ("checking", 5)]

    with caplog.at_level(logging.INFO, report.__name__):
        for phase, seconds in phases:
            for tenth in range(10 * seconds):
                logged(phase, tenth, 10 * seconds)
                clock.now_ns += 100_000_000

    assert caplog.messages == [
        "model 'resnet': reading, 20 of 40",
        "model 'resnet': another process builds its plan",
        "model 'resnet': building, 20 of 200",
        "model 'resnet': building, 70 of 200",
        "model 'resnet': building, 120 of 200",
        "model 'resnet': building, 170 of 200",
        "model 'resnet': checking, 20 of 50",
    ]
