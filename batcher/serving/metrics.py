"""Prometheus metrics, made from the models' books when somebody scrapes.

Counters keep Triton's names where Triton has them (protocol notes §3.5); what it lacks
(histograms, padding, fill) is ours, under `batcher_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from batcher.serving.model import Budget, Model
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
    (
        "batcher_padding_rows",
        "Rows run only to fill batches up to their rung",
        lambda s: s.padding_rows,
    ),
)


class ModelCollector(Collector):
    """The metrics of all models and of the daemon.

    Args:
        models: the models that are there at the moment.
        budget: the in-flight bytes.
    """

    def __init__(self, models: Callable[[], Iterable[Model]], budget: Budget) -> None:
        self._models = models
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        models = [(m, (m.signature.name, m.signature.version)) for m in self._models()]
        for name, text, value in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=_LABELS)
            for model, labels in models:
                family.add_metric(labels, value(model.statistics))
            yield family
        failures = CounterMetricFamily(
            "nv_inference_request_failure",
            "Requests not answered with a result",
            labels=(*_LABELS, "reason"),
        )
        waiting = GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Requests that wait in the queue",
            labels=_LABELS,
        )
        for model, labels in models:
            for reason, count in model.statistics.failures.items():
                failures.add_metric((*labels, reason), count)
            waiting.add_metric(labels, model.scheduler.waiting)
        yield failures
        yield waiting
        yield self._batch_rows(models)
        yield _durations(
            "batcher_request_duration_seconds",
            "Arrival to answer",
            [(labels, m.statistics.latency) for m, labels in models],
        )
        yield _durations(
            "batcher_queue_duration_seconds",
            "Arrival to run",
            [(labels, m.statistics.waiting) for m, labels in models],
        )
        yield GaugeMetricFamily(
            "batcher_in_flight_bytes",
            "Bytes of requests that are not answered",
            value=self._budget.used,
        )
        yield GaugeMetricFamily(
            "batcher_in_flight_bytes_limit",
            "Above this many bytes requests are refused",
            value=self._budget.limit,
        )

    @staticmethod
    def _batch_rows(models: list[tuple[Model, tuple[str, str]]]) -> Metric:
        family = HistogramMetricFamily(
            "batcher_batch_rows", "Rows of the batches run", labels=_LABELS
        )
        for model, labels in models:
            sizes = [(n, b.runs) for n, b in list(model.statistics.batches.items())]
            bounds = []
            edge = 1
            while edge < model.signature.max_batch:
                bounds.append(edge)
                edge *= 2
            bounds.append(model.signature.max_batch)
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


def exposition(collector: Collector) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
