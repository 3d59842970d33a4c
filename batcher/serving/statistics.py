"""What a model has done, in plain integers: exact, and cheap to count.

Counted on the event loop only; folded into messages and metrics when somebody asks.
Durations are nanoseconds. Names follow Triton's statistics (protocol notes §1.2).
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from batcher.rpc import messages

LATENCY_BOUNDS_NS: Final = tuple(
    int(seconds * 1e9)
    for seconds in (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
        *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    )
)
"""Upper bounds of the latency histograms' buckets; one more bucket has none."""

_BOUNDS: Final = np.array(LATENCY_BOUNDS_NS, np.int64)
_FOLD_AT: Final = 2048  # durations

FAILURES: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Reasons of failures, as in Triton's metrics."""


class Histogram:
    """Counts per latency bucket, and the sum.

    Durations are kept as they come and counted many at a time, which costs a twentieth
    of counting them one by one.
    """

    __slots__ = ("_counts", "_pending", "_size", "_sum_ns")

    def __init__(self) -> None:
        self._counts = np.zeros(len(LATENCY_BOUNDS_NS) + 1, np.int64)
        self._sum_ns = 0
        self._pending: list[tuple[int, list[int]]] = []
        self._size = 0  # durations in `_pending`

    def add(self, end_ns: int, begins_ns: list[int]) -> None:
        """Takes in durations that end at one instant; keeps the list for a while."""
        self._pending.append((end_ns, begins_ns))
        self._size += len(begins_ns)
        if self._size >= _FOLD_AT:
            self._fold()

    def read(self) -> tuple[list[int], int]:
        """Counts per bucket (one more than there are bounds), and the sum in ns."""
        self._fold()
        return self._counts.tolist(), self._sum_ns

    def _fold(self) -> None:
        pending = self._pending
        durations = np.array([end - at for end, ats in pending for at in ats], np.int64)
        pending.clear()
        self._size = 0
        buckets = np.searchsorted(_BOUNDS, durations)
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum_ns += int(durations.sum())


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

    def answered(
        self,
        arrivals_ns: list[int],
        rows: int,
        started_ns: int,
        ended_ns: int,
        input_ns: int,
        infer_ns: int,
        output_begin_ns: int,
    ) -> None:
        """Counts requests that were answered together, from one run.

        Args:
            arrivals_ns: when each of them arrived.
            rows: the sum of their rows.
            started_ns, ended_ns: when the run began, and when all were answered.
            input_ns, infer_ns: how long their inputs were copied, and the run took.
            output_begin_ns: when answering began.
        """
        count = len(arrivals_ns)
        arrivals_sum_ns = sum(arrivals_ns)
        self.requests += count
        self.rows += rows
        self.success_ns += count * ended_ns - arrivals_sum_ns
        self.queue_ns += count * started_ns - arrivals_sum_ns
        self.input_ns += count * input_ns
        self.infer_ns += count * infer_ns
        self.output_ns += count * (ended_ns - output_begin_ns)
        self.latency.add(ended_ns, arrivals_ns)
        self.waiting.add(started_ns, arrivals_ns)
        self.last_ms = time.time_ns() // 1_000_000

    def run(
        self, rows: int, rung: int, input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Counts one successful run of a batch with `rows` rows, padded to `rung`."""
        size = self.batches.get(rows)
        if size is None:
            size = self.batches[rows] = BatchSizeStatistics()
        size.runs += 1
        size.input_ns += input_ns
        size.infer_ns += infer_ns
        size.output_ns += output_ns
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
