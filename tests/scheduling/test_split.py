"""Requests with more rows than a batch can hold: their parts, and the whole."""

from __future__ import annotations

import gc
import weakref

import pytest

from batcher.errors import DeadlineExceeded, EngineFailure, QueueFull, QueueTimeout
from batcher.scheduling import NEVER, Request
from batcher.scheduling.request import DONE, RUNNING, WAITING

from .helpers import (
    MS,
    Engine,
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


def parts_of(request: Request) -> list[Request]:
    """The parts of a request that was split."""
    assert request.parts is not None
    return request.parts


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (9, [(0, 8), (8, 1)]),
        (16, [(0, 8), (8, 8)]),
        (21, [(0, 8), (8, 8), (16, 5)]),
    ],
)
def test_parts(rows: int, parts: list[tuple[int, int]]) -> None:
    """A large request is split into full batches and a rest, in order of its rows."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    request = submit(
        scheduler, group, rows, at_ns=3 * MS, deadline_ns=9 * MS, expires_ns=8 * MS
    )

    assert [(part.first_row, part.rows) for part in parts_of(request)] == parts
    assert (request.rows, request.state) == (rows, WAITING)
    assert scheduler.waiting == len(parts)
    assert (group.rows, group.requests) == (rows, len(parts))
    for part in parts_of(request):
        assert type(part) is type(request)
        assert (part.parent, part.parts) == (request, None)
        assert (part.group, part.arrival_ns) == (group, 3 * MS)
        assert (part.deadline_ns, part.expires_ns) == (9 * MS, 8 * MS)


def test_largest_that_is_not_split() -> None:
    """A request that fills a batch exactly stays whole."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler), 8)

    assert request.parts is None
    assert runs(scheduler.poll(0)) == [(0, [request])]


def test_parts_have_fields_of_their_own() -> None:
    """What the serving layer keeps on a part is not shared with its siblings."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler), 17)
    first, second, third = parts_of(request)
    first.chunks = ["rows"]  # type: ignore[attr-defined]

    assert not hasattr(second, "chunks")
    assert not hasattr(request, "chunks")
    assert third.state == WAITING


def test_done_with_the_last_part() -> None:
    """The whole is done when all of its parts have run, in whatever order."""
    scheduler = make_scheduler(slots=3)
    request = submit(scheduler, make_group(scheduler), 24)
    scheduler.poll(0)
    states = []
    for slot in (2, 0, 1):
        scheduler.complete(slot, MS, run_ns=MS)
        states.append(request.state)

    assert states == [WAITING, WAITING, DONE]
    assert scheduler.idle
    assert [part.state for part in parts_of(request)] == [DONE] * 3


def test_rest_shares_a_batch() -> None:
    """The rest of a split request shares its batch with the requests behind it."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler)
    large = submit(scheduler, group, 10)
    small = submit(scheduler, group, 3)

    assert runs(scheduler.poll(0)) == [
        (0, parts_of(large)[:1]),
        (1, [parts_of(large)[1], small]),
    ]


def test_order_with_others() -> None:
    """Parts keep the place of their request in the queue."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler)
    occupy(scheduler, group)
    submit_all(scheduler, group, [2, 18, 3])
    left = []
    for at_ns in range(MS, 6 * MS, MS):
        scheduler.complete(0, at_ns, run_ns=MS)
        left += rows_run(scheduler.poll(at_ns))

    assert left == [[2], [8], [8], [2, 3]]
    assert scheduler.idle


def test_queue_bound() -> None:
    """A split request is refused or accepted as a whole, and counts once per part."""
    scheduler = make_scheduler(max_queue=2)
    group = make_group(scheduler)
    submit(scheduler, group)
    submit(scheduler, group, 24)

    assert scheduler.waiting == 4
    with pytest.raises(QueueFull):
        scheduler.submit(make_request(group), 0)


# -- parts that do not all run ----------------------------------------------------


def test_cancel_while_a_part_runs() -> None:
    """Cancelling a split request takes its waiting parts out; those that run go on."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler)
    request = submit(scheduler, group, 20, deadline_ns=50 * MS)
    other = submit(scheduler, group)
    parts = parts_of(request)
    scheduler.poll(0)
    scheduler.cancel(request)

    assert [part.state for part in (request, *parts)] == [DONE] * 4
    assert (scheduler.waiting, group.rows) == (1, 1)

    batch = scheduler.complete(0, MS, run_ns=MS)

    assert batch.requests == parts[:1]
    assert runs(scheduler.poll(MS)) == [(0, [other])]
    assert scheduler.next_wakeup_ns() == NEVER


