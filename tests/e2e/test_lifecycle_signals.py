"""Signals at any time: the end is prompt, and nothing of the daemon is left behind."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import models
import numpy as np
import pytest

from .client import Client, ones, result
from .conftest import Start
from .daemon import Daemon, eventually, free_port
from .repository import write, write_fake

TURNS = 12_000  # of `slow`: a second, more or less
HANGS_MS = 120_000


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The daemon's temporary directory."""
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    """A good model, and one whose load takes two minutes in a thread."""
    write(tmp_path / "models", "a", models.slow())
    write_fake(tmp_path / "models", "b", HANGS_MS)
    return tmp_path / "models"


@pytest.fixture
def serving(start: Start, tmp_path: Path, temporary: Path) -> Iterator[Any]:
    """Starts a daemon with a request that runs for half a minute."""
    root = write(tmp_path / "models", "slow", models.slow())
    address = ("--grpc-address", f"unix:{tmp_path}/a.sock")
    clients = []

    def begin(*flags: str) -> tuple[Daemon, Any]:
        daemon = start(root, *address, *flags, variables={"TMPDIR": str(temporary)})
        client = Client(daemon.grpc)
        clients.append(client)
        call = long_call(client, "slow", 30 * TURNS)
        eventually(lambda: daemon.in_flight_bytes() > 40)
        return daemon, call

    yield begin
    for client in clients:
        client.channel.close()


def long_call(client: Client, model: str, turns: int) -> Any:
    """A call that runs for about a second per 12,000 turns."""
    return client.start(model, x=ones(1, 7), iters=np.array([[turns]]), timeout=60)


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigCgt:\s+([0-9a-f]+)$", status, re.MULTILINE)
    assert found is not None
    return bool(int(found[1], 16) >> (number - 1) & 1)


