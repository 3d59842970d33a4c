"""When requests that wait expire: at a deadline, or at the end of their patience."""

from __future__ import annotations

import heapq
from typing import Final

from batcher.scheduling.request import NEVER, WAITING, Request

_FEW: Final = 64  # entries that are not worth thinning out


class Expiries:
    """The instants at which waiting requests expire, soonest first.

    A request that leaves its queue in time stays as a stale entry, and is skipped.

    Attributes:
        soonest_ns: no request expires before (`NEVER` when none is known). The entry
            may be stale; `first` looks.
    """

    __slots__ = ("_heap", "_pushed", "soonest_ns")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._pushed = 0  # breaks ties
        self.soonest_ns = NEVER

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request, waiting: int) -> None:
        """Takes in a request that may expire.

        Args:
            request: it waits.
            waiting: how many wait in all (with parts); bounds the stale entries.
        """
        expiry_ns = min(request.deadline_ns, request.expires_ns)
        self._pushed += 1
        heapq.heappush(self._heap, (expiry_ns, self._pushed, request))
        if len(self._heap) > _FEW + 2 * waiting:
            self._heap = [entry for entry in self._heap if _waits(entry[2])]
            heapq.heapify(self._heap)
        self._note()

    def first(self) -> Request | None:
        """The waiting request that expires first, if any."""
        heap = self._heap
        while heap and not _waits(heap[0][2]):
            heapq.heappop(heap)
        self._note()
        return heap[0][2] if heap else None

    def pop(self, now_ns: int) -> Request | None:
        """Takes out a waiting request that has expired, until there is none."""
        request = self.first()
        if request is None or self.soonest_ns > now_ns:
            return None
        heapq.heappop(self._heap)
        self._note()
        return request

    def clear(self) -> None:
        """Forgets everything: nothing waits."""
        self._heap.clear()
        self.soonest_ns = NEVER

    def _note(self) -> None:
        self.soonest_ns = self._heap[0][0] if self._heap else NEVER


def _waits(request: Request) -> bool:
    """Whether any row of the request is still in a queue."""
    # Parts leave in their order: the last one waits for longest.
    return (request.parts[-1] if request.parts else request).state == WAITING
