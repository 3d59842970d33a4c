"""A unary call and the bytes it is sent as.

What one request of the load is lives here: its body, ready for the wire, and the
record of one sending of it. Neither knows frames' meanings, sockets or clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batcher.tuning.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    HEADERS,
    frame_start,
)
from batcher.tuning.headers import PENDING, request_blocks

if TYPE_CHECKING:
    from batcher.tuning.plan import Body

INFER_PATH: Final = "/inference.GRPCInferenceService/ModelInfer"
"""Path of the method that is called."""


class CallRequest:
    """A request as it goes on the wire, but for the stream id.

    Args:
        blocks: the header block's four forms (`headers.request_blocks`).
        message: the serialised ModelInferRequest.
        deadline_ns: nanoseconds a call may take, or None.
        index: position in the list of bodies.
    """

    __slots__ = ("blocks", "data", "deadline_ns", "index", "pieces", "size_bytes")

    def __init__(
        self,
        blocks: tuple[bytes, bytes, bytes, bytes],
        message: bytes,
        deadline_ns: int | None,
        index: int,
    ) -> None:
        self.blocks = blocks
        self.data = b"\0" + len(message).to_bytes(4, "big") + message
        self.size_bytes = len(self.data)
        self.deadline_ns = deadline_ns
        self.index = index
        # All forms share what follows the header block: bodies may be large and many.
        chunks = [
            self.data[i : i + FRAME_BYTES]
            for i in range(0, self.size_bytes, FRAME_BYTES)
        ]
        starts = [
            frame_start(len(chunk), DATA, END_STREAM if chunk is chunks[-1] else 0)
            for chunk in chunks
        ]
        rest = tuple(
            chunk + start
            for chunk, start in zip(chunks, [*starts[1:], b""], strict=True)
        )
        self.pieces = tuple(
            (
                frame_start(len(block), HEADERS, END_HEADERS),
                block + starts[0],
                *rest,
            )
            for block in blocks
        )
        """For each form of the block what `stream_id.join` makes a whole request of."""


class Call:
    """One sending of a request.

    Attributes:
        request: what is sent.
        due_ns: the instant from which the latency counts.
        measured: whether it belongs to the measured window.
        link: index of the link (connection) it was given to.
        stream_id: HTTP/2's, as on the wire; empty before it is sent.
        received_bytes: of DATA so far; not kept of an answer that is read in one go.
        payload: collects the answer when it will be looked at, else None.
        code: gRPC status, PENDING until the call ends.
        text: the status' text; not set before the call ends, nor by OK.
        expires_at_ns: when it is given up; set only if the request has a deadline.
        retried: it was sent again because the server had not looked at it.
    """

    __slots__ = (
        "code",
        "due_ns",
        "expires_at_ns",
        "link",
        "measured",
        "payload",
        "received_bytes",
        "request",
        "retried",
        "stream_id",
        "text",
    )

    text: str
    expires_at_ns: int

    def __init__(
        self, request: CallRequest, due_ns: int, link: int, measured: bool
    ) -> None:
        self.request = request
        self.due_ns = due_ns
        self.link = link
        self.measured = measured
        self.stream_id = b""
        self.received_bytes = 0
        self.payload: bytearray | None = None
        self.code = PENDING
        self.retried = False

    def fail(self, code: int, text: str) -> None:
        """End the call with this status."""
        self.code = code
        self.text = text

    def retry(self) -> None:
        """Forget the first sending, which the server has not looked at."""
        self.code = PENDING
        self.stream_id = b""
        self.received_bytes = 0
        self.retried = True
        if self.payload is not None:
            self.payload = bytearray()


def requests_of(bodies: tuple[Body, ...], authority: str) -> list[CallRequest]:
    """The bodies ready for the wire.

    Raises:
        ConfigError: a body's metadata cannot be sent.
    """
    return [
        CallRequest(
            request_blocks(authority, INFER_PATH, body.deadline_us, body.metadata),
            body.message,
            None if body.deadline_us is None else body.deadline_us * 1000,
            index,
        )
        for index, body in enumerate(bodies)
    ]
