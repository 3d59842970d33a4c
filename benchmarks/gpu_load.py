"""Load on a daemon by `batcher bench`'s own generator, and what both sides spent.

The generator's processes are started from here (`batcher.tuning.bench.run`), so that a
run of three seconds costs no more than those, and the server's books are read at the
edges of the window that is measured.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from batcher.errors import BatcherError
from batcher.tuning import bench, server_stats
from batcher.tuning.arrivals import Poisson
from batcher.tuning.plan import Body
from batcher.tuning.progress import Progress
from benchmarks.gpu_daemon import Daemon

_WARMUP_S: Final = 0.5
_DRAIN_S: Final = 1.0
_LATE: Final = 0.85  # share of warm-up and window after which the window's books close
_STREAMS: Final = 64  # calls in flight per connection, at most
_CALLERS_PER_PROCESS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A daemon under one load.

    Attributes:
        load: in words.
        requests_per_s: answered.
        p50_ms, p90_ms, p99_ms, max_ms: of the answers, from when a request was due
            (open loop) or sent (closed loop).
        sent: requests of the window.
        errors: those that failed, by code.
        batches: how many batches had so many rows.
        mean_batch: rows.
        busy: share of the time that a slot's batch was on the device, per slot.
        server_cores, generator_cores: CPU seconds per second.
        warnings: of the generator.
    """

    load: str
    requests_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    sent: int
    errors: dict[str, int]
    batches: dict[int, int]
    mean_batch: float
    busy: float
    server_cores: float
    generator_cores: float
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }

    @property
    def text(self) -> str:
        """In a line."""
        failed = sum(self.errors.values())
        errors = f", {failed} of {self.sent} FAILED {self.errors}" if failed else ""
        return (
            f"{self.load}: {self.requests_per_s:,.0f}/s, p50 {self.p50_ms:.2f} p90 "
            f"{self.p90_ms:.2f} p99 {self.p99_ms:.2f} ms, batch {self.mean_batch:.1f}, "
            f"busy {self.busy:.2f}, cores {self.server_cores:.1f} server "
            f"{self.generator_cores:.1f} generator{errors}"
        )


def drive(
    daemon: Daemon,
    body: Body,
    *,
    slots: int,
    seconds: float,
    callers: int | None = None,
    rate_per_s: float | None = None,
    processes: int = 0,
) -> Served:
    """Makes load for some seconds. Give either `callers` or `rate_per_s`.

    Args:
        daemon: the server.
        body: what every request carries.
        slots: that it has.
        seconds: of the window, after half a second that does not count.
        callers: closed loop.
        rate_per_s: open loop, Poisson.
        processes: of the generator, at most; 0 is all cores but four.

    Raises:
        BatcherError: the server does not answer.
    """
    most = processes or max(1, len(os.sched_getaffinity(0)) - 4)
    if callers is not None:
        used = max(1, min(most, callers // _CALLERS_PER_PROCESS))
        connections = min(callers, max(2 * used, math.ceil(callers / _STREAMS)))
    else:
        used, connections = most, 2 * most
    window = _Window(daemon)
    report = bench.run(
        bench.BenchConfig(
            target=daemon.address,
            bodies=(body,),
            callers=callers,
            arrivals=Poisson(rate_per_s) if rate_per_s is not None else None,
            connections=connections,
            processes=used,
            warmup_s=_WARMUP_S,
            measure_s=seconds,
            drain_s=_DRAIN_S,
            server_statistics=False,
        ),
        progress=window.follow,
    )
    if report.interrupted:  # it ends the load, and is not raised there
        raise KeyboardInterrupt
    batches, infer_ns, wall_s, cpu_s = window.totals()
    runs = sum(batches.values())
    latency = report.latency
    return Served(
        load=report.load,
        requests_per_s=report.answered_per_s,
        p50_ms=latency.percentile_ns(50) / 1e6,
        p90_ms=latency.percentile_ns(90) / 1e6,
        p99_ms=latency.percentile_ns(99) / 1e6,
        max_ms=latency.max_ns / 1e6,
        sent=report.sent,
        errors={code: error.count for code, error in report.errors.items()},
        batches=batches,
        mean_batch=sum(n * count for n, count in batches.items()) / max(runs, 1),
        busy=infer_ns / 1e9 / wall_s / slots,
        server_cores=cpu_s / wall_s,
        generator_cores=sum(report.generator_busy),
        warnings=report.warnings,
    )


class _Books(dict[int, tuple[int, int]]):
    """Per rows of a batch: batches, and ns that they took.

    Attributes:
        at: when they were read.
        cpu_s: what the server's processes had used by then.
    """

    at: float
    cpu_s: float


class _Window:
    """Reads the server's books when the window begins and shortly before it ends."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._first: _Books | None = None
        self._last: _Books | None = None

    def follow(self, progress: Progress) -> None:
        if progress.phase != "measure" or self._last is not None:
            return
        if self._first is None:
            self._first = self._read()
        elif progress.fraction >= _LATE:
            self._last = self._read()

    def totals(self) -> tuple[dict[int, int], int, float, float]:
        """Batches by rows, ns that they took, and wall and CPU seconds.

        Raises:
            BatcherError: the window was too short, or its end was not seen.
        """
        first, last = self._first, self._last
        if first is None:
            raise BatcherError("the window ended before the server's books were read")
        if last is None:
            last = self._read()
        grown = {
            rows: tuple(
                b - a for a, b in zip(first.get(rows, (0, 0)), now, strict=True)
            )
            for rows, now in sorted(last.items())
        }
        batches = {rows: count for rows, (count, _) in grown.items() if count}
        infer_ns = sum(ns for _, ns in grown.values())
        return batches, infer_ns, last.at - first.at, last.cpu_s - first.cpu_s

    def _read(self) -> _Books:
        daemon = self._daemon
        snapshot = server_stats.snapshot(daemon.address, (daemon.model,))
        books = _Books()
        for stats in snapshot.values():
            for batch in stats.batch_stats:
                infer = batch.compute_infer
                books[int(batch.batch_size)] = int(infer.count), int(infer.ns)
        books.at = time.perf_counter()
        books.cpu_s = daemon.cpu_seconds()
        return books


# -- Poisson under a limit --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate that was tried: whether it was within the limit."""

    rate_per_s: float
    within: bool
    served: Served


def highest_rate(
    run: Callable[[float], Served], limit_ms: float, top_per_s: float, probes: int
) -> list[Probe]:
    """The highest Poisson rate whose p99 is within a limit, by bisection.

    Args:
        run: makes the load: takes a rate, returns `Served`.
        limit_ms: of p99; no request may fail.
        top_per_s: more than the server can do.
        probes: how many rates to try; the last are `top_per_s` / 2 ** probes apart.

    Returns:
        All probes in order. The first is at 0.8 of the top.
    """
    tried: list[Probe] = []
    low, high = 0.0, top_per_s
    rate = 0.8 * top_per_s
    for _ in range(probes):
        served = run(rate)
        within = not served.errors and served.p99_ms <= limit_ms
        tried.append(Probe(rate, within, served))
        if within:
            low = rate
        else:
            high = rate
        rate = (low + high) / 2
    return tried


def best_of(probes: Sequence[Probe]) -> float:
    """The highest rate within the limit; 0 where none was."""
    return max((p.rate_per_s for p in probes if p.within), default=0.0)
