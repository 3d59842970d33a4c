"""A load-generating process: one thread, one epoll, many calls in flight.

The loop that sends and counts lives here; the wire is `http2` and `linkset`, the
figures' meaning is `tally`. A process starts with a plan, says when its connections
are up, waits for the common start instant and sends its counts and result through a
pipe. All instants are of CLOCK_MONOTONIC, which the processes of a machine share.
"""

from __future__ import annotations

import ctypes
import gc
import select
import time
import traceback
from collections import deque
from itertools import chain, islice
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING, Final

from batcher.tuning.calls import Call, requests_of
from batcher.tuning.headers import (
    DEADLINE_EXCEEDED,
    OK,
    PENDING,
    UNAVAILABLE,
    UNPROCESSED,
)
from batcher.tuning.link import Address
from batcher.tuning.linkset import LinkSet
from batcher.tuning.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batcher.tuning.link import Channel, Link
    from batcher.tuning.plan import WorkerPlan

_TICK_NS: Final = 50_000_000
_FAST_TICK_NS: Final = 5_000_000
_START_TIMEOUT_NS: Final = 10_000_000_000
_NEVER: Final = 2**62
_PR_SET_TIMERSLACK: Final = 29


def serve(fd: int) -> None:
    """Run the plan that comes through the pipe `fd`; the whole life of a process."""
    pipe = Pipe(fd)
    try:
        plan = pipe.recv()
    except EOFError:
        return  # the parent has gone
    main(plan, pipe)


def main(plan: WorkerPlan, pipe: Pipe) -> None:
    """Run a process' share of the load."""
    # Calls make no cycles, and a collection would delay every call in flight.
    gc.disable()
    # Linux wakes a sleeper up to 50 µs late unless told that it matters (prctl(2)).
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        worker = Worker(plan, pipe)
        fault = worker.connect()
        if fault:
            pipe.send(("failed", fault))
            return
        gc.freeze()
        pipe.send(("ready", None))
        kind, start_at_ns = pipe.recv()
        if kind == "start":
            worker.run(start_at_ns)
            pipe.send(("result", worker.tally.result))
    except (EOFError, BrokenPipeError):
        return  # the parent has gone
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


