"""What happens on streams: ModelStreamInfer, health's Watch, server reflection.

A `Stream` is told what arrives and writes to a `StreamWriter`; a transport is on the
other side. Everything happens on the event loop's thread. Reading stops while a stream
is `busy`, so that a slow reader is bounded by flow control and not by memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from batcher.rpc import messages, wire
from batcher.rpc.transport import Handler, Metadata, Trailing

MAX_IN_FLIGHT: Final = 1024
"""Requests of one stream that are queued, running or unsent; then reading stops."""

STREAM_INFER: Final = f"/{messages.SERVICE_NAME}/ModelStreamInfer"
WATCH: Final = f"/{health.SERVICE_NAME}/Watch"
REFLECTION: Final = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"

_INFER: Final = f"/{messages.SERVICE_NAME}/ModelInfer"
_INFER_RESPONSE: Final = 0x12  # ModelStreamInferResponse.infer_response, field 2

# Parameter triton_final_response = true, appended to every answer: protobuf merges it.
_FINAL: Final = messages.ModelInferResponse(
    parameters={"triton_final_response": messages.InferParameter(bool_param=True)}
).SerializeToString()


class StreamWriter(Protocol):
    """Where a stream's messages go."""

    @property
    def unsent(self) -> int:
        """Messages that gRPC has not taken yet."""
        ...

    def send(self, payload: bytes) -> None:
        """Sends a message after those before it."""
        ...

    def end(self, code: int = 0, text: str = "", trailing: Trailing = ()) -> None:
        """Ends the stream once everything is sent; nothing is sent after it."""
        ...


class Stream(Protocol):
    """One call of a streaming method, as seen from the transport."""

    @property
    def busy(self) -> bool:
        """Whether reading should stop for now."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that still owe the caller an answer."""
        ...

    def on_message(self, payload: bytes, deadline_ns: int | None) -> None:
        """The caller has sent a message."""
        ...

    def on_half_close(self) -> None:
        """The caller sends nothing more."""
        ...

    def on_gone(self) -> None:
        """The caller has gone, or the stream has ended."""
        ...


StreamFactory = Callable[[StreamWriter, Metadata, str], Stream]
"""Makes a stream of its writer, the caller's metadata and its address."""


class InferStream:
    """ModelStreamInfer: many requests in flight, answered in order of completion.

    Errors come back inside the stream, with the request's id, and the stream goes on; a
    caller that sends the metadata `triton_grpc_error: true` gets the first error as the
    stream's status instead (protocol notes §1.5).
    """

    def __init__(
        self, handler: Handler, writer: StreamWriter, metadata: Metadata, peer: str
    ) -> None:
        self._handler = handler
        self._writer = writer
        self._metadata = metadata
        self._peer = peer
        self._as_status = any(
            key == "triton_grpc_error" and str(value).lower() == "true"
            for key, value in metadata
        )
        self._calls = 0
        self._open: dict[int, bytes] = {}  # call -> payload, for the id of an error
        self._tokens: dict[int, object] = {}
        self._half_closed = False

    @property
    def busy(self) -> bool:
        return len(self._open) + self._writer.unsent >= MAX_IN_FLIGHT

    @property
    def in_flight(self) -> int:
        return len(self._open) + self._writer.unsent

    def on_message(self, payload: bytes, deadline_ns: int | None) -> None:
        self._calls = call = self._calls + 1
        self._open[call] = payload
        token = self._handler.on_call(
            self, call, _INFER, payload, self._metadata, deadline_ns, self._peer
        )
        if token is not None:
            self._tokens[call] = token

    def on_half_close(self) -> None:
        self._half_closed = True
        self._end_if_done()

    def on_gone(self) -> None:
        tokens = list(self._tokens.values())
        self._tokens.clear()
        self._open.clear()
        for token in tokens:
            self._handler.on_cancel(token)

    def respond(self, call: int, payload: bytes, trailing: Trailing = ()) -> None:
        self._tokens.pop(call, None)
        if self._open.pop(call, None) is not None:
            self._writer.send(wire.field(_INFER_RESPONSE, payload + _FINAL))
            self._end_if_done()

    def fail(self, call: int, code: int, text: str, trailing: Trailing = ()) -> None:
        self._tokens.pop(call, None)
        payload = self._open.pop(call, None)
        if payload is None:
            return
        if self._as_status:
            self._writer.end(code, text, trailing)
            self.on_gone()
            return
        answer = messages.ModelStreamInferResponse(error_message=text or "error")
        answer.infer_response.id = _id_of(payload)
        self._writer.send(answer.SerializeToString())
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._half_closed and not self._open:
            self._writer.end()


