"""Signals: what was accepted is answered, nothing new is taken, the exit is clean."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import models
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from .client import Client, assert_refused, decode, ones, request, result, trailing
from .conftest import Start
from .daemon import Daemon, eventually, free_port
from .repository import window, write, write_fake
from .test_streams import Stream

OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SECOND = 12_000  # turns of `slow`: a second, more or less


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that run long, wait long, or do neither."""
    root = tmp_path_factory.mktemp("shutdown")
    write(root, "slow", models.slow())
    write(root, "patient", models.probe(), window(64, 60_000))
    write(root, "probe", models.probe(), window(16, 2))
    return root


def long_call(client: Client, turns: int = SECOND) -> Any:
    """A call that runs for about a second per 12,000 turns."""
    return client.start("slow", x=ones(1, 7), iters=np.array([[turns]]), timeout=60)


def wait_accepted(daemon: Daemon, count: int = 1) -> None:
    """Waits until requests of this many messages are in the daemon."""
    eventually(lambda: daemon.in_flight_bytes() > 40 * count)


def test_what_was_accepted_is_answered(start: Start, repository: Path) -> None:
    """SIGTERM: what waits runs at once, what comes is refused, watchers are told."""
    daemon = start(repository)
    with (
        Client(daemon.grpc) as client,
        Stream(client) as stream,
        Stream(client) as idle,
    ):
        health = health_pb2_grpc.HealthStub(client.channel)
        kind = health_pb2.HealthCheckResponse
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        first = next(watch).status
        idle.send("probe", x=ones())
        idle.receive()
        running = long_call(client)
        calls = [client.start("patient", x=ones(1, i), timeout=30) for i in range(5)]
        for i in range(3):
            stream.send("patient", x=ones(1, 10 + i), id=str(i))
        eventually(lambda: daemon.waiting("patient") == 8)
        daemon.signal()

        # The delay of a minute is over for those that wait.
        assert [result(call)["y"][0, 0] for call in calls] == [0, 2, 4, 6, 8]
        assert [result(call)["n"][0, 0] for call in calls] == [8] * 5
        streamed = [decode(stream.receive().infer_response) for _ in range(3)]
        assert [answer["y"][0, 0] for answer in streamed] == [20, 22, 24]
        # Everybody who asks is told, while the last request still runs.
        assert (first, next(watch).status) == (kind.SERVING, kind.NOT_SERVING)
        check = health.Check(health_pb2.HealthCheckRequest())
        assert check.status == kind.NOT_SERVING
        assert client.stub.ServerLive(pb.ServerLiveRequest()).live
        assert not client.stub.ServerReady(pb.ServerReadyRequest()).ready
        assert daemon.get("/readyz") == (503, "not ready\n")
        assert daemon.get("/livez") == (200, "ok\n")
        for _ in range(2):  # known headers and new ones
            error = assert_refused(
                lambda: client.infer("probe", x=ones()), UNAVAILABLE, "shutting down"
            )
            assert trailing(error)["retry-after"] == "1"
        stream.send("probe", x=ones(), id="late")
        late = stream.receive()
        assert "shutting down" in late.error_message
        assert late.infer_response.id == "late"
        assert not running.done()
        assert result(running)["y"].tolist() == ones(1, 7).tolist()
        code = daemon.wait_exit(10)
        ended = idle.call.code()

    assert code == 0, daemon.stderr
    assert ended in (UNAVAILABLE, grpc.StatusCode.CANCELLED, OK)
    assert "drained" in daemon.stderr
    daemon.check_stderr()


