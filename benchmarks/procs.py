"""What processes and the machine cost (CPU time, memory, how fast a core is now), and
how a process ends.

Reads /proc, so Linux only. Nothing here starts a server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_PROC: Final = Path("/proc")
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """`pid` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(entry / "stat")):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        process = todo.pop()
        if (_PROC / str(process)).exists():
            found.append(process)
        todo += children.get(process, [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes, threads that have ended included."""
    return sum(_cpu(_PROC / str(pid) / "stat") for pid in pids)


def thread_cpu_seconds(pid: int) -> dict[int, tuple[str, float]]:
    """Name and CPU time of every living thread of one process."""
    threads = {}
    for task in (_PROC / str(pid) / "task").iterdir():
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            threads[int(task.name)] = (name, _cpu(task / "stat"))
    return threads


def machine_cpu_seconds() -> float:
    """What all cores have spent in processes, time stolen by the host included.

    Interrupts are left out: those of the loopback network belong to the benchmark, but
    the kernel books them on nobody.
    """
    fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system = (int(f) for f in fields[:3])
    return (user + nice + system + int(fields[7])) * _TICK_S


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process tree, in MB: resident, and with shared pages counted once."""

    rss: float
    pss: float


def memory_mb(pids: Iterable[int]) -> Memory:
    """Memory of these processes."""
    total = {"Rss:": 0, "Pss:": 0}
    for pid in pids:
        with contextlib.suppress(OSError):
            text = (_PROC / str(pid) / "smaps_rollup").read_text()
            for line in text.splitlines()[1:]:
                key, amount, *_ = line.split()
                if key in total:
                    total[key] += int(amount)
    return Memory(round(total["Rss:"] / 1024, 1), round(total["Pss:"] / 1024, 1))


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Runs the calling thread on one core; None leaves it where it is."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def core_speed(core: int | None, seconds: float = 0.05) -> float:
    """Additions per microsecond of CPU time: a host that is busy shows here first.

    A virtual machine's neighbours slow a core down without taking its time, so the
    figures of one benchmark can differ by half with nothing else running in it.
    """
    with pinned(core):
        started = time.thread_time()
        loops = 0
        while time.thread_time() - started < seconds:
            total = 0
            for number in range(1000):
                total += number
            loops += 1
        return loops * 1e3 / (time.thread_time() - started) / 1e6


def _stat(path: Path) -> list[str] | None:
    """The fields after the command's name, which may itself hold spaces."""
    try:
        return path.read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def _cpu(path: Path) -> float:
    fields = _stat(path)
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


def stop(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Ends a process, then whatever of its tree is still there."""
    children = tree(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
