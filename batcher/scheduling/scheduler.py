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
from collections import deque
from collections.abc import Hashable
from weakref import WeakValueDictionary

from batcher.errors import (
    BatcherError,
    DeadlineExceeded,
    QueueFull,
    QueueTimeout,
)
from batcher.scheduling.decisions import Decision, Dispatch, Reject
from batcher.scheduling.expiry import Expiries
from batcher.scheduling.policy import Choice, Hold, Policy
from batcher.scheduling.request import (
    DONE,
    NEVER,
    WAITING,
    Batch,
    Group,
    Request,
)
from batcher.scheduling.slot import COMMIT_LEAD_NS, Slot


class Scheduler:
    """Queues, slots and the policy of one model.

    Args:
        policy: decides when a batch closes.
        slots: how many batches run at the same time.
        max_queue: the most requests that wait; one more is refused with `QueueFull`
            (the parts of a split one count each, and the last one in may exceed it).
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
        self._slots = [Slot(i) for i in range(slots)]
        self._idle: deque[Slot] = deque(self._slots)
        self._groups: WeakValueDictionary[Hashable, Group] = WeakValueDictionary()
        self._active: dict[Group, None] = {}  # with something waiting, an ordered set
        self._retries: deque[Batch] = deque()
        self._rejects: list[Reject] = []
        self._expiries = Expiries()
        self._wakeup_ns = NEVER

    # -- what happens -------------------------------------------------------------

    def group(self, key: Hashable, rungs: tuple[int, ...]) -> Group:
        """The group of `key`, made when it does not exist. It lives while in use."""
        group = self._groups.get(key)
        if group is None or group.rungs != rungs:
            group = self._groups[key] = Group(key, rungs)
        return group

    def use_rungs(self, key: Hashable, rungs: tuple[int, ...]) -> None:
        """Lets a group, if it is in use, run other batch sizes; the largest stays."""
        group = self._groups.get(key)
        if group is not None and rungs[-1] == group.max_rows:
            group.rungs = rungs

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
            self._expiries.push(request, self.waiting)

    def cancel(self, request: Request) -> None:
        """Forgets a request that nobody waits for any more.

        What waits leaves the queue; a run under way goes on, and its rows are dropped.
        Without effect on a request that is done.
        """
        if request.state != DONE:
            self._leave_queue(request)

    def complete(
        self,
        slot: int,
        now_ns: int,
        run_ns: int,
        error: BatcherError | None = None,
        *,
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

        Of a batch that succeeded the caller answers every request but those that it
        cancelled, or that a `Reject` named; a split one once all its parts have run.
        """
        lane = self._slots[slot]
        batch = lane.running
        if batch is None:
            raise ValueError(f"slot {slot} runs nothing")
        lane.running = None
        if lane.ahead is not None:
            lane.start(lane.ahead, now_ns)
            lane.ahead = None
        else:
            self._idle.append(lane)
        if error is None:
            batch.group.cost.record(batch.rung, run_ns)
            for request in batch.requests:
                request.state = DONE
                if request.parent is not None:
                    _finish(request.parent)
        else:
            self._failed(batch, error, retry)
        return batch

    def abandon(self) -> list[Request]:
        """Gives up every request that has no answer yet, and returns them, each once.

        They waited, ran, or were in a decision that `poll` did not get to return. What
        runs goes on; its slot must still be completed.
        """
        batches = list(self._retries)
        for slot in self._slots:
            batches += [b for b in (slot.running, slot.ahead) if b is not None]
        open_ = [r for group in self._active for r in group.living()]
        open_ += [r for batch in batches for r in batch.requests if r.state != DONE]
        given_up = list(dict.fromkeys(r.parent or r for r in open_))
        for request in given_up:
            self.cancel(request)
        given_up += [reject.request for reject in self._rejects]
        self._retries.clear()
        self._rejects.clear()
        return given_up

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
        """What is to be done at this instant, in order; rejects come first."""
        if self._expiries.soonest_ns <= now_ns:
            self._expire(now_ns)
        decisions: list[Decision] = []
        self._wakeup_ns = NEVER
        while self._active or self._retries:
            dispatch = self._next_dispatch(now_ns)
            if dispatch is None:
                break
            decisions.append(dispatch)
        if not self.waiting:
            self._expiries.clear()  # all of requests that left the queue in time
        if self._rejects:
            decisions[:0] = self._rejects
            self._rejects.clear()
        return decisions

    def next_wakeup_ns(self) -> int:
        """When `poll` must be called again though nothing happens (`NEVER`: not)."""
        return min(self._wakeup_ns, self._expiries.soonest_ns)

    # -- inside -------------------------------------------------------------------

    def _next_dispatch(self, now_ns: int) -> Dispatch | None:
        """The next batch and its slot, if it is time for one."""
        slot = self._available_slot(now_ns)
        if slot is None:
            return None
        batch = self._next_retry(now_ns) or self._close_batch(slot, now_ns)
        if batch is None:
            return None
        if slot.running is None:
            self._idle.popleft()
            slot.start(batch, now_ns)
        else:
            slot.ahead = batch
        return Dispatch(slot.index, batch)

    def _available_slot(self, now_ns: int) -> Slot | None:
        """The slot that the next batch goes to, None when each has a batch ahead."""
        if self._idle:
            return self._idle[0]
        if not self.commit_ahead:
            return None
        slots = [slot for slot in self._slots if slot.ahead is None]
        if not slots:
            return None
        slot = min(slots, key=lambda s: s.commit_at_ns)
        if slot.commit_at_ns <= now_ns:
            return slot
        return min(slots, key=lambda s: s.free_at_ns)

    def _close_batch(self, slot: Slot, now_ns: int) -> Batch | None:
        """Takes the next batch out of the queues, or notes when to ask again."""
        if not self._active:
            return None
        # Before the slot is about to be free only a full batch closes: it cannot become
        # better by waiting. And only in its turn, or else a group that is always full
        # would leave no slot to the others.
        early = slot.running is not None and now_ns < slot.commit_at_ns
        if early:
            self._wakeup_ns = min(s.commit_at_ns for s in self._slots if not s.ahead)
            if not any(g.rows >= g.max_rows for g in self._active):
                return None
            # What lies ready on a slot can expire no more: not with time running out.
            if self._expiries.soonest_ns < slot.free_at_ns < NEVER:
                return None
        choice = self.policy.choose(self._active, now_ns)
        if isinstance(choice, Hold):
            must = self._must_leave(choice.until_ns, now_ns)
            if must is None:
                return None
            choice = must
        group = choice.group
        if early and not group.full:
            return None
        waiting_rows = group.rows
        requests = group.take(choice.max_rows)
        self.waiting -= len(requests)
        if not group.requests:
            del self._active[group]
        return Batch(group, requests, waiting_rows - group.rows)

    def _must_leave(self, until_ns: int, now_ns: int) -> Choice | None:
        """What leaves although the policy would wait until `until_ns`, if anything.

        No slot idles while a request's time runs out: it leaves in time to be run.
        """
        if self._draining:
            oldest = min(self._active, key=lambda g: g.waiting[0].arrival_ns)
            return Choice(oldest, oldest.max_rows)
        request = self._expiries.first()
        if request is not None:
            group = request.group
            rung = group.rung_for(min(group.rows, group.max_rows))
            run_ns = group.cost.estimate_ns(rung) or 0
            leave_ns = self._expiries.soonest_ns - run_ns - COMMIT_LEAD_NS
            if leave_ns <= now_ns:
                return Choice(group, group.max_rows)
            until_ns = min(until_ns, leave_ns)
        self._wakeup_ns = until_ns
        return None

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
        group = request.group
        for part in request.parts or (request,):
            waits = part.state == WAITING
            part.state = DONE
            if waits:
                group.forget(part)
                self.waiting -= 1
        request.state = DONE
        request.parts = None  # parts hold their parent: no cycle must keep the payload
        if not group.requests:
            self._active.pop(group, None)

    def _reject(self, request: Request, error: BatcherError) -> None:
        """Gives up a request; for a part, the whole request it belongs to."""
        whole = request.parent or request
        self._leave_queue(whole)
        self._rejects.append(Reject(whole, error))

    def _failed(self, batch: Batch, error: BatcherError, retry: bool) -> None:
        living = [r for r in batch.requests if r.state != DONE]
        # The guilty one may have been cancelled meanwhile: what counts is what ran.
        if retry and len(batch.requests) > 1:
            half = len(living) // 2
            halves = (living[:half], living[half:])
            self._retries.extend(_batch(part) for part in halves if part)
            return
        for request in living:
            # Each caller gets an exception of its own, so that tracebacks do not grow.
            self._reject(request, copy.copy(error))

    def _expire(self, now_ns: int) -> None:
        while (request := self._expiries.pop(now_ns)) is not None:
            waited_ms = (now_ns - request.arrival_ns) / 1e6
            if request.deadline_ns <= now_ns:
                text = f"the deadline passed after {waited_ms:.1f} ms in the queue"
                self._reject(request, DeadlineExceeded(text))
            else:
                text = f"request timeout expired after {waited_ms:.1f} ms in the queue"
                self._reject(request, QueueTimeout(text))


def _finish(parent: Request) -> None:
    """Marks a split request with its last part."""
    # From the end: parts finish in about their order, so this stops at once.
    if all(part.state == DONE for part in reversed(parent.parts or ())):
        parent.state = DONE


def _batch(requests: list[Request]) -> Batch:
    return Batch(requests[0].group, requests, sum(r.rows for r in requests))
