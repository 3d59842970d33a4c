"""The HTTP port by itself: clients that go away, faults, limits."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from batcher.rpc.transport import Address
from batcher.serving import http as served
from batcher.serving.http import HttpServer
from batcher.serving.logs import JsonFormatter


class Port:
    """An HTTP port whose pages are made by functions of the test's own."""

    def __init__(self) -> None:
        self.ready: Callable[[], bool] = lambda: True
        self.metrics: Callable[[], bytes] = lambda: b"m 1\n"
        self.server = HttpServer(
            Address("127.0.0.1", 0), lambda: self.ready(), lambda: self.metrics()
        )
        self.number = int(self.server.address.rpartition(":")[2])

    def connect(self) -> socket.socket:
        """A connection that says nothing yet."""
        return socket.create_connection(("127.0.0.1", self.number), 5)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.number, timeout=5)
        try:
            connection.request("GET", path)
            with connection.getresponse() as answer:
                return answer.status, answer.read()
        finally:
            connection.close()

    def settle(self) -> None:
        """Waits until no connection has a thread any more."""
        deadline = time.monotonic() + 5
        while any("process_request" in t.name for t in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def port() -> Iterator[Port]:
    """A port of the test's own."""
    made = Port()
    yield made
    made.server.close()


def reset(connection: socket.socket) -> None:
    """Ends a connection with RST."""
    linger = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


def fail(error: Exception) -> Callable[[], bytes]:
    """A page that cannot be made."""

    def page() -> bytes:
        raise error

    return page


# -- clients that go away -------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"", b"GE", b"GET /livez HTTP/1.0\r\nHost", b"GET /metrics HTTP/1.0\r\n\r\n"],
    ids=["nothing", "half a word", "half a header", "all"],
)
@pytest.mark.parametrize("leave", [reset, socket.socket.close])
def test_a_client_that_goes_away_is_not_worth_a_line(
    port: Port,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    said: bytes,
    leave: Callable[[socket.socket], None],
) -> None:
    """TCP health checks and broken requests leave nothing in the log."""
    port.metrics = lambda: bytes(4_000_000)
    for _ in range(3):
        connection = port.connect()
        connection.sendall(said)
        leave(connection)
    status, _ = port.get("/livez")
    port.settle()

    assert status == 200
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG] == []
    assert capfd.readouterr().err == ""


def test_a_client_that_is_silent_is_let_go_without_a_line(
    port: Port,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says nothing, or takes nothing: after the time for that it is closed."""
    monkeypatch.setattr(served._Handler, "timeout", 0.1)
    port.metrics = lambda: bytes(40_000_000)
    with port.connect() as mute, port.connect() as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        rest = mute.recv(1)
        port.settle()

    assert rest == b""
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG] == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\r\n\r\n", b""),
        (b"GET /livez\r\n\r\n", b"ok"),
        (b"GET /livez HTTP/9.9\r\n\r\n", b"<!DOCTYPE HTML>"),
        (b"\xff\x16\x03\x01 \xe9 \xff\r\n\r\n", b""),
        (b"GET " + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n", b"HTTP/1.0 414"),
        (b"GET /livez HTTP/1.0\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"HTTP/1.0 431"),
        (b"GET /livez HTTP/1.0\r\nno header\r\n\r\n", b"HTTP/1.0 200"),
        (b"PATCH / HTTP/1.0\r\n\r\n", b"HTTP/1.0 405"),
    ],
)
def test_what_makes_no_sense_is_refused_without_a_line(
    port: Port,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    said: bytes,
    status: bytes,
) -> None:
    """Another protocol on the port is the client's business."""
    with port.connect() as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    port.settle()

    assert answer.startswith(status)
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG] == []
    assert capfd.readouterr().err == ""


# -- faults of our own ----------------------------------------------------------------


