"""Unix socket paths: one daemon each, stale files taken over, the mode set.

Both gRPC servers bind a Unix path by replacing whatever lies there, which would steal
the socket of a running daemon. A lock file beside it (`PATH.lock`, released by the
kernel when its holder dies, however it dies) and a connection attempt prevent that.

What is here is also on a list, so that a process that ends at once leaves nothing
behind (`close_all`).
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from batcher.errors import ConfigError
from batcher.rpc.transport import Address

_MAX_PATH: Final = 107  # bytes; sockaddr_un holds 108 with its NUL
_PREFIX: Final = "batcher-"
_FOLDER: Final = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")  # as mkdtemp names it
_SOCKET: Final = "streams.sock"
_FILES: Final = {_SOCKET, f"{_SOCKET}.lock"}
_EMPTY_S: Final = 60.0
"""An empty folder that is younger (seconds) may be another program's, not yet used."""

_held: list[SocketGuard | PrivateFolder] = []


def close_all() -> None:
    """Removes every socket and folder of this process, without waiting for anything."""
    for one in reversed(_held.copy()):
        with suppress(Exception):
            one.close()


def why_not(address: Address) -> str:
    """Why an address cannot be bound, for servers that do not say it."""
    kind = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        if address.path is not None:
            return "the Unix socket cannot be made"
        with socket.socket(kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        return error.strerror or str(error)
    return "unknown reason"


class SocketGuard:
    """Holds a Unix socket path for as long as the daemon listens on it.

    Args:
        path: of the socket.
        mode: permission bits that the socket gets.

    Raises:
        ConfigError: somebody listens there, the path is no socket, or its folder
            cannot be written.
    """

    def __init__(self, path: str, mode: int) -> None:
        self.path = path
        self.mode = mode
        self._lock_path = f"{path}.lock"
        self._inode: int | None = None
        self._lock = self._acquire()
        try:
            self._remove_stale()
        except ConfigError:
            self._release()
            raise
        _held.append(self)

    @contextmanager
    def binding(self) -> Iterator[None]:
        """Binds within: the socket never has wider permissions than it ends up with."""
        old = os.umask(0o777 & ~self.mode)
        try:
            yield
        finally:
            os.umask(old)
        try:
            self._inode = os.stat(self.path).st_ino
            os.chmod(self.path, self.mode)
        except FileNotFoundError:
            raise ConfigError(
                f"cannot listen on unix:{self.path}: the socket cannot be made"
            ) from None

    def close(self) -> None:
        """Removes the socket, if it is still ours, and lets the path go."""
        if self not in _held:
            return
        with suppress(OSError):
            if self._inode is not None and os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        self._release()
        _held.remove(self)  # last: a signal that comes before it begins again

    def _acquire(self) -> int:
        while True:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on unix:{self.path}: {error}"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise ConfigError(
                    f"cannot listen on unix:{self.path}: another daemon holds it "
                    f"({self._lock_path} is locked)"
                ) from None
            with suppress(FileNotFoundError):
                if os.stat(self._lock_path).st_ino == os.fstat(lock).st_ino:
                    return lock
            os.close(lock)  # its last holder removed it while we waited: once more

    def _release(self) -> None:
        with suppress(OSError):
            os.unlink(self._lock_path)
        os.close(self._lock)

    def _remove_stale(self) -> None:
        try:
            mode = os.stat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"cannot listen on unix:{self.path}: a file that is no socket is there"
            )
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self.path)
            except (ConnectionRefusedError, FileNotFoundError):
                with suppress(FileNotFoundError):
                    os.unlink(self.path)
                return
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on unix:{self.path}: {error}"
                ) from error
        raise ConfigError(
            f"cannot listen on unix:{self.path}: another server listens there"
        )


class PrivateFolder:
    """A new folder in the temporary directory that only this user can enter.

    It is locked as long as its process lives. Those that nobody holds are of daemons
    that were killed: making one removes them. (An abstract socket would need no folder,
    but has no permissions: every user of the machine could connect to it.)

    Attributes:
        path: of the folder.
        socket: path for a socket within.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self) -> None:
        try:
            self.path, self._lock = _new_folder()
        except OSError as error:
            raise ConfigError(
                f"cannot make a private folder (TMPDIR says where): {error}"
            ) from error
        _held.append(self)
        self.socket = os.path.join(self.path, _SOCKET)
        if len(self.socket.encode()) > _MAX_PATH:
            self.close()
            raise ConfigError(
                f"the path of the private socket {self.socket} has over {_MAX_PATH} "
                "bytes; set TMPDIR to a shorter one"
            )
        _remove_dead_folders()

    def close(self) -> None:
        """Removes the folder and what is in it."""
        if self not in _held:
            return
        with suppress(OSError):
            _empty(self._lock)
            os.rmdir(self.path)
        os.close(self._lock)
        _held.remove(self)


def _new_folder() -> tuple[str, int]:
    """A folder, and the descriptor that holds its lock."""
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX)
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                locked = _flock(lock)
            except OSError:  # a file system without locks: nobody takes it for dead
                locked = True
            with suppress(FileNotFoundError):
                if locked and os.path.samestat(os.stat(path), os.fstat(lock)):
                    return path, lock
            os.close(lock)
        # A neighbour took it for a dead one's, as it was not locked yet: once more.


def _remove_dead_folders() -> None:
    """Removes the folders of this user's daemons that are dead."""
    with suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if _FOLDER.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        mine = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
        if not mine or not _flock(folder):
            return
        names = set(os.listdir(folder))
        if not names <= _FILES:  # of some other program
            return
        if not names and time.time() - status.st_mtime < _EMPTY_S:
            return
        for name in names - {_SOCKET}:  # all that daemons of version 0.1.0 lock
            lock = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
            try:
                if not _flock(lock):
                    return
            finally:
                os.close(lock)
        _empty(folder)
        os.rmdir(path)
    finally:
        os.close(folder)


def _empty(folder: int) -> None:
    for name in _FILES:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _flock(descriptor: int) -> bool:
    """Whether nobody else holds the lock; it is held from now on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
