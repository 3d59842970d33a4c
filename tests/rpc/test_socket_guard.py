"""Unix socket paths: one daemon each, and nothing of others is touched."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from batcher.errors import ConfigError
from batcher.rpc.sockets import SocketGuard


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a socket may be."""
    return tmp_path / "b.sock"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened."""
    with ExitStack() as exits:
        yield exits


def bound(path: Path, stack: ExitStack, *, listen: bool = True) -> socket.socket:
    """A socket at `path`."""
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(path))
    if listen:
        server.listen()
    return server


def guarded(path: Path, stack: ExitStack, mode: int = 0o600) -> SocketGuard:
    """A guard at `path` that has bound its socket."""
    guard = SocketGuard(str(path), mode)
    with guard.binding():
        bound(path, stack)
    return guard


def test_a_free_path_is_taken_and_left_clean(path: Path, stack: ExitStack) -> None:
    """Socket and lock are there while the guard is, and gone afterwards."""
    guard = guarded(path, stack)
    during = sorted(p.name for p in path.parent.iterdir())

    guard.close()

    assert during == ["b.sock", "b.sock.lock"]
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o777])
def test_the_socket_has_its_mode_from_the_start(
    path: Path, stack: ExitStack, mode: int
) -> None:
    """Permissions are never wider than asked for, nor does the umask narrow them."""
    umask = os.umask(0o077)
    stack.callback(os.umask, umask)
    guard = SocketGuard(str(path), mode)
    with guard.binding():
        bound(path, stack)
        first = stat.S_IMODE(path.stat().st_mode)
    last = stat.S_IMODE(path.stat().st_mode)
    after = os.umask(0o077)
    guard.close()

    assert first & ~mode == 0
    assert last == mode
    assert after == 0o077


def test_the_umask_comes_back_when_binding_fails(path: Path, stack: ExitStack) -> None:
    """A bind that fails leaves the process's umask as it was, and nothing behind."""
    stack.callback(os.umask, os.umask(0o022))
    guard = SocketGuard(str(path), 0o600)

    with pytest.raises(OSError, match="nope"), guard.binding():
        raise OSError("nope")
    guard.close()

    assert os.umask(0o022) == 0o022
    assert list(path.parent.iterdir()) == []


def test_a_stale_socket_is_taken_over(path: Path, stack: ExitStack) -> None:
    """A socket that nobody listens on is removed: its daemon was killed."""
    bound(path, stack).close()

    guard = SocketGuard(str(path), 0o600)

    assert not path.exists()
    guard.close()


def test_a_live_server_keeps_its_path(path: Path, stack: ExitStack) -> None:
    """A path that somebody listens on is refused, and its socket works on."""
    server = bound(path, stack)

    with pytest.raises(ConfigError, match="another server listens there"):
        SocketGuard(str(path), 0o600)
    client = stack.enter_context(socket.socket(socket.AF_UNIX))
    client.connect(str(path))
    stack.enter_context(server.accept()[0])
    stack.enter_context(server.accept()[0])  # the guard's attempt came first

    assert not Path(f"{path}.lock").exists()


def test_a_foreign_file_is_not_touched(path: Path) -> None:
    """A file that is no socket is refused, and stays as it is."""
    path.write_text("precious")

    with pytest.raises(ConfigError, match="a file that is no socket is there"):
        SocketGuard(str(path), 0o600)

    assert path.read_text() == "precious"
    assert not Path(f"{path}.lock").exists()


def test_a_datagram_socket_is_not_touched(path: Path, stack: ExitStack) -> None:
    """A socket of another kind is somebody's, and is refused."""
    server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    server.bind(str(path))

    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        SocketGuard(str(path), 0o600)

    assert path.is_socket()


def test_two_guards_do_not_share_a_path(path: Path, stack: ExitStack) -> None:
    """The second daemon is refused even before the first has bound its socket."""
    first = SocketGuard(str(path), 0o600)
    stack.callback(first.close)

    with pytest.raises(ConfigError) as caught:
        SocketGuard(str(path), 0o600)

    assert "another daemon holds it" in str(caught.value)
    assert f"{path}.lock is locked" in str(caught.value)


def test_a_refused_guard_does_not_disturb_the_first(
    path: Path, stack: ExitStack
) -> None:
    """After a second daemon was refused the path is held as before."""
    first = guarded(path, stack)

    for _ in range(2):
        with pytest.raises(ConfigError, match="another daemon holds it"):
            SocketGuard(str(path), 0o600)

    assert path.is_socket()
    first.close()
    SocketGuard(str(path), 0o600).close()


def test_the_lock_of_a_killed_daemon_is_free(path: Path) -> None:
    """Whatever a daemon that was killed left behind, the next one starts."""
    code = (
        "import os, signal, socket, sys\n"
        "from batcher.rpc.sockets import SocketGuard\n"
        "guard = SocketGuard(sys.argv[1], 0o600)\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        "with guard.binding():\n"
        "    server.bind(sys.argv[1])\n"
        "    server.listen()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    left = sorted(p.name for p in path.parent.iterdir())

    SocketGuard(str(path), 0o600).close()

    assert left == ["b.sock", "b.sock.lock"]
    assert list(path.parent.iterdir()) == []


def test_only_the_own_socket_is_removed(path: Path, stack: ExitStack) -> None:
    """A socket that replaced ours at the path is left to its owner."""
    guard = guarded(path, stack)
    aside = path.with_name("old.sock")
    path.rename(aside)  # keeps the inode in use, so that it cannot be given again
    bound(path, stack)

    guard.close()

    assert path.is_socket()


def test_a_socket_removed_by_others_is_no_error(path: Path, stack: ExitStack) -> None:
    """Closing works when somebody has already removed the socket."""
    guard = guarded(path, stack)
    path.unlink()

    guard.close()

    assert list(path.parent.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A path in a missing folder is a configuration error with the path."""
    path = tmp_path / "none" / "b.sock"

    with pytest.raises(ConfigError, match=f"unix:{path}: .*No such file"):
        SocketGuard(str(path), 0o600)
