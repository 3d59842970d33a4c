"""Requests that make a run fail: the guilty one gets the error, nobody else does."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from .client import Client, assert_refused, result
from .daemon import Daemon

INTERNAL = grpc.StatusCode.INTERNAL
FAILURE = "nv_inference_request_failure"
POISON = 99


def ids(*values: int) -> np.ndarray:
    """Rows of ids for `emb`."""
    return np.array(values).reshape(-1, 1)


def rows(*values: int) -> list[list[float]]:
    """The rows of the table that these ids mean."""
    return [[4.0 * v + i for i in range(4)] for v in values]


def test_alone(client: Client, daemon: Daemon) -> None:
    """A request that fails alone is INTERNAL with the engine's reason (B104)."""
    before = client.books("emb")
    failed = daemon.metric(FAILURE, model="emb", reason="BACKEND")
    for _ in range(10):
        assert_refused(
            lambda: client.infer("emb", ids=ids(POISON)), INTERNAL, "'emb'", "99"
        )
    books = client.books("emb") - before

    assert (books.failures, books.requests, books.runs) == (10, 0, 0)
    assert daemon.metric(FAILURE, model="emb", reason="BACKEND") - failed == 10
    assert daemon.waiting("emb") == 0


def test_among_seven(client: Client, daemon: Daemon) -> None:
    """Ten times among seven good ones: +10 failures, +70 successes (B104)."""
    before = client.books("emb8")
    failed = daemon.metric(FAILURE, model="emb8", reason="BACKEND")
    for round_ in range(10):
        values = [1, 2, 3, 4, 5, 6, 7]
        values.insert(round_ % 8, POISON)
        calls = [client.start("emb8", ids=ids(v)) for v in values]
        for value, call in zip(values, calls, strict=True):
            if value == POISON:
                assert_refused(call.result, INTERNAL, "99")
            else:
                assert result(call)["y"].tolist() == rows(value)
    books = client.books("emb8") - before

    assert (books.failures, books.requests, books.rows) == (10, 70, 70)
    assert sum(size * count for size, count in books.batches.items()) == 70
    assert daemon.metric(FAILURE, model="emb8", reason="BACKEND") - failed == 10


@pytest.mark.parametrize("place", [0, 31, 63])
def test_among_sixty_three(client: Client, place: int) -> None:
    """In a batch of 64 exactly the guilty one fails, wherever it stands."""
    values = [i % 10 for i in range(63)]
    values.insert(place, POISON)
    calls = [client.start("emb64", ids=ids(v)) for v in values]
    failed = [i for i, call in enumerate(calls) if call.code() != grpc.StatusCode.OK]

    assert failed == [place]
    assert calls[place].code() == INTERNAL
    good = [call for i, call in enumerate(calls) if i != place]
    values.remove(POISON)
    assert [result(c)["y"].tolist() for c in good] == [rows(v) for v in values]


def test_several_guilty(client: Client) -> None:
    """Every guilty request of a batch fails, and only those."""
    places = {0, 1, 5, 7}
    values = [POISON if i in places else i for i in range(8)]
    calls = [client.start("emb8", ids=ids(v)) for v in values]
    failed = {i for i, call in enumerate(calls) if call.code() == INTERNAL}

    assert failed == places
    assert [result(calls[i])["y"].tolist() for i in (2, 3, 4, 6)] == [
        rows(i) for i in (2, 3, 4, 6)
    ]


def test_within_a_larger_request(client: Client) -> None:
    """A guilty row fails the whole request it is of, and no other request."""
    guilty = client.start("emb8", ids=ids(1, POISON, 3))
    good = client.start("emb8", ids=ids(5, 6, 7, 8, 9))

    assert_refused(guilty.result, INTERNAL)
    assert result(good)["y"].tolist() == rows(5, 6, 7, 8, 9)


def test_within_a_split_request(client: Client, daemon: Daemon) -> None:
    """A split request fails once, though others of its parts succeed."""
    before = client.books("emb8")
    values = [i % 10 for i in range(24)]
    values[17] = POISON
    assert_refused(lambda: client.infer("emb8", ids=ids(*values)), INTERNAL, "99")
    books = client.books("emb8") - before

    assert (books.failures, books.requests) == (1, 0)
    assert client.infer("emb8", ids=ids(*range(8)))["y"].tolist() == rows(*range(8))
    assert daemon.waiting("emb8") == 0
