"""Bounded memory and work while every slot is stuck and callers come and go."""

from __future__ import annotations

import pytest

from batcher.scheduling import NEVER, Request

from .helpers import MS, make_group, make_scheduler, occupy, rejects, submit

MANY = 10_000


@pytest.mark.parametrize("stay", [0, 1, 20])
def test_cancels(stay: int) -> None:
    """Ten thousand callers who give up leave no more than a few traces behind."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    for _ in range(stay):
        submit(scheduler, group, deadline_ns=10**9 * MS)
    largest_queue = largest_heap = 0
    for _ in range(MANY):
        scheduler.cancel(submit(scheduler, group, deadline_ns=10**8 * MS))
        largest_queue = max(largest_queue, len(group.waiting))
        largest_heap = max(largest_heap, len(scheduler._expiries))

    assert largest_queue <= 32 + 2 * stay + 1
    assert largest_heap <= 64 + 2 * (stay + 1)
    assert (scheduler.waiting, group.requests, group.rows) == (stay, stay, stay)


def test_timeouts() -> None:
    """Ten thousand requests that time out leave nothing behind."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    rejected = 0
    for step in range(MANY):
        submit(scheduler, group, at_ns=step * MS, expires_ns=(step + 5) * MS)
        rejected += len(rejects(scheduler.poll(step * MS)))

        assert scheduler.waiting <= 5
        assert len(group.waiting) <= 5
        assert len(scheduler._expiries) <= 5
        assert scheduler.next_wakeup_ns() > step * MS

    rejected += len(rejects(scheduler.poll((MANY + 5) * MS)))

    assert rejected == MANY
    assert len(group.waiting) == 0
    assert len(scheduler._expiries) == 0


def test_answers_with_distant_deadlines() -> None:
    """A request that was answered is not kept until its deadline."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    for step in range(1000):
        submit(scheduler, group, at_ns=step * MS, deadline_ns=10**9 * MS)
        scheduler.poll(step * MS)

        assert len(scheduler._expiries) == 0
        assert scheduler.next_wakeup_ns() == NEVER

        scheduler.complete(0, step * MS, run_ns=MS)


def test_many_groups() -> None:
    """Requests of ever new shapes leave no groups behind."""
    scheduler = make_scheduler()
    occupy(scheduler, make_group(scheduler))
    for index in range(1000):
        scheduler.cancel(submit(scheduler, make_group(scheduler, str(index))))

    assert len(scheduler._active) == 0
    assert len(scheduler._groups) == 1


@pytest.mark.parametrize("order", [1, -1])
def test_cancels_take_linear_time(order: int) -> None:
    """Cancelling a long queue looks at each request a few times, from either end."""
    looked_at = 0

    class CountingRequest(Request):
        def __getattribute__(self, name: str) -> object:
            nonlocal looked_at
            looked_at += name == "state"
            return super().__getattribute__(name)

    scheduler = make_scheduler(max_queue=1000)
    group = make_group(scheduler)
    occupy(scheduler, group)
    requests = [CountingRequest(group, 1, deadline_ns=10**9) for _ in range(1000)]
    for request in requests:
        scheduler.submit(request, 0)
    for request in requests[::order]:
        scheduler.cancel(request)
        scheduler.poll(0)

    assert scheduler.waiting == 0
    assert looked_at < 10 * 1000
