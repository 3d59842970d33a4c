"""What a run found, as a value, as JSON and as text.

The figures are put together in `bench`; here they only get names, units and a layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from batcher.tuning.percentiles import LatencySummary
    from batcher.tuning.plan import ErrorCount
    from batcher.tuning.server_stats import ModelUse

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
"""Percentiles in the report."""

_SHOWN_BODIES: Final = 8
"""Bodies whose shapes the text has; JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What a run measured."""

    target: str
    """Address of the server."""

    load: str
    """The load in words, such as `closed loop, 64 callers`."""

    bodies: tuple[str, ...]
    """What was sent, by the number of the body: its inputs and their shapes."""

    connections: int
    """Connections to the server."""

    processes: int
    """Load-generating processes."""

    seed: int
    """Seed of everything random."""

    window_s: float
    """Seconds that were measured."""

    interrupted: bool
    """Whether the run was stopped early; figures are of what was measured till then."""

    sent: int
    """Measured requests: those due in the window."""

    succeeded: int
    """Measured requests answered OK."""

    answered_per_s: float
    """OK answers per second of the window."""

    offered_per_s: float | None
    """Requests due per second of the window; None in closed loop."""

    errors: dict[str, ErrorCount]
    """Measured requests that failed, by gRPC code; `OVERFLOW` and `UNANSWERED` are
    of the generator."""

    latency: LatencySummary
    """Of measured OK answers: from the instant a request was due (open loop) or sent
    (closed loop) until its answer was read."""

    send_lag: LatencySummary | None
    """How late requests left the generator; None in closed loop."""

    generator_cpu_us_per_request: float
    """CPU microseconds of all load-generating processes for each request."""

    generator_busy: tuple[float, ...]
    """For each process the fraction of a core that it used."""

    generator_starved: tuple[float, ...]
    """For each process the fraction of the time that it waited for a core."""

    verified: int
    """Answers compared with what was expected."""

    mismatches: int
    """Answers that were not as expected."""

    mismatch_sample: str
    """What was wrong with the first of those."""

    retries: int
    """Requests sent again since the server had not looked at them."""

    connections_lost: int
    """Connections that ended, or attempts that failed, during the run."""

    models: tuple[ModelUse, ...] | None
    """The server's own figures; None when they are not available."""

    models_note: str
    """Why they are not available."""

    warnings: tuple[str, ...]
    """What a reader must know before believing the figures."""

    @property
    def failed(self) -> int:
        """Measured requests that failed."""
        return sum(error.count for error in self.errors.values())

    @property
    def passed(self) -> bool:
        """Whether the figures tell of the server at work: some request was answered, no
        more than half failed, and no compared answer was wrong."""
        enough = self.succeeded > 0 and 2 * self.failed <= self.sent
        return enough and not self.mismatches

    def as_dict(self) -> dict[str, object]:
        """The report under stable keys, with units in their names."""
        models = None
        if self.models is not None:
            models = [_model_dict(use) for use in self.models]
        return {
            "format": 1,
            "target": self.target,
            "load": self.load,
            "bodies": list(self.bodies),
            "connections": self.connections,
            "processes": self.processes,
            "seed": self.seed,
            "window_s": self.window_s,
            "interrupted": self.interrupted,
            "sent": self.sent,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "answered_per_s": self.answered_per_s,
            "offered_per_s": self.offered_per_s,
            "latency": _latency_dict(self.latency),
            "send_lag": self.send_lag and _latency_dict(self.send_lag),
            "errors": {
                code: {"count": error.count, "sample": error.sample}
                for code, error in self.errors.items()
            },
            "verified": self.verified,
            "mismatches": self.mismatches,
            "mismatch_sample": self.mismatch_sample,
            "retries": self.retries,
            "connections_lost": self.connections_lost,
            "generator_cpu_us_per_request": self.generator_cpu_us_per_request,
            "generator_busy": list(self.generator_busy),
            "generator_starved": list(self.generator_starved),
            "models": models,
            "models_note": self.models_note,
            "warnings": list(self.warnings),
        }

    def to_json(self) -> str:
        """The report as JSON, indented."""
        return json.dumps(self.as_dict(), indent=2)

    def render(self, console: Console) -> None:
        """Write the report for people."""
        from rich.markup import escape

        console.print(self._figures())
        if self.errors:
            console.print(self._error_table())
        if self.mismatches:
            sample = escape(self.mismatch_sample)
            console.print(f"[red]wrong answers[/red] e.g. {sample}")
        for use in self.models or ():
            console.print(_model_table(use))
        if self.models is None:
            console.print(
                f"Server statistics: not available ({escape(self.models_note)})"
            )
        for warning in self.warnings:
            console.print(f"[yellow]Warning:[/yellow] {escape(warning)}")

    def _figures(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        title = escape(f"{self.target}: {self.load}")
        table = Table(title=title, show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")

        def row(name: str, value: str) -> None:
            table.add_row(name, value)

        for index, body in enumerate(self.bodies[:_SHOWN_BODIES]):
            row(f"Body {index}" if len(self.bodies) > 1 else "Body", escape(body))
        if len(self.bodies) > _SHOWN_BODIES:
            row("", f"and {len(self.bodies) - _SHOWN_BODIES} more")
        row("Answered", f"{self.answered_per_s:,.1f} requests/s")
        if self.offered_per_s is not None:
            row("Offered", f"{self.offered_per_s:,.1f} requests/s")
        stopped = " (interrupted)" if self.interrupted else ""
        row("Measured", f"{self.window_s:.2f} s{stopped}")
        row("Requests", f"{self.sent:,} ({self.failed:,} failed)")
        for percent in PERCENTILES:
            value = self.latency.percentile_ns(percent)
            row(f"Latency p{percent:g}", _ms(value))
        row("Latency mean", _ms(self.latency.mean_ns))
        row("Latency max", _ms(self.latency.max_ns))
        if self.send_lag is not None:
            row("Send lag p99", _ms(self.send_lag.percentile_ns(99)))
        if self.verified:
            row("Verified", f"{self.verified:,} ({self.mismatches:,} wrong)")
        cpu_us = self.generator_cpu_us_per_request
        busy = ", ".join(f"{share:.0%}" for share in self.generator_busy)
        row("Generator", f"{cpu_us:.1f} µs CPU/request; cores busy {busy}")
        return table

    def _error_table(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        table = Table("Code", "Requests", "First message", title="Errors")
        for code, error in sorted(self.errors.items()):
            table.add_row(code, f"{error.count:,}", escape(error.sample))
        return table


def _ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:,.3f} ms"


def _latency_dict(summary: LatencySummary) -> dict[str, object]:
    names = {50.0: "p50_us", 90.0: "p90_us", 99.0: "p99_us", 99.9: "p99_9_us"}
    return {
        "count": summary.count,
        **{
            names[percent]: summary.percentile_ns(percent) / 1000
            for percent in PERCENTILES
        },
        "max_us": summary.max_ns / 1000,
        "mean_us": summary.mean_ns / 1000,
        "exact": summary.exact,
    }


def _model_dict(use: ModelUse) -> dict[str, object]:
    return {
        "model": use.model,
        "version": use.version,
        "inferences": use.inferences,
        "executions": use.executions,
        "succeeded": use.succeeded,
        "failed": use.failed,
        "mean_batch_size": use.mean_batch_size,
        "batch_sizes": {str(size): count for size, count in use.batch_sizes.items()},
        "queue_us": use.queue_us,
        "compute_input_us": use.compute_input_us,
        "compute_infer_us": use.compute_infer_us,
        "compute_output_us": use.compute_output_us,
    }


def _model_table(use: ModelUse) -> Table:
    from rich.markup import escape
    from rich.table import Table

    title = f"Server: model {use.model} version {use.version or '?'}"
    table = Table("Batch size", "Batches", "Share of rows", "", title=escape(title))
    rows = sum(size * count for size, count in use.batch_sizes.items())
    for size, count in use.batch_sizes.items():
        share = size * count / rows if rows else 0.0
        table.add_row(f"{size}", f"{count:,}", f"{share:.1%}", "█" * round(share * 30))
    table.caption = (
        f"mean batch {use.mean_batch_size:.2f} · queue {use.queue_us:,.0f} µs · "
        f"compute {use.compute_input_us:,.0f} + {use.compute_infer_us:,.0f} + "
        f"{use.compute_output_us:,.0f} µs (input, infer, output)"
    )
    return table
