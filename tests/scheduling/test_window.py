"""The window policy: what Triton does (protocol notes, "how Triton decides")."""

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


def test_waits_out_the_delay() -> None:
    """A batch waits until its oldest request is as old as the delay, slot or not."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US)
    group = make_group(scheduler)
    first = submit(scheduler, group, at_ns=1 * MS)

    assert scheduler.poll(1 * MS) == []
    assert scheduler.next_wakeup_ns() == 1 * MS + 500 * US

    second = submit(scheduler, group, 2, at_ns=1 * MS + 499 * US)

    assert scheduler.poll(1 * MS + 499 * US) == []
    assert scheduler.next_wakeup_ns() == 1 * MS + 500 * US
    assert runs(scheduler.poll(1 * MS + 500 * US)) == [(0, [first, second])]


def test_full_batch_leaves() -> None:
    """A full batch leaves before the delay is over."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US)
    requests = submit_all(scheduler, make_group(scheduler), [5, 3])

    assert runs(scheduler.poll(0)) == [(0, requests)]


def test_batch_that_cannot_grow() -> None:
    """A queue whose next request does not fit is full, and leaves without it."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US)
    group = make_group(scheduler)
    submit_all(scheduler, group, [5, 4])

    assert rows_run(scheduler.poll(0)) == [[5]]

    scheduler.complete(0, 100 * US, run_ns=100 * US)

    assert scheduler.poll(100 * US) == []  # the 4 waits for its own delay
    assert scheduler.next_wakeup_ns() == 500 * US


def test_no_delay() -> None:
    """With a delay of 0 a free slot runs at once what waits."""
    scheduler = make_scheduler("window")
    submit_all(scheduler, make_group(scheduler), [1, 2])

    assert rows_run(scheduler.poll(0)) == [[1, 2]]


def test_all_slots_busy() -> None:
    """While every slot is busy the batch collects past its delay, without wake-ups."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US, slots=2)
    group = make_group(scheduler)
    occupy(scheduler, group, slots=2)
    waiting = submit_all(scheduler, group, [1, 1], at_ns=100 * US)

    assert scheduler.poll(100 * US) == []
    assert scheduler.next_wakeup_ns() == NEVER

    waiting.append(submit(scheduler, group, at_ns=5 * MS))

    assert scheduler.poll(5 * MS) == []

    scheduler.complete(1, 6 * MS, run_ns=6 * MS)

    assert runs(scheduler.poll(6 * MS)) == [(1, waiting)]


def test_slot_free_before_the_delay_is_over() -> None:
    """A slot that becomes free within the delay waits out the rest of it."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US)
    group = make_group(scheduler)
    occupy(scheduler, group)
    request = submit(scheduler, group, at_ns=100 * US)
    scheduler.complete(0, 200 * US, run_ns=200 * US)

    assert scheduler.poll(200 * US) == []
    assert scheduler.next_wakeup_ns() == 600 * US
    assert runs(scheduler.poll(600 * US)) == [(0, [request])]


@pytest.mark.parametrize(
    ("preferred", "rows", "batches"),
    [
        ((4,), [1, 1, 1], []),
        ((4,), [1, 1, 1, 1], [[1, 1, 1, 1]]),
        ((4,), [4], [[4]]),
        ((4,), [2, 1, 1, 2], [[2, 1, 1]]),  # the rest waits
        ((2, 4), [1, 1], [[1, 1]]),
        ((2, 4), [1, 1, 1], [[1, 1]]),
        ((2, 4), [1, 1, 1, 1, 1], [[1, 1, 1, 1]]),  # the longest preferred prefix
        ((2, 6), [2, 1, 1, 1], [[2]]),
        ((3, 6), [2, 2, 2], [[2, 2, 2]]),
        ((3,), [2, 2], [[2]]),  # outgrown: what comes just before
        ((4,), [3, 3, 1], [[3]]),
        ((4,), [1, 2, 2], [[1, 2]]),
        ((4,), [6], [[6]]),  # larger than any preferred size: nothing to wait for
        ((4,), [6, 1], [[6]]),
        ((4,), [4, 4], [[4, 4]]),  # full comes before preferred
        ((2, 4), [1, 1, 7], [[1, 1]]),  # full, but what fits is not
        ((8,), [7], []),
        ((), [7], []),
    ],
)
def test_preferred_sizes(
    preferred: tuple[int, ...], rows: list[int], batches: list[list[int]]
) -> None:
    """A prefix of a preferred size leaves at once, the longest that there is."""
    scheduler = make_scheduler(
        "window", max_delay_ns=500 * US, preferred_rows=preferred
    )
    submit_all(scheduler, make_group(scheduler), rows)

    assert rows_run(scheduler.poll(0)) == batches


def test_preferred_size_past_the_delay() -> None:
    """Once the delay is over all that fits leaves, preferred or not."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US, preferred_rows=(4,))
    group = make_group(scheduler)
    occupy(scheduler, group)
    submit_all(scheduler, group, [1] * 6)
    scheduler.complete(0, 500 * US, run_ns=500 * US)

    assert rows_run(scheduler.poll(500 * US)) == [[1] * 6]


def test_preferred_sizes_on_several_slots() -> None:
    """Free slots each take a batch of a preferred size; the rest waits."""
    scheduler = make_scheduler(
        "window", max_delay_ns=500 * US, preferred_rows=(2,), slots=3
    )
    submit_all(scheduler, make_group(scheduler), [1] * 5)

    assert rows_run(scheduler.poll(0)) == [[1, 1], [1, 1]]
    assert scheduler.next_wakeup_ns() == 500 * US


def test_preferred_prefix_skips_holes() -> None:
    """A cancelled request does not count towards a preferred size."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US, preferred_rows=(3,))
    group = make_group(scheduler)
    requests = submit_all(scheduler, group, [1, 1, 1])
    scheduler.cancel(requests[1])

    assert scheduler.poll(0) == []

    last = submit(scheduler, group)

    assert runs(scheduler.poll(0)) == [(0, [requests[0], requests[2], last])]


def test_one_group_waits_while_another_leaves() -> None:
    """The delay of one group does not hold a slot that another group may use."""
    scheduler = make_scheduler("window", max_delay_ns=500 * US)
    a, b = make_group(scheduler, "a"), make_group(scheduler, "b")
    older = submit(scheduler, a, at_ns=0)
    full = submit(scheduler, b, 8, at_ns=100 * US)

    assert runs(scheduler.poll(100 * US)) == [(0, [full])]

    scheduler.complete(0, 200 * US, run_ns=100 * US)

    assert scheduler.poll(200 * US) == []
    assert scheduler.next_wakeup_ns() == 500 * US
    assert runs(scheduler.poll(500 * US)) == [(0, [older])]