def test_under_load(start: Start, repository: Path) -> None:
    """SIGTERM under 64 callers: each call is answered right, or refused as stopping."""
    daemon = start(repository)
    stop = threading.Event()
    endings: list[Counter[str]] = []
    lost: list[str] = []

    def caller(number: int) -> None:
        mine: Counter[str] = Counter()
        message = request("probe", x=ones(1, number))
        with Client(daemon.grpc) as client:
            while not stop.is_set():
                try:
                    answer = client.stub.ModelInfer(message, timeout=10)
                except grpc.RpcError as error:
                    mine[str(error.code())] += 1
                    if error.code() != UNAVAILABLE:
                        lost.append(f"{error.code()} {error.details()}")
                    break
                right = decode(answer)["y"].tolist() == [[2.0 * number] * 4]
                mine["right" if right else "wrong"] += 1
        endings.append(mine)

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    metric = "nv_inference_request_success"
    eventually(lambda: daemon.metric(metric, model="probe") > 500, 10)
    daemon.signal()
    code = daemon.wait_exit(10)
    stop.set()
    for thread in threads:
        thread.join(15)
    total = sum(endings, Counter())

    assert code == 0, daemon.stderr
    assert lost == []
    assert set(total) == {"right", str(UNAVAILABLE)}
    assert total[str(UNAVAILABLE)] == 64
    daemon.check_stderr()


def test_open_streams_end_with_a_reason(start: Start, repository: Path) -> None:
    """A stream that is idle when the daemon ends hears why, on both transports."""
    daemon = start(repository)
    with Client(daemon.grpc) as client, Stream(client) as stream:
        stream.send("probe", x=ones())
        stream.receive()
        daemon.signal()
        with pytest.raises(grpc.RpcError) as ended:
            stream.receive()

        assert ended.value.code() == UNAVAILABLE
        assert ended.value.details() == "the server is shutting down"
        assert daemon.wait_exit() == 0


def test_second_signal(repository: Path, tmp_path: Path) -> None:
    """A second signal does not wait for what runs."""
    with Daemon(repository, cwd=tmp_path) as daemon, Client(daemon.grpc) as client:
        running = long_call(client, 30 * SECOND)
        wait_accepted(daemon)
        daemon.signal()
        daemon.wait_line("draining: 1 request")
        started = time.monotonic()
        daemon.signal()
        code = daemon.wait_exit(5)

        assert code == 130, daemon.stderr
        assert time.monotonic() - started < 1
        assert running.code() == UNAVAILABLE
    daemon.check_stderr()


def test_drain_timeout(start: Start, repository: Path) -> None:
    """What takes longer than --drain-timeout is given up: exit code 1, and said so."""
    daemon = start(repository, "--drain-timeout", "0.3")
    with Client(daemon.grpc) as client:
        running = long_call(client, 5 * SECOND)
        wait_accepted(daemon)
        started = time.monotonic()
        daemon.signal()
        code = daemon.wait_exit(10)

        assert code == 1, daemon.stderr
        assert 0.3 < time.monotonic() - started < 3
        assert running.code() == UNAVAILABLE
    assert "drain timed out: 1 request" in daemon.stderr
    daemon.check_stderr()


def test_idle(repository: Path, tmp_path: Path) -> None:
    """Without anything to do SIGINT ends it at once, and cleans up."""
    address = ("--grpc-address", f"unix:{tmp_path}/a.sock")
    daemon = Daemon(repository, *address, cwd=tmp_path)
    with daemon, Client(daemon.grpc) as client:
        client.infer("probe", x=ones())
        started = time.monotonic()
        daemon.signal(signal.SIGINT)
        code = daemon.wait_exit(10)

    assert code == 0, daemon.stderr
    assert time.monotonic() - started < 2
    assert list(tmp_path.glob("a.sock*")) == []
    daemon.check_stderr()


def test_while_loading(tmp_path: Path) -> None:
    """SIGTERM while models are loaded ends the start with exit code 0 (B108)."""
    for number in range(20):
        write_fake(tmp_path / "models", f"m{number}", 150, max_batch=1)
    address = ("--http-address", f"127.0.0.1:{free_port()}")
    daemon = Daemon(tmp_path / "models", *address, cwd=tmp_path, ready=False)
    with daemon:
        eventually(daemon.reached, 20)
        assert daemon.get("/readyz")[0] == 503
        daemon.signal()
        started = time.monotonic()
        code = daemon.wait_exit(10)

        assert code == 0, daemon.stderr
        assert time.monotonic() - started < 2
    assert "ready in" not in daemon.stderr
    daemon.check_stderr()
