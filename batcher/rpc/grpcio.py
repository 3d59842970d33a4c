"""The `grpcio` transport: grpc.aio, for what the native one cannot do.

Serves every method, streams included, at any number of addresses. Handlers get raw
bytes; the coroutine that gRPC makes of every call only waits for its answer, and all
answers of a batch wake in one round of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from batcher.errors import ConfigError
from batcher.rpc.sockets import SocketGuard
from batcher.rpc.stream import InferStream
from batcher.rpc.transport import Address, Handler, Trailing, deadline_ns

_CODES = {code.value[0]: code for code in grpc.StatusCode}

STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class GrpcioTransport:
    """Serves all methods at some addresses.

    Args:
        addresses: where to listen.
        handler: gets the calls.
        methods: full names of the unary methods.
        install: adds further services (health, reflection) to the server.
        after_call: called after every call handed over, to let the daemon act on it.
        max_message_bytes: hard limit of a received message.
        socket_mode: permission bits of Unix sockets.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        handler: Handler,
        methods: Sequence[str],
        install: Callable[[grpc.aio.Server], None],
        after_call: Callable[[], None],
        *,
        max_message_bytes: int,
        socket_mode: int = 0o660,
    ) -> None:
        self._addresses = list(addresses)
        self._handler = handler
        self._methods = methods
        self._install = install
        self._after_call = after_call
        self._max_message_bytes = max_message_bytes
        self._socket_mode = socket_mode
        self._guards: list[SocketGuard] = []
        self._server: grpc.aio.Server | None = None
        self._streams: set[InferStream] = set()
        self.unanswered = 0

    @property
    def in_flight(self) -> int:
        return self.unanswered + sum(s.in_flight for s in self._streams)

    @property
    def addresses(self) -> list[str]:
        return [str(a) for a in self._addresses]

    async def start(self) -> None:
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second daemon must fail, not share
                # Clients may keep idle connections alive (Triton's default allows it
                # every 5 minutes; a sidecar's callers do more often).
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            )
        )
        server.add_generic_rpc_handlers((_Methods(self, self._methods),))
        self._install(server)
        try:
            self._addresses = [self._bind(server, a) for a in self._addresses]
            await server.start()
        except BaseException:
            self._close_guards()
            raise
        self._server = server

    def respond(self, call: _Call, payload: bytes, trailing: Trailing = ()) -> None:
        if not call.answer.done():
            call.trailing = trailing
            call.answer.set_result(payload)

    def fail(self, call: _Call, code: int, text: str, trailing: Trailing = ()) -> None:
        if not call.answer.done():
            call.failure = (code, text, trailing)
            call.answer.set_result(b"")

    def drain_inbox(self) -> None:
        """Nothing to do: gRPC calls the handlers on the loop by itself."""

    async def stop(self) -> None:
        if self._server is not None:
            # Everything accepted is answered by now; what is left are idle streams.
            await self._server.stop(grace=0.5)
        self._close_guards()

    def _bind(self, server: grpc.aio.Server, address: Address) -> Address:
        try:
            if address.path is None:
                port = server.add_insecure_port(str(address))
                return Address(host=address.host, port=port)
            guard = SocketGuard(address.path, self._socket_mode)
            self._guards.append(guard)
            with guard.binding():
                server.add_insecure_port(str(address))
            return address
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error} (is it in use?)"
            ) from error

    def _close_guards(self) -> None:
        for guard in self._guards:
            guard.close()
        self._guards.clear()

    def unary(self, method: str) -> Callable[..., Any]:
        """The handler of one unary method."""
        on_call = self._handler.on_call
        on_cancel = self._handler.on_cancel
        after_call = self._after_call
        loop = asyncio.get_running_loop()

        async def serve(payload: bytes, context: Any) -> bytes:
            call = _Call(loop.create_future())
            metadata = context.invocation_metadata() or ()
            peer = context.peer()
            self.unanswered += 1
            try:
                token = on_call(
                    self, call, method, payload, metadata, deadline_ns(context), peer
                )
                if token is None:
                    answer = call.answer.result()
                else:
                    after_call()
                    try:
                        answer = await call.answer
                    except asyncio.CancelledError:
                        on_cancel(token)
                        raise
            finally:
                self.unanswered -= 1
            if call.trailing:
                context.set_trailing_metadata(call.trailing)
            if call.failure is not None:
                code, text, trailing = call.failure
                await context.abort(_CODES[code], text, trailing)
            return answer

        return serve

    async def stream_infer(
        self, messages: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serves one ModelStreamInfer call."""
        stream = InferStream(self._handler, self._after_call, context)
        self._streams.add(stream)
        try:
            status = await stream.run(messages)
        finally:
            self._streams.discard(stream)
        if status is not None:
            code, text, trailing = status
            await context.abort(_CODES[code], text, trailing)


class _Call:
    """One unary call: what its coroutine waits for."""

    __slots__ = ("answer", "failure", "trailing")

    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self.answer = answer
        self.failure: tuple[int, str, Trailing] | None = None
        self.trailing: Trailing = ()


class _Methods(grpc.GenericRpcHandler):
    """Names to handlers; requests and responses are raw bytes."""

    def __init__(self, transport: GrpcioTransport, methods: Sequence[str]) -> None:
        self._handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(transport.unary(name))
            for name in methods
        }
        self._handlers[STREAM_INFER] = grpc.stream_stream_rpc_method_handler(
            transport.stream_infer
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method)
