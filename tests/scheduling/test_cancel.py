"""Callers that go away, and a model that gives up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from batcher.errors import EngineFailure
from batcher.scheduling import NEVER, Choice, Group, Hold, Request, Scheduler
from batcher.scheduling.request import DONE, NEW

from .helpers import (
    MS,
    US,
    make_group,
    make_request,
    make_scheduler,
    occupy,
    rejects,
    runs,
    submit,
    submit_all,
)


def test_cancel_while_waiting() -> None:
    """A request that is cancelled while it waits leaves the queue and never runs."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    first, second, third = submit_all(scheduler, group, [2, 3, 4])
    scheduler.cancel(second)

    assert second.state == DONE
    assert scheduler.waiting == 2
    assert (group.rows, group.requests) == (6, 2)

    scheduler.complete(0, MS, run_ns=MS)

    assert runs(scheduler.poll(MS)) == [(0, [first, third])]


def test_cancel_the_only_one() -> None:
    """Cancelling all that waits leaves nothing to do and nothing to wake up for."""
    scheduler = make_scheduler(max_delay_ns=5 * MS)
    request = submit(scheduler, make_group(scheduler), deadline_ns=9 * MS)
    scheduler.poll(0)
    scheduler.cancel(request)

    assert scheduler.poll(0) == []
    assert scheduler.next_wakeup_ns() == NEVER
    assert scheduler.idle


def test_cancel_while_running() -> None:
    """A request cancelled while it runs stays in its batch, whose run goes on."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    first, second = submit_all(scheduler, group, [1, 1])
    scheduler.poll(0)
    scheduler.cancel(first)

    assert (first.state, scheduler.idle) == (DONE, False)

    batch = scheduler.complete(0, MS, run_ns=MS)

    assert batch.requests == [first, second]
    assert second.state == DONE
    assert scheduler.poll(MS) == []
    assert scheduler.idle


def test_cancel_while_it_lies_ready() -> None:
    """A request cancelled in a batch that lies ready stays in it: it was dispatched."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    full = submit(scheduler, group, 8)
    scheduler.poll(0)
    scheduler.cancel(full)
    scheduler.complete(0, MS, run_ns=MS)

    assert scheduler.complete(0, 2 * MS, run_ns=MS).requests == [full]
    assert scheduler.idle


def test_cancel_when_done() -> None:
    """Cancelling a request that has been answered, or cancelled, does nothing."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    answered = submit(scheduler, group)
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS)
    waiting = submit_all(scheduler, group, [1, 1])
    for request in (answered, waiting[0], waiting[0]):
        scheduler.cancel(request)

    assert scheduler.waiting == 1
    assert runs(scheduler.poll(MS)) == [(0, waiting[1:])]


def test_cancel_when_never_accepted() -> None:
    """Cancelling a request that was refused does nothing to those that wait."""
    scheduler = make_scheduler(max_queue=1)
    group = make_group(scheduler)
    waiting = submit(scheduler, group)
    refused = make_request(group)

    assert refused.state == NEW

    scheduler.cancel(refused)

    assert scheduler.waiting == 1
    assert runs(scheduler.poll(0)) == [(0, [waiting])]


def test_cancelled_requests_make_no_batch_full() -> None:
    """The rows of a cancelled request do not count towards a full batch."""
    scheduler = make_scheduler(max_delay_ns=5 * MS)
    group = make_group(scheduler)
    requests = submit_all(scheduler, group, [3, 2, 3])
    scheduler.cancel(requests[1])

    assert scheduler.poll(0) == []

    last = submit(scheduler, group, 2)

    assert runs(scheduler.poll(0)) == [(0, [requests[0], requests[2], last])]


def test_cancel_between_a_failure_and_its_retry() -> None:
    """A cancelled request is left out when its failed batch is tried again."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    a, b, c, d = submit_all(scheduler, group, [1, 1, 1, 1])
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))
    for request in (a, b, c):
        scheduler.cancel(request)

    assert not scheduler.idle
    assert runs(scheduler.poll(MS)) == [(0, [d])]


def test_cancel_all_before_the_retry() -> None:
    """When all of a failed batch are cancelled nothing is tried again."""
    scheduler = make_scheduler()
    requests = submit_all(scheduler, make_group(scheduler), [1, 1])
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))
    for request in requests:
        scheduler.cancel(request)

    assert scheduler.poll(MS) == []
    assert scheduler.idle


# -- giving up --------------------------------------------------------------------


def test_abandon() -> None:
    """Giving up returns what waits, runs or lies ready, each request once."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    running = occupy(scheduler, group)
    ready = [submit(scheduler, group, 8)]
    scheduler.poll(0)
    waiting = submit_all(scheduler, group, [1, 2])
    scheduler.cancel(submit(scheduler, group))

    assert set(scheduler.abandon()) == {*running, *ready, *waiting}
    assert scheduler.waiting == 0
    assert scheduler.poll(0) == []
    assert scheduler.abandon() == []
    assert not scheduler.idle  # the slot still runs

    scheduler.complete(0, MS, run_ns=MS)
    scheduler.complete(0, 2 * MS, run_ns=MS)

    assert scheduler.idle


def test_abandon_retries() -> None:
    """Giving up returns what was to be tried again, save what was cancelled."""
    scheduler = make_scheduler()
    requests = submit_all(scheduler, make_group(scheduler), [1, 1, 1])
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))
    scheduler.cancel(requests[0])

    assert scheduler.abandon() == requests[1:]
    assert scheduler.poll(MS) == []
    assert scheduler.idle


def test_abandon_a_split_request() -> None:
    """Giving up returns a split request whole, and once, however many parts it has."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler), 30)
    scheduler.poll(0)

    assert scheduler.abandon() == [request]
    assert request.state == DONE
    assert scheduler.waiting == 0

    scheduler.complete(0, MS, run_ns=MS)
    scheduler.complete(0, 2 * MS, run_ns=MS)

    assert scheduler.idle


def test_abandon_with_a_reject_pending() -> None:
    """Giving up returns those whose rejection was not fetched yet."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler))
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))

    assert scheduler.abandon() == [request]
    assert scheduler.poll(MS) == []
    assert scheduler.idle


class Broken:
    """A policy with a bug: it fails when asked for the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def choose(self, groups: Iterable[Group], now_ns: int) -> Choice | Hold:
        self.asked += 1
        if self.asked == 2:
            raise ZeroDivisionError
        return Choice(next(iter(groups)), 8)


def test_abandon_after_a_bug_in_poll() -> None:
    """When `poll` fails half-way, giving up still returns every open request."""
    scheduler = Scheduler(Broken(), slots=2, max_queue=10)
    group = make_group(scheduler)
    expired: list[Request] = [submit(scheduler, group, expires_ns=100 * US)]
    requests = submit_all(scheduler, group, [8, 8])

    with pytest.raises(ZeroDivisionError):
        scheduler.poll(100 * US)

    assert set(scheduler.abandon()) == {*expired, *requests}
    assert scheduler.abandon() == []
    assert rejects(scheduler.poll(100 * US)) == []
