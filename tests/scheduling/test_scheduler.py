"""The scheduler's bounds, slots, groups and end; other files have one subject each."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest

from batcher.errors import EngineFailure, QueueFull
from batcher.scheduling import Choice, Dispatch, Group, Hold, Scheduler
from batcher.scheduling.request import DONE, NEW, RUNNING, WAITING

from .helpers import (
    MS,
    Engine,
    batches,
    make_group,
    make_request,
    make_scheduler,
    occupy,
    rejects,
    rows_run,
    runs,
    submit,
    submit_all,
)

# -- one request ------------------------------------------------------------------


def test_life_of_a_request() -> None:
    """A request is new, waits from its arrival on, runs, and is done."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    request = make_request(group, 3)
    states = [request.state]
    scheduler.submit(request, 7 * MS)
    states.append(request.state)
    [batch] = batches(scheduler.poll(7 * MS))
    states.append(request.state)
    completed = scheduler.complete(0, 9 * MS, run_ns=2 * MS)
    states.append(request.state)

    assert states == [NEW, WAITING, RUNNING, DONE]
    assert request.arrival_ns == 7 * MS
    assert completed is batch
    assert (batch.group, batch.requests, batch.rows) == (group, [request], 3)
    assert batch.rung == 4
    assert scheduler.poll(9 * MS) == []


def test_poll_again() -> None:
    """A second poll at the same instant decides nothing."""
    scheduler = make_scheduler(slots=2)
    submit_all(scheduler, make_group(scheduler), [8, 8, 8, 8, 8, 1])

    assert len(scheduler.poll(0)) == 4  # two that run and two that lie ready
    assert scheduler.poll(0) == []


def test_cost_is_learnt() -> None:
    """A run that succeeded teaches the group's table; one that failed does not."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    submit(scheduler, group, 3)
    scheduler.poll(0)
    scheduler.complete(0, 5 * MS, run_ns=4 * MS)

    assert group.cost.estimate_ns(4) == 4 * MS

    culprit = submit(scheduler, group, 3)
    Engine(scheduler, [culprit]).run_all(9 * MS)

    assert group.cost.estimate_ns(4) == 4 * MS


def test_completion_of_nothing() -> None:
    """Completing a slot that runs nothing is an error of the caller."""
    scheduler = make_scheduler()

    with pytest.raises(ValueError, match="slot 0 runs nothing"):
        scheduler.complete(0, MS, run_ns=MS)


# -- bounds -----------------------------------------------------------------------


def test_queue_bound() -> None:
    """One request more than `max_queue` is refused, stays new, and changes nothing."""
    scheduler = make_scheduler(max_queue=2)
    group = make_group(scheduler)
    waiting = submit_all(scheduler, group, [1, 1])
    refused = make_request(group)

    with pytest.raises(QueueFull, match="2 requests wait"):
        scheduler.submit(refused, 0)

    assert refused.state == NEW
    assert scheduler.waiting == 2
    assert runs(scheduler.poll(0)) == [(0, waiting)]


def test_refused_request_opens_no_group() -> None:
    """A request that was refused leaves no trace in its group."""
    scheduler = make_scheduler(max_queue=1)
    a, b = make_group(scheduler, "a"), make_group(scheduler, "b")
    submit(scheduler, a)
    with pytest.raises(QueueFull):
        scheduler.submit(make_request(b), 0)

    assert rows_run(scheduler.poll(0)) == [[1]]
    assert (b.rows, b.requests) == (0, 0)


def test_queue_bound_counts_all_groups() -> None:
    """The bound is on the requests of all groups together, not on their rows."""
    scheduler = make_scheduler(max_queue=2)
    submit(scheduler, make_group(scheduler, "a"), 8)
    submit(scheduler, make_group(scheduler, "b"), 8)

    with pytest.raises(QueueFull):
        submit(scheduler, make_group(scheduler, "c"))


def test_room_in_the_queue() -> None:
    """Whatever leaves the queue makes room: a dispatch, a cancel, an expiry."""
    scheduler = make_scheduler(max_queue=1)
    group = make_group(scheduler)
    submit(scheduler, group)
    scheduler.poll(0)
    cancelled = submit(scheduler, group)
    scheduler.cancel(cancelled)
    submit(scheduler, group, expires_ns=MS)
    scheduler.poll(MS)
    submit(scheduler, group)

    assert scheduler.waiting == 1


# -- order ------------------------------------------------------------------------


def test_first_in_first_out() -> None:
    """Requests of a group leave in order of arrival, whatever their sizes."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler)
    occupy(scheduler, group)
    requests = submit_all(scheduler, group, [3, 5, 1, 8, 2, 2, 7, 1])
    left = []
    for at_ns in range(MS, 6 * MS, MS):
        scheduler.complete(0, at_ns, run_ns=MS)
        left += [r for _, batch in runs(scheduler.poll(at_ns)) for r in batch]

    assert left == requests


