"""Builders for the scheduler's tests, and what its decisions say in short.

All times are literal nanoseconds on a clock that only the tests know; it starts at 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batcher.errors import BatcherError, EngineFailure
from batcher.scheduling import (
    NEVER,
    POLICIES,
    Batch,
    Decision,
    Dispatch,
    Group,
    PolicyOptions,
    Reject,
    Request,
    Scheduler,
)

US = 1_000
MS = 1_000_000

RUNGS = (1, 2, 4, 8)


class PlainRequest(Request):
    """A request that can be read in a failing assert, and weakly referenced."""

    def __repr__(self) -> str:
        return f"<{self.rows} rows of {self.arrival_ns} ns>"


def make_request(
    group: Group, rows: int = 1, *, deadline_ns: int = NEVER, expires_ns: int = NEVER
) -> Request:
    """A request that was not submitted yet."""
    return PlainRequest(group, rows, deadline_ns, expires_ns)


def make_scheduler(
    policy: str = "eager",
    *,
    max_delay_ns: int = 0,
    preferred_rows: tuple[int, ...] = (),
    slots: int = 1,
    max_queue: int = 1000,
    commit_ahead: bool = True,
) -> Scheduler:
    """A scheduler with one of the shipped policies."""
    options = PolicyOptions(max_delay_ns=max_delay_ns, preferred_rows=preferred_rows)
    return Scheduler(
        POLICIES[policy](options),
        slots=slots,
        max_queue=max_queue,
        commit_ahead=commit_ahead,
    )


def make_group(
    scheduler: Scheduler,
    key: str = "a",
    *,
    rungs: tuple[int, ...] = RUNGS,
    run_ns: int | None = None,
) -> Group:
    """A group whose every rung takes `run_ns` (None: nothing was measured yet)."""
    group = scheduler.group(key, rungs)
    if run_ns is not None:
        for rung in rungs:
            group.cost.record(rung, run_ns)
    return group


def submit(
    scheduler: Scheduler,
    group: Group,
    rows: int = 1,
    *,
    at_ns: int = 0,
    deadline_ns: int = NEVER,
    expires_ns: int = NEVER,
) -> Request:
    """Makes a request and submits it."""
    request = make_request(group, rows, deadline_ns=deadline_ns, expires_ns=expires_ns)
    scheduler.submit(request, at_ns)
    return request


def submit_all(
    scheduler: Scheduler, group: Group, rows: Iterable[int], *, at_ns: int = 0
) -> list[Request]:
    """Submits one request for each number of rows."""
    return [submit(scheduler, group, count, at_ns=at_ns) for count in rows]


def occupy(
    scheduler: Scheduler, group: Group, *, slots: int = 1, at_ns: int = 0
) -> list[Request]:
    """Gives each of the slots one full batch to run, and returns their requests."""
    full = submit_all(scheduler, group, [group.max_rows] * slots, at_ns=at_ns)

    assert runs(scheduler.poll(at_ns)) == [(i, [full[i]]) for i in range(slots)]
    return full


def runs(decisions: Sequence[Decision]) -> list[tuple[int, list[Request]]]:
    """Slot and requests of every dispatch; there must be nothing else."""
    assert all(isinstance(decision, Dispatch) for decision in decisions)
    return [(d.slot, d.batch.requests) for d in decisions if isinstance(d, Dispatch)]


def rows_run(decisions: Sequence[Decision]) -> list[list[int]]:
    """Rows of the requests of every dispatch; there must be nothing else."""
    return [[request.rows for request in requests] for _, requests in runs(decisions)]


def rejects(decisions: Sequence[Decision]) -> list[tuple[Request, type[BatcherError]]]:
    """Request and error class of every reject; there must be nothing else."""
    assert all(isinstance(decision, Reject) for decision in decisions)
    return [(d.request, type(d.error)) for d in decisions if isinstance(d, Reject)]


def batches(decisions: Sequence[Decision]) -> list[Batch]:
    """The batch of every dispatch; there must be nothing else."""
    assert all(isinstance(decision, Dispatch) for decision in decisions)
    return [d.batch for d in decisions if isinstance(d, Dispatch)]


class Engine:
    """Carries out decisions on slot 0: a batch with a guilty request fails.

    Attributes:
        runs: rows of every batch that was run, in order.
        rejected: what was rejected, in order.
    """

    def __init__(self, scheduler: Scheduler, guilty: Iterable[Request] = ()) -> None:
        self.scheduler = scheduler
        self.guilty = set(guilty)
        self.runs: list[int] = []
        self.rejected: list[Reject] = []

    def run_all(self, now_ns: int, *, retry: bool = True) -> None:
        """Polls and runs until nothing is left."""
        queue: list[Batch] = []
        while True:
            for decision in self.scheduler.poll(now_ns):
                if isinstance(decision, Dispatch):
                    queue.append(decision.batch)
                else:
                    self.rejected.append(decision)
            if not queue:
                return
            batch = queue.pop(0)
            self.runs.append(batch.rows)
            guilty = not self.guilty.isdisjoint(batch.requests)
            error = EngineFailure("NaN in row 3") if guilty else None
            self.scheduler.complete(0, now_ns, run_ns=MS, error=error, retry=retry)
