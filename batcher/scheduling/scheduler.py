"""The scheduler: a pure state machine from requests and completions to decisions.

The driver calls `submit`, `cancel` and `complete` as things happen, then `poll(now)`,
carries out the decisions, and calls `poll` again no later than `next_wakeup_ns()`.
The daemon and the simulator drive the same object. Rules:

* Every request submitted is in exactly one batch that is dispatched, or in exactly one
  `Reject`, or was cancelled. (A failed batch is dispatched again in halves.)
* Requests of a group leave in the order of their arrival.
* Nothing past its deadline, or its time in the queue, is dispatched.
* `poll` twice at one instant decides nothing the second time, and no wake-up lies in
  the past after `poll`.

Nothing here reads a clock, waits, logs or calls back.
"""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Final
from weakref import WeakValueDictionary

from batcher.errors import (
    BatcherError,
    DeadlineExceeded,
    QueueFull,
    QueueTimeout,
)
from batcher.scheduling.decisions import Decision, Dispatch, Reject
from batcher.scheduling.policy import Choice, Hold, Policy
from batcher.scheduling.request import (
    DONE,
    NEVER,
    RUNNING,
    WAITING,
    Batch,
    Group,
    Request,
)

COMMIT_LEAD_NS: Final = 300_000
"""How long before a slot is free its next batch closes, so that its inputs lie ready.

Host work between two batches is a bubble: 0.3 ms per batch costs 8 % of goodput on one
engine (scheduling notes, "commit-ahead").
"""


class _Slot:
    """What the scheduler knows of one slot: the batch it runs and the one behind it."""

    __slots__ = ("ahead", "free_at_ns", "index", "running")

    def __init__(self, index: int) -> None:
        self.index = index
        self.running: Batch | None = None
        self.ahead: Batch | None = None
        self.free_at_ns = NEVER  # predicted; NEVER when nothing is known

    def start(self, batch: Batch, now_ns: int) -> None:
        self.running = batch
        cost_ns = batch.group.cost.estimate_ns(batch.rung)
        # A run shorter than twice the lead is not worth closing a batch ahead for.
        short = cost_ns is None or cost_ns < 2 * COMMIT_LEAD_NS
        self.free_at_ns = NEVER if short else now_ns + (cost_ns or 0)


