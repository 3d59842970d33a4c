"""Closed-loop load with h2load, and what it cost the server.

h2load (C, from nghttp2) posts one fixed body over HTTP/2 (gRPC) or HTTP/1.1, so one
tool drives every server and takes little CPU itself. It does not read grpc-status, so
whoever calls this must check an answer first, and compare `body_bytes` with its size:
an error has no body.

As a command it measures a server that is already running:

    python -m benchmarks.load --address 127.0.0.1:8001 --callers 64 --pid PID
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks import procs, wire

CALLERS: Final = {1: (1, 1), 8: (8, 1), 64: (8, 8), 256: (16, 16)}
"""Calls in flight: (HTTP/2 connections, streams on each)."""

_GRPC_HEADERS: Final = ("content-type: application/grpc", "te: trailers")


_CONNECT_MS: Final = 100
"""h2load's own warm-up: connections are made before the measured time begins."""

_GRACE_S: Final = 5.0
_ATTEMPTS: Final = 3


class LoadError(RuntimeError):
    """h2load gave nothing that could be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where one kind of request goes."""

    url: str
    body: bytes
    headers: tuple[str, ...] = _GRPC_HEADERS
    http1: bool = False
    """HTTP/1.1, which needs a connection for every caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of load."""

    callers: int
    answers: int
    """Answered with HTTP 2xx within the measured time."""

    bad: int
    body_bytes: float
    """Per answer."""

    rps: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    cpu_us: float | None
    """Server CPU per request, user and system, of the whole process tree."""

    server_cores: float | None
    client_cores: float
    other_cores: float | None
    """Load of everything else on the machine. Far from 0, the row is suspect."""

    core_speed: float
    """Speed of the server's core around this run; see `procs.core_speed`."""

    rss_mb: float | None
    pss_mb: float | None


def grpc_target(address: str, model: str = wire.MODEL) -> Target:
    """`ModelInfer` of a gRPC server."""
    body = wire.grpc_frame(wire.infer_request(model))
    return Target(url=f"http://{address}{wire.INFER}", body=body)


