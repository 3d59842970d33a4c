"""Unix socket paths: one daemon each, stale files taken over, the mode set.

Both gRPC servers bind a Unix path by replacing whatever lies there, which would steal
the socket of a running daemon. A lock file beside it (`PATH.lock`, released by the
kernel when its holder dies, however it dies) and a connection attempt prevent that.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from batcher.errors import ConfigError
from batcher.rpc.transport import Address


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

    @contextmanager
    def binding(self) -> Iterator[None]:
        """Binds within: the socket never has wider permissions than it ends up with."""
        old = os.umask(0o777 & ~self.mode)
        try:
            yield
        finally:
            os.umask(old)
        os.chmod(self.path, self.mode)
        self._inode = os.stat(self.path).st_ino

    def close(self) -> None:
        """Removes the socket, if it is still ours, and lets the path go."""
        with suppress(OSError):
            if self._inode is not None and os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        self._release()

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