def ended(
    daemon: Daemon, send: Callable[[], None], within_s: float
) -> tuple[int, list[str]]:
    """The exit code after a signal, which has to come soon, and the lines on stderr."""
    started = time.monotonic()
    send()
    code = daemon.wait_exit(10)
    seconds = time.monotonic() - started

    assert seconds < within_s
    daemon.check_stderr()
    lines = daemon.stderr.splitlines()
    return code, [line for line in lines if " WARNING " not in line]  # of the warm-up


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("style", ["text", "json"])
def test_during_the_imports(
    tmp_path: Path, temporary: Path, number: signal.Signals, style: str
) -> None:
    """A signal in the first second: one line, exit code 0."""
    root = write_fake(tmp_path / "models", "a", 0)
    flags = ("--log-format", style)
    variables = {"TMPDIR": str(temporary)}
    daemon = Daemon(root, *flags, cwd=tmp_path, ready=False, variables=variables)
    with daemon:
        eventually(lambda: handles(daemon.pid, signal.SIGTERM))
        code, lines = ended(daemon, lambda: daemon.signal(number), 1)

    assert code == 0
    assert len(lines) == 1
    assert f"{number.name} during the start: nothing to drain" in lines[0]
    assert lines[0].startswith("{") == (style == "json")
    assert list(temporary.glob("batcher-*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_during_a_load(
    start: Start,
    hanging: Path,
    tmp_path: Path,
    temporary: Path,
    number: signal.Signals,
) -> None:
    """A load that takes minutes is not waited for: one line, exit code 0."""
    daemon = start(
        *(hanging, "--grpc-address", f"unix:{tmp_path}/a.sock"),
        *("--http-address", f"127.0.0.1:{free_port()}"),
        ready=False,
        variables={"TMPDIR": str(temporary)},
    )
    eventually(daemon.reached, 20)
    eventually(lambda: 'model="a"' in daemon.get("/metrics")[1])
    code, lines = ended(daemon, lambda: daemon.signal(number), 2)

    assert code == 0
    assert len(lines) == 1
    assert f"{number.name} while models load: nothing to drain" in lines[0]
    assert list(tmp_path.glob("a.sock*")) == []
    assert list(temporary.glob("batcher-*")) == []


def half_loaded(start: Start, hanging: Path) -> tuple[Daemon, int]:
    """A daemon that serves one model and loads another, and its gRPC port."""
    port = free_port()
    addresses = ("--grpc-address", f"127.0.0.1:{port}")
    addresses += ("--http-address", f"127.0.0.1:{free_port()}")
    daemon = start(hanging, *addresses, ready=False)
    eventually(daemon.reached, 20)
    eventually(lambda: 'model="a"' in daemon.get("/metrics")[1])
    return daemon, port


def test_what_was_accepted_during_a_load(start: Start, hanging: Path) -> None:
    """A model that is served already answers before the daemon ends."""
    daemon, port = half_loaded(start, hanging)
    with Client(f"127.0.0.1:{port}") as client:
        call = long_call(client, "a", TURNS)
        eventually(lambda: daemon.in_flight_bytes() > 40)
        code, lines = ended(daemon, daemon.signal, 10)

        assert result(call)["y"].tolist() == ones(1, 7).tolist()
    assert code == 0
    assert [line.split("server: ")[-1] for line in lines] == [
        "draining: 1 requests in flight",
        "drained",
    ]


def test_a_second_signal_leaves_nothing(
    serving: Any, tmp_path: Path, temporary: Path
) -> None:
    """A second signal ends it at once; its sockets and folders are gone."""
    daemon, _ = serving()
    during = list(tmp_path.glob("a.sock"))
    daemon.signal()
    daemon.wait_line("draining: 1 request")
    code, _ = ended(daemon, daemon.signal, 1)

    assert code == 130
    assert len(during) == 1
    assert list(tmp_path.glob("a.sock*")) == []
    assert list(temporary.glob("batcher-*")) == []


def test_a_second_signal_during_a_load(start: Start, hanging: Path) -> None:
    """The second signal does not wait for what the first one waits for."""
    daemon, port = half_loaded(start, hanging)
    with Client(f"127.0.0.1:{port}") as client:
        call = long_call(client, "a", 30 * TURNS)
        eventually(lambda: daemon.in_flight_bytes() > 40)
        daemon.signal()
        daemon.wait_line("draining: 1 request")
        code, _ = ended(daemon, daemon.signal, 1)

        assert call.code() == grpc.StatusCode.UNAVAILABLE
    assert code == 130


def test_a_drain_timeout_leaves_nothing(
    serving: Any, tmp_path: Path, temporary: Path
) -> None:
    """A run that hangs is given up; the daemon's sockets and folders are gone."""
    daemon, _ = serving("--drain-timeout", "0.2")
    code, lines = ended(daemon, daemon.signal, 3)

    assert code == 1
    assert "drain timed out: 1 requests lost" in lines[-1]
    assert list(tmp_path.glob("a.sock*")) == []
    assert list(temporary.glob("batcher-*")) == []


def test_a_killed_daemons_folder_goes_with_the_next_start(
    tmp_path: Path, temporary: Path
) -> None:
    """kill -9 leaves a folder; the next start removes it, and no living daemon's."""
    root = write_fake(tmp_path / "models", "a", 0)
    options: dict[str, Any] = {"cwd": tmp_path, "variables": {"TMPDIR": str(temporary)}}
    with Daemon(root, **options) as neighbour:
        kept = set(temporary.glob("batcher-*"))
        with Daemon(root, **options) as killed:
            killed.kill()
        left = set(temporary.glob("batcher-*")) - kept
        with Daemon(root, **options) as daemon:
            after = set(temporary.glob("batcher-*"))
            modes = {path.stat().st_mode & 0o777 for path in after}
        assert neighbour.process.poll() is None
        assert daemon.process.returncode == 0
    assert len(kept) == len(left) == 1
    assert kept < after
    assert left & after == set()
    assert modes == {0o700}
    assert list(temporary.glob("batcher-*")) == []
