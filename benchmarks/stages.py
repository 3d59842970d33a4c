"""Where our daemon's time goes: CPU µs of a request, by thread, module and function.

py-spy samples the Python stacks under load. Its samples only divide a thread's time up;
how much there is comes from the kernel's count for that thread, and so does the time of
threads without Python (the native transport's, gRPC's own). A sample belongs to the
innermost function of ours on the stack: what that calls in libraries is on its account.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import load, procs
from benchmarks.running import CLIENT_CORE, Running, ServerError

_OURS: Final = re.compile(r"(?:^|/)((?:batcher|engines)/[\w/]+)\.py")
_FRAME: Final = re.compile(r"^(?P<function>.+) \((?P<file>[^()]+?)(?::\d+)?\)$")
_THREAD: Final = re.compile(r"^thread \((?P<id>\d+)\)")
_RATE: Final = 250


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the table."""

    thread: str
    module: str
    function: str
    us: float
    """CPU per request."""


def profile(running: Running, callers: int, seconds: float) -> list[Stage]:
    """Loads the server and samples it for `seconds`.

    Raises:
        ServerError: py-spy is missing, or may not look into the process.
    """
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    spy = spy or shutil.which("py-spy")
    if spy is None:
        raise ServerError("--profile needs py-spy: pip install py-spy")
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        under_load = pool.submit(
            load.closed_loop,
            running.target(),
            callers=callers,
            seconds=seconds + 3,
            server_pid=running.pid,
            client_core=CLIENT_CORE if running.pinned else None,
        )
        time.sleep(2.0)  # the warm-up, and the first second
        raw = Path(folder, "stacks")
        command = [spy, "record", "--pid", str(running.pid), "--format", "raw"]
        command += ["--threads", "--function", "--rate", str(_RATE)]
        command += ["--duration", str(max(1, round(seconds))), "--output", str(raw)]
        before, begun = procs.thread_cpu_seconds(running.pid), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - begun
        after = procs.thread_cpu_seconds(running.pid)
        measured = under_load.result()
        if done.returncode or not raw.exists():
            raise ServerError(f"py-spy failed: {done.stderr.strip()[-300:]}")
        stacks = raw.read_text()
    requests = measured.rps * wall
    threads = {
        thread: (name, (cpu - before.get(thread, (name, 0.0))[1]) * 1e6 / requests)
        for thread, (name, cpu) in after.items()
    }
    return divide(stacks, threads)


def divide(stacks: str, threads: dict[int, tuple[str, float]]) -> list[Stage]:
    """Gives every thread's µs of a request to the functions that it was seen in.

    Args:
        stacks: py-spy's raw output: frames from the outside in, and a count, per line.
        threads: name and CPU µs per request of each thread, by its kernel id.
    """
    seen: dict[int, Counter[tuple[str, str]]] = {}
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if match := _THREAD.match(thread):
            place = seen.setdefault(int(match["id"]), Counter())
            place[_owner(frames)] += int(count)
    stages = []
    others: Counter[str] = Counter()
    for thread_id, (name, us) in threads.items():
        counts = seen.get(thread_id)
        if counts is None:
            others[name] += us  # type: ignore[assignment]
            continue
        total = counts.total()
        stages += [
            Stage(f"{name} {thread_id}", module, function, us * count / total)
            for (module, function), count in counts.items()
        ]
    stages += [Stage(name, "(no Python)", "", us) for name, us in others.items()]
    return sorted(stages, key=lambda stage: -stage.us)


def _owner(frames: list[str]) -> tuple[str, str]:
    """Module and function: the innermost of ours, or else the innermost."""
    places = [m for f in frames if (m := _FRAME.match(f))]
    for place in reversed(places):
        if ours := _OURS.search(place["file"]):
            return ours[1].replace("/", "."), place["function"]
    if not places:
        return "(unknown)", ""
    return Path(places[-1]["file"]).stem, places[-1]["function"]
