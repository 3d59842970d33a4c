"""Failed batches: tried again in halves until the guilty request is alone."""

from __future__ import annotations

import pytest

from batcher.errors import EngineFailure
from batcher.scheduling.request import DONE

from .helpers import (
    MS,
    Engine,
    make_group,
    make_scheduler,
    rejects,
    rows_run,
    runs,
    submit,
    submit_all,
)


@pytest.mark.parametrize("guilty", [0, 31, 32, 63])
def test_one_guilty_of_64(guilty: int) -> None:
    """One guilty request of 64 is found in 13 runs, and only it is rejected."""
    scheduler = make_scheduler()
    group = make_group(scheduler, rungs=(1, 2, 4, 8, 16, 32, 64))
    requests = submit_all(scheduler, group, [1] * 64)
    engine = Engine(scheduler, [requests[guilty]])
    engine.run_all(0)

    assert [reject.request for reject in engine.rejected] == [requests[guilty]]
    assert len(engine.runs) == 1 + 2 * 6
    assert sorted(engine.runs, reverse=True) == [
        64, 32, 32, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1,
    ]  # fmt: skip
    assert [request.state for request in requests] == [DONE] * 64
    assert scheduler.idle


def test_all_guilty() -> None:
    """When all of a batch are guilty each is rejected, and the work is bounded."""
    scheduler = make_scheduler()
    group = make_group(scheduler, rungs=(1, 2, 4, 8, 16, 32, 64))
    requests = submit_all(scheduler, group, [1] * 64)
    engine = Engine(scheduler, requests)
    engine.run_all(0)

    assert {reject.request for reject in engine.rejected} == set(requests)
    assert len(engine.rejected) == 64
    assert len(engine.runs) == 127
    assert scheduler.idle


def test_requests_of_many_rows() -> None:
    """A batch is halved by requests, never within one."""
    scheduler = make_scheduler()
    requests = submit_all(scheduler, make_group(scheduler), [1, 4, 3])
    engine = Engine(scheduler, [requests[1]])
    engine.run_all(0)

    assert engine.runs == [8, 1, 7, 4, 3]
    assert [reject.request for reject in engine.rejected] == [requests[1]]


def test_fault_that_has_passed() -> None:
    """When the halves succeed, everybody is answered."""
    scheduler = make_scheduler()
    requests = submit_all(scheduler, make_group(scheduler), [1, 1, 1, 1])
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("a cosmic ray"))
    engine = Engine(scheduler)
    engine.run_all(MS)

    assert engine.runs == [2, 2]
    assert engine.rejected == []
    assert [request.state for request in requests] == [DONE] * 4


def test_single_request() -> None:
    """A request that fails alone is not tried again."""
    scheduler = make_scheduler()
    request = submit(scheduler, make_group(scheduler), 5)
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))

    assert rejects(scheduler.poll(MS)) == [(request, EngineFailure)]
    assert scheduler.poll(MS) == []


def test_no_retry() -> None:
    """With `retry=False` the whole batch is rejected at once."""
    scheduler = make_scheduler()
    requests = submit_all(scheduler, make_group(scheduler), [1, 2, 1])
    scheduler.poll(0)
    failed = EngineFailure("the device is lost")
    scheduler.complete(0, MS, run_ns=MS, error=failed, retry=False)

    assert rejects(scheduler.poll(MS)) == [(r, EngineFailure) for r in requests]
    assert scheduler.idle


def test_errors_are_distinct_objects() -> None:
    """Each caller gets an error of its own, with the same text and hint."""
    scheduler = make_scheduler()
    submit_all(scheduler, make_group(scheduler), [1, 1, 1])
    failed = EngineFailure("the device is lost")
    failed.retry_after_ms = 250
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=failed, retry=False)
    errors = [getattr(decision, "error", None) for decision in scheduler.poll(MS)]

    assert len({id(error) for error in [failed, *errors]}) == 4
    assert {str(error) for error in errors} == {"the device is lost"}
    assert {getattr(error, "retry_after_ms", None) for error in errors} == {250}
    assert {type(error) for error in errors} == {EngineFailure}


def test_cancelled_culprit() -> None:
    """A request is not held guilty for one that was cancelled while both ran."""
    scheduler = make_scheduler()
    culprit, innocent = submit_all(scheduler, make_group(scheduler), [1, 1])
    scheduler.poll(0)
    scheduler.cancel(culprit)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))
    engine = Engine(scheduler, [culprit])
    engine.run_all(MS)

    assert engine.runs == [1]
    assert engine.rejected == []
    assert innocent.state == DONE


@pytest.mark.parametrize("retry", [True, False])
def test_all_cancelled(retry: bool) -> None:
    """A failed batch that nobody waits for any more is forgotten."""
    scheduler = make_scheduler()
    requests = submit_all(scheduler, make_group(scheduler), [1, 1])
    scheduler.poll(0)
    for request in requests:
        scheduler.cancel(request)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"), retry=retry)

    assert scheduler.poll(MS) == []
    assert scheduler.idle


def test_retries_go_first() -> None:
    """What is tried again goes before what waits, in order of arrival."""
    scheduler = make_scheduler(commit_ahead=False)
    group = make_group(scheduler)
    failed = submit_all(scheduler, group, [4, 3])
    scheduler.poll(0)
    submit(scheduler, group, 8)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))

    assert runs(scheduler.poll(MS)) == [(0, failed[:1])]

    scheduler.complete(0, 2 * MS, run_ns=MS)

    assert runs(scheduler.poll(2 * MS)) == [(0, failed[1:])]

    scheduler.complete(0, 3 * MS, run_ns=MS)

    assert rows_run(scheduler.poll(3 * MS)) == [[8]]


def test_retries_on_every_slot() -> None:
    """The halves of a failed batch use all slots, and lie ready without waiting."""
    scheduler = make_scheduler(slots=2)
    group = make_group(scheduler, run_ns=5 * MS)
    failed = submit_all(scheduler, group, [4, 3])
    scheduler.poll(0)
    other = submit(scheduler, group)
    busy = runs(scheduler.poll(0))
    scheduler.complete(0, 1 * MS, run_ns=1 * MS, error=EngineFailure("NaN"))

    assert busy == [(1, [other])]
    assert runs(scheduler.poll(1 * MS)) == [(0, failed[:1]), (1, failed[1:])]


def test_failure_with_a_batch_ahead() -> None:
    """The batch that lies ready behind a failed one runs as if nothing had happened."""
    scheduler = make_scheduler()
    group = make_group(scheduler)
    failed = submit_all(scheduler, group, [4, 4])
    ahead = submit(scheduler, group, 8)
    scheduler.poll(0)
    scheduler.complete(0, MS, run_ns=MS, error=EngineFailure("NaN"))

    assert runs(scheduler.poll(MS)) == [(0, failed[:1])]
    assert scheduler.complete(0, 2 * MS, run_ns=MS).requests == [ahead]
    assert runs(scheduler.poll(2 * MS)) == [(0, failed[1:])]