class Scheduler:
    """Queues, slots and the policy of one model.

    Args:
        policy: decides when a batch closes.
        slots: how many batches run at the same time.
        max_queue: the most requests that wait; one more is refused with `QueueFull`.
        commit_ahead: whether a slot takes its next batch before the running one ends
            (the engine side must be able to hold two).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        max_queue: int,
        commit_ahead: bool = True,
    ) -> None:
        self.policy = policy
        self.max_queue = max_queue
        self.commit_ahead = commit_ahead
        self.waiting = 0  # requests in all queues; a split one counts once per part
        self._draining = False
        self._slots = [_Slot(i) for i in range(slots)]
        self._idle: deque[_Slot] = deque(self._slots)
        self._groups: WeakValueDictionary[Hashable, Group] = WeakValueDictionary()
        self._active: dict[Group, None] = {}  # with something waiting, an ordered set
        self._retries: deque[Batch] = deque()
        self._rejects: list[Reject] = []
        self._expiries: list[tuple[int, int, Request]] = []  # heap
        self._expiry_count = 0  # ties in the heap, and a bound on its stale entries
        self._wakeup_ns = NEVER

    # -- what happens -------------------------------------------------------------

    def group(self, key: Hashable, rungs: tuple[int, ...]) -> Group:
        """The group of `key`, made when it does not exist. It lives while in use."""
        group = self._groups.get(key)
        if group is None or group.rungs != rungs:
            group = self._groups[key] = Group(key, rungs)
        return group

    def submit(self, request: Request, now_ns: int) -> None:
        """Queues a request; the next `poll` may dispatch it.

        A request with more rows than a batch can hold is split into parts, which are
        queued and dispatched in its place.

        Raises:
            QueueFull: `max_queue` requests wait already; the request stays NEW.
        """
        group = request.group
        if self.waiting >= self.max_queue:
            raise QueueFull(
                f"the queue is full ({self.max_queue} requests wait); try again later"
            )
        request.arrival_ns = now_ns
        request.state = WAITING
        if not group.requests:
            self._active[group] = None
        if request.rows <= group.max_rows:
            group.push(request)
            self.waiting += 1
        else:
            self._split(request)
        if request.deadline_ns != NEVER or request.expires_ns != NEVER:
            expiry_ns = min(request.deadline_ns, request.expires_ns)
            self._expiry_count += 1
            entry = (expiry_ns, self._expiry_count, request)
            heapq.heappush(self._expiries, entry)
            if len(self._expiries) > 64 + 2 * self.waiting:
                self._compact_expiries()

    def cancel(self, request: Request) -> None:
        """Forgets a request that nobody waits for any more.

        What waits leaves the queue; a run under way goes on, and its rows are dropped.
        Without effect on a request that is done.
        """
        if request.state != DONE:
            self._leave_queue(request)
            request.state = DONE

    def complete(
        self,
        slot: int,
        now_ns: int,
        *,
        run_ns: int,
        error: BatcherError | None = None,
        retry: bool = True,
    ) -> Batch:
        """Takes note that the batch running on `slot` has ended, and returns it.

        Args:
            slot: index of the slot.
            now_ns: this instant.
            run_ns: how long the engine ran it (feeds the cost table when it succeeded).
            error: why it failed, None for success.
            retry: whether a failed batch of several requests is tried again in halves
                until the guilty request is alone. The requests of a batch that is not
                tried again come back as `Reject` from the next `poll`.

        Of a batch that succeeded the caller answers every request that is not DONE.
        """
        lane = self._slots[slot]
        batch = lane.running
        if batch is None:
            raise ValueError(f"slot {slot} runs nothing")
        lane.running = None
        lane.free_at_ns = NEVER
        if lane.ahead is not None:
            lane.start(lane.ahead, now_ns)
            lane.ahead = None
        else:
            self._idle.append(lane)
        if error is None:
            batch.group.cost.record(batch.rung, run_ns)
            for request in batch.requests:
                if request.state == RUNNING:
                    self._finish(request)
        else:
            self._failed(batch, error, retry)
        return batch

    def abandon(self) -> list[Request]:
        """Empties the queues; returns what waited, oldest first within a group."""
        waited = [r for group in self._active for r in group.living()]
        waited += [r for batch in self._retries for r in batch.requests]
        for request in waited:
            self.cancel(request)
        self._retries.clear()
        return waited

    def drain(self) -> None:
        """From now on no batch waits to become fuller."""
        self._draining = True

    @property
    def idle(self) -> bool:
        """True when nothing waits and nothing runs."""
        return (
            not self.waiting
            and not self._retries
            and not self._rejects
            and len(self._idle) == len(self._slots)
        )

    # -- what to do ---------------------------------------------------------------

    def poll(self, now_ns: int) -> list[Decision]:
        """Everything that is to be done at this instant, in order."""
        decisions: list[Decision] = []
        if self._expiries and self._expiries[0][0] <= now_ns:
            self._expire(now_ns)
        if self._rejects:
            decisions.extend(self._rejects)
            self._rejects.clear()
        self._wakeup_ns = NEVER
        while self._active or self._retries:
            slot = self._available_slot(now_ns)
            if slot is None:
                break
            batch = self._next_batch(slot, now_ns)
            if batch is None:
                break
            if slot.running is None:
                self._idle.popleft()
                slot.start(batch, now_ns)
            else:
                slot.ahead = batch
            decisions.append(Dispatch(slot.index, batch))
        if self._rejects:  # of retries that came too late
            decisions.extend(self._rejects)
            self._rejects.clear()
        return decisions

    def next_wakeup_ns(self) -> int:
        """When `poll` must be called again though nothing happens (`NEVER`: not)."""
        if self._expiries and self._expiries[0][0] < self._wakeup_ns:
            return self._expiries[0][0]
        return self._wakeup_ns

    # -- inside -------------------------------------------------------------------

    def _available_slot(self, now_ns: int) -> _Slot | None:
        """The slot that the next batch goes to, if one can take it now."""
        if self._idle:
            return self._idle[0]
        if not self.commit_ahead:
            return None
        free = [slot for slot in self._slots if slot.ahead is None]
        if not free:
            return None
        slot = min(free, key=lambda s: s.free_at_ns)
        if self._retries or self._about_to_be_free(slot, now_ns):
            return slot
        # A full batch cannot become better by waiting: it may lie ready early.
        if any(group.full for group in self._active):
            return slot
        if slot.free_at_ns != NEVER:
            commit_ns = slot.free_at_ns - COMMIT_LEAD_NS
            self._wakeup_ns = min(self._wakeup_ns, commit_ns)
        return None

    def _about_to_be_free(self, slot: _Slot, now_ns: int) -> bool:
        return slot.running is None or now_ns >= slot.free_at_ns - COMMIT_LEAD_NS

    def _next_batch(self, slot: _Slot, now_ns: int) -> Batch | None:
        """Closes the next batch, or notes when to ask the policy again."""
        batch = self._next_retry(now_ns)
        if batch is not None or not self._active:
            return batch
        groups: Iterable[Group] = self._active
        if not self._about_to_be_free(slot, now_ns):
            groups = [group for group in groups if group.full]
            if not groups:
                return None
        choice = self.policy.choose(groups, now_ns)
        if isinstance(choice, Hold):
            if not self._draining:
                self._wakeup_ns = min(self._wakeup_ns, choice.until_ns)
                return None
            group = min(groups, key=Group.oldest_arrival_ns)
            choice = Choice(group, group.max_rows)
        group = choice.group
        requests = group.take(choice.max_rows)
        self.waiting -= len(requests)
        if not group.requests:
            self._deactivate(group)
        return _batch(requests)

    def _next_retry(self, now_ns: int) -> Batch | None:
        """The next half of a failed batch; what has passed its deadline goes."""
        while self._retries:
            living: list[Request] = []
            for request in self._retries.popleft().requests:
                if request.state != DONE and request.deadline_ns <= now_ns:
                    self._reject(request, DeadlineExceeded("the deadline passed"))
                elif request.state != DONE:
                    living.append(request)
            if living:
                return _batch(living)
        return None

    def _split(self, request: Request) -> None:
        group = request.group
        request.parts = []
        for first_row in range(0, request.rows, group.max_rows):
            part = copy.copy(request)
            part.parts = None
            part.parent = request
            part.first_row = first_row
            part.rows = min(group.max_rows, request.rows - first_row)
            request.parts.append(part)
            group.push(part)
            self.waiting += 1

    def _leave_queue(self, request: Request) -> None:
        """Takes a request, or what is left of its parts, out of queue and batches."""
        for part in request.parts or (request,):
            if part.state == WAITING:
                part.group.forget(part)
                self.waiting -= 1
            part.state = DONE
        if not request.group.requests:
            self._deactivate(request.group)

    def _deactivate(self, group: Group) -> None:
        group.waiting.clear()
        self._active.pop(group, None)

    def _finish(self, request: Request) -> None:
        """Marks a request or part whose rows are there; a parent with its last part."""
        request.state = DONE
        parent = request.parent
        if parent is not None and all(p.state == DONE for p in parent.parts or ()):
            parent.state = DONE

    def _reject(self, request: Request, error: BatcherError) -> None:
        """Gives up a request; for a part, the whole request it belongs to."""
        whole = request.parent or request
        if whole.state != DONE:
            self._leave_queue(whole)
            whole.state = DONE
            self._rejects.append(Reject(whole, error))

    def _failed(self, batch: Batch, error: BatcherError, retry: bool) -> None:
        living = [r for r in batch.requests if r.state != DONE]
        if len(living) > 1 and retry:
            half = len(living) // 2
            self._retries.append(_batch(living[:half]))
            self._retries.append(_batch(living[half:]))
            return
        for request in living:
            # Each caller gets an exception of its own, so that tracebacks do not grow.
            self._reject(request, copy.copy(error))

    def _expire(self, now_ns: int) -> None:
        heap = self._expiries
        while heap and heap[0][0] <= now_ns:
            request = heapq.heappop(heap)[2]
            if not _waits(request):
                continue
            waited_ms = (now_ns - request.arrival_ns) / 1e6
            if request.deadline_ns <= now_ns:
                text = f"the deadline passed after {waited_ms:.1f} ms in the queue"
                self._reject(request, DeadlineExceeded(text))
            else:
                text = f"request timeout expired after {waited_ms:.1f} ms in the queue"
                self._reject(request, QueueTimeout(text))

    def _compact_expiries(self) -> None:
        self._expiries = [e for e in self._expiries if _waits(e[2])]
        heapq.heapify(self._expiries)


def _waits(request: Request) -> bool:
    """Whether any row of the request is still in a queue."""
    if request.parts is None:
        return request.state == WAITING
    return any(part.state == WAITING for part in request.parts)


def _batch(requests: list[Request]) -> Batch:
    return Batch(requests[0].group, requests, sum(r.rows for r in requests))
