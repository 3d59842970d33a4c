"""What shares a run and what does not: by `n` of the probe and by the statistics."""

from __future__ import annotations

import time
from collections import Counter

import grpc
import numpy as np
import pytest

from .client import Client, assert_refused, ones, result
from .daemon import Daemon, eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def rows(count: int, first: float = 0) -> np.ndarray:
    """Rows that can be told apart."""
    return first + np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def run_sizes(client: Client, model: str, count: int) -> list[int]:
    """Sends single rows at once; returns the size of the run of each."""
    calls = [client.start(model, x=rows(1, i)) for i in range(count)]
    answers = [result(call) for call in calls]

    assert [a["y"][0, 0] for a in answers] == [2 * i for i in range(count)]
    return [int(a["n"][0, 0]) for a in answers]


def test_what_piles_up_runs_together(client: Client, daemon: Daemon) -> None:
    """Requests that arrive while the slot is busy are one batch afterwards (B001)."""
    before = client.books("slow")
    first = client.start("slow", x=ones(), iters=np.array([[6000]]))
    eventually(lambda: daemon.in_flight_bytes() and not daemon.waiting("slow"))
    calls = [client.start("slow", x=ones(), iters=np.array([[1]])) for _ in range(4)]
    eventually(lambda: daemon.waiting("slow") == 4 or first.done())
    answers = [result(call) for call in calls]
    books = client.books("slow") - before

    assert result(first)["n"].tolist() == [[1]]
    assert [a["n"].tolist() for a in answers] == [[[4]]] * 4
    assert sorted(a["pos"][0, 0] for a in answers) == [0, 1, 2, 3]
    assert (books.requests, books.runs, books.batches) == (5, 2, {1: 1, 4: 1})


