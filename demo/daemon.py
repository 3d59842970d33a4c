"""The daemon of the demo: the installed `batcher`, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_START_S = 60.0
_STOP_S = 15.0
_READY = re.compile(r"ready in .* s on (\S+?)(?:,|: )")


class DaemonError(Exception):
    """The daemon did not start; the text ends with its log."""


class Daemon:
    """`batcher serve PATH...` on a free port; stopped when the block is left.

    Args:
        paths: what to serve.
        flags: further flags.
    """

    def __init__(self, paths: Sequence[Path], flags: Sequence[str] = ()) -> None:
        program = Path(sysconfig.get_path("scripts")) / "batcher"
        module = [sys.executable, "-m", "batcher"]
        self._command = [
            *([str(program)] if program.exists() else module),
            "serve",
            *map(str, paths),
            *("--grpc-address", "127.0.0.1:0"),
            *("--http-address", "none"),
            *flags,
        ]
        self.address = ""
        self.log: list[str] = []
        self._ready = threading.Event()

    def __enter__(self) -> Daemon:
        # In a session of its own: Ctrl-C reaches the demo, which stops its daemons.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def await_ready(self) -> None:
        """Waits until it serves.

        Raises:
            DaemonError: it ended, or takes too long.
        """
        deadline = time.monotonic() + _START_S
        while not self._ready.wait(0.1):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                self._reader.join(1.0)
                log = "\n  ".join(self.log[-10:])
                raise DaemonError(f"{' '.join(self._command)} did not start:\n  {log}")

    def stop(self) -> int:
        """SIGTERM: the daemon answers what it accepted and ends; its exit code."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)
        return self._process.returncode

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip())
                if found := _READY.search(line):
                    self.address = found[1]
                    self._ready.set()
