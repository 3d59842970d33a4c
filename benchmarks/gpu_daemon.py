"""The daemon as a process of its own: started, waited for, watched, ended.

It is ready when it says so on stderr; what it says before that, with the time of each
line since the start of the process, tells the phases of its start.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import procs
from benchmarks.servers import REPOSITORY_DIR

_STOP_TIMEOUT_S: Final = 10.0
_WARM_TIMEOUT_S: Final = 20.0
_KEPT_LINES: Final = 2000


class DaemonError(RuntimeError):
    """The daemon did not start, or ended on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the daemon is started.

    Attributes:
        engine: that wins over the model's file; "" for the file's.
        plan_cache: folder of TensorRT plans.
        slots: how many; 0 for what the model's file says.
        policy: when batches close.
        max_delay_us: the window's.
        unix: whether it listens on a Unix socket rather than on loopback.
        ready_s: the longest wait until it is ready.
    """

    engine: str
    plan_cache: Path
    slots: int = 0
    policy: str = "eager"
    max_delay_us: int = 0
    unix: bool = False
    ready_s: float = 180.0

    @property
    def text(self) -> str:
        """In a word, for tables."""
        window = f" {self.max_delay_us}us" if self.policy == "window" else ""
        return f"{self.policy}{window}/{self.slots}"


def command(model: Path, address: str, options: Options) -> list[str]:
    """The command line that serves a model's folder at an address."""
    line = [sys.executable, "-m", "batcher", "serve", str(model)]
    line += ["--grpc-address", address, "--http-address", "none"]
    line += ["--policy", options.policy]
    if options.slots:
        line += ["--slots", str(options.slots)]
    if options.max_delay_us:
        line += ["--max-delay-us", str(options.max_delay_us)]
    if options.engine:
        line += ["--engine", options.engine]
    if options.engine == "tensorrt":
        line += ["--plan-cache", str(options.plan_cache)]
    return line


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon that is ready.

    Attributes:
        model: name of the model that it serves.
        address: as gRPC clients take it.
        pid: of the process; it may have children.
        ready_s: from its start to the line that says it is ready.
        log: its lines, each after the seconds since its start.
    """

    model: str
    address: str
    pid: int
    ready_s: float
    log: Sequence[tuple[float, str]]

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far."""
        return procs.cpu_seconds(procs.tree(self.pid))


@contextlib.contextmanager
def serving(model: Path, options: Options, folder: Path) -> Iterator[Daemon]:
    """A daemon that serves one model while the block runs.

    Args:
        model: its folder.
        options: how.
        folder: for a Unix socket.

    Raises:
        DaemonError: it is not ready in time, or ended and so made the block fail.
    """
    address = f"127.0.0.1:{procs.free_port()}"
    if options.unix:
        address = f"unix:{folder / 'grpc.sock'}"
    begun = time.perf_counter()
    process = subprocess.Popen(
        command(model, address, options),
        cwd=REPOSITORY_DIR,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Not in the terminal's group: Ctrl-C is for us, and we end it.
        process_group=0,
    )
    log: list[tuple[float, str]] = []
    told = threading.Event()

    def listen() -> None:
        for line in process.stderr or ():
            if len(log) < _KEPT_LINES:
                log.append((round(time.perf_counter() - begun, 3), line.rstrip()))
            if _is_ready(line):
                told.set()
        told.set()

    listener = threading.Thread(target=listen, name="daemon-log", daemon=True)
    listener.start()
    try:
        told.wait(options.ready_s)
        ready = next((at for at, line in log if _is_ready(line)), None)
        if ready is None:
            raise DaemonError(_failure(process, "is not ready", log))
        _wait_warm(options, log)
        yield Daemon(model.name, address, process.pid, ready, log)
    except Exception as error:
        # What is told of a daemon that is gone says less than its own last words.
        if isinstance(error, DaemonError) or process.poll() is None:
            raise
        raise DaemonError(_failure(process, "ended", log)) from error
    finally:
        procs.stop(process, _STOP_TIMEOUT_S)
        listener.join(1.0)


def _is_ready(line: str) -> bool:
    return line.startswith("batcher ") and " ready in " in line


def _wait_warm(options: Options, log: Sequence[tuple[float, str]]) -> None:
    """Waits until what is warmed while the model is served is warm, too."""
    until = time.monotonic() + _WARM_TIMEOUT_S
    while options.engine == "tensorrt" and time.monotonic() < until:
        if any("are warm after" in line for _, line in log):
            return
        time.sleep(0.05)


def _failure(
    process: subprocess.Popen[str], what: str, log: Sequence[tuple[float, str]]
) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)  # its stderr ends a little before it does
    status = process.poll()
    how = "after its time" if status is None else f"(exit status {status})"
    tail = "\n    ".join(line for _, line in log[-8:])
    return f"the daemon {what} {how}: {' '.join(map(str, process.args))}\n    {tail}"  # type: ignore[arg-type]
