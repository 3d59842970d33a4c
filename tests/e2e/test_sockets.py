"""Where it listens: Unix sockets and TCP ports, one daemon each, errors in one line."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import models
import pytest

from .client import Client, ones, result
from .conftest import Start
from .daemon import Daemon, eventually, run_batcher
from .repository import window, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return write(tmp_path_factory.mktemp("sockets"), "probe", models.probe(), window(2))


@pytest.fixture(scope="module")
def several(
    transport: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A daemon at several addresses of every kind."""
    cwd = tmp_path_factory.mktemp("several")
    addresses = ["127.0.0.1:0", f"unix:{cwd}/a.sock", f"unix://{cwd}/b.sock"]
    addresses += ["unix:c.sock", *(["[::1]:0"] if has_ipv6() else [])]
    options = [o for address in addresses for o in ("--grpc-address", address)]
    options += ["--http-address", "127.0.0.1:0", "--socket-mode", "0600"]
    old = os.umask(0o077)
    try:
        daemon = Daemon(model, *options, "--transport", transport, cwd=cwd)
    finally:
        os.umask(old)
    with daemon:
        yield daemon


def has_ipv6() -> bool:
    """Whether the IPv6 loopback is there."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


def socket_path(daemon: Daemon) -> Path:
    """Its first Unix socket."""
    return Path(daemon.addresses[1].removeprefix("unix:"))


def answers(target: str, *options: tuple[str, Any]) -> bool:
    """Whether a daemon at `target` serves a pair of requests."""
    with Client(target, *options) as client:
        calls = [client.start("probe", x=ones(1, v), timeout=5) for v in (1, 2)]
        return [result(c)["y"][0, 0] for c in calls] == [2, 4]


def refused(cwd: Path, *arguments: str | Path) -> str:
    """A start that must fail by exit code 2 and one line, which is returned."""
    done = run_batcher("serve", *arguments, cwd=cwd)

    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "WARNING" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("batcher: ")
    return lines[0]


def test_every_kind_of_address(several: Daemon) -> None:
    """Each address is served, and shown with the port that it got."""
    folder = socket_path(several).parent
    shown = several.addresses

    assert shown[1:4] == [
        f"unix:{folder}/a.sock",
        f"unix:{folder}/b.sock",
        "unix:c.sock",
    ]
    assert shown[0].startswith("127.0.0.1:")
    assert shown[0] != "127.0.0.1:0"
    assert [answers(a) for a in shown[:3]] == [True, True, True]
    assert answers(f"unix:{folder}/c.sock")
    if has_ipv6():
        assert answers(f"ipv6:{shown[4]}")


def test_one_queue(several: Daemon) -> None:
    """A caller over TCP and one over a Unix socket share a run."""
    with Client(several.addresses[0]) as one, Client(several.addresses[1]) as two:
        calls = [c.start("probe", x=ones()) for c in (one, two)]

        assert [result(call)["n"].tolist() for call in calls] == [[[2]], [[2]]]


def test_socket_mode(several: Daemon) -> None:
    """--socket-mode sets the permission bits of all sockets."""
    for name in ("a.sock", "b.sock", "c.sock"):
        mode = (socket_path(several).parent / name).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600


def test_authorities(several: Daemon) -> None:
    """Clients of all languages send their own :authority; each is served (B084)."""
    for authority in ("localhost", "%2Fa%2Fb", "unix", "[::]:50051"):
        option = ("grpc.default_authority", authority)
        assert answers(several.addresses[1], option), authority


@pytest.mark.parametrize("authority", ["/a/b", ""])
def test_authorities_that_are_no_host(
    several: Daemon, request: pytest.FixtureRequest, transport: str, authority: str
) -> None:
    """Some clients send the raw path, or nothing (B084)."""
    if transport == "native":
        reason = "pygrpc-native's HTTP/2 refuses them as malformed"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))

    assert answers(several.addresses[1], ("grpc.default_authority", authority))


def test_second_daemon(
    several: Daemon, model: Path, tmp_path: Path, transport: str
) -> None:
    """A second daemon on a path or port ends with 2 and one line; the first lives."""
    same = ("--transport", transport)
    none = ("--http-address", "none")
    path, port = socket_path(several), several.addresses[0]
    own = ("--grpc-address", "unix:own.sock")
    starts = (
        ("--grpc-address", f"unix:{path}", *none),
        ("--grpc-address", port, *none),
        (*own, "--http-address", several.http),
    )
    with ThreadPoolExecutor(2) as pool:
        on_path, on_port, on_http = pool.map(
            lambda options: refused(tmp_path, model, *options, *same), starts
        )

    assert "another daemon holds it" in on_path
    assert str(path) in on_path
    assert f"cannot listen on {port}" in on_port
    assert f"cannot listen on http {several.http}" in on_http
    assert list(tmp_path.iterdir()) == []  # its own socket is not left behind
    for _ in range(5):  # no connection goes to the other one
        assert answers(port)
        assert answers(f"unix:{path}")
    assert several.get("/livez") == (200, "ok\n")


def test_kill_and_restart(start: Start, model: Path, tmp_path: Path) -> None:
    """After kill -9 the same addresses are taken again at once (B049).

    The socket left behind is replaced, a neighbour of the same model is not touched,
    and in the end nothing lies around.
    """
    path = tmp_path / "a.sock"
    both = ("--grpc-address", "127.0.0.1:0", "--grpc-address", f"unix:{path}")
    first = start(model, *both, ready=False)
    neighbour = start(model, "--grpc-address", f"unix:{tmp_path}/b.sock")
    first.wait_ready()
    with Client(first.grpc) as client:
        waiting = client.start("probe", x=ones(), timeout=10)
        eventually(lambda: first.waiting("probe") == 1)
        first.kill()

        assert waiting.code() == grpc.StatusCode.UNAVAILABLE
    assert path.is_socket()
    options = ("--http-address", first.http, "--grpc-address", first.grpc)
    second = start(model, *options, "--grpc-address", f"unix:{path}")

    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert answers(first.grpc)
    assert answers(f"unix:{path}")
    assert second.get("/readyz")[0] == 200
    assert answers(f"unix:{tmp_path}/b.sock")
    second.stop()
    neighbour.stop()
    assert list(tmp_path.iterdir()) == []


def test_addresses_that_cannot_be(model: Path, tmp_path: Path) -> None:
    """An address that cannot be is one clear line and exit code 2."""
    foreign = "192.0.2.1:1234"
    cases = (
        (foreign, "native", f"cannot listen on {foreign}"),
        (foreign, "grpcio", f"cannot listen on {foreign}"),
        ("nonsense", "auto", "neither HOST:PORT"),
        ("unix:/no/a.sock", "auto", "cannot listen on unix:/no/a.sock"),
    )

    def start(case: tuple[str, str, str]) -> str:
        options = ("--grpc-address", case[0], "--transport", case[1])
        return refused(tmp_path, model, *options, "--http-address", "none")

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(start, cases))

    for (_, _, text), line in zip(cases, lines, strict=True):
        assert text in line


def test_paths_of_others_are_left_alone(model: Path, tmp_path: Path) -> None:
    """A socket of some other program, or a file, is not replaced."""
    options = ("--http-address", "none", "--grpc-address")
    file = tmp_path / "precious"
    file.write_text("mine")
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with ThreadPoolExecutor(2) as pool:
            on_socket, on_file = pool.map(
                lambda path: refused(tmp_path, model, *options, f"unix:{path}"),
                (path, file),
            )

        assert "another server listens there" in on_socket
        assert path.is_socket()
    assert "no socket" in on_file
    assert file.read_text() == "mine"
