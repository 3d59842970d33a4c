"""From the processes' results to one report, with what to beware of."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from batcher.tuning.arrivals import Trace
from batcher.tuning.percentiles import LatencySummary
from batcher.tuning.plan import ErrorCount
from batcher.tuning.report import BenchReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batcher.tuning.arrivals import Arrivals
    from batcher.tuning.plan import Body, WorkerResult
    from batcher.tuning.server_stats import ModelUse

BUSY_LIMIT: Final = 0.9
"""Fraction of a core from which on a process is taken for the limit."""

LAG_LIMIT_NS: Final = 1_000_000
"""Send lag (p99, nanoseconds) from which on the generator is too late."""

_KEPT_UP: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run besides its processes' results."""

    target: str
    """Address of the server."""

    load: str
    """The load in words."""

    bodies: tuple[Body, ...]
    """What was sent."""

    arrivals: Arrivals | None
    """When requests were due; None in closed loop."""

    length_ns: int
    """Nanoseconds that warm-up and window were to last together."""

    requests: int | None
    """Number of requests that were to be measured, None for a length of time only."""

    connections: int
    """Connections to the server."""

    seed: int
    """Seed of everything random."""

    interrupted: bool
    """Whether the run was stopped early."""

    models: tuple[ModelUse, ...] | None
    """The server's figures, or None."""

    models_note: str
    """Why there are none."""


def summarise(facts: RunFacts, results: Sequence[WorkerResult]) -> BenchReport:
    """Put the report of a run together."""
    latency = LatencySummary(r.latency for r in results)
    open_loop = facts.arrivals is not None
    lag = LatencySummary(r.send_lag for r in results) if open_loop else None
    window_s = max(r.window_ns for r in results) / 1e9
    sent = sum(r.sent for r in results)
    handled = sum(r.handled for r in results)
    report = BenchReport(
        target=facts.target,
        load=facts.load,
        bodies=tuple(b.label or f"{len(b.message):,} bytes" for b in facts.bodies),
        connections=facts.connections,
        processes=len(results),
        seed=facts.seed,
        window_s=window_s,
        interrupted=facts.interrupted,
        sent=sent,
        succeeded=sum(r.succeeded for r in results),
        answered_per_s=_answered_per_s(facts, results, window_s),
        offered_per_s=_per_s(sent, window_s) if open_loop else None,
        errors=_errors(results),
        latency=latency,
        send_lag=lag,
        generator_cpu_us_per_request=(
            sum(r.cpu_ns for r in results) / handled / 1000 if handled else 0.0
        ),
        generator_busy=tuple(r.cpu_ns / max(1, r.wall_ns) for r in results),
        generator_starved=tuple(r.runqueue_ns / max(1, r.wall_ns) for r in results),
        verified=sum(r.verified for r in results),
        mismatches=sum(r.mismatches for r in results),
        mismatch_sample=next(
            (r.mismatch_sample for r in results if r.mismatch_sample), ""
        ),
        retries=sum(r.retries for r in results),
        connections_lost=sum(r.connections_lost for r in results),
        models=facts.models,
        models_note=facts.models_note,
        warnings=(),
    )
    warnings = (*_about_the_load(facts, sent), *_warnings(report))
    return replace(report, warnings=warnings)


def _answered_per_s(
    facts: RunFacts, results: Sequence[WorkerResult], window_s: float
) -> float:
    """The rate of OK answers: of those counted, or of those that came meanwhile."""
    if facts.requests is not None:
        return _per_s(sum(r.succeeded for r in results), window_s)
    return sum(_per_s(r.answered, r.wall_ns / 1e9) for r in results)


def _per_s(count: int, window_s: float) -> float:
    return count / window_s if window_s else 0.0


def _errors(results: Sequence[WorkerResult]) -> dict[str, ErrorCount]:
    merged: dict[str, ErrorCount] = {}
    for result in results:
        for code, error in result.errors.items():
            known = merged.setdefault(code, ErrorCount(0, error.sample))
            known.count += error.count
    return merged


def _about_the_load(facts: RunFacts, sent: int) -> list[str]:
    """What was sent otherwise than a reader might think."""
    found = []
    guessed = dict.fromkeys(name for body in facts.bodies for name in body.guessed)
    if guessed:
        found.append(
            f"nobody said how large the inputs {', '.join(guessed)} are: their axes of "
            "any size were sent with size 1; give --shape what real requests have"
        )
    if facts.interrupted:
        return found
    if facts.requests is not None and sent < facts.requests:
        found.append(
            f"{sent:,} of the {facts.requests:,} requests asked for were measured: the "
            "time was over (--seconds)"
        )
    elif facts.requests is None and isinstance(facts.arrivals, Trace):
        offsets = facts.arrivals.offsets_ns
        due = bisect_left(offsets, facts.length_ns)
        if due < len(offsets):
            found.append(
                f"{due:,} of the trace's {len(offsets):,} arrivals were sent: the time "
                "was over (--seconds)"
            )
    return found


def _warnings(report: BenchReport) -> list[str]:
    found = []
    if not report.succeeded:
        found.append("no request succeeded: there is no latency to report")
    elif not report.passed and not report.mismatches:
        found.append(
            f"{report.failed:,} of {report.sent:,} requests failed: the figures are of "
            "the few that did not"
        )
    pairs = zip(report.generator_busy, report.generator_starved, strict=True)
    for index, (busy, starved) in enumerate(pairs):
        if busy + starved > BUSY_LIMIT:
            found.append(
                f"load process {index} used {busy:.0%} of a core and waited "
                f"{starved:.0%} of the time for one: the generator may be the limit, "
                "not the server; give it more processes or cores of its own"
            )
    lag = report.send_lag
    if lag is not None and lag.percentile_ns(99) > LAG_LIMIT_NS:
        found.append(
            f"1 % of the requests left {lag.percentile_ns(99) / 1e6:.1f} ms late or "
            "later: the generator did not keep the schedule (the delay is in the "
            "latencies)"
        )
    offered = report.offered_per_s
    if offered is not None and report.answered_per_s < _KEPT_UP * offered:
        found.append(
            f"the server answered {report.answered_per_s:,.0f} of the "
            f"{offered:,.0f} requests offered per second: latencies grow with the "
            "length of the run"
        )
    if report.connections_lost:
        found.append(f"connections were lost {report.connections_lost} times")
    if report.mismatches:
        found.append(
            f"{report.mismatches} of {report.verified} compared answers are wrong: "
            f"{report.mismatch_sample}"
        )
    if not report.latency.exact:
        found.append("so many requests that percentiles are to 0.4 %")
    return found
