"""A server while it runs: started on its core, checked, measured, stopped.

What `servers.py` describes becomes a process here. A server counts as ready when it has
answered one call with the right bytes, not when its port is open.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc

from benchmarks import load, procs, wire
from benchmarks.servers import REPOSITORY_DIR, Server, Work

SERVER_CORE: Final = 0
CLIENT_CORE: Final = 1

_READY_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 8.0
_QUIET_CORES: Final = 0.2


class ServerError(RuntimeError):
    """A server did not start, or answered wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One server under one load, once."""

    server: str
    load: load.Measured
    mean_batch: float | None
    startup_s: float
    """From the start of the process to the first right answer."""

    @property
    def disturbed(self) -> bool:
        """Whether other processes took so much that the figures mean little."""
        return (self.load.other_cores or 0.0) > _QUIET_CORES


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A started server."""

    server: Server
    pid: int
    port: int
    startup_s: float
    pinned: bool
    counts_file: Path
    answer_bytes: int = 0
    """Size of one right answer's body."""

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    def target(self) -> load.Target:
        """What the load generator posts, and where."""
        if self.server.answers == "http":
            return load.Target(
                url=f"http://{self.address}/inference",
                body=wire.PAYLOAD,
                headers=("content-type: application/octet-stream",),
                http1=True,
            )
        return load.grpc_target(self.address)

    def measure(self, callers: int, seconds: float, *, retries: int = 2) -> Sample:
        """Loads the server, and checks that it answered with tensors and not errors.

        A run that other processes disturbed is repeated; the quietest is kept.

        Raises:
            ServerError: it did not.
            load.LoadError: the load failed.
        """
        quietest = self._measure_once(callers, seconds)
        for _ in range(retries):
            if not quietest.disturbed:
                break
            again = self._measure_once(callers, seconds)
            quietest = min(quietest, again, key=lambda s: s.load.other_cores or 0.0)
        return quietest

    def _measure_once(self, callers: int, seconds: float) -> Sample:
        before = self.rows_and_batches()
        measured = load.closed_loop(
            self.target(),
            callers=callers,
            seconds=seconds,
            server_pid=self.pid,
            server_core=SERVER_CORE if self.pinned else None,
            client_core=CLIENT_CORE if self.pinned else None,
        )
        after = self.rows_and_batches()
        # A little more than the size of one: those sent while it connected count too.
        if measured.bad or measured.body_bytes < self.answer_bytes:
            raise ServerError(
                f"{self.server.name}: some of {measured.answers} answers were errors: "
                f"{measured.bad} HTTP errors; {measured.body_bytes} bytes on average, "
                f"where one right answer has {self.answer_bytes}"
            )
        mean_batch = None
        if before and after:
            rows, batches = after[0] - before[0], after[1] - before[1]
            mean_batch = round(rows / max(1, batches), 2)
        return Sample(
            server=self.server.name,
            load=measured,
            mean_batch=mean_batch,
            startup_s=self.startup_s,
        )

    def rows_and_batches(self) -> tuple[int, int] | None:
        """What the model has run so far; None where the server does not tell."""
        if self.server.counts == "file" and self.counts_file.exists():
            rows, batches = struct.unpack("<QQ", self.counts_file.read_bytes())
            return rows, batches
        if self.server.counts == "statistics":
            with contextlib.suppress(grpc.RpcError):
                reply = _call(self.address, wire.STATISTICS, wire.statistics_request())
                return wire.rows_and_batches(reply)
        return None

    def answer(self) -> bytes:
        """The body of the answer to one call."""
        target = self.target()
        if self.server.answers == "http":
            request = urllib.request.Request(target.url, data=target.body)
            with urllib.request.urlopen(request, timeout=3) as reply:
                body: bytes = reply.read()
                return body
        message = _call(self.address, wire.INFER, wire.infer_request())
        return wire.grpc_frame(message)


@contextlib.contextmanager
def started(server: Server, work: Work, *, pinned: bool = True) -> Iterator[Running]:
    """Starts a server, waits until it answers, and stops it at the end.

    Args:
        server: which.
        work: how long its model takes.
        pinned: its process tree gets `SERVER_CORE`, and the load `CLIENT_CORE`.

    Raises:
        ServerError: it ended, or gave no right answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, port = Path(name), procs.free_port()
        launch = server.launch(work, port, folder)
        counts, log = folder / "counts", folder / "log"
        environment = {
            **os.environ,
            **launch.environment,
            "BENCH_BASE_MS": str(work.base_ms),
            "BENCH_PER_ROW_US": str(work.per_row_us),
            "BENCH_COUNTS": str(counts),
        }
        pin = ["taskset", "-c", str(SERVER_CORE)] if pinned else []
        begun = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*pin, *launch.command],
                cwd=REPOSITORY_DIR,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            running = Running(
                server=server,
                pid=process.pid,
                port=port,
                startup_s=0.0,
                pinned=pinned,
                counts_file=counts,
            )
            size = _wait_ready(running, process, log, begun)
            elapsed = round(time.perf_counter() - begun, 2)
            yield replace(running, startup_s=elapsed, answer_bytes=size)
        finally:
            procs.stop(process, _STOP_TIMEOUT_S)


def _wait_ready(
    running: Running, process: subprocess.Popen[bytes], log: Path, begun: float
) -> int:
    """The size of the first right answer."""
    failure = "no answer"
    while time.perf_counter() - begun < _READY_TIMEOUT_S:
        if process.poll() is not None:
            failure = f"ended with status {process.returncode}"
            break
        try:
            answer = running.answer()
            if wire.PAYLOAD in answer:
                return len(answer)
            failure = "answered wrongly"
        except (OSError, grpc.RpcError) as error:
            failure = f"{error}".split("\n\t", 1)[0]
        time.sleep(0.05)
    tail = "\n    ".join(log.read_text(errors="replace").splitlines()[-5:])
    raise ServerError(f"{running.server.name}: {failure}\n    {tail}")


def _call(address: str, method: str, message: bytes) -> bytes:
    with grpc.insecure_channel(address) as channel:
        reply: bytes = channel.unary_unary(method, None, None)(message, timeout=3)
        return reply
