"""The books: what is counted, and what Triton's message and the metrics page say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from batcher.rpc import messages
from batcher.serving.budget import Budget
from batcher.serving.metrics import collect, exposition
from batcher.serving.model import Model
from batcher.serving.statistics import (
    FAILURES,
    LATENCY_BOUNDS_NS,
    Histogram,
    ModelStatistics,
)

from .desk import made_model

MakeModel = Callable[..., Model]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

MS = 1_000_000


def books() -> ModelStatistics:
    """The case of B105: 6 requests of 3 rows two by two, and 2 of 8 rows alone."""
    statistics = ModelStatistics()
    for i in range(3):
        begin = i * 100 * MS
        statistics.run(6, 8, 1 * MS, 10 * MS, 2 * MS)
        statistics.answered(
            [begin, begin + MS],
            rows=6,
            started_ns=begin + 5 * MS,
            ended_ns=begin + 17 * MS,
            input_ns=1 * MS,
            infer_ns=10 * MS,
            output_begin_ns=begin + 15 * MS,
        )
    for i in range(2):
        begin = (3 + i) * 100 * MS
        statistics.run(8, 8, 1 * MS, 12 * MS, 1 * MS)
        statistics.answered(
            [begin],
            rows=8,
            started_ns=begin + 1 * MS,
            ended_ns=begin + 14 * MS,
            input_ns=1 * MS,
            infer_ns=12 * MS,
            output_begin_ns=begin + 13 * MS,
        )
    statistics.fail("BACKEND", 7 * MS)
    statistics.fail("REJECTED", 1 * MS)
    return statistics


@pytest.fixture
def make() -> Iterator[MakeModel]:
    """Makes models, and closes them."""
    made: list[Model] = []

    def make_model(**options: Any) -> Model:
        made.append(made_model(**options))
        return made[-1]

    yield make_model
    for model in made:
        model.close()


def duration(message: messages.StatisticDuration) -> tuple[int, float]:
    """Count and milliseconds."""
    return message.count, message.ns / MS


# -- the message ----------------------------------------------------------------------


def test_requests_rows_and_runs_are_told_apart() -> None:
    """8 requests, 34 rows, 5 runs; runs are listed by their rows (B105)."""
    message = books().message("m", "3")

    assert (message.name, message.version) == ("m", "3")
    assert (message.inference_count, message.execution_count) == (34, 5)
    assert [(b.batch_size, b.compute_infer.count) for b in message.batch_stats] == [
        (6, 3),
        (8, 2),
    ]
    assert message.last_inference > 1_600_000_000_000


def test_durations_are_summed_over_requests() -> None:
    """Each duration counts every answered request, and the parts fit into the whole."""
    stats = books().message("m", "3").inference_stats

    assert duration(stats.success) == (8, 3 * (17 + 16) + 2 * 14)
    assert duration(stats.queue) == (8, 3 * (5 + 4) + 2 * 1)
    assert duration(stats.compute_input) == (8, 3 * 2 * 1 + 2 * 1)
    assert duration(stats.compute_infer) == (8, 3 * 2 * 10 + 2 * 12)
    assert duration(stats.compute_output) == (8, 3 * 2 * 2 + 2 * 1)
    assert duration(stats.fail) == (2, 8)


def test_durations_of_batches_are_summed_over_runs() -> None:
    """The statistics of a batch size count runs, not requests."""
    six, eight = books().message("m", "3").batch_stats

    assert duration(six.compute_input) == (3, 3)
    assert duration(six.compute_infer) == (3, 30)
    assert duration(six.compute_output) == (3, 6)
    assert duration(eight.compute_infer) == (2, 24)


def test_spare_rows_are_counted_apart() -> None:
    """Rows that only fill a rung are in no other count."""
    assert books().padding_rows == 3 * 2


def test_a_model_that_did_nothing_has_empty_books() -> None:
    """Before the first request everything is 0, and no batch size is listed."""
    message = ModelStatistics().message("m", "1")

    assert message == messages.ModelStatistics(
        name="m", version="1", inference_stats=message.inference_stats
    )
    assert duration(message.inference_stats.success) == (0, 0)


# -- histograms -----------------------------------------------------------------------


END_NS = 30_000_000_000


@given(st.lists(st.lists(st.integers(0, 20_000_000_000), max_size=50), max_size=5))
def test_a_histogram_counts_every_duration(durations_ns: list[list[int]]) -> None:
    """Whenever it is read, each duration is in the first bucket that holds it."""
    histogram = Histogram()
    flat: list[int] = []
    for some in durations_ns:
        histogram.add(END_NS, [END_NS - duration for duration in some])
        flat += some
        counts, sum_ns = histogram.read()
        bounds = [*LATENCY_BOUNDS_NS, 1 << 62]
        below = [0, *(sum(d <= bound for d in flat) for bound in bounds)]
        expected = [b - a for a, b in itertools.pairwise(below)]

        assert (counts, sum_ns) == (expected, sum(flat))


def test_a_histogram_keeps_no_more_than_it_must() -> None:
    """However many durations come between two reads, the memory is bounded."""
    histogram = Histogram()

    for _ in range(100):
        histogram.add(2 * MS, [MS] * 1000)

    counts, sum_ns = histogram.read()
    assert sum(counts) == 100_000
    assert sum_ns == 100_000 * MS
    assert len(histogram._pending) == 0


# -- the page -------------------------------------------------------------------------


def samples(page: bytes) -> Samples:
    """Every sample of a page by name and labels; none may be there twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def page_of(*models: Model, budget: Budget | None = None) -> Samples:
    """The samples of the metrics page of these models."""
    return samples(exposition(collect(models, budget or Budget(1000))))


