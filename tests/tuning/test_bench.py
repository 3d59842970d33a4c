"""`batcher bench` against real servers: what is sent, counted and reported."""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from hpack import Encoder

from batcher.errors import BatcherError, ConfigError
from batcher.tuning import frames
from batcher.tuning.bench import run

from .bench_setup import closed, make_body

if TYPE_CHECKING:
    from batcher.tuning.progress import Progress

    from .bench_setup import StartServer


def test_closed_loop_measures_the_number_of_requests_it_is_asked_for(
    front: str,
) -> None:
    """Each of the requested number of requests is sent once and answered."""
    report = run(closed(front, requests=500, server_statistics=True))

    assert (report.sent, report.succeeded, report.failed) == (500, 500, 0)
    assert report.latency.count == 500
    assert report.latency.exact
    assert report.answered_per_s == pytest.approx(500 / report.window_s)
    assert report.models is not None
    assert report.models[0].inferences == 500


def test_statistics_of_the_server_are_subtracted(front: str) -> None:
    """Batch sizes and queue time are of the window only, by the server's account."""
    report = run(closed(front, callers=8, requests=200, server_statistics=True))

    assert report.models is not None
    (use,) = report.models
    assert (use.model, use.version, use.inferences) == ("echo", "1", 200)
    assert sum(size * count for size, count in use.batch_sizes.items()) == 200
    assert use.mean_batch_size == pytest.approx(200 / sum(use.batch_sizes.values()))
    assert use.queue_us == pytest.approx(1000)


def test_a_server_without_statistics_is_no_failure(start_server: StartServer) -> None:
    """Where ModelStatistics is not there, the report says so and has the rest."""
    server = start_server("aio")

    report = run(closed(server.target, server_statistics=True))

    assert report.succeeded == 100
    assert report.models is None
    assert "UNIMPLEMENTED" in report.models_note


def test_two_processes_share_connections_callers_and_requests(front: str) -> None:
    """The shares of the processes add up to what was asked for."""
    config = closed(front, processes=2, connections=3, callers=5, requests=101)

    report = run(config)

    assert report.processes == 2
    assert (report.sent, report.succeeded) == (101, 101)
    assert len(report.generator_busy) == 2


def test_a_timed_window_leaves_out_the_warm_up(front: str) -> None:
    """Without a number of requests the window has the length that was asked for."""
    report = run(closed(front, requests=None, warmup_s=0.1, measure_s=0.3))

    assert report.window_s == pytest.approx(0.3)
    assert report.succeeded == report.sent > 0
    assert report.failed == 0


def test_unix_socket(start_server: StartServer, tmp_path: Path) -> None:
    """A target may be the path of a Unix socket."""
    server = start_server(address=f"unix:{tmp_path}/s")

    report = run(closed(server.target, server_statistics=True))

    assert report.succeeded == 100
    assert report.models is not None


