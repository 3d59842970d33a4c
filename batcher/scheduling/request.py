"""What waits and what runs: Request, Group and Batch.

Plain state and the few rules that belong to it. No clock, no input or output, no
policy: times are integer nanoseconds of the caller's monotonic clock, passed in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Final

from batcher.scheduling.cost import CostRow

# States of a request. Plain ints, because they are compared on the hot path.
NEW: Final = 0
WAITING: Final = 1
RUNNING: Final = 2
DONE: Final = 3

NEVER: Final = 1 << 62
"""An instant that never comes (nanoseconds)."""


class Request:
    """One caller's rows: the unit that is queued, and answered exactly once.

    The serving layer subclasses it with what it needs to answer (payload, call).

    Attributes:
        group: the requests it may share a batch with.
        rows: how many rows it brings (at least 1; rows, not requests, fill a batch).
        deadline_ns: instant after which nobody wants the answer (`NEVER` for none).
        expires_ns: instant until which it may wait in the queue (`NEVER` for none).
        arrival_ns: instant of `Scheduler.submit`.
        state: one of NEW, WAITING, RUNNING, DONE.
        parent: the request that this one is a part of, when it was split.
        parts: the parts of a request with more rows than a batch can hold.
        first_row: of a part, its first row within the parent.
    """

    __slots__ = (
        "arrival_ns",
        "deadline_ns",
        "expires_ns",
        "first_row",
        "group",
        "parent",
        "parts",
        "rows",
        "state",
    )

    def __init__(
        self,
        group: Group,
        rows: int,
        deadline_ns: int = NEVER,
        expires_ns: int = NEVER,
    ) -> None:
        self.group = group
        self.rows = rows
        self.deadline_ns = deadline_ns
        self.expires_ns = expires_ns
        self.arrival_ns = 0
        self.state = NEW
        self.parent: Request | None = None
        self.parts: list[Request] | None = None
        self.first_row = 0


class Group:
    """A queue of requests that may share a batch, oldest first.

    Two requests are of one group when everything but their rows agrees: the model, the
    shapes without the batch axis (or the buckets they are padded to).

    A cancelled or expired request leaves a hole in the queue, which is skipped; `rows`
    and `requests` count the living only.

    Attributes:
        key: equal for requests that may share a batch.
        rungs: batch sizes worth running, ascending; the last is the largest batch.
        max_rows: the largest rung.
        rows, requests: what waits now.
        waiting: the queue, oldest first; its head is never a hole.
        cost: measured run times of this group's batches.
    """

    __slots__ = (
        "__weakref__",
        "cost",
        "key",
        "max_rows",
        "requests",
        "rows",
        "rungs",
        "waiting",
    )

    def __init__(self, key: Hashable, rungs: tuple[int, ...]) -> None:
        if not rungs or rungs[0] < 1 or list(rungs) != sorted(set(rungs)):
            raise ValueError(f"rungs must be ascending and positive, got {rungs}")
        self.key = key
        self.rungs = rungs
        self.max_rows = rungs[-1]
        self.waiting: deque[Request] = deque()
        self.rows = 0
        self.requests = 0
        self.cost = CostRow()

    def push(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self.waiting.append(request)
        self.rows += request.rows
        self.requests += 1

    def forget(self, request: Request) -> None:
        """Counts out a request that waits no more; its place becomes a hole."""
        self.rows -= request.rows
        self.requests -= 1
        waiting = self.waiting
        while waiting and waiting[0].state != WAITING:
            waiting.popleft()
        if len(waiting) > 32 and len(waiting) > 2 * self.requests:
            self.waiting = deque(self.living())

    @property
    def full(self) -> bool:
        """Whether as much waits as a batch can hold."""
        return self.rows >= self.max_rows

    def living(self) -> Iterator[Request]:
        """What waits, oldest first."""
        return (r for r in self.waiting if r.state == WAITING)

    def take(self, max_rows: int) -> list[Request]:
        """Removes and returns the longest prefix of the queue that fits."""
        taken: list[Request] = []
        waiting = self.waiting
        room = max_rows
        while waiting:
            request = waiting[0]
            if request.state != WAITING:
                waiting.popleft()
                continue
            if request.rows > room:
                break
            waiting.popleft()
            room -= request.rows
            request.state = RUNNING
            taken.append(request)
        self.rows -= max_rows - room
        self.requests -= len(taken)
        return taken

    def rung_for(self, rows: int) -> int:
        """The smallest rung that holds `rows` (at most `max_rows`)."""
        return self.rungs[bisect_left(self.rungs, rows)]


class Batch:
    """A closed, ordered set of requests that run together.

    Attributes:
        group: the group of all its requests.
        requests: in order of arrival; row offsets follow from their rows.
        rows: the sum of their rows.
        rung: the size that is run; `rung - rows` rows are padding.
    """

    __slots__ = ("group", "requests", "rows", "rung")

    def __init__(self, group: Group, requests: list[Request], rows: int) -> None:
        self.group = group
        self.requests = requests
        self.rows = rows
        self.rung = group.rung_for(rows)
