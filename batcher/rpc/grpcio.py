"""The `grpcio` transport: grpc's C core, for what the native one cannot do.

Serves every method, streams included, at any number of addresses. It works with grpc's
completion queue, as grpcio's own thread-based server does, and with the same classes
(`grpc._cython.cygrpc`): one thread takes events from the queue and hands them to the
event loop with one wake-up for all that have arrived. grpc.aio, the documented way,
switches threads 16 times a call and costs four to five times as much (measured).
The classes are not public; what is used of them has not changed in years, `_core`
below is all of it, and the suite runs every method over it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc._cython.cygrpc as _core

from batcher.errors import ConfigError
from batcher.rpc.sockets import SocketGuard, why_not
from batcher.rpc.streams import Stream, StreamFactory
from batcher.rpc.transport import Address, Handler, Trailing

_MAX_PENDING: Final = 65_536
_ASKED_FOR: Final = 64
"""Calls that are asked for ahead; those beyond wait in gRPC, and are cancelled there
when the server shuts down."""
_NO_FLAGS: Final = 0
_REQUEST: Final = "request"  # the tag of a call that is to come
_SHUTDOWN: Final = "shutdown"

_INVALID_ARGUMENT: Final = 3
_UNIMPLEMENTED: Final = 12
_UNAVAILABLE: Final = 14

_GRACE_S: Final = 1.0
"""How long `stop` waits for callers to take their answers (seconds)."""
_QUIET_S: Final = 0.05
"""A time without new calls, after which `stop` takes it that callers know (seconds)."""
_STEP_S: Final = 0.005


class GrpcioTransport:
    """Serves all methods at some addresses.

    Args:
        addresses: where to listen.
        handler: gets the calls, on the event loop's thread.
        methods: full names of the unary methods.
        streams: the streaming methods, and what makes a stream of each.
        wake: asks the event loop, from any thread, to call `drain_inbox` soon.
        max_message_bytes: hard limit of a received message.
        socket_mode: permission bits of Unix sockets.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        handler: Handler,
        methods: Sequence[str],
        streams: Mapping[str, StreamFactory],
        wake: Callable[[], None],
        *,
        max_message_bytes: int,
        socket_mode: int = 0o660,
    ) -> None:
        self._addresses = list(addresses)
        self._handler = handler
        self._methods = frozenset(methods)
        self._streams = streams
        self._wake = wake
        self._max_message_bytes = max_message_bytes
        self._socket_mode = socket_mode
        self._guards: list[SocketGuard] = []
        self._server: Any = None
        self._queue: Any = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: set[_UnaryCall | _StreamCall] = set()
        self._over = False  # the queue is shut down
        self._accepted = 0  # calls, ever

    @property
    def in_flight(self) -> int:
        return sum(call.in_flight for call in self._calls)

    @property
    def addresses(self) -> list[str]:
        return [str(a) for a in self._addresses]

    async def start(self) -> None:
        options = (
            ("grpc.max_receive_message_length", self._max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second daemon must fail, not share
            # Clients may keep idle connections alive (Triton's default allows it every
            # 5 minutes; a sidecar's callers do it more often).
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            # Calls that arrived and were not handed to us yet. By default gRPC drops
            # them at random, as CANCELLED, from 1,000 on; ours queue, and what is too
            # much is refused with a reason.
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        )
        server = _core.Server(options, False)
        queue = _core.CompletionQueue()
        server.register_completion_queue(queue)
        try:
            self._addresses = [self._bind(server, a) for a in self._addresses]
        except BaseException:
            self._close_guards()
            raise
        server.start()
        for _ in range(_ASKED_FOR):
            server.request_call(queue, queue, _REQUEST)
        self._server, self._queue = server, queue
        self._thread = threading.Thread(target=self._poll, name="grpcio", daemon=True)
        self._thread.start()

    def respond(
        self, call: _UnaryCall, payload: bytes, trailing: Trailing = ()
    ) -> None:
        call.finish(payload, 0, "", trailing)

    def fail(
        self, call: _UnaryCall, code: int, text: str, trailing: Trailing = ()
    ) -> None:
        call.finish(None, code, text, trailing)

    def drain_inbox(self) -> None:
        inbox = self._inbox
        while inbox:
            inbox.popleft()()

    def end_streams(self) -> None:
        for call in list(self._calls):
            if isinstance(call, _StreamCall):
                call.end(_UNAVAILABLE, "the server is shutting down")

    async def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            await self._until_quiet()
            # Accepts nothing more; the tag comes back when all calls have ended.
            self._server.shutdown(self._queue, _SHUTDOWN)
            # What was accepted is answered by now; what is left are idle streams.
            for call in list(self._calls):
                call.end(_UNAVAILABLE, "the server is shutting down")
            patience = _GRACE_S / _STEP_S
            while self._thread.is_alive():
                self.drain_inbox()  # after a failed start nobody else does
                patience -= 1
                if patience == 0:  # callers that do not take their answers
                    self._server.cancel_all_calls()
                await asyncio.sleep(_STEP_S)
        self._close_guards()

    async def _until_quiet(self) -> None:
        """Goes on refusing calls until callers have heard of it, or for a while.

        A call that reaches gRPC while it shuts down ends as CANCELLED, which says less
        than a refusal, and which clients do not try again.
        """
        quiet = 0
        for _ in range(int(_GRACE_S / _STEP_S)):
            seen = self._accepted
            await asyncio.sleep(_STEP_S)
            quiet = quiet + 1 if seen == self._accepted else 0
            if quiet * _STEP_S >= _QUIET_S:
                return

    def _bind(self, server: Any, address: Address) -> Address:
        target = str(address).encode()
        if address.path is not None:
            guard = SocketGuard(address.path, self._socket_mode)
            self._guards.append(guard)
            with guard.binding():
                port = server.add_http2_port(target)
        else:
            port = server.add_http2_port(target)
        if not port:
            raise ConfigError(f"cannot listen on {address}: {why_not(address)}")
        return address if address.path else Address(host=address.host, port=port)

    def _close_guards(self) -> None:
        for guard in self._guards:
            guard.close()
        self._guards.clear()

    # -- the queue's thread -----------------------------------------------------------

    def _poll(self) -> None:
        queue = self._queue
        while True:
            event = queue.poll()
            tag = event.tag
            if tag is _REQUEST:
                if event.success:  # not while the server shuts down
                    try:
                        self._server.request_call(queue, queue, _REQUEST)
                    except ValueError:  # `stop` came between: this call is the last
                        pass
                    self._accept(event)
            elif tag is _SHUTDOWN:
                self.post(self._shut_down)
            elif event.completion_type == _core.CompletionType.queue_shutdown:
                return
            else:
                tag(event)
            del event, tag  # a kept event would keep its call

    def _accept(self, event: Any) -> None:
        """A new call: watches for its end, and asks for its (first) message."""
        self._accepted += 1
        method = event.call_details.method.decode("utf-8", "replace")
        remaining_s = event.call_details.deadline - time.time()
        deadline_ns = None
        if remaining_s < 1e9:  # an endless deadline is infinity, or far in the future
            deadline_ns = time.monotonic_ns() + int(remaining_s * 1e9)
        call: _UnaryCall | _StreamCall
        if method in self._methods:
            call = _UnaryCall(self, event, method, deadline_ns)
        else:
            call = _StreamCall(self, event, method, deadline_ns)
        close = (_core.ReceiveCloseOnServerOperation(_NO_FLAGS),)
        event.call.start_server_batch(close, call.closed)
        event.call.start_server_batch(_receive(), call.received)

    def _shut_down(self) -> None:
        # On the loop's thread, like all writes: a write to a queue that is shut down
        # would abort the process.
        self._over = True
        self._queue.shutdown()

    def start_batch(self, call: Any, operations: Any, tag: Callable[..., None]) -> None:
        """Starts operations on a call; without effect once everything is over."""
        if not self._over:
            call.start_server_batch(operations, tag)

    def post(self, action: Callable[[], None]) -> None:
        """Runs `action` on the event loop's thread."""
        self._inbox.append(action)
        self._wake()


def _receive() -> tuple[Any]:
    # Operations hold the state of one batch: they must not be shared.
    return (_core.ReceiveMessageOperation(_NO_FLAGS),)


def _status(code: int, text: str, trailing: Trailing) -> Any:
    return _core.SendStatusFromServerOperation(
        trailing or None, code, text.encode("utf-8", "replace"), _NO_FLAGS
    )


def _sent(event: Any) -> None:
    """Nothing follows a sent answer."""


class _Call:
    """What unary and streaming calls have in common."""

    __slots__ = ("_call", "_deadline_ns", "_metadata", "_method", "_transport")

    def __init__(
        self,
        transport: GrpcioTransport,
        event: Any,
        method: str,
        deadline_ns: int | None,
    ) -> None:
        self._transport = transport
        self._call = event.call
        self._metadata = event.invocation_metadata
        self._method = method
        self._deadline_ns = deadline_ns

    def closed(self, event: Any) -> None:
        if event.batch_operations[0].cancelled():
            self._transport.post(self._gone)

    def _gone(self) -> None:
        raise NotImplementedError


class _UnaryCall(_Call):
    """One unary call, from its arrival to its end.

    `closed` and `received` are called on the queue's thread, the rest on the loop's.
    """

    __slots__ = ("_cancelled", "_token", "in_flight")

    def __init__(
        self,
        transport: GrpcioTransport,
        event: Any,
        method: str,
        deadline_ns: int | None,
    ) -> None:
        super().__init__(transport, event, method, deadline_ns)
        self._token: object | None = None
        self._cancelled = False
        self.in_flight = 0  # 1 from the message's arrival to the answer

    def received(self, event: Any) -> None:
        payload = event.batch_operations[0].message()
        if payload is None:
            self._transport.post(self._empty)
            return
        self._transport.post(lambda: self._arrived(payload))

    def finish(
        self, payload: bytes | None, code: int, text: str, trailing: Trailing
    ) -> None:
        if not self.in_flight:
            return
        self._leave()
        self._token = None  # it knows this call: a cycle would keep both for long
        operations = [
            _core.SendInitialMetadataOperation(None, _NO_FLAGS),
            _status(code, text, trailing),
        ]
        if payload is not None:
            operations.append(_core.SendMessageOperation(payload, _NO_FLAGS))
        self._transport.start_batch(self._call, operations, _sent)

    def end(self, code: int, text: str) -> None:
        """Refuses the call, if it is not answered yet."""
        self.finish(None, code, text, ())

    def _arrived(self, payload: bytes) -> None:
        if self._cancelled:
            return
        self.in_flight = 1
        transport = self._transport
        transport._calls.add(self)
        self._token = transport._handler.on_call(
            transport,
            self,
            self._method,
            payload,
            self._metadata,
            self._deadline_ns,
            self._call.peer(),
        )

    def _empty(self) -> None:
        """No message came: none was sent, or it was cut off.

        Or it was too large, or the caller has gone: then gRPC has ended the call, and
        this answer has no effect.
        """
        self.in_flight = 1
        self.finish(None, _INVALID_ARGUMENT, "the call has no (whole) message", ())

    def _gone(self) -> None:
        self._cancelled = True
        if self.in_flight:
            self._leave()
            token, self._token = self._token, None
            if token is not None:
                self._transport._handler.on_cancel(token)

    def _leave(self) -> None:
        self.in_flight = 0
        self._transport._calls.discard(self)


class _StreamCall(_Call):
    """One streaming call: hands messages over one at a time, and writes one at a time.

    A method that nobody serves ends here too. `closed`, `received` and `_written` are
    called on the queue's thread, the rest on the loop's.
    """

    def __init__(
        self,
        transport: GrpcioTransport,
        event: Any,
        method: str,
        deadline_ns: int | None,
    ) -> None:
        super().__init__(transport, event, method, deadline_ns)
        self._stream: Stream | None = None
        self._outbox: deque[bytes] = deque()
        self._writing = False
        self._reading = True  # the first receive is under way
        self._started = False  # initial metadata is sent
        self._end: tuple[int, str, Trailing] | None = None
        self._over = False
        transport.post(self._open)

    @property
    def in_flight(self) -> int:
        return self._stream.in_flight if self._stream is not None else 0

    @property
    def unsent(self) -> int:
        return len(self._outbox)

    def send(self, payload: bytes) -> None:
        if not self._over and self._end is None:
            self._outbox.append(payload)
            self._pump()

    def end(self, code: int = 0, text: str = "", trailing: Trailing = ()) -> None:
        if self._end is None:
            self._end = (code, text, trailing)
            self._pump()

    def received(self, event: Any) -> None:
        payload = event.batch_operations[0].message()
        self._transport.post(lambda: self._arrived(payload))

    def _open(self) -> None:
        factory = self._transport._streams.get(self._method)
        if factory is None:
            self.end(_UNIMPLEMENTED, f"no method {self._method[:200]}")
            return
        self._transport._calls.add(self)
        self._stream = factory(self, self._metadata, self._call.peer())

    def _arrived(self, payload: bytes | None) -> None:
        self._reading = False
        stream = self._stream
        if self._over or stream is None or self._end is not None:
            return
        if payload is None:
            self._reading = True  # there is nothing more to read
            stream.on_half_close()
            return
        try:
            stream.on_message(payload, self._deadline_ns)
        except Exception as error:  # a message that is none of the method's
            self.end(_INVALID_ARGUMENT, f"{self._method}: {error}"[:1000])
        self._read()

    def _read(self) -> None:
        stream = self._stream
        if self._reading or self._over or self._end or stream is None or stream.busy:
            return
        self._reading = True
        self._transport.start_batch(self._call, _receive(), self.received)

    def _pump(self) -> None:
        """Starts the next write, if none is under way."""
        if self._writing or self._over:
            return
        operations: list[Any] = []
        if not self._started:
            self._started = True
            operations.append(_core.SendInitialMetadataOperation(None, _NO_FLAGS))
        if self._outbox:
            operations.append(_core.SendMessageOperation(self._outbox[0], _NO_FLAGS))
        elif self._end is not None:
            operations.append(_status(*self._end))
            self._leave()
        self._writing = True
        self._transport.start_batch(self._call, operations, self._written)

    def _written(self, event: Any) -> None:
        self._transport.post(self._sent)

    def _sent(self) -> None:
        self._writing = False
        if self._over:
            return
        if self._outbox:
            self._outbox.popleft()
        if self._outbox or self._end is not None:
            self._pump()
        self._read()

    def _gone(self) -> None:
        self._outbox.clear()
        if not self._over:
            self._leave()

    def _leave(self) -> None:
        self._over = True
        self._transport._calls.discard(self)
        stream, self._stream = self._stream, None  # it knows this call: no cycle
        if stream is not None:
            stream.on_gone()
