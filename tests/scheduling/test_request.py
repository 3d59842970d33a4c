"""Requests, groups and batches: the queue of a group, and which rung is run."""

from __future__ import annotations

import pytest

from batcher.scheduling import NEVER, Batch, Group, Request
from batcher.scheduling.request import DONE, NEW, RUNNING, WAITING

from .helpers import RUNGS, make_request


def make_queue(*rows: int) -> tuple[Group, list[Request]]:
    """A group with one request in its queue for each number of rows."""
    group = Group("a", RUNGS)
    requests = [make_request(group, count) for count in rows]
    for request in requests:
        request.state = WAITING
        group.push(request)
    return group, requests


def forget(group: Group, request: Request) -> None:
    """What the scheduler does with a request that leaves the queue."""
    request.state = DONE
    group.forget(request)


def test_new_request() -> None:
    """A request that was not submitted is new, whole and without limits."""
    request = Request(Group("a", RUNGS), 3)

    assert request.state == NEW
    assert request.rows == 3
    assert request.first_row == 0
    assert (request.deadline_ns, request.expires_ns) == (NEVER, NEVER)
    assert (request.parent, request.parts) == (None, None)


@pytest.mark.parametrize("rungs", [(), (0, 1), (-1,), (2, 1), (1, 1, 2)])
def test_wrong_rungs(rungs: tuple[int, ...]) -> None:
    """Rungs that are none, below 1 or not ascending are refused."""
    with pytest.raises(ValueError, match="ascending and positive"):
        Group("a", rungs)


@pytest.mark.parametrize(
    ("rows", "rung"),
    [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (7, 8), (8, 8)],
)
def test_rung_choice(rows: int, rung: int) -> None:
    """A batch runs at the smallest rung that holds its rows."""
    group, requests = make_queue(rows)

    assert Batch(group, requests, rows).rung == rung


def test_largest_rung_bounds_a_batch() -> None:
    """The largest rung is the most rows of a batch."""
    assert Group("a", (3, 6)).max_rows == 6


@pytest.mark.parametrize(
    ("rows", "max_rows", "taken"),
    [
        ((1, 1, 1), 8, [1, 1, 1]),
        ((1, 1, 1), 2, [1, 1]),
        ((5, 4), 8, [5]),
        ((5, 3, 1), 8, [5, 3]),
        ((5, 4, 1), 8, [5]),  # the 1 would fit, but may not overtake the 4
        ((8,), 4, []),
    ],
)
def test_take(rows: tuple[int, ...], max_rows: int, taken: list[int]) -> None:
    """The longest prefix of the queue that fits is taken, and nobody overtakes."""
    group, requests = make_queue(*rows)

    assert group.take(max_rows) == requests[: len(taken)]
    assert [request.rows for request in requests[: len(taken)]] == taken
    assert [request.state for request in requests] == [
        RUNNING if i < len(taken) else WAITING for i in range(len(rows))
    ]
    assert group.rows == sum(rows) - sum(taken)
    assert group.requests == len(rows) - len(taken)


@pytest.mark.parametrize(("rows", "full"), [((), False), ((7,), False), ((5, 4), True)])
def test_full(rows: tuple[int, ...], full: bool) -> None:
    """A group is full when as many rows wait as a batch can hold, fitting or not."""
    assert make_queue(*rows)[0].full is full


@pytest.mark.parametrize("gone", [[0], [1], [3], [0, 1], [2, 1, 0], [3, 1]])
def test_holes(gone: list[int]) -> None:
    """A request that left the queue is neither counted, nor listed, nor taken."""
    group, requests = make_queue(1, 1, 1, 1)
    for index in gone:
        forget(group, requests[index])
    living = [r for i, r in enumerate(requests) if i not in gone]

    assert (group.rows, group.requests) == (len(living), len(living))
    assert list(group.living()) == living
    assert group.waiting[0] is living[0]
    assert group.take(8) == living
    assert (group.rows, group.requests) == (0, 0)


def test_holes_are_bounded() -> None:
    """Holes in a queue never outnumber those who wait by more than a few."""
    group, requests = make_queue(*[1] * 1000)
    lengths = []
    for request in requests[1:]:  # the head stays, so that no hole is ever at the head
        forget(group, request)
        lengths.append(len(group.waiting) - 2 * group.requests)

    assert max(lengths) <= 32
    assert list(group.living()) == [requests[0]]
