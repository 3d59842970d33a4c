"""One at a time across threads, processes and hosts, for the maker of a file.

`flock` where the file system has it: the kernel frees it when its holder dies. On
network folders without it, a lock file made with O_EXCL, kept fresh by its holder, and
taken over when it is stale. What the lock protects is published by rename, so that two
makers at once would be a waste, and no harm.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Locking = Literal["auto", "flock", "file"]

POLL_S: Final = 0.1
"""Between two looks at a lock that another holds."""

REFRESH_S: Final = 5.0
"""Between two signs of life of the holder of a lock file."""

STALE_S: Final = 60.0
"""Without a sign of life for so long, a lock file's holder is taken for dead."""

_NO_FLOCK: Final = {
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
    errno.EINVAL,
}


class WaitCancelled(Exception):
    """The caller did not want to wait any longer."""


@contextmanager
def exclusive(
    path: Path,
    *,
    locking: Locking = "auto",
    on_wait: Callable[[], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    stale_s: float = STALE_S,
) -> Iterator[None]:
    """Holds the lock `path` for the block; waits for whoever holds it.

    Args:
        path: of the lock file; its folder exists. It is left there (removing it would
            let two in) or removed, as the kind of locking needs.
        locking: "auto" takes flock, and the lock file where there is none.
        on_wait: called once when it must be waited for.
        cancelled: asked while waiting.
        stale_s: see `STALE_S`.

    Raises:
        OSError: the folder cannot be written.
        WaitCancelled: `cancelled` said so.
    """
    wait = _Wait(on_wait, cancelled)
    if locking != "file" and fcntl is not None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _flock(descriptor, wait, required=locking == "flock"):
                yield
                return
        finally:
            os.close(descriptor)  # gives the lock back
    # Another name: the one above was made, and is nobody's.
    with _lock_file(path.with_name(path.name + "file"), wait, stale_s):
        yield


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock `path` now (for those who would tidy up)."""
    if path.with_name(path.name + "file").exists():
        return True
    if fcntl is None or not path.exists():
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_FLOCK
    finally:
        os.close(descriptor)
    return False


class _Wait:
    """One turn of waiting: tells of the first, and asks whether to go on."""

    def __init__(
        self, on_wait: Callable[[], None] | None, cancelled: Callable[[], bool] | None
    ) -> None:
        self._on_wait = on_wait
        self._cancelled = cancelled

    def turn(self) -> None:
        if self._on_wait is not None:
            self._on_wait()
            self._on_wait = None
        if self._cancelled is not None and self._cancelled():
            raise WaitCancelled
        time.sleep(POLL_S)


def _flock(descriptor: int, wait: _Wait, *, required: bool) -> bool:
    """Takes the lock; False if this file system has none."""
    while True:
        try:
            # Polling, so that Ctrl-C and `cancelled` are heard.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            wait.turn()
        except OSError as error:
            if required or error.errno not in _NO_FLOCK:
                raise
            return False


@contextmanager
def _lock_file(path: Path, wait: _Wait, stale_s: float) -> Iterator[None]:
    token = secrets.token_hex(8)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
    while not _create(path, json.dumps(owner).encode()):
        if not _take_over(path, stale_s):
            wait.turn()
    ended = threading.Event()
    alive = threading.Thread(
        target=_refresh, args=(path, token, ended), name="lock-refresh", daemon=True
    )
    alive.start()
    try:
        yield
    finally:
        ended.set()
        alive.join()
        if _token(path) == token:  # else it was taken over
            path.unlink(missing_ok=True)


def _create(path: Path, content: bytes) -> bool:
    """Makes the lock file with its content at once, or says that it is there."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    draft.write_bytes(content)
    try:
        os.link(draft, path)  # fails where `path` exists, on NFS too
        return True
    except FileExistsError:
        return False
    except OSError:  # no hard links here
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return True
    finally:
        draft.unlink(missing_ok=True)


def _take_over(path: Path, stale_s: float) -> bool:
    """Removes the lock file of a dead holder; True if it may be free now."""
    before = _token(path)
    if not _is_stale(path, stale_s):
        return False
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.rename(aside)  # only one of those who try succeeds
    except FileNotFoundError:
        return True
    if _token(aside) != before:
        # It was another's, made since we looked: give it back.
        try:
            os.link(aside, path)
        except OSError:
            pass
    aside.unlink(missing_ok=True)
    return True


def _is_stale(path: Path, stale_s: float) -> bool:
    try:
        content = path.read_bytes()
        age_s = _now_there(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return True
    try:
        owner = json.loads(content)
        host, pid = owner["host"], int(owner["pid"])
    except (ValueError, KeyError, TypeError):
        return age_s > stale_s
    if host == socket.gethostname() and pid != os.getpid() and not _lives(pid):
        return True
    return age_s > stale_s


def _now_there(folder: Path) -> float:
    """The time by the clock of the file server, which sets modification times."""
    probe = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:  # one that was killed and not waited for yet is there, and holds nothing
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return True
    return state != b"Z"


def _token(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _refresh(path: Path, token: str, ended: threading.Event) -> None:
    while not ended.wait(REFRESH_S):
        try:
            if _token(path) == token:
                os.utime(path)
        except OSError:
            pass
