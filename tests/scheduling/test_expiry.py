"""Deadlines and queue timeouts: who is rejected, with what, and when."""

from __future__ import annotations

import pytest

from batcher.errors import BatcherError, DeadlineExceeded, EngineFailure, QueueTimeout
from batcher.scheduling import NEVER, Reject
from batcher.scheduling.request import DONE, RUNNING

from .helpers import (
    MS,
    US,
    make_group,
    make_scheduler,
    occupy,
    rejects,
    runs,
    submit,
)


@pytest.mark.parametrize(
    ("deadline_ns", "expires_ns", "at_ns", "error"),
    [
        (7 * MS, NEVER, 7 * MS, DeadlineExceeded),
        (NEVER, 7 * MS, 7 * MS, QueueTimeout),
        (9 * MS, 7 * MS, 7 * MS, QueueTimeout),
        (7 * MS, 9 * MS, 7 * MS, DeadlineExceeded),
        (7 * MS, 7 * MS, 7 * MS, DeadlineExceeded),
    ],
)
def test_expires_at_the_earlier_instant(
    deadline_ns: int, expires_ns: int, at_ns: int, error: type[BatcherError]
) -> None:
    """A request is rejected at its deadline or queue timeout, with that one's error."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    request = submit(
        scheduler, group, at_ns=MS, deadline_ns=deadline_ns, expires_ns=expires_ns
    )

    assert scheduler.poll(at_ns - 1) == []
    assert scheduler.next_wakeup_ns() == at_ns
    assert rejects(scheduler.poll(at_ns)) == [(request, error)]
    assert request.state == DONE
    assert scheduler.waiting == 0
    assert scheduler.poll(at_ns) == []
    assert scheduler.next_wakeup_ns() == NEVER


def test_late_poll() -> None:
    """When both instants have passed unnoticed, the deadline is what counts."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    request = submit(scheduler, group, deadline_ns=9 * MS, expires_ns=7 * MS)

    assert rejects(scheduler.poll(9 * MS)) == [(request, DeadlineExceeded)]


@pytest.mark.parametrize(
    ("deadline_ns", "text"),
    [
        (9 * MS, "the deadline passed after 7.5 ms in the queue"),
        (NEVER, "request timeout expired after 7.5 ms in the queue"),
    ],
)
def test_text(deadline_ns: int, text: str) -> None:
    """The caller reads how long the request waited."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    submit(
        scheduler,
        group,
        at_ns=1_500 * US,
        deadline_ns=deadline_ns,
        expires_ns=9 * MS,
    )
    [decision] = scheduler.poll(9 * MS)

    assert isinstance(decision, Reject)
    assert str(decision.error) == text


def test_expired_on_arrival() -> None:
    """A request that comes too late is rejected although a slot is free."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler), at_ns=MS, deadline_ns=MS)

    assert rejects(scheduler.poll(MS)) == [(request, DeadlineExceeded)]


def test_free_slot_before_the_deadline() -> None:
    """A request that is dispatched in time is not rejected while it runs."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    request = submit(scheduler, group, deadline_ns=2 * MS, expires_ns=1 * MS)

    assert runs(scheduler.poll(0)) == [(0, [request])]
    assert scheduler.next_wakeup_ns() == NEVER  # nothing waits any more
    assert scheduler.poll(3 * MS) == []
    assert request.state == RUNNING


@pytest.mark.parametrize("policy", ["eager", "window"])
@pytest.mark.parametrize("run_ns", [None, 1 * MS])
def test_no_slot_idles_while_a_requests_time_runs_out(
    policy: str, run_ns: int | None
) -> None:
    """A batch leaves before its delay is over, if a request would expire else.

    That is its run time and 0.3 ms before the request expires.
    """
    scheduler = make_scheduler(policy, max_delay_ns=50 * MS)
    group = make_group(scheduler, run_ns=run_ns)
    first = submit(scheduler, group)
    hurried = submit(scheduler, group, at_ns=1 * MS, deadline_ns=8 * MS)
    leave_ns = 8 * MS - (run_ns or 0) - 300_000

    assert scheduler.poll(1 * MS) == []
    assert scheduler.next_wakeup_ns() == leave_ns
    assert scheduler.poll(leave_ns - 1) == []
    assert runs(scheduler.poll(leave_ns)) == [(0, [first, hurried])]


def test_time_that_is_too_short_for_a_delay() -> None:
    """A request that has less time than a run takes leaves at once."""
    scheduler = make_scheduler(max_delay_ns=50 * MS)
    group = make_group(scheduler, run_ns=10 * MS)
    request = submit(scheduler, group, expires_ns=5 * MS)

    assert runs(scheduler.poll(0)) == [(0, [request])]


def test_what_left_its_queue_hurries_nobody() -> None:
    """The deadline of a cancelled request does not shorten the others' delay."""
    scheduler = make_scheduler(max_delay_ns=50 * MS)
    group = make_group(scheduler)
    cancelled = submit(scheduler, group, deadline_ns=8 * MS)
    stays = submit(scheduler, group)
    scheduler.cancel(cancelled)

    assert scheduler.poll(0) == []
    assert scheduler.next_wakeup_ns() == 50 * MS
    assert scheduler.poll(8 * MS) == []
    assert runs(scheduler.poll(50 * MS)) == [(0, [stays])]