@pytest.mark.parametrize(
    ("rows", "rungs"),
    [([1], [1]), ([1, 1], [2]), ([2, 1], [4]), ([4, 1], [8]), ([5, 4], [8, 4])],
)
def test_rung_of_a_batch(rows: list[int], rungs: list[int]) -> None:
    """A batch is padded up to the next rung, and no further."""
    scheduler = make_scheduler(slots=2)
    submit_all(scheduler, make_group(scheduler), rows)

    assert [batch.rung for batch in batches(scheduler.poll(0))] == rungs


# -- slots ------------------------------------------------------------------------


def test_several_slots() -> None:
    """Each free slot takes a batch; the next goes to whichever is free first."""
    scheduler = make_scheduler(slots=3, commit_ahead=False)
    group = make_group(scheduler)
    requests = submit_all(scheduler, group, [8, 8, 8, 8, 1])

    assert runs(scheduler.poll(0)) == [(i, [requests[i]]) for i in range(3)]

    scheduler.complete(1, 2 * MS, run_ns=2 * MS)

    assert runs(scheduler.poll(2 * MS)) == [(1, [requests[3]])]

    scheduler.complete(2, 3 * MS, run_ns=3 * MS)
    scheduler.complete(0, 3 * MS, run_ns=3 * MS)

    assert runs(scheduler.poll(3 * MS)) == [(2, [requests[4]])]


def test_slots_take_turns() -> None:
    """Slots are used in the order in which they became free."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler)
    used = []
    for at_ns in range(0, 4 * MS, MS):
        submit(scheduler, group, at_ns=at_ns)
        [(slot, _)] = runs(scheduler.poll(at_ns))
        scheduler.complete(slot, at_ns, run_ns=0)
        used.append(slot)

    assert used == [0, 1, 0, 1]


def test_completions_at_one_instant() -> None:
    """Completions that are handled together free their slots together."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler)
    occupy(scheduler, group, slots=2)
    requests = submit_all(scheduler, group, [4, 4, 4])
    scheduler.complete(0, MS, run_ns=MS)
    scheduler.complete(1, MS, run_ns=MS)

    assert runs(scheduler.poll(MS)) == [(0, requests[:2]), (1, requests[2:])]


# -- groups -----------------------------------------------------------------------


def test_group_is_shared() -> None:
    """A key names one group for as long as it is in use."""
    scheduler = make_scheduler()
    group = scheduler.group(("image", 224), (1, 2))

    assert scheduler.group(("image", 224), (1, 2)) is group
    assert scheduler.group(("image", 256), (1, 2)) is not group


def test_group_with_other_rungs() -> None:
    """New rungs make a new group; what waits in the old one is served all the same."""
    scheduler = make_scheduler(slots=2)
    old = make_group(scheduler, rungs=(1, 2))
    in_old = submit(scheduler, old)
    new = make_group(scheduler, rungs=(1, 2, 4))
    in_new = submit(scheduler, new)

    assert new is not old
    assert runs(scheduler.poll(0)) == [(0, [in_old]), (1, [in_new])]


