"""Commit-ahead: a slot's next batch closes just before the running one ends."""

from __future__ import annotations

import pytest

from batcher.scheduling import NEVER
from batcher.scheduling.slot import COMMIT_LEAD_NS

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


def test_lead() -> None:
    """The literal instants below follow from this lead."""
    assert COMMIT_LEAD_NS == 300 * US


def test_closes_just_before_the_slot_is_free() -> None:
    """A partial batch stays open until 0.3 ms before the predicted end of the run."""
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group, at_ns=10 * MS)
    first = submit(scheduler, group, at_ns=11 * MS)

    assert scheduler.poll(11 * MS) == []
    assert scheduler.next_wakeup_ns() == 14_700 * US

    second = submit(scheduler, group, at_ns=14_699 * US)

    assert scheduler.poll(14_700 * US - 1) == []
    assert scheduler.next_wakeup_ns() == 14_700 * US
    assert runs(scheduler.poll(14_700 * US)) == [(0, [first, second])]
    assert scheduler.next_wakeup_ns() == NEVER


def test_next_batch_runs_when_the_first_ends() -> None:
    """The batch that lies ready runs from the completion on, and takes its own time."""
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    ahead = submit(scheduler, group)
    scheduler.poll(4_700 * US)
    first = scheduler.complete(0, 5_100 * US, run_ns=5 * MS)

    assert first.rows == 8
    assert scheduler.poll(5_100 * US) == []  # it was dispatched already

    submit(scheduler, group)

    assert scheduler.poll(5_100 * US) == []
    assert scheduler.next_wakeup_ns() == 9_800 * US

    second = scheduler.complete(0, 7 * MS, run_ns=2 * MS)

    assert second.requests == [ahead]


def test_never_more_than_two() -> None:
    """A slot holds the batch that it runs and one more, however much waits."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler, run_ns=5 * MS)
    submit_all(scheduler, group, [8] * 9)

    assert [slot for slot, _ in runs(scheduler.poll(0))] == [0, 1, 0, 1]
    assert scheduler.poll(4_900 * US) == []
    assert scheduler.next_wakeup_ns() == NEVER


def test_full_batch_closes_early() -> None:
    """A full batch lies ready at once: waiting cannot make it better."""
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    requests = submit_all(scheduler, group, [5, 2])

    assert scheduler.poll(1 * MS) == []

    requests.append(submit(scheduler, group))

    assert runs(scheduler.poll(1 * MS)) == [(0, requests)]


@pytest.mark.parametrize("run_ns", [None, 0, 100 * US, 600 * US - 1])
def test_not_behind_a_short_run(run_ns: int | None) -> None:
    """No partial batch is closed behind a run that is short, or of unknown length."""
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=run_ns)
    occupy(scheduler, group)
    request = submit(scheduler, group)

    assert scheduler.poll(1000 * MS) == []
    assert scheduler.next_wakeup_ns() == NEVER

    scheduler.complete(0, 1000 * MS, run_ns=1000 * MS)

    assert runs(scheduler.poll(1000 * MS)) == [(0, [request])]


def test_unknown_run_after_a_known_one() -> None:
    """What was predicted for one run is not used for the next one on the same slot."""
    scheduler = make_scheduler()
    known = make_group(scheduler, "known", run_ns=5 * MS)
    unknown = make_group(scheduler, "unknown")
    occupy(scheduler, known)
    submit(scheduler, unknown)
    scheduler.poll(4_700 * US)
    scheduler.complete(0, 5 * MS, run_ns=5 * MS)
    request = submit(scheduler, known)

    assert scheduler.poll(50 * MS) == []
    assert scheduler.next_wakeup_ns() == NEVER

    scheduler.complete(0, 60 * MS, run_ns=55 * MS)

    assert runs(scheduler.poll(60 * MS)) == [(0, [request])]


def test_shortest_run_that_is_long_enough() -> None:
    """A run of twice the lead is the shortest behind which a partial batch closes."""
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=600 * US)
    occupy(scheduler, group)
    request = submit(scheduler, group)

    assert scheduler.poll(300 * US - 1) == []
    assert runs(scheduler.poll(300 * US)) == [(0, [request])]


def test_full_batch_behind_a_short_run() -> None:
    """A full batch is closed even behind a run that is short or of unknown length."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    requests = submit_all(scheduler, group, [8, 8])

    assert runs(scheduler.poll(0)) == [(0, requests[:1]), (0, requests[1:])]


def test_full_batch_goes_to_the_slot_that_is_free_first() -> None:
    """A full batch is not put behind a long run while a short one is about to end."""
    scheduler = make_scheduler(slots=2)
    slow = make_group(scheduler, "slow", run_ns=20 * MS)
    fast = make_group(scheduler, "fast", run_ns=400 * US)
    submit(scheduler, slow)
    submit(scheduler, fast)
    scheduler.poll(0)
    full = submit(scheduler, fast, 8)

    assert runs(scheduler.poll(0)) == [(1, [full])]


