"""`batcher bench` in open loop: when requests leave, and from when latency counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batcher.tuning.arrivals import Constant, Gamma, Poisson, read_trace
from batcher.tuning.bench import run

from .bench_setup import closed, make_body

if TYPE_CHECKING:
    from pathlib import Path

    from .bench_setup import StartServer


def test_open_loop_counts_latency_from_the_instant_a_request_was_due(
    start_server: StartServer,
) -> None:
    """All requests due while the server stands still carry what they waited."""
    server = start_server(options={"stall_after": 100, "stall_ms": 200})

    report = run(
        closed(
            server.target,
            callers=None,
            arrivals=Constant(500),
            requests=None,
            measure_s=0.8,
        )
    )

    assert (report.sent, report.succeeded) == (400, 400)
    # 100 requests were due in those 200 ms, half of them in the first half.
    slow = 400 * (1 - report.latency.share_within(100_000_000))
    assert slow >= 40
    assert report.latency.max_ns > 150_000_000
    assert report.offered_per_s == pytest.approx(500, rel=0.01)
    assert report.send_lag is not None
    assert report.send_lag.count == 400


def test_open_loop_bounds_what_is_in_flight(start_server: StartServer) -> None:
    """A request that is one too many is not sent, and counts as an error."""
    server = start_server()

    report = run(
        closed(
            server.target,
            bodies=(make_body(sleep_ms=500),),
            callers=None,
            arrivals=Constant(200),
            max_in_flight=20,
            requests=None,
            measure_s=0.4,
        )
    )

    assert report.sent == 80
    assert report.succeeded == 20
    assert report.errors["OVERFLOW"].count == 60
    assert "20 are in flight" in report.errors["OVERFLOW"].sample


def test_requests_without_an_answer_are_errors(start_server: StartServer) -> None:
    """What the drain does not bring is reported as unanswered."""
    server = start_server()

    report = run(
        closed(
            server.target,
            bodies=(make_body(sleep_ms=700),),
            callers=None,
            arrivals=Constant(50),
            requests=None,
            measure_s=0.2,
            drain_s=0.1,
        )
    )

    assert report.sent == report.errors["UNANSWERED"].count == 10


def test_the_same_seed_sends_the_same_requests(front: str) -> None:
    """What is sent depends on the seed, and not on the number of processes."""
    bodies = (make_body(weight=3.0), make_body(fail=3))
    config = closed(
        front,
        bodies=bodies,
        callers=None,
        arrivals=Poisson(1000),
        requests=None,
        measure_s=0.3,
        allow_errors=True,
        seed=7,
    )

    one = run(config)
    two = run(replace(config, processes=2))

    assert (one.sent, one.failed) == (two.sent, two.failed)
    assert one.failed > 0


def test_a_trace_is_replayed(front: str, tmp_path: Path) -> None:
    """Each line is one request, of the body it names, and the run ends with it."""
    trace = tmp_path / "trace"
    trace.write_text(
        "# seconds, body\n" + "".join(f"0.{i:02}, {i % 4 == 0:d}\n" for i in range(20))
    )

    report = run(
        closed(
            front,
            bodies=(make_body(), make_body(fail=9)),
            callers=None,
            arrivals=read_trace(trace),
            requests=None,
            allow_errors=True,
        )
    )

    assert (report.sent, report.succeeded) == (20, 15)
    assert report.errors["FAILED_PRECONDITION"].count == 5
    assert report.window_s == pytest.approx(0.19)


def test_bursty_arrivals_run(front: str) -> None:
    """Gamma arrivals are sent in number as they were drawn."""
    report = run(
        closed(front, callers=None, arrivals=Gamma(2000, 4.0), requests=300, seed=1)
    )

    assert (report.sent, report.succeeded) == (300, 300)
    assert report.load == "open loop, Gamma 2000/s, CV 4"
