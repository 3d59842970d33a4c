"""What holds whatever happens: random callers, engines and times against a model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from batcher.errors import (
    BatcherError,
    DeadlineExceeded,
    EngineFailure,
    QueueFull,
    QueueTimeout,
)
from batcher.scheduling import NEVER, Batch, Dispatch, Group, Reject, Request
from batcher.scheduling.request import NEW
from batcher.scheduling.slot import COMMIT_LEAD_NS

from .helpers import MS, US, make_group, make_request, make_scheduler

ANSWERED, REJECTED, CANCELLED = "answered", "rejected", "cancelled"

INSTANTS = st.sampled_from([0, 1, 100 * US, 300 * US, 1 * MS, 3 * MS, 20 * MS, NEVER])


@dataclass(eq=False)
class Call:
    """What the model knows of a request."""

    request: Request
    guilty: bool
    open_parts: int
    ends: list[str] = field(default_factory=list)  # must become exactly one

    @property
    def open(self) -> bool:
        return not self.ends


@dataclass
class Lane:
    """What the model knows of a slot."""

    batches: list[Batch] = field(default_factory=list)
    commit_at_ns: int = NEVER

    def start(self, now_ns: int) -> None:
        batch = self.batches[0]
        cost_ns = batch.group.cost.estimate_ns(batch.rung)
        long = cost_ns is not None and cost_ns >= 2 * COMMIT_LEAD_NS
        self.commit_at_ns = now_ns + (cost_ns or 0) - COMMIT_LEAD_NS if long else NEVER


class Callers(RuleBasedStateMachine):
    """Drives a scheduler, and keeps books of its own on everything that it says."""

    @initialize(
        policy=st.sampled_from(["eager", "window"]),
        max_delay_ns=st.sampled_from([0, 200 * US, 2 * MS]),
        preferred=st.sampled_from([(), (2,), (2, 4)]),
        slots=st.integers(1, 3),
        rungs=st.sampled_from([(1,), (1, 2, 4, 8), (3, 5), (4,)]),
        max_queue=st.sampled_from([3, 8, 100]),
        commit_ahead=st.booleans(),
        costs=st.lists(
            st.sampled_from([None, 100 * US, 5 * MS]), min_size=3, max_size=3
        ),
    )
    def start(
        self,
        policy: str,
        max_delay_ns: int,
        preferred: tuple[int, ...],
        slots: int,
        rungs: tuple[int, ...],
        max_queue: int,
        commit_ahead: bool,
        costs: list[int | None],
    ) -> None:
        self.scheduler = make_scheduler(
            policy,
            max_delay_ns=max_delay_ns,
            preferred_rows=preferred,
            slots=slots,
            max_queue=max_queue,
            commit_ahead=commit_ahead,
        )
        self.groups = [
            make_group(self.scheduler, key, rungs=rungs, run_ns=cost)
            for key, cost in zip("abc", costs, strict=True)
        ]
        self.max_delay_ns = max_delay_ns
        self.prefers = policy == "window" and bool(preferred)
        self.commit_ahead = commit_ahead
        self.draining = False
        self.now_ns = 0
        self.polled = False  # whether nothing has happened since the last poll
        self.calls: list[Call] = []
        self.call_of: dict[Request, Call] = {}
        self.queues: dict[Group, deque[Request]] = {g: deque() for g in self.groups}
        self.retries: list[Request] = []  # of failed batches, not dispatched again yet
        self.failed: dict[Request, BatcherError] = {}  # to be rejected by the next poll
        self.lanes = [Lane() for _ in range(slots)]

    # -- what callers do --------------------------------------------------------------

    @rule(
        group=st.integers(0, 2),
        rows=st.one_of(st.integers(1, 4), st.integers(1, 20)),
        deadline=INSTANTS,
        timeout=INSTANTS,
        guilty=st.sampled_from([False, False, False, True]),
    )
    def submit(
        self, group: int, rows: int, deadline: int, timeout: int, guilty: bool
    ) -> None:
        request = make_request(
            self.groups[group],
            rows,
            deadline_ns=min(self.now_ns + deadline, NEVER),
            expires_ns=min(self.now_ns + timeout, NEVER),
        )
        full = self.waiting() >= self.scheduler.max_queue
        try:
            self.scheduler.submit(request, self.now_ns)
        except QueueFull:
            assert full
            assert request.state == NEW
            return
        assert not full
        parts = request.parts or [request]
        call = Call(request, guilty, len(parts))
        self.calls.append(call)
        self.call_of |= dict.fromkeys(parts, call)
        self.queues[request.group].extend(parts)
        assert sum(part.rows for part in parts) == rows
        self.polled = False

    @precondition(lambda self: self.calls)
    @rule(index=st.integers(0, 10**6))
    def cancel(self, index: int) -> None:
        call = self.calls[-1 - index % len(self.calls)]
        self.scheduler.cancel(call.request)
        if call.open and call.request not in self.failed:  # else its rejection comes
            self.end(call, CANCELLED)
        self.polled = False

    @rule(really=st.sampled_from([False] * 19 + [True]))
    def abandon(self, really: bool) -> None:
        if really:
            given_up = self.scheduler.abandon()
            still_open = [call for call in self.calls if call.open]
            assert len(given_up) == len(still_open)
            assert set(given_up) == {call.request for call in still_open}
            for call in still_open:
                self.end(call, CANCELLED)
            self.failed.clear()
            self.polled = False

    # -- what time and engines do -----------------------------------------------------

    @rule(by_ns=st.sampled_from([1, 50 * US, 300 * US, 2 * MS, 10 * MS]))
    def advance(self, by_ns: int) -> None:
        self.now_ns += by_ns
        self.polled = False

    @precondition(lambda self: self.polled)
    @rule()
    def sleep(self) -> None:
        """The driver's timer: exactly to the instant that the scheduler asked for."""
        wakeup_ns = self.scheduler.next_wakeup_ns()
        if wakeup_ns < NEVER:
            self.now_ns = wakeup_ns
            self.poll()

    @precondition(lambda self: any(lane.batches for lane in self.lanes))
    @rule(pick=st.integers(0, 10**6), retry=st.sampled_from([True, True, True, False]))
    def complete(self, pick: int, retry: bool) -> None:
        busy = [i for i, lane in enumerate(self.lanes) if lane.batches]
        slot = busy[pick % len(busy)]
        lane = self.lanes[slot]
        batch = lane.batches.pop(0)
        ran = [self.call_of[part] for part in batch.requests]
        error = EngineFailure("NaN") if any(call.guilty for call in ran) else None
        completed = self.scheduler.complete(
            slot, self.now_ns, run_ns=3 * MS, error=error, retry=retry
        )
        assert completed is batch
        if lane.batches:
            lane.start(self.now_ns)
        living = [p for p in batch.requests if self.call_of[p].open]
        for part in living:
            call = self.call_of[part]
            if error is None:
                call.open_parts -= 1
                if not call.open_parts:
                    self.end(call, ANSWERED)
            elif retry and len(ran) > 1:
                self.retries.append(part)
            elif call.request not in self.failed:
                # Only who failed alone is guilty, unless nobody may be tried again.
                assert call.guilty or not retry
                self.forget(call)
                self.failed[call.request] = error
        self.polled = False

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def drain(self, really: bool) -> None:
        if really:
            self.scheduler.drain()
            self.draining = True
            self.polled = False

    # -- what the scheduler says ------------------------------------------------------

    @rule()
    def poll(self) -> None:
        decisions = self.scheduler.poll(self.now_ns)
        for decision in decisions:
            if isinstance(decision, Reject):
                self.rejected(decision)
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self.dispatched(decision)
        assert not self.failed
        assert self.scheduler.poll(self.now_ns) == []
        assert self.scheduler.next_wakeup_ns() > self.now_ns
        for queue in self.queues.values():
            for part in queue:
                assert min(part.deadline_ns, part.expires_ns) > self.now_ns
        self.nothing_is_held_without_reason()
        self.polled = True

    def rejected(self, decision: Reject) -> None:
        request, error = decision.request, decision.error
        [call] = [c for c in self.calls if c.request is request]
        waits = any(self.call_of[p] is call for p in self.queues[request.group])
        if request in self.failed:
            failed = self.failed.pop(request)
            assert type(error) is type(failed)
            assert error is not failed
        elif isinstance(error, QueueTimeout):
            assert waits
            assert request.expires_ns <= self.now_ns < request.deadline_ns
        else:
            assert isinstance(error, DeadlineExceeded)
            assert waits or any(self.call_of[p] is call for p in self.retries)
            assert request.deadline_ns <= self.now_ns
        self.end(call, REJECTED)

    def dispatched(self, decision: Dispatch) -> None:
        batch, lane = decision.batch, self.lanes[decision.slot]
        group = batch.group
        assert batch.requests
        assert batch.rows == sum(part.rows for part in batch.requests)
        assert batch.rows <= batch.rung <= group.max_rows
        assert batch.rung == min(r for r in group.rungs if r >= batch.rows)
        for part in batch.requests:
            assert part.group is group
            assert self.call_of[part].open
            assert part.deadline_ns > self.now_ns
        if batch.requests[0] in self.retries:
            for part in batch.requests:
                self.retries.remove(part)
        else:
            self.its_turn(batch, lane)
            for part in batch.requests:
                assert part is self.queues[group].popleft()  # in order of arrival
                assert part.expires_ns > self.now_ns
        assert self.commit_ahead or not lane.batches
        lane.batches.append(batch)
        assert len(lane.batches) <= 2
        if len(lane.batches) == 1:
            lane.start(self.now_ns)

    def its_turn(self, batch: Batch, lane: Lane) -> None:
        """The group with the oldest request goes first, of those that may go."""
        if not self.prefers and not self.draining:
            may_go = [g for g in self.groups if self.queues[g] and self.may_go(g)]
            if may_go:
                oldest_ns = min(self.queues[g][0].arrival_ns for g in may_go)
                assert batch.requests[0].arrival_ns == oldest_ns
            else:  # it leaves because its time runs out, and first of all
                assert self.expiry_ns(batch.group) == min(
                    map(self.expiry_ns, self.groups)
                )
                assert self.leave_ns(batch.group) <= self.now_ns
        if lane.batches and self.now_ns < lane.commit_at_ns:
            assert self.full(batch.group)  # only then is it closed so early

    def nothing_is_held_without_reason(self) -> None:
        """While a slot is free only the policy's delay holds what waits."""
        if all(lane.batches for lane in self.lanes):
            return
        assert not self.retries
        waiting = [group for group in self.groups if self.queues[group]]
        assert not (waiting and self.draining)
        assert not any(self.may_go(group) for group in waiting)
        if waiting:
            hurried = min(waiting, key=self.expiry_ns)
            wakeup_ns = self.scheduler.next_wakeup_ns()
            assert wakeup_ns <= self.leave_ns(hurried)
            assert wakeup_ns <= min(
                self.queues[group][0].arrival_ns + self.max_delay_ns
                for group in waiting
            )

    # -- the model --------------------------------------------------------------------

    def waiting(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def full(self, group: Group) -> bool:
        return sum(part.rows for part in self.queues[group]) >= group.max_rows

    def may_go(self, group: Group) -> bool:
        age_ns = self.now_ns - self.queues[group][0].arrival_ns
        return self.full(group) or age_ns >= self.max_delay_ns

    def expiry_ns(self, group: Group) -> int:
        """When the first of the group's waiting requests expires."""
        return min(
            (min(p.deadline_ns, p.expires_ns) for p in self.queues[group]),
            default=NEVER,
        )

    def leave_ns(self, group: Group) -> int:
        """When a batch of the group must leave, so that nothing of it expires."""
        rows = min(sum(part.rows for part in self.queues[group]), group.max_rows)
        cost_ns = group.cost.estimate_ns(group.rung_for(rows)) or 0
        expiry_ns = self.expiry_ns(group)
        return expiry_ns if expiry_ns == NEVER else expiry_ns - cost_ns - COMMIT_LEAD_NS

    def forget(self, call: Call) -> None:
        """Takes a call out of queue and retries; what runs is only marked."""
        queue = self.queues[call.request.group]
        for part in [p for p in queue if self.call_of[p] is call]:
            queue.remove(part)
        self.retries = [p for p in self.retries if self.call_of[p] is not call]

    def end(self, call: Call, how: str) -> None:
        call.ends.append(how)
        self.forget(call)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.waiting == self.waiting()
        for group, queue in self.queues.items():
            assert group.requests == len(queue)
            assert group.rows == sum(part.rows for part in queue)
            assert list(group.living()) == list(queue)
        if self.scheduler.idle:
            assert all(not call.open for call in self.calls)
        assert all(len(call.ends) <= 1 for call in self.calls)

    def teardown(self) -> None:
        """Left alone, the scheduler brings everything to an end by its own wake-ups."""
        if not hasattr(self, "scheduler"):
            return
        self.poll()
        steps = 10 + 10 * len(self.call_of)
        while not self.scheduler.idle:
            steps -= 1
            assert steps > 0, "wake-ups without end"
            if any(lane.batches for lane in self.lanes):
                self.now_ns += 3 * MS
                self.complete(0, True)
            else:
                self.now_ns = self.scheduler.next_wakeup_ns()
                assert self.now_ns < NEVER
            self.poll()

        assert [len(call.ends) for call in self.calls] == [1] * len(self.calls)
        assert self.waiting() == 0
        assert self.scheduler.waiting == 0
        assert not self.retries
        assert self.scheduler.next_wakeup_ns() == NEVER


TestCallers = Callers.TestCase
TestCallers.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
