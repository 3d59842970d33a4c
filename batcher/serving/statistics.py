"""What a model has done, in plain integers: exact, and cheap to count.

Counted on the event loop only; folded into messages and metrics when somebody asks.
Durations are nanoseconds. Names follow Triton's statistics (protocol notes §1.2).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from batcher.rpc import messages

LATENCY_BOUNDS_NS: Final = tuple(
    int(seconds * 1e9)
    for seconds in (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
        *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    )
)
"""Upper bounds of the latency histograms' buckets; one more bucket has none."""

FAILURES: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Reasons of failures, as in Triton's metrics."""


class Histogram:
    """Counts per latency bucket, and the sum."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        """Takes in one duration."""
        self.counts[bisect_left(LATENCY_BOUNDS_NS, ns)] += 1
        self.sum_ns += ns


class BatchSizeStatistics:
    """Runs of one batch size."""

    __slots__ = ("infer_ns", "input_ns", "output_ns", "runs")

    def __init__(self) -> None:
        self.runs = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0


class ModelStatistics:
    """The books of one model version.

    Attributes:
        requests, rows, runs: answered requests, their rows, and batches run for them.
        padding_rows: rows that were run only to fill a batch up to its rung.
        success_ns: from arrival to answer, summed over `requests`.
        queue_ns, input_ns, infer_ns, output_ns: the parts of it, summed likewise.
        failures, failure_ns: refused and failed requests, by reason.
        cancelled_runs: requests whose caller left while they ran (their rows are run,
            and count in no other field but `runs`' batch sizes).
        batches: by rows of the batch.
        latency, waiting: histograms of arrival to answer and arrival to run.
        last_ms: when the last request was answered (milliseconds since the epoch).
    """

    def __init__(self) -> None:
        self.requests = 0
        self.rows = 0
        self.runs = 0
        self.padding_rows = 0
        self.success_ns = 0
        self.queue_ns = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0
        self.failures = dict.fromkeys(FAILURES, 0)
        self.failure_ns = 0
        self.batches: dict[int, BatchSizeStatistics] = {}
        self.latency = Histogram()
        self.waiting = Histogram()
        self.last_ms = 0

    def fail(self, reason: str, duration_ns: int) -> None:
        """Counts a request that was not answered with a result."""
        self.failures[reason] += 1
        self.failure_ns += duration_ns

    def run(self, rows: int, rung: int, input_ns: int, infer_ns: int) -> None:
        """Counts one successful run of a batch with `rows` rows, padded to `rung`."""
        size = self.batches.get(rows)
        if size is None:
            size = self.batches[rows] = BatchSizeStatistics()
        size.runs += 1
        size.input_ns += input_ns
        size.infer_ns += infer_ns
        self.runs += 1
        self.padding_rows += rung - rows

    def message(self, name: str, version: str) -> messages.ModelStatistics:
        """The same as Triton's message."""
        result = messages.ModelStatistics(
            name=name,
            version=version,
            last_inference=self.last_ms,
            inference_count=self.rows,
            execution_count=self.runs,
        )
        stats = result.inference_stats
        count = self.requests
        _set(stats.success, count, self.success_ns)
        _set(stats.fail, sum(self.failures.values()), self.failure_ns)
        _set(stats.queue, count, self.queue_ns)
        _set(stats.compute_input, count, self.input_ns)
        _set(stats.compute_infer, count, self.infer_ns)
        _set(stats.compute_output, count, self.output_ns)
        for rows, size in sorted(self.batches.items()):
            batch = result.batch_stats.add(batch_size=rows)
            _set(batch.compute_input, size.runs, size.input_ns)
            _set(batch.compute_infer, size.runs, size.infer_ns)
            _set(batch.compute_output, size.runs, size.output_ns)
        return result


def _set(duration: messages.StatisticDuration, count: int, ns: int) -> None:
    duration.count = count
    duration.ns = ns
