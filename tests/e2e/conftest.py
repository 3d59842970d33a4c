"""The daemons that tests share, each on both transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from .client import Client
from .daemon import Daemon, eventually
from .repository import write_timed, write_zoo

Start = Callable[..., Daemon]


@pytest.fixture(scope="session", params=["native", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    """Who speaks gRPC."""
    return request.param


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of all tiny models."""
    return write_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def timed_process(
    transport: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """The daemon of `timed`, started early: it warms up for seconds, mostly asleep."""
    root = write_timed(tmp_path_factory.mktemp("timed"))
    process = Daemon(root, "--transport", transport, cwd=root, ready=False)
    try:
        yield process
        if process.addresses:
            process.stop()
    finally:
        process.kill()


@pytest.fixture(scope="session")
def timed(timed_process: Daemon) -> Daemon:
    """The daemon that serves models of known run times."""
    timed_process.wait_ready()
    return timed_process


@pytest.fixture
def caller(timed: Daemon) -> Iterator[Client]:
    """A client of `timed`; afterwards nothing of its calls is left in the daemon."""
    with Client(timed.grpc) as connected:
        yield connected
    eventually(lambda: timed.in_flight_bytes() == 0, what="all bytes are given back")
    pending = timed.metrics("nv_inference_pending_request_count")
    assert set(pending.values()) == {0}
    timed.check_stderr()


@pytest.fixture(scope="session")
def daemon(
    transport: str,
    zoo: Path,
    timed_process: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Daemon]:
    """The daemon that serves the zoo; stopped by SIGTERM in the end."""
    cwd = tmp_path_factory.mktemp("daemon")
    with Daemon(zoo, "--transport", transport, cwd=cwd) as running:
        yield running


@pytest.fixture(scope="session")
def client(daemon: Daemon) -> Iterator[Client]:
    """A client of the shared daemon."""
    with Client(daemon.grpc) as connected:
        yield connected


@pytest.fixture
def start(transport: str, tmp_path: Path) -> Iterator[Start]:
    """Starts daemons of the test's own; what still runs in the end is killed."""
    with ExitStack() as stack:

        def start_one(*arguments: str | Path, **options: Any) -> Daemon:
            options.setdefault("cwd", tmp_path)
            one = Daemon(*arguments, "--transport", transport, **options)
            stack.callback(one.kill)
            return one

        yield start_one


@pytest.fixture(autouse=True)
def _alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test with the shared daemon: it serves as if nothing had happened."""
    if "daemon" not in request.fixturenames:
        yield
        return
    running: Daemon = request.getfixturevalue("daemon")
    connected: Client = request.getfixturevalue("client")
    yield
    check_alive(running, connected)


def check_alive(running: Daemon, connected: Client) -> None:
    """The alive check of the bug log: live, ready, right within 1 s, stderr clean."""
    stub = connected.stub
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=1).live
    assert stub.ServerReady(pb.ServerReadyRequest(), timeout=1).ready
    x = np.array([[1, 2, 3, 4]], np.float32)
    assert connected.infer("probe", x=x, timeout=1)["y"].tolist() == [[2, 4, 6, 8]]
    assert running.process.poll() is None
    running.check_stderr()