def test_switched_off() -> None:
    """Without commit-ahead nothing is dispatched to a slot that runs."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    full = submit(scheduler, group, 8)

    assert scheduler.poll(4_900 * US) == []
    assert scheduler.next_wakeup_ns() == NEVER

    scheduler.complete(0, 5 * MS, run_ns=5 * MS)

    assert runs(scheduler.poll(5 * MS)) == [(0, [full])]


def test_overdue_run() -> None:
    """A run that takes longer than predicted gets its next batch, and no wake-ups."""
    scheduler = make_scheduler()
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    request = submit(scheduler, group, at_ns=30 * MS)

    assert runs(scheduler.poll(30 * MS)) == [(0, [request])]

    submit(scheduler, group, at_ns=30 * MS)

    assert scheduler.poll(30 * MS) == []
    assert scheduler.next_wakeup_ns() == NEVER


def test_several_slots() -> None:
    """The batch that is open goes to the slot that is free first; then the next."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group, at_ns=0)  # slot 0 until 5 ms
    occupied = submit(scheduler, group, 8, at_ns=2 * MS)  # slot 1 until 7 ms

    assert runs(scheduler.poll(2 * MS)) == [(1, [occupied])]

    first = submit(scheduler, group, at_ns=3 * MS)

    assert scheduler.poll(3 * MS) == []
    assert scheduler.next_wakeup_ns() == 4_700 * US
    assert runs(scheduler.poll(4_700 * US)) == [(0, [first])]

    second = submit(scheduler, group, at_ns=4_800 * US)

    assert scheduler.poll(4_800 * US) == []
    assert scheduler.next_wakeup_ns() == 6_700 * US
    assert runs(scheduler.poll(6_700 * US)) == [(1, [second])]


def test_long_run_beside_a_stuck_short_one() -> None:
    """A short run that never ends does not keep the other slot from its next batch."""
    scheduler = make_scheduler(slots=2)
    fast = make_group(scheduler, "fast", run_ns=100 * US)
    slow = make_group(scheduler, "slow", run_ns=5 * MS)
    submit(scheduler, fast)
    submit(scheduler, slow)
    scheduler.poll(0)
    request = submit(scheduler, slow, at_ns=1 * MS)

    assert scheduler.poll(1 * MS) == []
    assert scheduler.next_wakeup_ns() == 4_700 * US
    assert runs(scheduler.poll(4_700 * US)) == [(1, [request])]


def test_delay_of_the_policy() -> None:
    """A slot that is about to be free waits for the delay like one that is free."""
    scheduler = make_scheduler(max_delay_ns=2 * MS)
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    request = submit(scheduler, group, at_ns=4 * MS)

    assert scheduler.poll(4 * MS) == []
    assert scheduler.next_wakeup_ns() == 4_700 * US
    assert scheduler.poll(4_700 * US) == []
    assert scheduler.next_wakeup_ns() == 6 * MS

    scheduler.complete(0, 5 * MS, run_ns=5 * MS)

    assert scheduler.poll(5 * MS) == []
    assert scheduler.next_wakeup_ns() == 6 * MS
    assert runs(scheduler.poll(6 * MS)) == [(0, [request])]


# -- several groups ---------------------------------------------------------------


def test_full_group_passes_a_younger_one() -> None:
    """A full group whose turn it is closes early; the partial one stays open."""
    scheduler = make_scheduler()
    a = make_group(scheduler, "a", run_ns=5 * MS)
    b = make_group(scheduler, "b", run_ns=5 * MS)
    occupy(scheduler, a)
    full = submit_all(scheduler, a, [4, 4], at_ns=1 * MS)
    submit(scheduler, b, at_ns=1 * MS)
    full_first = runs(scheduler.poll(1 * MS))

    assert full_first == [(0, full)]


def test_full_group_passes_one_that_is_not_due() -> None:
    """A full group closes early while an older, partial one waits out its delay."""
    scheduler = make_scheduler("window", max_delay_ns=20 * MS)
    a = make_group(scheduler, "a", run_ns=5 * MS)
    b = make_group(scheduler, "b", run_ns=5 * MS)
    occupy(scheduler, a)
    submit(scheduler, b, at_ns=1 * MS)
    full = submit(scheduler, a, 8, at_ns=2 * MS)

    assert runs(scheduler.poll(2 * MS)) == [(0, [full])]


def test_full_group_waits_for_an_older_one() -> None:
    """A full group does not take the slot that an older, partial one is to have."""
    scheduler = make_scheduler()
    a = make_group(scheduler, "a", run_ns=5 * MS)
    b = make_group(scheduler, "b", run_ns=5 * MS)
    occupy(scheduler, a)
    older = submit(scheduler, b, at_ns=1 * MS)
    full = submit(scheduler, a, 8, at_ns=2 * MS)

    assert scheduler.poll(2 * MS) == []
    assert scheduler.next_wakeup_ns() == 4_700 * US
    assert runs(scheduler.poll(4_700 * US)) == [(0, [older])]

    scheduler.complete(0, 5 * MS, run_ns=5 * MS)

    assert runs(scheduler.poll(5 * MS)) == [(0, [full])]


@pytest.mark.parametrize("run_ns", [5 * MS, 100 * US])
def test_rare_group_beside_a_flood(run_ns: int) -> None:
    """A single request is served in its turn beside a group that is always full."""
    scheduler = make_scheduler()
    flood = make_group(scheduler, "flood", run_ns=run_ns)
    rare = make_group(scheduler, "rare", run_ns=run_ns)
    submit_all(scheduler, flood, [8] * 5)
    scheduler.poll(0)
    request = submit(scheduler, rare)
    served = []
    for turn in range(1, 8):
        at_ns = turn * run_ns
        submit(scheduler, flood, 8, at_ns=at_ns)
        served.append(request in scheduler.complete(0, at_ns, run_ns=run_ns).requests)
        scheduler.poll(at_ns)

    assert served == [False] * 5 + [True, False]


def test_drain_while_busy() -> None:
    """A scheduler that drains commits ahead as before: a busy slot loses nothing."""
    scheduler = make_scheduler("window", max_delay_ns=1000 * MS)
    group = make_group(scheduler, run_ns=5 * MS)
    occupy(scheduler, group)
    submit(scheduler, group)
    scheduler.drain()

    assert scheduler.poll(1 * MS) == []
    assert scheduler.next_wakeup_ns() == 4_700 * US
    assert rows_run(scheduler.poll(4_700 * US)) == [[1]]