def test_a_fault_of_ours_is_one_record_and_a_500(
    port: Port, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bug is logged once, with its traceback, and as JSON where that is asked for."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(served.__name__)
    logger.addHandler(handler)
    try:
        port.metrics = fail(ZeroDivisionError("a bug"))
        answer = port.get("/metrics")
    finally:
        logger.removeHandler(handler)

    (record,) = map(json.loads, out.getvalue().splitlines())
    assert answer == (500, b"internal error\n")
    assert record["level"] == "error"
    assert record["message"] == "http: /metrics failed"
    assert "ZeroDivisionError: a bug" in record["traceback"]
    assert capfd.readouterr().err == ""


def test_errors_of_the_system_in_a_page_are_faults_of_ours(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not taken for a client that has gone."""
    port.metrics = fail(ConnectionResetError("of another connection"))
    answer = port.get("/metrics")

    assert answer == (500, b"internal error\n")
    assert [r.levelname for r in caplog.records] == ["ERROR"]


def test_a_daemon_that_is_too_busy_says_so(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """A page that takes too long is one warning, without a traceback, and a 503."""
    port.metrics = fail(TimeoutError())
    answer = port.get("/metrics")

    assert answer == (503, b"too busy\n")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.exc_info is None
    assert "/metrics was not made in time" in record.getMessage()


# -- limits ---------------------------------------------------------------------------


def test_connections_without_end_leave_the_port_open(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """One more than the limit ends the oldest; one warning says that it happens."""
    with ExitStack() as stack:
        silent = [
            stack.enter_context(port.connect())
            for _ in range(served.MAX_CONNECTIONS + 20)
        ]
        answer = port.get("/livez")
        first = silent[0].recv(1)
        silent[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
    port.settle()

    assert answer == (200, b"ok\n")
    assert first == b""
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "128 connections at once" in caplog.text


def test_a_connection_has_an_end(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a byte now and then does not hold a thread for ever."""
    monkeypatch.setattr(served, "_LIFE_S", 0.3)
    connection = port.connect()
    connection.settimeout(0.05)
    connection.sendall(b"GET /livez HTTP/1.0\r\n")
    ended = False
    for _ in range(100):
        try:
            connection.sendall(b"a")
            ended = connection.recv(100) == b""
        except TimeoutError:
            continue
        except OSError:
            ended = True
        break
    connection.close()
    port.settle()

    assert ended


def test_a_thread_that_cannot_be_had_is_a_warning(
    port: Port,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections are closed meanwhile, and answered again afterwards."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(3):
            with port.connect() as connection:
                assert connection.recv(1) == b""

    assert port.get("/livez") == (200, b"ok\n")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "can't start new thread" in caplog.text
    assert capfd.readouterr().err == ""


STARVED = """
import os, resource, socket, sys, time
from batcher.rpc.transport import Address
from batcher.serving import logs
from batcher.serving.http import HttpServer

logs.setup("json", "info")
server = HttpServer(Address("127.0.0.1", 0), lambda: True, lambda: b"")
host, port = server.address.split(":")
client = socket.create_connection((host, int(port)))  # its thread imports what it needs
client.sendall(b"GET /livez HTTP/1.0\\r\\n\\r\\n")
while client.recv(100):
    pass
clients = [socket.socket() for _ in range(3)]
open_files = len(os.listdir("/proc/self/fd")) - 1
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))
for one in clients:
    one.connect((host, int(port)))
    one.sendall(b"GET /livez HTTP/1.0\\r\\n\\r\\n")
before = time.process_time()
time.sleep(1)
used = time.process_time() - before
resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 50, hard))
answers = [one.recv(12).decode() for one in clients]
print(used, *answers, sep="|")
server.close()
"""


def test_without_file_descriptors_it_waits_and_recovers() -> None:
    """It does not spin or fill the log, and answers who waited when it can."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )

    used, *answers = done.stdout.strip().split("|")
    assert answers == ["HTTP/1.0 200"] * 3
    assert float(used) < 0.3
    (record,) = map(json.loads, done.stderr.splitlines())
    assert record["level"] == "warning"
    assert "no connection can be accepted" in record["message"]
    assert "ulimit -n" in record["message"]


# -- addresses ------------------------------------------------------------------------


def test_an_ipv6_address_is_listened_on() -> None:
    """The address is shown as it is given."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    server = HttpServer(Address.parse("[::1]:0"), lambda: True, lambda: b"")
    port = int(server.address.removeprefix("[::1]:"))
    with socket.create_connection(("::1", port), 5) as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        answer = connection.makefile("rb").read()
    server.close()

    assert answer.endswith(b"ok\n")
