"""The `native` transport: HTTP/2 and gRPC in Rust, outside the interpreter lock.

One front per address. A receiver thread takes whole batches of calls from it and hands
them to the event loop with one wake-up. Streaming methods go to a grpcio server on a
private Unix socket behind it (`fallback`), since the front serves unary calls only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pygrpc_native import EVENT_CALL, NativeGrpcFront

from batcher.errors import ConfigError, PayloadTooLarge
from batcher.rpc.sockets import SocketGuard
from batcher.rpc.status import StatusTable
from batcher.rpc.transport import Address, Handler, Trailing

_BATCH = 256  # calls taken in one trip across the interpreter lock


class NativeTransport:
    """Serves unary calls at one address.

    Args:
        address: where to listen.
        handler: gets the calls, on the event loop's thread.
        methods: full names of the unary methods.
        wake: asks the event loop, from any thread, to call `drain_inbox` soon.
        status: the table for errors made here.
        max_message_bytes: larger messages are refused (after they were received: a
            hard limit needs the grpcio transport).
        socket_mode: permission bits of a Unix socket.
        fallback: path of the Unix socket of a grpcio server for everything else.
    """

    def __init__(
        self,
        address: Address,
        handler: Handler,
        methods: Sequence[str],
        wake: Callable[[], None],
        status: StatusTable,
        *,
        max_message_bytes: int,
        socket_mode: int = 0o660,
        fallback: str | None = None,
        io_threads: int = 1,
    ) -> None:
        self._address = address
        self._handler = handler
        self._methods = list(methods)
        self._wake = wake
        self._status = status
        self._max_message_bytes = max_message_bytes
        self._socket_mode = socket_mode
        self._fallback = fallback
        self._io_threads = io_threads
        self._guard: SocketGuard | None = None
        self._front: NativeGrpcFront | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[list[Any]] = deque()
        self._pending: dict[int, object] = {}  # call id -> token for on_cancel

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    @property
    def addresses(self) -> list[str]:
        return [str(self._address)]

    async def start(self) -> None:
        path = self._address.path
        target = str(self._address)
        if path is not None:
            self._guard = SocketGuard(path, self._socket_mode)
        try:
            front = NativeGrpcFront(
                target,
                [(name, False) for name in self._methods],
                io_threads=self._io_threads,
                call_details=True,
            )
            if self._fallback is not None:
                front.set_fallback(self._fallback)
            if self._guard is None:
                front.start()
                host = self._address.host
                self._address = Address(host=host, port=front.bound_port)
            else:
                with self._guard.binding():
                    front.start()
        except OSError as error:
            if self._guard is not None:
                self._guard.close()
            raise ConfigError(f"cannot listen on {target}: {error}") from error
        self._front = front
        self._thread = threading.Thread(
            target=self._receive, name=f"rpc {target}", daemon=True
        )
        self._thread.start()

    def respond(self, call: int, payload: bytes, trailing: Trailing = ()) -> None:
        self._pending.pop(call, None)
        if trailing:
            self._front.respond(call, payload, None, trailing)  # type: ignore[union-attr]
        else:
            self._front.respond(call, payload)  # type: ignore[union-attr]

    def fail(self, call: int, code: int, text: str, trailing: Trailing = ()) -> None:
        self._pending.pop(call, None)
        # The front keeps the names that begin with grpc- to itself.
        own = [pair for pair in trailing if not pair[0].startswith("grpc-")]
        self._front.fail(call, code, text, own or None)  # type: ignore[union-attr]

    def drain_inbox(self) -> None:
        inbox = self._inbox
        pending = self._pending
        on_call = self._handler.on_call
        methods = self._methods
        limit = self._max_message_bytes
        while inbox:
            now_ns = time.monotonic_ns()
            for kind, call, method, payload, _key, details in inbox.popleft():
                if kind != EVENT_CALL:
                    token = pending.pop(call, None)
                    if token is not None:
                        self._handler.on_cancel(token)
                    continue
                metadata, peer, remaining_s = details
                if len(payload) > limit:
                    self._refuse(call, len(payload))
                    continue
                token = on_call(
                    self,
                    call,
                    methods[method],
                    payload,
                    metadata,
                    None if remaining_s is None else now_ns + int(remaining_s * 1e9),
                    peer,
                )
                if token is not None:
                    pending[call] = token

    def end_streams(self) -> None:
        """It has none: they go through to the fallback."""

    async def stop(self) -> None:
        if self._front is not None:
            self._front.close()
        if self._thread is not None:
            self._thread.join()
        if self._guard is not None:
            self._guard.close()

    def _receive(self) -> None:
        """The receiver thread: whole batches of calls into the inbox."""
        receive = self._front.recv_batch_details  # type: ignore[union-attr]
        while (events := receive(_BATCH)) is not None:
            self._inbox.append(events)
            self._wake()

    def _refuse(self, call: int, size: int) -> None:
        error = PayloadTooLarge(
            f"the message has {size} bytes; the limit is {self._max_message_bytes}"
        )
        self.fail(call, *self._status.status(error))