def test_the_page_agrees_with_the_message(make: MakeModel) -> None:
    """Counters have Triton's very names, and the values of the statistics call."""
    model = make()
    model.statistics = books()

    page = page_of(model)

    labels = frozenset({("model", "m"), ("version", "1")})
    triton = {
        name: v for (name, ls), v in page.items() if ls == labels and "nv_" in name
    }
    assert triton == {
        "nv_inference_request_success": 8,
        "nv_inference_count": 34,
        "nv_inference_exec_count": 5,
        "nv_inference_request_duration_us": 127_000,
        "nv_inference_queue_duration_us": 29_000,
        "nv_inference_compute_input_duration_us": 8_000,
        "nv_inference_compute_infer_duration_us": 84_000,
        "nv_inference_compute_output_duration_us": 14_000,
        "nv_inference_pending_request_count": 0,
    }


def test_failures_have_their_reason(make: MakeModel) -> None:
    """Every reason is there from the start, so that a rate can be taken of it."""
    model = make()
    model.statistics = books()

    page = page_of(model)

    assert {
        dict(labels)["reason"]: value
        for (name, labels), value in page.items()
        if name == "nv_inference_request_failure"
    } == {**dict.fromkeys(FAILURES, 0), "BACKEND": 1, "REJECTED": 1}


def test_batch_sizes_are_a_histogram(make: MakeModel) -> None:
    """Buckets are powers of two up to the largest batch, cumulative, with the sum."""
    model = make(rungs=(1, 2, 4, 8, 12))
    model.statistics = books()

    page = page_of(model)

    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in page.items()
        if name == "batcher_batch_rows_bucket"
    }
    labels = frozenset({("model", "m"), ("version", "1")})
    assert buckets == {
        "1.0": 0,
        "2.0": 0,
        "4.0": 0,
        "8.0": 5,
        "12.0": 5,
        "+Inf": 5,
    }
    assert page["batcher_batch_rows_count", labels] == 5
    assert page["batcher_batch_rows_sum", labels] == 34


def test_durations_are_histograms_in_seconds(make: MakeModel) -> None:
    """Latency and waiting have cumulative buckets that end with all requests."""
    model = make()
    model.statistics = books()

    page = page_of(model)

    labels = {("model", "m"), ("version", "1")}
    name = "batcher_request_duration_seconds"
    assert page[f"{name}_count", frozenset(labels)] == 8
    assert page[f"{name}_sum", frozenset(labels)] == pytest.approx(0.127)
    assert page[f"{name}_bucket", frozenset(labels | {("le", "0.01")})] == 0
    assert page[f"{name}_bucket", frozenset(labels | {("le", "0.025")})] == 8
    waiting = "batcher_queue_duration_seconds_bucket"
    assert page[waiting, frozenset(labels | {("le", "0.001")})] == 2
    assert page[waiting, frozenset(labels | {("le", "+Inf")})] == 8


def test_padding_and_bytes_are_on_the_page(make: MakeModel) -> None:
    """What Triton has not is under our own prefix."""
    model = make()
    model.statistics = books()
    budget = Budget(1000)
    budget.used = 17

    page = page_of(model, budget=budget)

    labels = frozenset({("model", "m"), ("version", "1")})
    assert page["batcher_padding_rows_total", labels] == 6
    assert page["batcher_in_flight_bytes", frozenset()] == 17
    assert page["batcher_in_flight_bytes_limit", frozenset()] == 1000


@pytest.mark.parametrize(
    "name",
    ['a"b', "a\\b", "a\nb", 'le="1"} 5 #', "é モデル", "", "a{b}", "a,b=c", "\\n"],
)
def test_labels_hold_whatever_a_name_holds(make: MakeModel, name: str) -> None:
    """A model's name is escaped and reads back as it is: no sample is forged."""
    plain, odd = make(), make(name=name)

    page = page_of(odd)

    assert {n for n, _ in page} == {n for n, _ in page_of(plain)}
    assert len(page) == len(page_of(plain))
    assert {dict(labels).get("model", name) for _, labels in page} == {name}


def test_several_models_are_told_apart(make: MakeModel) -> None:
    """Each model has its own series, and no series is there twice."""
    page = page_of(make(name="a"), make(name="b", version="2"))

    assert {
        (dict(labels)["model"], dict(labels)["version"])
        for (name, labels) in page
        if name == "nv_inference_count"
    } == {("a", "1"), ("b", "2")}


def test_a_page_without_models_is_a_page() -> None:
    """Before the first model is loaded the page has the daemon's own metrics."""
    page = page_of()

    assert {name for name, _ in page} == {
        "batcher_in_flight_bytes",
        "batcher_in_flight_bytes_limit",
    }
