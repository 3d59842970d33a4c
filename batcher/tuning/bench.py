"""`batcher bench`: what load to make, and the run that makes it.

The configuration of a run and its conduct live here: the requests before it, the
processes, the common start, the server's statistics and the report. The load itself is
made by `worker`.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from batcher.errors import BatcherError, ConfigError
from batcher.tuning import server_stats
from batcher.tuning.arrivals import Arrivals, Constant, Gamma, Poisson, Trace
from batcher.tuning.fleet import Fleet
from batcher.tuning.headers import OK, code_name
from batcher.tuning.plan import Body, WorkerPlan
from batcher.tuning.probe import probe
from batcher.tuning.progress import Progress
from batcher.tuning.summary import RunFacts, summarise
from batcher.tuning.verify import raw_outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from batcher.tuning.report import BenchReport

_START_DELAY_NS: Final = 20_000_000
_REPORT_S: Final = 0.2
# What one process is asked to do when nobody says how many there are to be: half of
# what it can, since it shares the cores with the server.
_RATE_PER_PROCESS: Final = 20_000
_CALLERS_PER_PROCESS: Final = 256
_CALLERS_PER_CONNECTION: Final = 8
_CONNECTIONS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The load of a run. Give either `callers` or `arrivals`."""

    target: str
    """The server: `host:port`, `[ipv6]:port` or `unix:PATH`; no TLS."""

    bodies: tuple[Body, ...]
    """What is sent; each request carries one of them, drawn by weight."""

    callers: int | None = None
    """Closed loop: callers that each send a request when their last is answered."""

    arrivals: Arrivals | None = None
    """Open loop: when requests are due, whatever the server does; `Poisson`, `Gamma`,
    `Constant` or `Trace`. Latency counts from the instant a request is due."""

    connections: int | None = None
    """Connections to the server; None takes one for 8 callers, at most 8 (closed
    loop), or 8 (open loop). At most `callers`."""

    processes: int | None = None
    """Load-generating processes; None takes one for 20,000 requests/s or 256 callers,
    and at least one, but leaves a core to the server. At most `connections`."""

    max_in_flight: int = 10_000
    """Open loop: the most requests without an answer; one more is not sent, and counts
    as an error (`OVERFLOW`). Shared out among the processes."""

    warmup_s: float = 1.0
    """Seconds of load before the window; its requests are not measured."""

    measure_s: float = 5.0
    """Seconds of the measured window (at most; see `requests` and `Trace`)."""

    drain_s: float = 5.0
    """The most seconds to wait, after the window, for the answers to its requests; the
    load goes on meanwhile. What stays without one is an error (`UNANSWERED`)."""

    requests: int | None = None
    """Number of requests to measure; the run ends when they are answered. None
    measures all that are due in `measure_s`, which bounds the run either way."""

    verify_fraction: float = 0.0
    """Fraction (0 to 1) of the answers whose `raw_output_contents` are compared with
    the body's `expected_raw` or else with the answer to the request before the run."""

    allow_errors: bool = False
    """Run even when the server answers a request before the run with an error."""

    server_statistics: bool = True
    """Whether to ask the server for its ModelStatistics before and after the window."""

    probe_timeout_s: float = 30.0
    """The most seconds that a request before the run may take."""

    seed: int = 0
    """Seed of arrivals and of the choice of bodies: the same seed, the same sequence,
    in open loop for any number of processes."""

    def __post_init__(self) -> None:
        if not self.bodies:
            raise ConfigError("bodies is empty: there is nothing to send")
        if (self.callers is None) == (self.arrivals is None):
            raise ConfigError("give either callers (closed loop) or arrivals (open)")
        for name in ("callers", "connections", "processes", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("warmup_s", "drain_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be ≥ 0")
        for name in ("measure_s", "probe_timeout_s", "max_in_flight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be > 0")
        if not 0 <= self.verify_fraction <= 1:
            raise ConfigError(
                f"verify_fraction is {self.verify_fraction}; it must be from 0 to 1"
            )
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be ≥ 0")
        _check_order("connections", self.connections, "callers", self.callers)
        _check_order("processes", self.processes, "connections", self.connections)
        _check_order("processes", self.processes, "callers", self.callers)
        if isinstance(self.arrivals, Trace):
            _check_trace(self.arrivals, len(self.bodies), self.warmup_s)

    def chosen(self) -> tuple[int, int]:
        """The number of connections and of processes of the run."""
        if self.callers is not None:
            default = min(_CONNECTIONS, -(-self.callers // _CALLERS_PER_CONNECTION))
            wanted = self.callers / _CALLERS_PER_PROCESS
        else:
            default = _CONNECTIONS
            wanted = _rate_per_s(self.arrivals) / _RATE_PER_PROCESS
        connections = self.connections or max(default, self.processes or 1)
        spare_cores = max(1, len(os.sched_getaffinity(0)) - 1)
        processes = max(1, min(math.ceil(wanted), spare_cores, connections))
        return connections, self.processes or processes

    def load(self) -> str:
        """The load in words."""
        match self.arrivals:
            case None:
                return f"closed loop, {self.callers} callers"
            case Poisson(rate):
                return f"open loop, Poisson {rate:g}/s"
            case Gamma(rate, cv):
                return f"open loop, Gamma {rate:g}/s, CV {cv:g}"
            case Constant(rate):
                return f"open loop, constant {rate:g}/s"
            case Trace(offsets):
                return f"open loop, trace of {len(offsets)} arrivals"


def run(
    config: BenchConfig, progress: Callable[[Progress], None] | None = None
) -> BenchReport:
    """Make the load and report.

    Ctrl-C during the load ends it, and the report is of what was measured till then.

    Args:
        config: the load.
        progress: called a few times a second, in this thread.

    Raises:
        BatcherError: the server cannot be reached, a request before the run failed
            (unless `allow_errors`), or a load-generating process died.
        ConfigError: the target is no address, metadata cannot be sent, or an answer
            that is to be compared with has no raw outputs.
    """
    bodies = _probed(config)
    statistics = _Statistics(config)
    connections, _ = config.chosen()
    interrupted = False
    with Fleet(_plans(replace(config, bodies=bodies))) as fleet:
        fleet.await_ready()
        statistics.before()
        start_ns = time.monotonic_ns() + _START_DELAY_NS
        fleet.start(start_ns)
        try:
            _follow(config, fleet, start_ns, statistics, progress)
        except KeyboardInterrupt:
            interrupted = True
            fleet.stop()
        results = [result for result in fleet.results if result is not None]
    if not results:
        raise BatcherError("no load process gave a result")
    models = statistics.used()
    facts = RunFacts(
        target=config.target,
        load=config.load(),
        bodies=bodies,
        arrivals=config.arrivals,
        length_ns=sum(_lengths_ns(config)),
        requests=config.requests,
        connections=connections,
        seed=config.seed,
        interrupted=interrupted,
        models=models,
        models_note=statistics.note,
    )
    return summarise(facts, results)


class _Statistics:
    """The server's statistics around the window, when they can be had."""

    def __init__(self, config: BenchConfig) -> None:
        self.note = "" if config.server_statistics else "switched off"
        """Why there are none; empty while there are."""
        self._target = config.target
        self._models = server_stats.models_of(config.bodies) if not self.note else ()
        self._before: server_stats.Snapshot = {}
        self._after: server_stats.Snapshot | None = None

    def before(self) -> None:
        """The window begins, or is going to."""
        self._before = self._take()

    def after(self) -> None:
        """The window has ended; only the first call counts."""
        if self._after is None:
            self._after = self._take()

    def used(self) -> tuple[server_stats.ModelUse, ...] | None:
        """The difference, or None when there are no statistics."""
        self.after()
        if self.note or self._after is None:
            return None
        return server_stats.used_between(self._before, self._after)

    def _take(self) -> server_stats.Snapshot:
        if self.note:
            return {}
        try:
            return server_stats.snapshot(self._target, self._models)
        except BatcherError as fault:
            self.note = str(fault)
            return {}


def _follow(
    config: BenchConfig,
    fleet: Fleet,
    start_ns: int,
    statistics: _Statistics,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Listen to the processes until all are done; tell `progress`."""
    warmup_ns, measure_ns = _lengths_ns(config)
    from_ns = start_ns + warmup_ns
    until_ns = from_ns + measure_ns
    warm = config.warmup_s == 0
    reported_ns = start_ns
    answered_before = 0
    while not fleet.done:
        now_ns = time.monotonic_ns()
        boundary_ns = until_ns if now_ns >= from_ns else from_ns
        to_boundary_s = max(0, boundary_ns - now_ns) / 1e9 or _REPORT_S
        fleet.listen(min(_REPORT_S / 2, to_boundary_s))
        now_ns = time.monotonic_ns()
        if not warm and now_ns >= from_ns:
            warm = True
            statistics.before()
        if now_ns >= until_ns:
            statistics.after()
        elapsed_s = (now_ns - reported_ns) / 1e9
        if progress is None or elapsed_s < _REPORT_S:
            continue
        answered = sum(counts.answered for counts in fleet.counts)
        progress(
            Progress(
                phase=_phase(now_ns, from_ns, until_ns),
                fraction=min(1.0, (now_ns - start_ns) / (until_ns - start_ns)),
                answered_per_s=(answered - answered_before) / elapsed_s,
                answered=answered,
                errors=sum(counts.errors for counts in fleet.counts),
                in_flight=sum(counts.in_flight for counts in fleet.counts),
            )
        )
        reported_ns = now_ns
        answered_before = answered


def _phase(now_ns: int, from_ns: int, until_ns: int) -> str:
    if now_ns < from_ns:
        return "warm-up"
    return "measure" if now_ns < until_ns else "drain"


def _probed(config: BenchConfig) -> tuple[Body, ...]:
    """Send one request of each body; the bodies with what is expected of them."""
    bodies = []
    calls = probe(config.target, config.bodies, config.probe_timeout_s)
    for index, (body, call) in enumerate(zip(config.bodies, calls, strict=True)):
        if call.code != OK and not config.allow_errors:
            label = f"{index} {body.label}".rstrip()
            raise BatcherError(
                f"request before the run (body {label}) to {config.target}: "
                f"{code_name(call.code)}: {call.text}"
            )
        if config.verify_fraction and body.expected_raw is None and call.code == OK:
            try:
                outputs = raw_outputs(call.payload or b"")
            except ValueError as fault:
                raise BatcherError(f"answer to body {index}: {fault}") from fault
            if not outputs:
                raise ConfigError(
                    f"verify_fraction is {config.verify_fraction}, but the answer to "
                    f"body {index} has no raw_output_contents to compare with"
                )
            body = replace(body, expected_raw=outputs)
        bodies.append(body)
    return tuple(bodies)


def _plans(config: BenchConfig) -> list[WorkerPlan]:
    """The processes' shares of the run."""
    connections, processes = config.chosen()
    warmup_ns, measure_ns = _lengths_ns(config)
    return [
        WorkerPlan(
            index=index,
            processes=processes,
            target=config.target,
            bodies=config.bodies,
            connections=_part(connections, index, processes),
            callers=_part(config.callers or 0, index, processes),
            arrivals=config.arrivals,
            max_in_flight=(
                0
                if config.arrivals is None
                else max(1, _part(config.max_in_flight, index, processes))
            ),
            warmup_ns=warmup_ns,
            measure_ns=measure_ns,
            drain_ns=int(config.drain_s * 1e9),
            requests=(
                None
                if config.requests is None
                else _part(config.requests, index, processes)
            ),
            verify_fraction=config.verify_fraction,
            seed=config.seed,
        )
        for index in range(processes)
    ]


def _lengths_ns(config: BenchConfig) -> tuple[int, int]:
    """The lengths of warm-up and window; a trace's end is the window's too."""
    warmup_ns = int(config.warmup_s * 1e9)
    measure_ns = int(config.measure_s * 1e9)
    if isinstance(config.arrivals, Trace):
        measure_ns = min(measure_ns, config.arrivals.length_ns - warmup_ns + 1)
    return warmup_ns, measure_ns


def _part(whole: int, index: int, parts: int) -> int:
    """The share number `index` of `whole` in `parts`, as equal as can be."""
    return whole // parts + (index < whole % parts)


def _rate_per_s(arrivals: Arrivals | None) -> float:
    if isinstance(arrivals, Trace):
        return len(arrivals.offsets_ns) / max(arrivals.length_ns, 1) * 1e9
    return 0.0 if arrivals is None else arrivals.rate_per_s


def _check_order(name: str, value: int | None, of: str, limit: int | None) -> None:
    if value is not None and limit is not None and value > limit:
        raise ConfigError(f"{name} is {value}, but {of} is {limit}: at most as many")


def _check_trace(trace: Trace, bodies: int, warmup_s: float) -> None:
    if trace.length_ns < warmup_s * 1e9:
        raise ConfigError(
            f"the trace is {trace.length_ns / 1e9:g} s long, and the warm-up "
            f"(warmup_s, --warmup) {warmup_s:g} s: nothing would be measured"
        )
    unknown = next((i for i in trace.bodies or () if not 0 <= i < bodies), None)
    if unknown is not None:
        raise ConfigError(
            f"the trace names body {unknown}, but there are {bodies} bodies, numbered "
            "from 0"
        )