def closed_loop(
    target: Target,
    *,
    callers: int,
    seconds: float,
    warm_seconds: float = 1.0,
    server_pid: int | None = None,
    server_core: int | None = None,
    client_core: int | None = None,
) -> Measured:
    """Keeps `callers` requests in flight: unmeasured at first, then for `seconds`.

    Args:
        target: what to post, and where.
        callers: requests in flight; see `CALLERS` for how they share connections.
        seconds: length of the measured time.
        warm_seconds: length of the time before it.
        server_pid: root of the server's process tree, for CPU and memory.
        server_core: the core it is pinned to, if it is: its speed is sampled there.
        client_core: pins h2load to this core.

    Raises:
        LoadError: h2load is missing, failed, or got no answer.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _loaded(
                _command(target, callers, client_core),
                target,
                callers,
                seconds,
                warm_seconds,
                procs.tree(server_pid) if server_pid else [],
                server_core,
            )
        except LoadError:
            # Many connections at once can overflow a busy server's accept queue, and
            # h2load waits for the last of them even when its time is over.
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError


def _loaded(
    command: Sequence[str],
    target: Target,
    callers: int,
    seconds: float,
    warm_seconds: float,
    pids: Sequence[int],
    server_core: int | None,
) -> Measured:
    """One attempt."""
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        body, log = Path(folder, "body"), Path(folder, "log")
        body.write_bytes(target.body)
        posting = [*command, "-d", str(body)]
        if warm_seconds > 0:
            _h2load([*posting, target.url], warm_seconds, pids)
        speed = procs.core_speed(server_core)
        logged = [*posting, "--log-file", str(log), target.url]
        begin, end, body_bytes = _h2load(logged, seconds, pids)
        speed = (speed + procs.core_speed(server_core)) / 2
        memory = procs.memory_mb(pids)
        latencies_us, bad = _read_log(log)
    if not latencies_us:
        raise LoadError(f"no answer from {target.url} ({bad} refused)")
    answers = len(latencies_us)
    wall = end.at - begin.at
    server, client = end.server - begin.server, end.client - begin.client
    other = end.machine - begin.machine - server - client

    def quantile_ms(share: float) -> float:
        return latencies_us[min(answers - 1, int(share * answers))] / 1e3

    return Measured(
        callers=callers,
        answers=answers,
        bad=bad,
        body_bytes=round(body_bytes / answers, 1),
        rps=round(answers / seconds, 1),
        p50_ms=quantile_ms(0.5),
        p90_ms=quantile_ms(0.9),
        p99_ms=quantile_ms(0.99),
        max_ms=latencies_us[-1] / 1e3,
        cpu_us=round(server * 1e6 / answers, 1) if pids else None,
        server_cores=round(server / wall, 2) if pids else None,
        client_cores=round(client / wall, 2),
        other_cores=round(max(0.0, other) / wall, 2) if pids else None,
        core_speed=round(speed, 2),
        rss_mb=memory.rss if pids else None,
        pss_mb=memory.pss if pids else None,
    )


@dataclass(frozen=True, slots=True)
class _Clock:
    """CPU seconds used so far, and when."""

    at: float
    server: float
    client: float
    machine: float


def _command(target: Target, callers: int, core: int | None) -> list[str]:
    if shutil.which("h2load") is None:
        raise LoadError(
            "h2load is not installed (Debian: apt-get install nghttp2-client)"
        )
    connections, streams = CALLERS.get(callers, (callers, 1))
    if target.http1:
        connections, streams = callers, 1
    pin = ["taskset", "-c", str(core)] if core is not None else []
    command = [*pin, "h2load", "-c", str(connections), "-m", str(streams), "-t", "1"]
    if target.http1:
        command.append("--h1")
    for header in target.headers:
        command += ["-H", header]
    return command


def _h2load(
    command: Sequence[str], seconds: float, pids: Sequence[int]
) -> tuple[_Clock, _Clock, int]:
    """Runs h2load; returns what had been used when its measured time began and when it
    ended, and the bytes of all answers' bodies.

    h2load connects first, and says on its output when the measured time begins.
    """
    begin = end = None
    said: list[str] = []
    timed = [*command, "--warm-up-time", f"{_CONNECT_MS}ms"]
    timed += ["-D", f"{round(seconds * 1000)}ms"]
    with subprocess.Popen(
        timed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        limit = threading.Timer(seconds + _GRACE_S, process.kill)
        limit.start()
        for line in process.stdout or ():
            if "benchmark duration is started" in line:
                begin = _clock(pids, process.pid)
            elif "benchmark duration is over" in line:
                end = _clock(pids, process.pid)
            said.append(line)
        process.wait()
        limit.cancel()
    text = "".join(said)
    if process.returncode or begin is None or end is None:
        reason = "did not end" if process.returncode == -signal.SIGKILL else "failed"
        raise LoadError(f"h2load {reason}: {text.strip()[-300:]}")
    data = re.search(r"\((\d+)\) data", text)
    return begin, end, int(data[1]) if data else 0


def _clock(server: Sequence[int], client: int) -> _Clock:
    return _Clock(
        at=time.perf_counter(),
        server=procs.cpu_seconds(server),
        client=procs.cpu_seconds([client]),
        machine=procs.machine_cpu_seconds(),
    )


def _read_log(path: Path) -> tuple[list[int], int]:
    """Sorted latencies in µs of the answers with status 2xx, and how many had not.

    Status 0 is an answer whose head came before the measured time, and its end within.
    """
    good, bad = [], 0
    if path.exists():
        with path.open() as lines:
            for line in lines:
                _, status, elapsed_us = line.split("\t")[:3]
                if status.startswith("2"):
                    good.append(int(elapsed_us))
                elif status != "0":
                    bad += 1
    good.sort()
    return good, bad


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Load on a running gRPC v2 server.")
    parser.add_argument("--address", default="127.0.0.1:8001")
    parser.add_argument("--model", default=wire.MODEL, help="FP32[16], input INPUT0")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pid", type=int, help="of the server, for its CPU and memory")
    parser.add_argument("--client-core", type=int, help="pin h2load to this core")
    args = parser.parse_args()
    measured = closed_loop(
        grpc_target(args.address, args.model),
        callers=args.callers,
        seconds=args.seconds,
        server_pid=args.pid,
        client_core=args.client_core,
    )
    print(json.dumps(asdict(measured), indent=2))


if __name__ == "__main__":
    main()
