"""The client's side of one HTTP/2 connection, for unary gRPC calls only; sans-IO.

Bytes in, finished calls out; what must be sent collects in the outbox. There are no
sockets, clocks or statistics here. It is small because the load is: no priorities, no
push, no trailers of ours, one message each way. What a peer may do is all handled:
flow control, stream limits, padding, CONTINUATION, trailers-only answers, resets,
GOAWAY. RFC 9113 is cited as §.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from hpack import HPACKError

from batcher.tuning import frames
from batcher.tuning.frames import FRAME_BYTES, ProtocolError
from batcher.tuning.headers import (
    INTERNAL,
    OK,
    PENDING,
    PREFIX_BYTES,
    RESET_CODES,
    UNAVAILABLE,
    UNKNOWN,
    UNPROCESSED,
    Head,
    HeadReader,
)
from batcher.tuning.outbox import Outbox

if TYPE_CHECKING:
    from batcher.tuning.calls import Call

_UNLIMITED: Final = 2**31
# Half the window: a peer is never held up, and an update is a rare event.
_REFILL_BYTES: Final = 2**30
_MAX_BLOCK_BYTES: Final = 2**20
_HEADERS_FLAGS: Final = frames.END_HEADERS | frames.PADDED | frames.PRIORITY
_DATA_FLAGS: Final = frames.END_STREAM | frames.PADDED
_NO_TRAILERS: Final = Head(UNKNOWN, "the answer ended without trailers", False, False)


class Connection:
    """One HTTP/2 connection.

    Give it bytes with `receive`, calls with `submit`, and send what is in `output`
    after either. `error` says why a connection is beyond use.
    """

    def __init__(self) -> None:
        self.news = False
        """Whether something below has changed, or the end is near; the caller, who
        may have news of its own, resets it."""
        self.ready = False
        """Whether the peer's settings have come: it speaks HTTP/2."""
        self.draining = False
        """Whether no more calls can be opened here (GOAWAY, or ids used up)."""
        self.handed_back = False
        """Whether `receive` has returned calls that can be sent again (UNPROCESSED);
        the caller resets it."""
        self.error = ""
        """Why the connection is broken; empty while it is not."""
        self._out = Outbox()
        self._open = self._out.open
        self.output = self._out.output
        """What must be sent, in order; whoever sends it clears the list."""
        self.streams = self._out.streams
        """Calls on the wire by stream id."""
        self._waiting: deque[Call] = deque()
        self._heads = HeadReader()
        self._rest = b""
        self._block: tuple[bytes, int, bytes] | None = None
        self._finished: list[Call] = []
        self._max_streams = _UNLIMITED
        self._unacknowledged = 0
        self._closing = ""

    def submit(self, calls: list[Call]) -> None:
        """Send calls, or keep them until the peer allows more streams."""
        if self._waiting or len(self.streams) + len(calls) > self._max_streams:
            self._waiting += calls
            self._open_waiting()
        else:
            self._open(calls)

    def cancel(self, call: Call) -> None:
        """Tell the peer that a call on the wire, already ended by us, is given up."""
        if self.streams.pop(call.stream_id, None) is not None:
            self._out.reset(call.stream_id)
            self._open_waiting()

    def close(self, text: str) -> list[Call]:
        """The connection is gone: end all its calls as UNAVAILABLE; return them."""
        self.draining = True
        waiting = [call for call in self._waiting if call.code == PENDING]
        lost = [*self.streams.values(), *waiting]
        self._waiting.clear()
        self._out.clear()
        for call in lost:
            if call.code == PENDING:
                call.fail(UNAVAILABLE, text)
        return lost

    def receive(self, data: bytes) -> list[Call]:
        """Take bytes from the peer; return the calls that ended with them.

        After a fault of the peer `error` is set, and the connection must be closed.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        used = self._usual_answers(data, 0)
        if used < len(data):
            self._others(data, used)
        if self._unacknowledged >= _REFILL_BYTES:
            grow = self._unacknowledged.to_bytes(4, "big")
            self._out.frame(frames.WINDOW_UPDATE, 0, frames.CONNECTION, grow)
            self._unacknowledged = 0
        if self._waiting:
            self._open_waiting()
        finished = self._finished
        if finished:
            self._finished = []
        return finished

    # Implementation details follow.

    def _others(self, data: bytes, start: int) -> None:
        """Handle what is in `data` besides usual answers; keep what is not whole."""
        try:
            self._rest = data[self._frames(data, start) :]
        except (ProtocolError, HPACKError) as fault:
            self.error = f"HTTP/2 protocol error: {fault}"
            self.news = True
            self._out.frame(frames.GOAWAY, 0, frames.CONNECTION, b"\0\0\0\0\0\0\0\1")

    def _frames(self, data: bytes, start: int) -> int:
        """Handle every whole frame from `start` on; return where they end."""
        unpack = frames.FRAME.unpack_from
        size = len(data)
        while start + 9 <= size:
            word, flags, stream_id = unpack(data, start)
            end = start + 9 + (word >> 8)
            if end > size:
                if word >> 8 > FRAME_BYTES:
                    raise ProtocolError(_too_long(data[start:], self.ready))
                break
            kind = word & 0xFF
            payload = data[start + 9 : end]
            start = end
            if kind == frames.HEADERS and flags & _HEADERS_FLAGS == frames.END_HEADERS:
                self._head(flags, stream_id, payload)
                if flags & frames.END_STREAM:
                    start = self._usual_answers(data, start)
            elif kind == frames.DATA and not flags & _DATA_FLAGS:
                self._unacknowledged += len(payload)
                call = self.streams.get(stream_id)
                if call is not None:
                    call.received_bytes += len(payload)
                    if call.payload is not None:
                        call.payload += payload
            else:
                self._other(kind, flags, stream_id, payload)
        return start

    def _usual_answers(self, data: bytes, start: int) -> int:
        """Handle the whole answers at `start` that look as the last one did.

        Nearly all answers of a run are a header block, one DATA frame and trailers of
        the same bytes but for stream id and message. Reading such an answer in one go
        is what makes the generator cheap; every other one is read frame by frame.
        """
        usual = self._heads.usual
        if usual is None or self._out.stalled:
            return start
        pop = self.streams.pop
        append = self._finished.append
        length_at, message_at = usual.length_at, usual.message_at
        openings, closing = usual.openings, usual.closing
        closing_bytes = usual.closing_bytes
        matches = data.startswith
        size = len(data)
        message_bytes = 0
        while start < size:
            at = start + length_at
            length_bytes, opening = openings[data[at : at + 3]]
            stream_id = data[start + 5 : start + 9]
            message = start + message_at
            tail = message + length_bytes
            if not matches(stream_id.join(opening), start) or not matches(
                stream_id.join(closing), tail
            ):
                break
            call = pop(stream_id, None)
            if call is not None:
                call.code = OK
                if call.payload is not None:
                    call.payload += data[message:tail]
                append(call)
            message_bytes += length_bytes
            start = tail + closing_bytes
        self._unacknowledged += message_bytes
        return start

    def _head(self, flags: int, stream_id: bytes, block: bytes) -> None:
        """A whole header block: the head of an answer, or its end."""
        heads = self._heads
        head = heads.known.get(block) or heads.decode(block)
        if flags & frames.END_STREAM:
            if head.code == OK:
                heads.note_trailers(block)
            self._end(stream_id, head)
        elif head.bad_http:
            # Not gRPC's answer; its text will follow as DATA.
            call = self.streams.get(stream_id)
            if call is not None:
                call.fail(head.code, head.text)
        else:
            heads.note_head(block)

    def _end(self, stream_id: bytes, head: Head) -> None:
        """The answer has ended: with trailers, or without any."""
        call = self.streams.pop(stream_id, None)
        if call is None:
            return
        if call.code == PENDING or head.has_status:
            call.fail(head.code, head.text)
        if call.code == OK and call.received_bytes < PREFIX_BYTES:
            call.fail(INTERNAL, "status OK without a message")
        if self._out.forget(stream_id):
            self._out.reset(stream_id)
        self._finished.append(call)

    def _other(self, kind: int, flags: int, stream_id: bytes, payload: bytes) -> None:
        """Handle a frame that is not one of a usual answer's."""
        if not self.ready and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ProtocolError("the peer's first frame is not SETTINGS")
        if self._block is not None and kind != frames.CONTINUATION:
            raise ProtocolError("a header block was interrupted")
        if kind == frames.DATA:
            self._data(flags, stream_id, payload)
        elif kind == frames.HEADERS:
            self._headers(flags, stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, stream_id, payload)
        elif kind == frames.RST_STREAM:
            self._peer_reset(stream_id, payload)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self._out.frame(frames.PING, frames.ACK, frames.CONNECTION, payload)
        elif kind == frames.GOAWAY:
            self._goaway(payload)
        elif kind == frames.WINDOW_UPDATE:
            grown = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF
            self._out.grow_window(stream_id, grown)
        elif kind == frames.PUSH_PROMISE:
            raise ProtocolError("PUSH_PROMISE, though push is switched off")

    def _data(self, flags: int, stream_id: bytes, payload: bytes) -> None:
        # Padding counts for flow control (§6.9.1).
        self._unacknowledged += len(payload)
        call = self.streams.get(stream_id)
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if call is None:
            return
        call.received_bytes += len(payload)
        if call.payload is not None:
            call.payload += payload
        if flags & frames.END_STREAM:
            self._end(stream_id, _NO_TRAILERS)

    def _headers(self, flags: int, stream_id: bytes, payload: bytes) -> None:
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.PRIORITY:
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            self._head(flags, stream_id, payload)
        else:
            self._block = (stream_id, flags, payload)

    def _continuation(self, flags: int, stream_id: bytes, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise ProtocolError("CONTINUATION without a header block before it")
        _, first_flags, block = self._block
        block += payload
        if len(block) > _MAX_BLOCK_BYTES:
            raise ProtocolError("a header block of more than 1 MiB")
        self._block = (stream_id, first_flags, block)
        if flags & frames.END_HEADERS:
            self._block = None
            self._head(first_flags, stream_id, block)

    def _peer_reset(self, stream_id: bytes, payload: bytes) -> None:
        self._out.forget(stream_id)
        call = self.streams.pop(stream_id, None)
        if call is None:
            return
        error = int.from_bytes(payload[:4], "big")
        text = f"RST_STREAM with error {error}"
        if error == frames.REFUSED_STREAM:
            self._hand_back([call], text)
        else:
            call.fail(RESET_CODES.get(error, INTERNAL), text)
            self._finished.append(call)

    def _settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise ProtocolError("SETTINGS of a wrong length")
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == frames.HEADER_TABLE_SIZE and value < frames.DEFAULT_TABLE:
                self._out.use_no_table()
            elif key == frames.MAX_CONCURRENT_STREAMS:
                self._max_streams = value
            elif key == frames.INITIAL_WINDOW_SIZE:
                self._out.set_stream_window(value)
        self.ready = True
        self.news = True
        self._out.frame(frames.SETTINGS, frames.ACK, frames.CONNECTION, b"")
        self._out.pump()
        self._open_waiting()

    def _goaway(self, payload: bytes) -> None:
        """No new calls; those above the last id were not looked at (§6.8)."""
        if len(payload) < 8:
            raise ProtocolError("GOAWAY of a wrong length")
        self.draining = True
        self.news = True
        last_id = bytes([payload[0] & 0x7F]) + payload[1:4]
        reason = payload[8:].decode("utf-8", "replace") or "no reason given"
        error = int.from_bytes(payload[4:8], "big")
        self._closing = f"GOAWAY with error {error}: {reason}"
        unseen = [self.streams.pop(i) for i in [*self.streams] if i > last_id]
        for call in unseen:
            self._out.forget(call.stream_id)
        self._hand_back(unseen, self._closing)
        self._open_waiting()

    def _hand_back(self, calls: list[Call], text: str) -> None:
        """End calls that the peer has not looked at and that can be sent again."""
        for call in calls:
            if call.code == PENDING:
                call.fail(UNPROCESSED, text)
                self._finished.append(call)
                self.handed_back = True
                self.news = True

    def _open_waiting(self) -> None:
        """Open waiting calls while the peer's stream limit allows."""
        waiting = self._waiting
        if self._out.used_up and not self.draining:
            self.draining = True
            self.news = True
            self._closing = "the connection's stream ids are used up"
        if self.draining:
            self._hand_back([*waiting], self._closing)
            waiting.clear()
        while waiting and len(self.streams) < self._max_streams:
            call = waiting.popleft()
            if call.code == PENDING:
                self._open([call])


def _too_long(start: bytes, ready: bool) -> str:
    if not ready:
        return f"the peer does not speak HTTP/2 (it said {start[:40]!r})"
    return f"a frame of more than {FRAME_BYTES} bytes"