def test_a_group_can_use_more_rungs() -> None:
    """Its batches go up to the next rung there is; what waits stays in its queue."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler, rungs=(1, 8))
    for _ in range(3):
        submit(scheduler, group)
    (before,) = scheduler.poll(0)
    scheduler.use_rungs(group.key, (1, 4, 8))
    for _ in range(3):
        submit(scheduler, group)
    (after,) = scheduler.poll(0)

    assert isinstance(before, Dispatch)
    assert isinstance(after, Dispatch)
    assert (before.batch.rows, before.batch.rung) == (3, 8)
    assert (after.batch.rows, after.batch.rung) == (3, 4)
    assert scheduler.group(group.key, (1, 4, 8)) is group


def test_rungs_of_a_group_that_is_gone_or_ends_elsewhere_stay() -> None:
    """A group that nobody uses is none, and the largest batch stays the largest."""
    scheduler = make_scheduler()
    scheduler.use_rungs("nobody", (1, 2))
    group = make_group(scheduler, rungs=(1, 8))

    scheduler.use_rungs(group.key, (1, 16))

    assert group.rungs == (1, 8)


def test_group_vanishes() -> None:
    """A group is forgotten with its last request, so that shapes cannot pile up."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    submit(scheduler, group, deadline_ns=1000 * MS, expires_ns=500 * MS)
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS)
    scheduler.poll(MS)
    watch = weakref.ref(group)
    del group
    gc.collect()

    assert watch() is None
    assert len(scheduler._groups) == 0


def test_group_lives_while_in_use() -> None:
    """A group with a request waiting or running is not forgotten."""
    scheduler = make_scheduler()
    watch = weakref.ref(group := make_group(scheduler))
    submit(scheduler, group)
    del group
    gc.collect()

    assert watch() is make_group(scheduler)

    scheduler.poll(0)
    gc.collect()

    assert watch() is make_group(scheduler)


# -- the end ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["eager", "window"])
def test_drain(policy: str) -> None:
    """A scheduler that drains holds nothing back, oldest group first."""
    scheduler = make_scheduler(policy, max_delay_ns=1000 * MS, slots=2)
    a, b, c = (make_group(scheduler, key) for key in "abc")
    second = submit(scheduler, b, at_ns=2 * MS)
    third = submit(scheduler, c, at_ns=3 * MS)
    first = submit(scheduler, a, at_ns=1 * MS)

    assert scheduler.poll(3 * MS) == []

    scheduler.drain()

    assert runs(scheduler.poll(3 * MS)) == [(0, [first]), (1, [second])]
    assert scheduler.poll(3 * MS) == []

    scheduler.complete(0, 4 * MS, run_ns=MS)

    assert runs(scheduler.poll(4 * MS)) == [(0, [third])]

    scheduler.complete(0, 5 * MS, run_ns=MS)
    scheduler.complete(1, 5 * MS, run_ns=MS)

    assert scheduler.idle


def test_idle() -> None:
    """Idle is when nothing waits, nothing runs and nothing is left to be said."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    seen = [scheduler.idle]
    request = submit(scheduler, group)
    seen.append(scheduler.idle)
    scheduler.poll(0)
    seen.append(scheduler.idle)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))
    seen.append(scheduler.idle)  # the reject is not fetched yet
    told = rejects(scheduler.poll(MS))
    seen.append(scheduler.idle)

    assert seen == [True, False, False, False, True]
    assert told == [(request, EngineFailure)]


class Later:
    """A policy that waits for a fixed instant, then takes the first group."""

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def choose(self, groups: Iterable[Group], now_ns: int) -> Choice | Hold:
        if now_ns < self.at_ns:
            return Hold(self.at_ns)
        return Choice(next(iter(groups)), 2)


def test_policy_of_another_kind() -> None:
    """A policy may hold a full group, and may take less than what is there."""
    scheduler = Scheduler(Later(3 * MS), slots=1, max_queue=20)
    requests = submit_all(scheduler, make_group(scheduler), [1] * 11)

    assert scheduler.poll(0) == []
    assert scheduler.next_wakeup_ns() == 3 * MS
    assert runs(scheduler.poll(3 * MS)) == [(0, requests[:2]), (0, requests[2:4])]