def test_errors_are_counted_by_code_with_a_sample(front: str) -> None:
    """Bodies are drawn by weight, and each failing one is counted under its code."""
    bodies = (
        make_body(weight=2.0),
        make_body(fail=3),
        make_body(fail=8, metadata=(("tenant", "blue"), ("key-bin", b"\x00\xff"))),
    )
    config = closed(front, bodies=bodies, requests=400, allow_errors=True)

    report = run(config)

    assert set(report.errors) == {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert 150 < report.succeeded < 250
    assert 60 < report.errors["INVALID_ARGUMENT"].count < 140
    assert report.sent == report.succeeded + report.failed == 400
    sample = report.errors["RESOURCE_EXHAUSTED"].sample
    assert sample.startswith("body 2: asked to fail")
    assert "('tenant', 'blue')" in sample
    assert "('key-bin', b'\\x00\\xff')" in sample


def test_a_deadline_is_sent_and_kept(front: str) -> None:
    """A call with a deadline carries it, and ends with it if the server does not."""
    carried = run(
        closed(
            front,
            bodies=(make_body(fail=3, deadline_us=60_000_000),),
            allow_errors=True,
            requests=4,
        )
    )
    kept = run(
        closed(
            front,
            bodies=(make_body(sleep_ms=400, deadline_us=30_000),),
            allow_errors=True,
            requests=4,
        )
    )

    assert ", 59.9" in carried.errors["INVALID_ARGUMENT"].sample
    assert kept.errors["DEADLINE_EXCEEDED"].count == 4
    assert kept.window_s < 0.3


def test_large_bodies_both_ways_through_small_windows(
    start_server: StartServer,
) -> None:
    """600 kB go out through a server's small windows, and come back unharmed."""
    server = start_server(
        "aio",
        options={"grpc.http2.lookahead_bytes": 65_535, "grpc.http2.bdp_probe": 0},
    )

    report = run(
        closed(
            server.target,
            bodies=(make_body(600_000),),
            requests=40,
            verify_fraction=1.0,
        )
    )

    assert (report.succeeded, report.verified, report.mismatches) == (40, 40, 0)


def test_a_limit_of_concurrent_streams_is_kept(start_server: StartServer) -> None:
    """More callers than the server allows streams wait, and none is refused."""
    server = start_server(options={"max_concurrent_streams": 2})

    report = run(
        closed(
            server.target, callers=12, connections=2, bodies=(make_body(sleep_ms=2),)
        )
    )

    assert (report.succeeded, report.failed) == (100, 0)


def test_connections_that_a_server_retires_are_replaced(
    start_server: StartServer,
) -> None:
    """GOAWAY costs no request: calls in flight end, new ones get a new connection."""
    server = start_server(
        "aio",
        options={
            "grpc.max_connection_age_ms": 150,
            "grpc.max_connection_age_grace_ms": 2000,
        },
    )

    report = run(
        closed(
            server.target,
            requests=None,
            measure_s=0.7,
            bodies=(make_body(sleep_ms=5),),
        )
    )

    assert report.failed == 0
    assert report.succeeded > 50


class RetiringHandler(StreamRequestHandler):
    """Answers calls, but sends the second connection's first one away unseen.

    Its header encoder keeps a table, though the client has asked for none.
    """

    connections = 0

    def handle(self) -> None:
        cls = RetiringHandler
        cls.connections += 1
        retiring = cls.connections == 2
        encoder = Encoder()
        self.rfile.read(len(frames.PREFACE))
        self.wfile.write(frames.frame(frames.SETTINGS, 0, frames.CONNECTION, b""))
        while len(start := self.rfile.read(9)) == 9:
            word, flags, stream_id = frames.FRAME.unpack(start)
            self.rfile.read(word >> 8)
            if word & 0xFF != frames.DATA or not flags & frames.END_STREAM:
                continue
            if retiring:
                self.wfile.write(
                    frames.frame(frames.GOAWAY, 0, frames.CONNECTION, bytes(8))
                )
                return
            fields = [(":status", "200"), ("content-type", "application/grpc")]
            head = encoder.encode(fields)
            trailers = encoder.encode([("grpc-status", "0"), ("n", stream_id.hex())])
            end = frames.END_HEADERS | frames.END_STREAM
            self.wfile.write(
                frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, head)
                + frames.frame(frames.DATA, 0, stream_id, bytes(5))
                + frames.frame(frames.HEADERS, end, stream_id, trailers)
            )


