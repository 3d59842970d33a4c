"""A load-generating process: one thread, one epoll, many calls in flight.

The loop that sends and counts lives here; the wire is `http2` and `link`, the figures'
meaning is `plan.WorkerResult`. A process starts with a plan, says when its connections
are up, waits for the common start instant and sends its counts and result through a
pipe. All instants are of CLOCK_MONOTONIC, which the processes of a machine share.
"""

from __future__ import annotations

import gc
import select
import time
import traceback
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from batcher.tuning import arrivals as arrival_processes
from batcher.tuning.calls import Call, requests_of
from batcher.tuning.headers import (
    DEADLINE_EXCEEDED,
    OK,
    PENDING,
    UNAVAILABLE,
    UNPROCESSED,
)
from batcher.tuning.link import Address, Channel, Link
from batcher.tuning.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection as Pipe

    from batcher.tuning.plan import WorkerPlan

_TICK_NS: Final = 50_000_000
_FAST_TICK_NS: Final = 5_000_000
_START_TIMEOUT_NS: Final = 10_000_000_000
_NEVER: Final = 2**62

_READ: Final = select.EPOLLIN
_READ_WRITE: Final = select.EPOLLIN | select.EPOLLOUT


def main(plan: WorkerPlan, pipe: Pipe) -> None:
    """Run a process' share of the load; the entry point of a spawned process."""
    # Calls make no cycles, and a collection would delay every call in flight.
    gc.disable()
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
        self._links = [Link(i, address) for i in range(plan.connections)]
        self._requests = requests_of(plan.bodies, address.authority)
        self._epoll = select.epoll()
        self._epoll.register(pipe.fileno(), _READ)
        self._channels: dict[int, Channel] = {}
        self._writing: set[int] = set()
        self._expiring: dict[int, deque[Call]] = {
            request.deadline_ns: deque()
            for request in self._requests
            if request.deadline_ns is not None
        }
        self._special = bool(self._expiring) or plan.verify_fraction > 0
        self._issuing = False
        self._stopped = False
        self._tick_at_ns = 0
        self._turn_of_link = 0
        self._start_ns = 0
        self._next_due_ns = _NEVER
        self._next_body = 0
        weights = [body.weight for body in plan.bodies]
        picks = arrival_processes.draw_bodies(weights, plan.seed, 2 + plan.index)
        self._picks: Iterator[int] = chain.from_iterable(
            chunk.tolist() for chunk in picks
        )
        self._arrivals: Iterator[tuple[int, int]] = iter(())
        if plan.arrivals is not None:
            self._arrivals = arrival_processes.share(
                arrival_processes.draw(plan.arrivals, weights, plan.seed),
                plan.index,
                plan.processes,
            )

    def connect(self) -> str:
        """Bring all connections up; return why that failed, or nothing."""
        now_ns = time.monotonic_ns()
        give_up_at_ns = now_ns + _START_TIMEOUT_NS
        while not all(link.up for link in self._links):
            self._connect_due(now_ns)
            self._turn(_FAST_TICK_NS)
            now_ns = time.monotonic_ns()
            if self._stopped:
                return "stopped"
            if now_ns > give_up_at_ns:
                faults = {link.last_fault for link in self._links if not link.up}
                return f"no connection to {self._plan.target}: {', '.join(faults)}"
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
                self._flush(link.channel)
        while not self._stopped:
            now_ns = time.monotonic_ns()
            if now_ns >= self._tick_at_ns:
                self._tick(now_ns)
            if self._expiring:
                self._expire(now_ns)
            if not callers:
                self._send_due(now_ns)
            if tally.outstanding == 0 and tally.is_complete(now_ns):
                break
            if now_ns >= tally.give_up_at_ns:
                break
            self._turn(self._wait_ns(now_ns))
        tally.end(time.monotonic_ns(), interrupted=self._stopped)
        for channel in self._channels.values():
            channel.socket.close()

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
        if self._next_due_ns != _NEVER and wait_ns > 0:
            # epoll waits for whole milliseconds; select, on the epoll itself, has
            # microseconds.
            select.select([self._epoll.fileno()], [], [], wait_ns / 1e9)
            wait_ns = 0
        for fd, mask in self._epoll.poll(max(0, wait_ns) / 1e9):
            channel = self._channels.get(fd)
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
            if http.news or channel.closed or http.draining:
                finished = self._news(channel, finished, now_ns)
            if finished:
                self._finish(finished, link, now_ns)
            if link.channel is not channel:
                self._flush(link.channel)
                if channel.closed:
                    return
        if channel.flush() or self._writing:
            self._watch(channel)

    def _news(self, channel: Channel, finished: list[Call], now_ns: int) -> list[Call]:
        """A channel has become ready, or is at its end; the calls that ended."""
        link = channel.link
        http = channel.http
        http.news = False
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
            finished += self._drop(channel, now_ns)
        return finished

    def _flush(self, channel: Channel | None) -> None:
        """Send what a channel has to send, now or when its socket allows."""
        if channel is not None and (channel.flush() or self._writing):
            self._watch(channel)

    def _watch(self, channel: Channel) -> None:
        """Have the channel's socket say when it can be written to, if it cannot."""
        fd = channel.socket.fileno()
        if channel.blocked != (fd in self._writing):
            self._epoll.modify(fd, _READ_WRITE if channel.blocked else _READ)
            (self._writing.add if channel.blocked else self._writing.discard)(fd)

    def _connect_due(self, now_ns: int) -> None:
        """Begin the attempts to connect that are due, and end those overdue."""
        for link in self._links:
            channel = link.channel
            lost: list[Call] = []
            if channel is None and now_ns >= link.retry_at_ns:
                channel = link.connect(now_ns)
                if channel is None:
                    lost = self._fail_link(link, link.last_fault, now_ns)
                else:
                    fd = channel.socket.fileno()
                    self._channels[fd] = channel
                    # Writable means connected: the opening is sent then.
                    self._epoll.register(fd, _READ_WRITE)
                    self._writing.add(fd)
            elif channel is not None and link.overdue(now_ns):
                channel.closed = "the server does not answer HTTP/2"
                lost = self._drop(channel, now_ns)
            if lost:
                self._finish(lost, link, now_ns)

    def _drop(self, channel: Channel, now_ns: int) -> list[Call]:
        """Close a channel; return its calls, which end as UNAVAILABLE."""
        channel.flush()
        fd = channel.socket.fileno()
        self._epoll.unregister(fd)
        self._writing.discard(fd)
        del self._channels[fd]
        channel.socket.close()
        lost = channel.http.close(channel.closed)
        if channel.link.channel is channel:
            lost += self._fail_link(channel.link, channel.closed, now_ns)
        return lost

    def _fail_link(self, link: Link, fault: str, now_ns: int) -> list[Call]:
        self.tally.result.connections_lost += self._issuing
        lost = link.failed(fault, now_ns)
        self._tick_at_ns = min(self._tick_at_ns, link.retry_at_ns)
        return lost

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
            link = self._next_link()
            call = Call(request, due_ns, link.index, measured)
            if tally.is_full():
                tally.overflow(call)
            else:
                batches.setdefault(link, []).append(call)
        for link, calls in batches.items():
            self._prepare(calls, now_ns)
            link.submit(calls)
            self._flush(link.channel)

    def _next_link(self) -> Link:
        """The next link in turn that is up; if none is, the next."""
        links = self._links
        for _ in links:
            self._turn_of_link = (self._turn_of_link + 1) % len(links)
            link = links[self._turn_of_link]
            if link.up:
                break
        return link

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
                    self._flush(link.channel)

    def _cancel(self, call: Call) -> None:
        call.fail(DEADLINE_EXCEEDED, "the deadline passed without an answer")
        for channel in self._channels.values():
            if channel.http.streams.get(call.stream_id) is call:
                channel.http.cancel(call)
                self._flush(channel)
                return

    def _tick(self, now_ns: int) -> None:
        """What is done now and then."""
        down = not all(link.up for link in self._links)
        if down:
            self._connect_due(now_ns)
        tick_ns = _FAST_TICK_NS if down else _TICK_NS
        self._tick_at_ns = self.tally.next_boundary_ns(now_ns, now_ns + tick_ns)
        counts = self.tally.tick(now_ns)
        if counts is not None:
            self._pipe.send(("counts", counts))

    def _command(self) -> None:
        """The parent says stop, or has gone."""
        try:
            self._pipe.recv()
        except EOFError:
            pass
        self._stopped = True