def test_no_batch_lies_ready_while_it_could_expire() -> None:
    """A full batch whose requests may expire before the slot is free closes late.

    Then it is closed shortly before the slot is free, and who has expired is not in it.
    """
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    hurried = submit(scheduler, group, 4, deadline_ns=3 * MS)
    patient = submit(scheduler, group, 6, deadline_ns=60 * MS)

    assert scheduler.poll(0) == []
    assert rejects(scheduler.poll(3 * MS)) == [(hurried, DeadlineExceeded)]
    assert runs(scheduler.poll(4_700_000)) == [(0, [patient])]


def test_a_full_batch_with_time_enough_lies_ready() -> None:
    """Deadlines that a batch will meet do not keep it from being closed early."""
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    request = submit(scheduler, group, 8, deadline_ns=60 * MS)

    assert runs(scheduler.poll(0)) == [(0, [request])]


def test_expired_requests_do_not_fill_a_batch() -> None:
    """Requests that expire at an instant are out of the batch that leaves then."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    gone = [submit(scheduler, group, 3, deadline_ns=4 * MS) for _ in range(2)]
    stays = [submit(scheduler, group, 4, deadline_ns=4 * MS + 1) for _ in range(2)]
    scheduler.complete(0, 4 * MS, run_ns=4 * MS)

    first, second, third = scheduler.poll(4 * MS)

    assert rejects([first, second]) == [(r, DeadlineExceeded) for r in gone]
    assert runs([third]) == [(0, stays)]


def test_order_of_expiry() -> None:
    """Requests are rejected in the order of their instants, then of their arrival."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    instants = [3 * MS, 1 * MS, 2 * MS, 1 * MS]
    requests = [submit(scheduler, group, expires_ns=at_ns) for at_ns in instants]

    assert scheduler.next_wakeup_ns() == 1 * MS
    assert [request for request, _ in rejects(scheduler.poll(3 * MS))] == [
        requests[i] for i in (1, 3, 2, 0)
    ]


def test_one_wakeup_for_each_instant() -> None:
    """Every expiry that is to come asks for one wake-up, and none comes in between."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    for index in range(6):
        submit(scheduler, group, expires_ns=(index // 2 + 1) * MS)
    wakeups, rejected = [], 0
    while (at_ns := scheduler.next_wakeup_ns()) != NEVER:
        wakeups.append(at_ns)
        rejected += len(rejects(scheduler.poll(at_ns)))

    assert wakeups == [1 * MS, 2 * MS, 3 * MS]
    assert rejected == 6


# -- retries ----------------------------------------------------------------------


def test_deadline_passes_before_a_retry() -> None:
    """Of a failed batch only those are tried again whose deadline has not passed."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    late = submit(scheduler, group, deadline_ns=5 * MS)
    others = [submit(scheduler, group, deadline_ns=NEVER) for _ in range(3)]
    scheduler.poll(0)
    scheduler.complete(0, 5 * MS, run_ns=5 * MS, error=EngineFailure("NaN"))
    first, second, third = scheduler.poll(5 * MS)

    assert rejects([first]) == [(late, DeadlineExceeded)]
    assert runs([second, third]) == [(0, others[:1]), (0, others[1:])]


def test_queue_timeout_does_not_end_a_retry() -> None:
    """A queue timeout is on the wait in the queue, where a retry is not."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    requests = [submit(scheduler, group, expires_ns=2 * MS) for _ in range(2)]
    scheduler.poll(0)
    scheduler.complete(0, 5 * MS, run_ns=5 * MS, error=EngineFailure("NaN"))

    assert runs(scheduler.poll(5 * MS)) == [(0, requests[:1]), (0, requests[1:])]


def test_no_retry_is_left() -> None:
    """When all retries are too late, the slot goes to what waits in the queue."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler)
    late = [submit(scheduler, group, deadline_ns=5 * MS) for _ in range(2)]
    scheduler.poll(0)
    request = submit(scheduler, group)
    scheduler.complete(0, 5 * MS, run_ns=5 * MS, error=EngineFailure("NaN"))
    *first, last = scheduler.poll(5 * MS)

    assert rejects(first) == [(r, DeadlineExceeded) for r in late]
    assert runs([last]) == [(0, [request])]


def test_wakeup_after_retries_that_came_too_late() -> None:
    """Retries that are dropped do not swallow the wake-up of the batch that is open."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler, run_ns=10 * MS)
    late = [submit(scheduler, group, deadline_ns=5 * MS) for _ in range(2)]
    scheduler.poll(0)
    other = submit(scheduler, group, 8, at_ns=1 * MS)
    ahead = submit(scheduler, group, 8, at_ns=1 * MS)

    assert runs(scheduler.poll(1 * MS)) == [(1, [other]), (0, [ahead])]

    partial = submit(scheduler, group, at_ns=2 * MS)
    scheduler.complete(0, 5 * MS, run_ns=5 * MS, error=EngineFailure("NaN"))

    assert rejects(scheduler.poll(5 * MS)) == [(r, DeadlineExceeded) for r in late]
    assert scheduler.next_wakeup_ns() == 10_700 * US
    assert runs(scheduler.poll(10_700 * US)) == [(1, [partial])]
