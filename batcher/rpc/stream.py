"""One ModelStreamInfer call: many requests in flight, answered in order of completion.

Errors come back inside the stream, with the request's id, and the stream goes on; a
caller that sends the metadata `triton_grpc_error: true` gets the first error as the
stream's status instead (protocol notes §1.5). Reading stops while too much is in flight
or unsent, so that a slow reader is bounded by flow control and not by memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from batcher.rpc import messages, wire
from batcher.rpc.transport import Handler, Trailing, deadline_ns

MAX_IN_FLIGHT: Final = 1024
"""Requests of one stream that are queued, running or unsent."""

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_INFER_RESPONSE: Final = 0x12  # ModelStreamInferResponse.infer_response, field 2

# Parameter triton_final_response = true, appended to every answer: protobuf merges it.
_FINAL: Final = messages.ModelInferResponse(
    parameters={"triton_final_response": messages.InferParameter(bool_param=True)}
).SerializeToString()


class InferStream:
    """The state of one stream; also where its requests are answered (`Reply`)."""

    def __init__(
        self,
        handler: Handler,
        after_call: Callable[[], None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        self._handler = handler
        self._after_call = after_call
        self._context = context
        self._metadata = tuple(context.invocation_metadata() or ())
        self._peer = context.peer()
        self._as_status = any(
            key == "triton_grpc_error" and str(value).lower() == "true"
            for key, value in self._metadata
        )
        self._tokens: dict[int, object] = {}
        self._open: dict[int, bytes] = {}  # call -> payload, for the id of an error
        self._outbox: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._half_closed = False
        self._status: tuple[int, str, Trailing] | None = None

    @property
    def in_flight(self) -> int:
        """Requests that are not answered, or whose answer is not yet sent."""
        return len(self._open) + len(self._outbox)

    async def run(self, incoming: Any) -> tuple[int, str, Trailing] | None:
        """Reads and writes until the caller is done; returns a status to end with."""
        reader = asyncio.ensure_future(self._read(incoming))
        try:
            while self._status is None:
                while self._outbox:
                    await self._context.write(self._outbox[0])
                    self._outbox.popleft()
                    self._room.set()
                if self._half_closed and not self._open:
                    break
                self._changed.clear()
                if not self._outbox:
                    await self._changed.wait()
            return self._status
        finally:
            reader.cancel()
            for token in list(self._tokens.values()):
                self._handler.on_cancel(token)
            self._tokens.clear()
            self._open.clear()
            self._outbox.clear()

    def respond(self, call: int, payload: bytes, trailing: Trailing = ()) -> None:
        if self._forget(call) is not None:
            self._outbox.append(wire.field(_INFER_RESPONSE, payload + _FINAL))
            self._changed.set()

    def fail(self, call: int, code: int, text: str, trailing: Trailing = ()) -> None:
        payload = self._forget(call)
        if payload is None:
            return
        if self._as_status:
            self._status = self._status or (code, text, trailing)
        else:
            answer = messages.ModelStreamInferResponse(error_message=text or "error")
            answer.infer_response.id = _id_of(payload)
            self._outbox.append(answer.SerializeToString())
        self._changed.set()

    def _forget(self, call: int) -> bytes | None:
        self._tokens.pop(call, None)
        return self._open.pop(call, None)

    async def _read(self, incoming: Any) -> None:
        call = 0
        try:
            async for payload in incoming:
                call += 1
                self._open[call] = payload
                token = self._handler.on_call(
                    self,
                    call,
                    _METHOD,
                    payload,
                    self._metadata,
                    deadline_ns(self._context),
                    self._peer,
                )
                if token is not None:
                    self._tokens[call] = token
                self._after_call()
                if self.in_flight >= MAX_IN_FLIGHT:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._half_closed = True
            self._changed.set()


def _id_of(payload: bytes) -> str:
    try:
        return messages.ModelInferRequest.FromString(payload).id
    except Exception:
        return ""