@pytest.mark.parametrize("count", [5, 9, 17])
def test_never_above_max_batch(client: Client, count: int) -> None:
    """No run holds more rows than max_batch (B004)."""
    before = client.books("probe4")
    sizes = run_sizes(client, "probe4", count)

    assert Counter(sizes) == {4: count - count % 4, 1: count % 4}
    assert (client.books("probe4") - before).batches == {4: count // 4, 1: 1}


def test_large_batches_fill(client: Client) -> None:
    """A batch of 128 fills to 128, whatever other limits there are (B009)."""
    sizes = run_sizes(client, "probe128", 128)
    before = client.books("probe128")
    more = run_sizes(client, "probe128", 300)

    assert sizes == [128] * 128
    assert max(more) <= 128
    assert (client.books("probe128") - before).runs <= 4


def test_a_full_batch_does_not_wait(client: Client) -> None:
    """A request that fills a batch by itself runs at once (B011)."""
    started = time.monotonic()
    answer = client.infer("probe8", x=rows(8))

    assert answer["n"].tolist() == [[8]] * 8
    assert time.monotonic() - started < 1  # the window is 2 s


@pytest.mark.parametrize("count", [5, 9, 16, 31])
def test_large_requests_are_split(client: Client, count: int) -> None:
    """A request of more rows than a batch runs in parts and comes back whole (B011)."""
    before = client.books("probe4")
    answer = client.infer("probe4", x=rows(count), id="large")
    books = client.books("probe4") - before
    full, left = divmod(count, 4)

    assert answer["y"].tolist() == (2 * rows(count)).tolist()
    assert answer["n"].ravel().tolist() == [4] * (full * 4) + [left] * left
    assert (books.requests, books.rows) == (1, count)
    assert books.batches == {4: full} | ({left: 1} if left else {})


def test_parts_share_batches_with_others(client: Client) -> None:
    """The rest of a split request shares its run with the next caller's rows."""
    large = client.start("probe8", x=rows(12))
    small = client.start("probe8", x=rows(4, 100))

    assert result(large)["y"].tolist() == (2 * rows(12)).tolist()
    assert result(large)["n"].tolist() == [[8]] * 12
    assert result(small)["y"].tolist() == (2 * rows(4, 100)).tolist()
    assert result(small)["n"].tolist() == [[8]] * 4


def test_large_requests_are_refused_where_configured(client: Client) -> None:
    """With max_request_rows a larger request is refused with both numbers (B011)."""
    for count in (9, 16):
        assert_refused(
            lambda count=count: client.infer("probe_whole", x=rows(count)),
            INVALID,
            f"{count} rows",
            "batch-size must be <= 8",
        )
    assert client.infer("probe_whole", x=rows(8))["n"].tolist() == [[8]] * 8


def test_the_largest_request_is_64_batches(client: Client) -> None:
    """Without a limit of its own a model takes requests of 64 largest batches."""
    assert len(client.infer("probe4", x=rows(256))["y"]) == 256
    assert_refused(
        lambda: client.infer("probe4", x=rows(257)), INVALID, "257 rows", "<= 256"
    )


def test_the_delay_refuses_nobody(client: Client) -> None:
    """max_delay bounds the wait before a run, and never causes a refusal (B012)."""
    before = client.books("nap")
    for i in range(3):
        assert client.infer("nap", x=ones(1, i))["y"].tolist() == ones(1, i).tolist()
    calls = [client.start("nap", x=ones(1, i)) for i in range(10)]
    answers = [result(call)["y"][0, 0] for call in calls]
    books = client.books("nap") - before

    assert answers == list(range(10))
    assert (books.requests, books.failures) == (13, 0)


def test_counts_are_exact(client: Client, daemon: Daemon) -> None:
    """Requests, rows, runs and batch sizes, also on the metrics page (B105)."""
    names = (
        "nv_inference_request_success",
        "nv_inference_count",
        "nv_inference_exec_count",
        "batcher_batch_rows_sum",
        "batcher_batch_rows_count",
        "batcher_request_duration_seconds_count",
        "batcher_queue_duration_seconds_count",
    )

    def counts() -> list[float]:
        samples = daemon.metrics('model="probe8"')
        labels = frozenset({("model", "probe8"), ("version", "1")})
        return [samples[name, labels] for name in names]

    before = client.books("probe8")
    earlier = counts()
    calls = [client.start("probe8", x=rows(3)) for _ in range(6)]
    eventually(lambda: daemon.waiting("probe8") == 2)
    calls += [client.start("probe8", x=rows(8)) for _ in range(2)]
    sizes = [int(result(call)["n"][0, 0]) for call in calls]
    books = client.books("probe8") - before
    grown = [now - then for now, then in zip(counts(), earlier, strict=True)]

    assert sizes == [6] * 6 + [8] * 2
    assert (books.requests, books.rows, books.runs) == (8, 34, 5)
    assert books.batches == {6: 3, 8: 2}
    assert grown == [8, 34, 5, 34, 5, 8, 8]
    statistics = client.statistics("probe8").inference_stats
    spent = statistics.queue.ns + statistics.compute_infer.ns
    assert spent <= statistics.success.ns


def test_padded_rungs(client: Client, daemon: Daemon) -> None:
    """A batch goes up to its rung with spare rows that nobody gets or is charged."""
    padding = "batcher_padding_rows_total"
    before = client.books("probe_rungs")
    spare = daemon.metric(padding, model="probe_rungs")
    answer = client.infer("probe_rungs", x=rows(2, 5))
    books = client.books("probe_rungs") - before

    assert answer["y"].tolist() == (2 * rows(2, 5)).tolist()
    assert answer["n"].tolist() == [[4], [4]]
    assert answer["pos"].tolist() == [[0], [1]]
    assert (books.rows, books.batches) == (2, {2: 1})
    assert daemon.metric(padding, model="probe_rungs") - spare == 2


def test_models_do_not_wait_for_each_other(client: Client) -> None:
    """While one model runs, another one answers; each keeps its own books."""
    before = client.books("nap")
    long = client.start("nap", x=ones(1, 5))
    answers = [client.infer("probe", x=ones(1, i))["y"][0, 0] for i in range(5)]
    still_running = not long.done()
    books = client.books("nap") - before

    assert answers == [0, 2, 4, 6, 8]
    assert still_running
    assert result(long)["y"].tolist() == ones(1, 5).tolist()
    assert books.requests == 0


def test_parameters_do_not_mix(client: Client) -> None:
    """Unknown parameters neither keep callers apart nor reach anybody (B040)."""
    sent = (
        ({"tag": "alpha", "k": 7}, "one"),
        ({"tag": "beta"}, "two"),
    )
    calls = [client.start("probe2", x=ones(), parameters=p, id=i) for p, i in sent]
    answers = [call.result() for call in calls]

    assert [a.id for a in answers] == ["one", "two"]
    assert [dict(a.parameters) for a in answers] == [{}, {}]
    assert [result(call)["n"].tolist() for call in calls] == [[[2]], [[2]]]
    assert client.infer("twin_a", x=ones(), parameters={"tag": "x", "f": 0.5})


def test_outputs_do_not_keep_callers_apart(client: Client) -> None:
    """Callers that want different outputs share a run and get what they asked for."""
    one = client.start("probe2", x=ones(1, 1), outputs=["n"])
    two = client.start("probe2", x=ones(1, 2), outputs=["pos", "y"])

    assert list(result(one)) == ["n"]
    assert list(result(two)) == ["pos", "y"]
    assert result(one)["n"].tolist() == [[2]]
    assert result(two)["y"].tolist() == [[4, 4, 4, 4]]


def test_rows_of_one_caller_stay_in_order(client: Client) -> None:
    """Several rows of one request are neighbours in their run, in order."""
    calls = [client.start("probe8", x=rows(count)) for count in (3, 4, 1)]
    answers = [result(call) for call in calls]
    positions = [a["pos"].ravel().tolist() for a in answers]

    assert sorted(place for run in positions for place in run) == list(range(8))
    assert all(p == list(range(p[0], p[0] + len(p))) for p in positions)