def test_cancel_frees_memory_at_once() -> None:
    """A split request that was cancelled is no reference cycle: its payload goes."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler), 20)
    watch = weakref.ref(request)
    gc.disable()
    try:
        scheduler.cancel(request)
        del request

        assert watch() is None
    finally:
        gc.enable()


def test_timeout_while_a_part_runs() -> None:
    """A split request is rejected once, whole, when a part has waited for too long."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler)
    request = submit(scheduler, group, 20, expires_ns=2 * MS)
    scheduler.poll(0)

    assert scheduler.next_wakeup_ns() == 2 * MS
    assert rejects(scheduler.poll(2 * MS)) == [(request, QueueTimeout)]
    assert scheduler.waiting == 0

    scheduler.complete(0, 3 * MS, run_ns=3 * MS)

    assert scheduler.poll(3 * MS) == []
    assert scheduler.idle


def test_no_timeout_once_all_parts_run() -> None:
    """A split request whose last part is dispatched does not time out any more."""
    scheduler = make_scheduler(slots=3)
    group = make_group(scheduler)
    request = submit(scheduler, group, 24, deadline_ns=2 * MS)
    waiting = submit(scheduler, group, deadline_ns=9 * MS)

    assert runs(scheduler.poll(0)) == [
        (slot, [part]) for slot, part in enumerate(parts_of(request))
    ]
    assert scheduler.poll(2 * MS) == []
    assert request.state == WAITING

    for slot in range(3):
        scheduler.complete(slot, 3 * MS, run_ns=3 * MS)

    assert request.state == DONE
    assert runs(scheduler.poll(3 * MS)) == [(0, [waiting])]


def test_failed_part() -> None:
    """When a part fails alone the whole is rejected, and other parts are dropped."""
    scheduler = make_scheduler(slots=2, commit_ahead=False)
    group = make_group(scheduler)
    request = submit(scheduler, group, 32)
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))

    assert rejects(scheduler.poll(MS)) == [(request, EngineFailure)]
    assert request.state == DONE
    assert scheduler.waiting == 0

    scheduler.complete(1, 2 * MS, run_ns=2 * MS, error=EngineFailure("NaN"))

    assert scheduler.poll(2 * MS) == []  # rejected already
    assert scheduler.idle


def test_failed_part_beside_others() -> None:
    """A rest that is guilty costs its own request the answer, not its neighbours."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    large = submit(scheduler, group, 9)
    small = submit_all(scheduler, group, [1, 1, 1])
    engine = Engine(scheduler, guilty=parts_of(large)[1:])
    engine.run_all(0)

    assert [(reject.request, type(reject.error)) for reject in engine.rejected] == [
        (large, EngineFailure)
    ]
    assert [request.state for request in small] == [DONE] * 3
    assert engine.runs == [8, 4, 2, 2, 1, 1]


def test_retry_of_a_part_whose_request_is_gone() -> None:
    """A part that waits for its retry is dropped when its request fails elsewhere."""
    scheduler = make_scheduler(slots=2, commit_ahead=False)
    group = make_group(scheduler)
    large = submit(scheduler, group, 9)
    small = submit(scheduler, group)
    scheduler.poll(0)
    scheduler.complete(1, MS, run_ns=MS, error=EngineFailure("NaN"))  # rest and small
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))  # the first part
    first, second = scheduler.poll(MS)

    assert rejects([first]) == [(large, EngineFailure)]
    assert runs([second]) == [(1, [small])]


def test_deadline_of_a_part_before_its_retry() -> None:
    """A part whose deadline passes before its retry takes the whole request with it."""
    scheduler = make_scheduler(slots=2, commit_ahead=False)
    group = make_group(scheduler)
    large = submit(scheduler, group, 17, deadline_ns=5 * MS)
    small = submit(scheduler, group)
    [first, second] = parts_of(large)[:2]

    assert runs(scheduler.poll(0)) == [(0, [first]), (1, [second])]

    scheduler.complete(0, MS, run_ns=MS)

    assert runs(scheduler.poll(MS)) == [(0, [parts_of(large)[2], small])]

    scheduler.complete(0, 5 * MS, run_ns=MS, error=EngineFailure("NaN"))
    reject, dispatch = scheduler.poll(5 * MS)

    assert rejects([reject]) == [(large, DeadlineExceeded)]
    assert runs([dispatch]) == [(0, [small])]
    assert (first.state, second.state) == (DONE, DONE)
    assert second.state != RUNNING

    scheduler.complete(0, 6 * MS, run_ns=MS)
    scheduler.complete(1, 6 * MS, run_ns=6 * MS)

    assert scheduler.poll(6 * MS) == []
    assert scheduler.idle


def test_many_parts_take_linear_time() -> None:
    """Looking after the whole does not cost a walk over all parts for each part."""
    looked_at = 0

    class CountingRequest(Request):
        def __getattribute__(self, name: str) -> object:
            nonlocal looked_at
            looked_at += name == "state"
            return super().__getattribute__(name)

    scheduler = make_scheduler()
    group = make_group(scheduler, rungs=(1,))
    request = CountingRequest(group, 1000, deadline_ns=9000 * MS)
    scheduler.submit(request, 0)
    Engine(scheduler).run_all(0)

    assert request.state == DONE
    assert looked_at < 10 * 1000
