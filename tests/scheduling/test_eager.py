"""The eager policy: a free slot runs at once, batches form while the slots are busy."""

from __future__ import annotations

import pytest

from batcher.scheduling import NEVER

from .helpers import (
    MS,
    US,
    make_group,
    make_scheduler,
    occupy,
    rows_run,
    runs,
    submit,
    submit_all,
)


def test_free_slot() -> None:
    """A single request runs at once when a slot is free."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler), at_ns=5 * MS)

    assert runs(scheduler.poll(5 * MS)) == [(0, [request])]
    assert scheduler.next_wakeup_ns() == NEVER


def test_batch_forms_while_busy() -> None:
    """What arrives while every slot is busy leaves together when one is free."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    occupy(scheduler, group)
    waiting = []
    for at_ns in (1 * MS, 2 * MS, 3 * MS):
        waiting.append(submit(scheduler, group, at_ns=at_ns))

        assert scheduler.poll(at_ns) == []
        assert scheduler.next_wakeup_ns() == NEVER

    scheduler.complete(0, 4 * MS, run_ns=4 * MS)

    assert runs(scheduler.poll(4 * MS)) == [(0, waiting)]


def test_no_more_than_a_batch() -> None:
    """Of a longer queue one batch leaves, and the rest when a slot is free again."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler)
    occupy(scheduler, group)
    requests = submit_all(scheduler, group, [1] * 11)
    scheduler.complete(0, MS, run_ns=MS)

    assert runs(scheduler.poll(MS)) == [(0, requests[:8])]

    scheduler.complete(0, 2 * MS, run_ns=MS)

    assert runs(scheduler.poll(2 * MS)) == [(0, requests[8:])]


@pytest.mark.parametrize(
    ("rows", "batches"),
    [
        ([5, 4], [[5]]),  # rows count, not requests, and 9 rows are full
        ([4, 4], [[4, 4]]),
        ([5, 3, 1], [[5, 3]]),
        ([3, 3, 3], [[3, 3]]),
        ([8], [[8]]),
        ([5, 2], []),
        ([1] * 7, []),
    ],
)
def test_full_batch_does_not_wait(rows: list[int], batches: list[list[int]]) -> None:
    """With a delay a free slot runs at once what fills a batch, and only that."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    submit_all(scheduler, make_group(scheduler), rows, at_ns=MS)

    assert rows_run(scheduler.poll(MS)) == batches


def test_delay_holds_a_free_slot() -> None:
    """With a delay a free slot waits until the oldest request is that old."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    group = make_group(scheduler)
    first = submit(scheduler, group, at_ns=1 * MS)

    assert scheduler.poll(1 * MS) == []
    assert scheduler.next_wakeup_ns() == 3 * MS

    second = submit(scheduler, group, at_ns=2 * MS)  # does not start the delay again

    assert scheduler.poll(3 * MS - 1) == []
    assert scheduler.next_wakeup_ns() == 3 * MS
    assert runs(scheduler.poll(3 * MS)) == [(0, [first, second])]
    assert scheduler.next_wakeup_ns() == NEVER


def test_delay_ends_with_a_full_batch() -> None:
    """A batch that becomes full during the delay leaves at that moment."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    group = make_group(scheduler)
    first = submit(scheduler, group, 5, at_ns=1 * MS)

    assert scheduler.poll(1 * MS) == []

    second = submit(scheduler, group, 3, at_ns=1 * MS + 7 * US)

    assert runs(scheduler.poll(1 * MS + 7 * US)) == [(0, [first, second])]


def test_delay_passes_while_busy() -> None:
    """The delay counts from arrival: it may be over when a slot becomes free."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    group = make_group(scheduler)
    occupy(scheduler, group)
    request = submit(scheduler, group, at_ns=1 * MS)

    assert scheduler.poll(3 * MS) == []  # nothing to wake up for: the slot is busy
    assert scheduler.next_wakeup_ns() == NEVER

    scheduler.complete(0, 4 * MS, run_ns=4 * MS)

    assert runs(scheduler.poll(4 * MS)) == [(0, [request])]


def test_delay_after_a_cancel() -> None:
    """When the oldest request goes, the delay counts from the next one's arrival."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    group = make_group(scheduler)
    oldest = submit(scheduler, group, at_ns=1 * MS)
    second = submit(scheduler, group, at_ns=2 * MS)
    scheduler.cancel(oldest)

    assert scheduler.poll(3 * MS) == []
    assert scheduler.next_wakeup_ns() == 4 * MS
    assert runs(scheduler.poll(4 * MS)) == [(0, [second])]


def test_oldest_group_first() -> None:
    """Groups go by their oldest request, not by their size."""
    scheduler = make_scheduler()
    small, large = make_group(scheduler, "small"), make_group(scheduler, "large")
    [running] = occupy(scheduler, large)
    one = submit(scheduler, small, at_ns=1 * MS)
    seven = submit_all(scheduler, large, [1] * 7, at_ns=2 * MS)
    scheduler.complete(0, 3 * MS, run_ns=3 * MS)

    assert running.group is large
    assert runs(scheduler.poll(3 * MS)) == [(0, [one])]

    scheduler.complete(0, 4 * MS, run_ns=MS)

    assert runs(scheduler.poll(4 * MS)) == [(0, seven)]


def test_groups_that_arrive_again() -> None:
    """A group that was served goes to the end of the line, behind older requests."""
    scheduler = make_scheduler(slots=1, commit_ahead=False)
    a, b = make_group(scheduler, "a"), make_group(scheduler, "b")
    occupy(scheduler, a)
    submit_all(scheduler, a, [8], at_ns=1 * MS)
    submit_all(scheduler, b, [7], at_ns=2 * MS)
    submit_all(scheduler, a, [6], at_ns=3 * MS)
    order = []
    for at_ns in (4 * MS, 5 * MS, 6 * MS):
        scheduler.complete(0, at_ns, run_ns=MS)
        order += rows_run(scheduler.poll(at_ns))

    assert order == [[8], [7], [6]]


def test_group_that_is_due_before_an_older_one_is() -> None:
    """A full group may go while the oldest request still waits for company."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    a, b = make_group(scheduler, "a"), make_group(scheduler, "b")
    one = submit(scheduler, a, at_ns=1 * MS)
    eight = submit(scheduler, b, 8, at_ns=2 * MS)

    assert runs(scheduler.poll(2 * MS)) == [(0, [eight])]

    scheduler.complete(0, 3 * MS, run_ns=MS)

    assert runs(scheduler.poll(3 * MS)) == [(0, [one])]


def test_earliest_delay_of_several_groups() -> None:
    """The wake-up is when the first of several delays ends."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    a, b, c = (make_group(scheduler, key) for key in "abc")
    submit(scheduler, b, at_ns=200 * US)
    submit(scheduler, a, at_ns=100 * US)
    submit(scheduler, c, at_ns=300 * US)

    assert scheduler.poll(300 * US) == []
    assert scheduler.next_wakeup_ns() == 2 * MS + 100 * US