class Worker:
    """The loop of one process.

    Every turn waits for sockets, handles what came and sends what became due. A call
    is handled where its bytes are: nothing is queued between receiving an answer,
    counting it and, in closed loop, sending the caller's next request.
    """

    def __init__(self, plan: WorkerPlan, pipe: Pipe) -> None:
        self.tally = Tally(plan)
        self._plan = plan
        self._pipe = pipe
        address = Address(plan.target)
        self._set = LinkSet(address, plan.connections, pipe.fileno())
        self._links = self._set.links
        self._requests = requests_of(plan.bodies, address.authority)
        self._expiring: dict[int, deque[Call]] = {
            request.deadline_ns: deque()
            for request in self._requests
            if request.deadline_ns is not None
        }
        self._special = bool(self._expiring) or plan.verify_fraction > 0
        self._issuing = False
        self._stopped = False
        self._tick_at_ns = 0
        self._start_ns = 0
        self._next_due_ns = _NEVER
        self._next_body = 0
        self._picks: Iterator[int] = iter(())
        self._arrivals: Iterator[tuple[int, int]] = iter(())
        if plan.arrivals is not None or len(plan.bodies) > 1:
            self._draw(plan)

    def connect(self) -> str:
        """Bring all connections up; return why that failed, or nothing."""
        now_ns = time.monotonic_ns()
        give_up_at_ns = now_ns + _START_TIMEOUT_NS
        while not self._set.all_up:
            self._connect_due(now_ns)
            self._turn(_FAST_TICK_NS)
            now_ns = time.monotonic_ns()
            if self._stopped:
                return "stopped"
            if now_ns > give_up_at_ns:
                faults = {link.last_fault for link in self._links if not link.up}
                return f"no connection to {self._plan.target}: {', '.join(faults)}"
        self._set.lost = 0
        return ""

    def run(self, start_at_ns: int) -> None:
        """Send the load and count, from the common start instant on."""
        tally = self.tally
        tally.begin(start_at_ns)
        time.sleep(max(0, start_at_ns - time.monotonic_ns()) / 1e9)
        self._issuing = True
        callers = self._plan.callers
        self._start_ns = start_at_ns
        self._next_due_ns, self._next_body = self._next_arrival()
        if callers:
            for index, link in enumerate(self._links):
                # Caller i has its place on link i modulo their number.
                self._call_again(link, len(range(index, callers, len(self._links))))
                self._set.flush(link.channel)
        while not self._stopped:
            now_ns = time.monotonic_ns()
            if self._expiring:
                self._expire(now_ns)
            if not callers:
                self._send_due(now_ns)
            # After sending: what is due in the window's last instant belongs to it.
            if now_ns >= self._tick_at_ns and self._tick(now_ns):
                break
            self._turn(self._wait_ns(now_ns))
        tally.result.connections_lost = self._set.lost
        tally.end(time.monotonic_ns(), interrupted=self._stopped)
        self._set.close()

    def _draw(self, plan: WorkerPlan) -> None:
        """Prepare what is random: arrivals, and the choice of bodies."""
        # Not at the top of the file: numpy takes most of a process' start.
        from batcher.tuning import arrivals

        weights = [body.weight for body in plan.bodies]
        if plan.arrivals is None:
            picks = arrivals.draw_bodies(weights, plan.seed, 2 + plan.index)
            self._picks = chain.from_iterable(chunk.tolist() for chunk in picks)
        else:
            whole = arrivals.draw(plan.arrivals, weights, plan.seed)
            self._arrivals = arrivals.share(whole, plan.index, plan.processes)

    def _wait_ns(self, now_ns: int) -> int:
        """How long the loop may wait for sockets."""
        until_ns = self._tick_at_ns
        if self._next_due_ns < until_ns:
            until_ns = self._next_due_ns
        for queue in self._expiring.values():
            if queue:
                until_ns = min(until_ns, queue[0].expires_at_ns)
        return until_ns - now_ns

    def _turn(self, wait_ns: int) -> None:
        """Wait for sockets, then handle all that came."""
        if self._next_due_ns != _NEVER:
            self._set.doze(wait_ns)
            wait_ns = 0
        channels = self._set.channels
        for fd, mask in self._set.poll(wait_ns / 1e9 if wait_ns > 0 else 0):
            channel = channels.get(fd)
            if channel is not None:
                self._handle(channel, mask)
            elif fd == self._pipe.fileno():
                self._command()

    def _handle(self, channel: Channel, mask: int) -> None:
        """Take what a channel brought, and answer it."""
        link = channel.link
        http = channel.http
        if mask != select.EPOLLOUT:
            data = channel.receive()
            now_ns = time.monotonic_ns()
            finished = http.receive(data) if data else []
            if http.news:
                finished = self._news(channel, finished, now_ns)
            if finished:
                self._finish(finished, link, now_ns)
            if link.channel is not channel:
                self._set.flush(link.channel)
                if channel.closed:
                    return
        self._set.flush(channel)

    def _news(self, channel: Channel, finished: list[Call], now_ns: int) -> list[Call]:
        """A channel has become ready, or is at its end; the calls that ended."""
        link = channel.link
        http = channel.http
        http.news = http.draining
        if link.channel is channel:
            if http.draining:
                link.replaced(now_ns)
                self._connect_due(now_ns)
            elif not link.up and http.ready:
                link.opened()
        if http.handed_back:
            http.handed_back = False
            finished = self._retried(finished, link)
        if http.draining and not http.streams:
            channel.closed = channel.closed or "the server sent it away"
        if channel.closed or http.error:
            channel.closed = channel.closed or http.error
            finished = finished + self._set.drop(channel, now_ns)
            self._tick_at_ns = min(self._tick_at_ns, now_ns + _FAST_TICK_NS)
        return finished

    def _connect_due(self, now_ns: int) -> None:
        for link, lost in self._set.connect_due(now_ns):
            self._finish(lost, link, now_ns)

    def _finish(self, calls: list[Call], link: Link, now_ns: int) -> None:
        """Count a link's calls that ended; in closed loop their callers go on."""
        if self._expiring:
            for call in calls:
                if (
                    call.code == OK
                    and call.request.deadline_ns is not None
                    and call.expires_at_ns < now_ns
                ):
                    call.fail(DEADLINE_EXCEEDED, "answered after the deadline")
        self.tally.finish(calls, now_ns)
        if self._plan.callers and self._issuing:
            self._call_again(link, len(calls))

    def _retried(self, calls: list[Call], link: Link) -> list[Call]:
        """Send those again, once, that the server has not looked at; the others.

        A client library does so too, without telling its caller (gRFC A6).
        """
        over = []
        again = []
        for call in calls:
            if call.code != UNPROCESSED:
                over.append(call)
            elif call.retried:
                call.code = UNAVAILABLE
                over.append(call)
            else:
                call.retry()
                again.append(call)
        self.tally.result.retries += len(again)
        link.submit(again)
        return over

    def _call_again(self, link: Link, callers: int) -> None:
        """Closed loop: this many callers of a link send their next request."""
        now_ns = time.monotonic_ns()
        callers, measured = self.tally.admit(now_ns, callers)
        requests = self._requests
        if len(requests) == 1:
            request = requests[0]
            calls = [
                Call(request, now_ns, link.index, measured) for _ in range(callers)
            ]
        else:
            calls = [
                Call(requests[pick], now_ns, link.index, measured)
                for pick in islice(self._picks, callers)
            ]
        if self._special:
            self._prepare(calls, now_ns)
        link.submit(calls)

    def _prepare(self, calls: list[Call], now_ns: int) -> None:
        """Give calls what only some runs need: deadlines, and room for the answer."""
        if self._expiring:
            for call in calls:
                deadline_ns = call.request.deadline_ns
                if deadline_ns is not None:
                    call.expires_at_ns = now_ns + deadline_ns
                    self._expiring[deadline_ns].append(call)
        if self._plan.verify_fraction:
            for call in calls:
                if call.measured and self.tally.samples():
                    call.payload = bytearray()

    def _next_arrival(self) -> tuple[int, int]:
        offset_ns, body = next(self._arrivals, (_NEVER, 0))
        return min(_NEVER, self._start_ns + offset_ns), body

    def _send_due(self, now_ns: int) -> None:
        """Open loop: send every request whose time has come, however late it is."""
        tally = self.tally
        batches: dict[Link, list[Call]] = {}
        while self._next_due_ns <= now_ns:
            due_ns = self._next_due_ns
            request = self._requests[self._next_body]
            self._next_due_ns, self._next_body = self._next_arrival()
            admitted, measured = tally.admit(due_ns, 1)
            if not admitted:
                continue
            if measured:
                tally.note_lag(due_ns, now_ns)
            link = self._set.next_up()
            call = Call(request, due_ns, link.index, measured)
            if tally.is_full():
                tally.overflow(call)
            else:
                batches.setdefault(link, []).append(call)
        for link, calls in batches.items():
            self._prepare(calls, now_ns)
            link.submit(calls)
            self._set.flush(link.channel)

    def _expire(self, now_ns: int) -> None:
        """Give up calls whose deadline has passed, as a client library does."""
        for queue in self._expiring.values():
            while queue and (
                queue[0].code != PENDING or queue[0].expires_at_ns <= now_ns
            ):
                call = queue.popleft()
                if call.code == PENDING:
                    link = self._links[call.link]
                    self._cancel(call)
                    self._finish([call], link, now_ns)
                    self._set.flush(link.channel)

    def _cancel(self, call: Call) -> None:
        call.fail(DEADLINE_EXCEEDED, "the deadline passed without an answer")
        for channel in self._set.channels.values():
            if channel.http.streams.get(call.stream_id) is call:
                channel.http.cancel(call)
                self._set.flush(channel)
                return

    def _tick(self, now_ns: int) -> bool:
        """What is done now and then; returns whether the run is over."""
        tally = self.tally
        complete = tally.is_complete(now_ns)
        if (complete and not tally.outstanding) or now_ns >= tally.give_up_at_ns:
            return True
        down = not self._set.all_up
        if down:
            self._connect_due(now_ns)
        tick_ns = _FAST_TICK_NS if down or complete else _TICK_NS
        self._tick_at_ns = tally.next_boundary_ns(now_ns, now_ns + tick_ns)
        counts = tally.tick(now_ns)
        if counts is not None:
            self._pipe.send(("counts", counts))
        return False

    def _command(self) -> None:
        """The parent says stop, or has gone."""
        try:
            self._pipe.recv()
        except EOFError:
            pass
        self._stopped = True