class HealthWatchers:
    """Those who watch the daemon's readiness (`grpc.health.v1.Health/Watch`)."""

    def __init__(self) -> None:
        self._ready = False
        self._streams: set[_WatchStream] = set()

    def set_ready(self, ready: bool) -> None:
        """Tells everyone who watches, if it is news."""
        if ready != self._ready:
            self._ready = ready
            for stream in self._streams:
                stream.send(self._status(stream))

    def open(self, writer: StreamWriter) -> Stream:
        """A new watcher."""
        return _WatchStream(self, writer)

    def watch(self, stream: _WatchStream) -> None:
        """Begins to tell a stream, with what is now."""
        self._streams.add(stream)
        stream.send(self._status(stream))

    def forget(self, stream: _WatchStream) -> None:
        """Its caller has gone."""
        self._streams.discard(stream)

    def _status(self, stream: _WatchStream) -> int:
        kind = health_pb2.HealthCheckResponse
        if stream.service not in ("", messages.SERVICE_NAME):
            return int(kind.SERVICE_UNKNOWN)
        return int(kind.SERVING if self._ready else kind.NOT_SERVING)


class _WatchStream:
    busy = False
    in_flight = 0  # it owes nothing that a drain must wait for

    def __init__(self, watchers: HealthWatchers, writer: StreamWriter) -> None:
        self.service = ""
        self._watchers = watchers
        self._writer = writer

    def send(self, status: int) -> None:
        response = health_pb2.HealthCheckResponse(status=status)
        self._writer.send(response.SerializeToString())

    def on_message(self, payload: bytes, deadline_ns: int | None) -> None:
        self.service = health_pb2.HealthCheckRequest.FromString(payload).service
        self._watchers.watch(self)

    def on_half_close(self) -> None:
        """It goes on: the caller has sent the one message there is to send."""

    def on_gone(self) -> None:
        self._watchers.forget(self)


class ReflectionStream:
    """Server reflection: the library's answers, one per question."""

    busy = False
    in_flight = 0

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        names = (messages.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        try:
            messages.POOL.FindFileByName(health_pb2.DESCRIPTOR.name)
        except KeyError:
            messages.POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
            messages.POOL.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
        self._servicer = reflection.ReflectionServicer(names, pool=messages.POOL)

    def on_message(self, payload: bytes, deadline_ns: int | None) -> None:
        request = reflection_pb2.ServerReflectionRequest.FromString(payload)
        context: Any = None  # the library does not use it
        for answer in self._servicer.ServerReflectionInfo(iter((request,)), context):
            self._writer.send(answer.SerializeToString())

    def on_half_close(self) -> None:
        self._writer.end()

    def on_gone(self) -> None:
        """There is nothing to give up."""


def make_streams(
    handler: Handler, watchers: HealthWatchers
) -> dict[str, StreamFactory]:
    """Every streaming method, and what makes a stream of it."""

    def infer(writer: StreamWriter, metadata: Metadata, peer: str) -> Stream:
        return InferStream(handler, writer, metadata, peer)

    def watch(writer: StreamWriter, metadata: Metadata, peer: str) -> Stream:
        return watchers.open(writer)

    def reflect(writer: StreamWriter, metadata: Metadata, peer: str) -> Stream:
        return ReflectionStream(writer)

    return {STREAM_INFER: infer, WATCH: watch, REFLECTION: reflect}


def _id_of(payload: bytes) -> str:
    try:
        return messages.ModelInferRequest.FromString(payload).id
    except Exception:
        return ""
