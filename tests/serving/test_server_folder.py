"""The private folder of a daemon: gone with it, or taken away by the next one."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batcher.errors import ConfigError
from batcher.rpc.sockets import PrivateFolder, SocketGuard, close_all

KILLED = """
import os, signal, socket, sys
from batcher.rpc.sockets import PrivateFolder, SocketGuard
folder = PrivateFolder()
guard = SocketGuard(folder.socket, 0o600)
server = socket.socket(socket.AF_UNIX)
with guard.binding():
    server.bind(folder.socket)
    server.listen()
print(folder.path, flush=True)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    close_all()


def process(then: str) -> subprocess.Popen[str]:
    """A process that has a private folder with a socket, and then does something."""
    return subprocess.Popen(
        [sys.executable, "-c", KILLED + then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def old(folder: Path) -> Path:
    """A folder that has been there for an hour."""
    folder.mkdir(mode=0o700)
    hour_ago = folder.stat().st_mtime - 3600
    os.utime(folder, (hour_ago, hour_ago))
    return folder


def test_it_is_private_and_goes_with_its_socket(temporary: Path) -> None:
    """Only its user can enter, and closing leaves nothing, twice if need be."""
    folder = PrivateFolder()
    SocketGuard(folder.socket, 0o600)
    mode = stat.S_IMODE(os.stat(folder.path).st_mode)

    close_all()
    folder.close()

    assert Path(folder.path).parent == temporary
    assert mode == 0o700
    assert list(temporary.iterdir()) == []


def test_folders_of_the_killed_are_removed(temporary: Path) -> None:
    """A folder whose process was killed goes with the next start, a live one stays."""
    with process("sys.stdin.read()") as alive:
        assert alive.stdout is not None
        kept = Path(alive.stdout.readline().strip())
        with process("os.kill(os.getpid(), signal.SIGKILL)") as dead:
            dead.wait(30)
        left = set(temporary.iterdir())
        own = PrivateFolder()
        after = set(temporary.iterdir())
        files = sorted(p.name for p in kept.iterdir())
        alive.send_signal(signal.SIGKILL)

    assert dead.returncode == -signal.SIGKILL
    assert len(left) == 2
    assert after == {kept, Path(own.path)}
    assert files == ["streams.sock", "streams.sock.lock"]


def test_what_is_not_a_daemons_is_left_alone(temporary: Path) -> None:
    """Other names, other files, other permissions and links are not touched."""
    precious = old(temporary / "batcher-precious1") / "notes"
    full = old(temporary / "batcher-aaaaaaaa")
    (full / "streams.sock").touch()
    (full / "notes").touch()
    opened = old(temporary / "batcher-bbbbbbbb")
    opened.chmod(0o755)
    precious.touch()
    (temporary / "batcher-cccccccc").symlink_to(opened)
    (temporary / "batcher-dddddddd").touch()
    before = sorted(temporary.rglob("*"))

    PrivateFolder().close()

    assert sorted(temporary.rglob("*")) == before


def test_empty_folders_are_given_time(temporary: Path) -> None:
    """An empty folder may be another program's that has just made it."""
    new = temporary / "batcher-aaaaaaaa"
    new.mkdir(mode=0o700)
    old(temporary / "batcher-bbbbbbbb")

    PrivateFolder().close()

    assert list(temporary.iterdir()) == [new]


def test_daemons_of_the_first_version_are_alive(temporary: Path) -> None:
    """They lock the socket in the folder, and not the folder."""
    folder = old(temporary / "batcher-aaaaaaaa")
    with (folder / "streams.sock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        PrivateFolder().close()
        kept = folder.exists()
    PrivateFolder().close()

    assert kept
    assert list(temporary.iterdir()) == []


def test_a_path_that_is_too_long_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to change, and no folder is left."""
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    with pytest.raises(ConfigError, match="over 107 bytes; set TMPDIR"):
        PrivateFolder()

    assert list(deep.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary directory that is not there is named, with the way out."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "none"))

    with pytest.raises(ConfigError, match=r"private folder .TMPDIR.*none"):
        PrivateFolder()
