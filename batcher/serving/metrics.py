"""Prometheus metrics, made from the models' books when somebody scrapes.

Counters keep Triton's names where Triton has them (protocol notes §3.5), and are then
untyped, since the library ends the name of every typed counter in `_total`; what Triton
lacks (histograms, padding, fill) is ours, under `batcher_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from batcher.serving.budget import Budget
from batcher.serving.model import Model
from batcher.serving.statistics import LATENCY_BOUNDS_NS, Histogram, ModelStatistics

_LABELS = ("model", "version")

_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    (
        "nv_inference_request_success",
        "Requests answered with a result",
        lambda s: s.requests,
    ),
    ("nv_inference_count", "Rows of answered requests", lambda s: s.rows),
    ("nv_inference_exec_count", "Batches run", lambda s: s.runs),
    (
        "nv_inference_request_duration_us",
        "Arrival to answer, cumulative",
        lambda s: s.success_ns / 1e3,
    ),
    (
        "nv_inference_queue_duration_us",
        "Arrival to run, cumulative",
        lambda s: s.queue_ns / 1e3,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Copying inputs, cumulative over requests",
        lambda s: s.input_ns / 1e3,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Running, cumulative over requests",
        lambda s: s.infer_ns / 1e3,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Answering, cumulative over requests",
        lambda s: s.output_ns / 1e3,
    ),
)


def collect(served: Iterable[Model], budget: Budget) -> list[Metric]:
    """The metrics of these models and of the daemon, as they are at this moment.

    To be called where the books are written, on the event loop. Making the page of
    them (`exposition`) is the larger part of the work, and may be done anywhere.
    """
    models = [(m, (m.signature.name, m.signature.version)) for m in served]
    families: list[Metric] = []
    for name, text, value in _COUNTERS:
        counter = UnknownMetricFamily(name, text, labels=_LABELS)
        for model, labels in models:
            counter.add_metric(labels, value(model.statistics))
        families.append(counter)
    failures = UnknownMetricFamily(
        "nv_inference_request_failure",
        "Requests not answered with a result",
        labels=(*_LABELS, "reason"),
    )
    waiting = GaugeMetricFamily(
        "nv_inference_pending_request_count",
        "Requests that wait in the queue",
        labels=_LABELS,
    )
    padding = CounterMetricFamily(
        "batcher_padding_rows",
        "Rows run only to fill batches up to their rung",
        labels=_LABELS,
    )
    for model, labels in models:
        for reason, count in model.statistics.failures.items():
            failures.add_metric((*labels, reason), count)
        waiting.add_metric(labels, model.scheduler.waiting)
        padding.add_metric(labels, model.statistics.padding_rows)
    families += [failures, waiting, padding, _batch_rows(models)]
    families.append(
        _durations(
            "batcher_request_duration_seconds",
            "Arrival to answer",
            [(labels, m.statistics.latency) for m, labels in models],
        )
    )
    families.append(
        _durations(
            "batcher_queue_duration_seconds",
            "Arrival to run",
            [(labels, m.statistics.waiting) for m, labels in models],
        )
    )
    families.append(
        GaugeMetricFamily(
            "batcher_in_flight_bytes",
            "Bytes of requests that are not answered",
            value=budget.used,
        )
    )
    families.append(
        GaugeMetricFamily(
            "batcher_in_flight_bytes_limit",
            "Above this many bytes requests are refused",
            value=budget.limit,
        )
    )
    return families


def exposition(families: Iterable[Metric]) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Collected(list(families)))
    return generate_latest(registry)


class _Collected(Collector):
    """Families that are there already, as the library wants to be given them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _batch_rows(models: list[tuple[Model, tuple[str, str]]]) -> Metric:
    family = HistogramMetricFamily(
        "batcher_batch_rows", "Rows of the batches run", labels=_LABELS
    )
    for model, labels in models:
        sizes = [(n, b.runs) for n, b in model.statistics.batches.items()]
        largest = model.signature.max_batch
        bounds = [1 << i for i in range(largest.bit_length()) if 1 << i < largest]
        bounds.append(largest)
        buckets = [
            (str(float(bound)), sum(runs for n, runs in sizes if n <= bound))
            for bound in bounds
        ]
        buckets.append(("+Inf", sum(runs for _, runs in sizes)))
        family.add_metric(labels, buckets, sum(n * runs for n, runs in sizes))
    return family


def _durations(
    name: str, text: str, histograms: list[tuple[tuple[str, str], Histogram]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_LABELS)
    for labels, histogram in histograms:
        counts, sum_ns = histogram.read()
        total = 0
        buckets = []
        for bound_ns, count in zip(LATENCY_BOUNDS_NS, counts, strict=False):
            total += count
            buckets.append((str(bound_ns / 1e9), total))
        buckets.append(("+Inf", total + counts[-1]))
        family.add_metric(labels, buckets, sum_ns / 1e9)
    return family