def test_calls_that_a_server_has_not_looked_at_are_sent_again() -> None:
    """A GOAWAY that leaves calls out costs none of them; they count as retries."""
    with ThreadingTCPServer(("127.0.0.1", 0), RetiringHandler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        target = f"127.0.0.1:{server.server_address[1]}"
        report = run(closed(target, callers=3, connections=1))
        server.shutdown()
        thread.join()

    assert (report.succeeded, report.failed) == (100, 0)
    assert report.retries == 3
    assert RetiringHandler.connections == 3


def test_a_server_killed_in_the_middle(start_server: StartServer) -> None:
    """Lost calls are UNAVAILABLE, the run goes on to its end, and says it."""
    server = start_server()

    def kill(progress: Progress) -> None:
        if progress.answered:
            server.kill()

    report = run(closed(server.target, requests=None, measure_s=0.6), kill)

    assert set(report.errors) == {"UNAVAILABLE"}
    assert report.errors["UNAVAILABLE"].count >= 4
    assert report.succeeded > 0
    assert report.connections_lost >= 2
    assert any("connections were lost" in warning for warning in report.warnings)


def test_answers_are_compared_with_the_first_one(front: str) -> None:
    """Wrong answers among the sampled ones are counted, with one in words."""
    bodies = (make_body(flip_every=10),)

    report = run(closed(front, bodies=bodies, verify_fraction=1.0))

    assert (report.verified, report.succeeded) == (100, 100)
    assert report.mismatches == 10
    assert "output 0 differs from byte 63 on" in report.mismatch_sample
    assert any("compared answers are wrong" in warning for warning in report.warnings)


def test_given_answers_are_compared_with(front: str) -> None:
    """A sampled fraction is held against what the body itself expects."""
    body = replace(make_body(), expected_raw=(b"x" * 64,))

    report = run(closed(front, bodies=(body,), verify_fraction=0.25))

    assert (report.verified, report.mismatches) == (25, 25)


def test_a_load_process_that_dies_is_named(front: str) -> None:
    """The run ends at once, and says which process it was."""

    def kill(progress: Progress) -> None:
        for path in Path("/proc/self/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                if b"tuning.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)

    with pytest.raises(BatcherError, match=r"load process 0 died \(exit code -9\)"):
        run(closed(front, requests=None, measure_s=60.0), kill)


def test_ctrl_c_gives_a_partial_report(front: str) -> None:
    """SIGINT ends the run, and what was measured till then is reported."""

    def interrupt(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    report = run(closed(front, requests=None, measure_s=60.0), interrupt)

    assert report.interrupted
    assert 0 < report.window_s < 10
    assert report.succeeded > 0
    assert report.failed == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_server_is_said_before_the_run() -> None:
    """Nothing listens: one line, with the address and the reason."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    with pytest.raises(BatcherError, match=f"no server at 127.0.0.1:{port}: .*refused"):
        run(closed(f"127.0.0.1:{port}"))


def test_a_server_of_another_protocol_is_said_before_the_run() -> None:
    """What does not answer HTTP/2 is named, with what it said."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    Thread(target=server.handle_request, daemon=True).start()

    with pytest.raises(BatcherError, match=r"no server at .*: .*HTTP/2"):
        run(closed(f"127.0.0.1:{server.server_port}"))
    server.server_close()


def test_a_body_that_fails_is_said_before_the_run(front: str) -> None:
    """One request of each body is sent first; the server's code and text stop it."""
    bodies = (make_body(), make_body(model="nope"))

    with pytest.raises(BatcherError, match=r"body 1.*NOT_FOUND: unknown model: 'nope'"):
        run(closed(front, bodies=bodies))


def test_the_report_as_json_and_as_text(
    front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys are stable, with units in their names; the text has the main figures."""
    from rich.console import Console

    report = run(closed(front, server_statistics=True))

    found = json.loads(report.to_json())
    assert set(found) == {
        *("format", "target", "load", "bodies", "connections", "processes", "seed"),
        *("window_s", "interrupted", "sent", "succeeded", "failed"),
        *("answered_per_s", "offered_per_s", "latency", "send_lag", "errors"),
        *("verified", "mismatches", "mismatch_sample", "retries"),
        *("connections_lost", "generator_cpu_us_per_request", "generator_busy"),
        *("generator_starved", "models", "models_note", "warnings"),
    }
    assert set(found["latency"]) == {
        *("count", "p50_us", "p90_us", "p99_us", "p99_9_us", "max_us", "mean_us"),
        "exact",
    }
    report.render(Console(width=100))
    text = capsys.readouterr().out
    assert "requests/s" in text
    assert "Latency p99.9" in text
    assert "model echo version 1" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bodies": ()}, "bodies is empty"),
        ({"callers": None}, "either callers .* or arrivals"),
        ({"connections": 5}, "connections is 5, but callers is 4"),
        ({"processes": 3}, "processes is 3, but connections is 2"),
        ({"verify_fraction": 1.5}, "verify_fraction is 1.5"),
        ({"measure_s": 0}, "measure_s is 0"),
        ({"target": "nowhere"}, "target 'nowhere'"),
        ({"bodies": (make_body(metadata=(("grpc-x", "1"),)),)}, "metadata 'grpc-x'"),
    ],
)
def test_a_wrong_configuration_is_named(
    changes: dict[str, object], message: str
) -> None:
    """What cannot be is said with the names of the fields."""
    with pytest.raises(ConfigError, match=message):
        run(replace(closed("127.0.0.1:1"), **changes))  # type: ignore[arg-type]
