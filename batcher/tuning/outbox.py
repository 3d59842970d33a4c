"""The sending half of an HTTP/2 connection: streams opened, bodies held back, bytes.

Flow control towards the peer lives here (§ is of RFC 9113); what the peer says is read
in `http2`. Sans-IO: what must be sent collects in `output`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batcher.tuning import frames
from batcher.tuning.frames import FRAME_BYTES

if TYPE_CHECKING:
    from batcher.tuning.calls import Call


class _Stalled:
    """A request body of which the peer's flow control holds back a part."""

    __slots__ = ("call", "sent_bytes", "window")

    def __init__(self, call: Call, window: int) -> None:
        self.call = call
        self.sent_bytes = 0
        self.window = window


class Outbox:
    """What goes to the peer of one connection."""

    def __init__(self) -> None:
        self.streams: dict[bytes, Call] = {}
        """Calls on the wire by stream id."""
        self.used_up = False
        """Whether there are no more stream ids."""
        self.output = [frames.opening()]
        """What must be sent, in order; whoever sends it clears the list."""
        self.stalled: dict[bytes, _Stalled] = {}
        """Bodies of which a part waits for the peer's windows, oldest first."""
        self._next_id = 1
        self._form = 0
        self._window = frames.DEFAULT_WINDOW
        self._stream_window = frames.DEFAULT_WINDOW

    def open(self, calls: list[Call]) -> None:
        """Put each call on a stream of its own."""
        streams = self.streams
        append = self.output.append
        pack = frames.STREAM_ID.pack
        next_id = self._next_id
        window = self._window
        form = self._form
        # The largest body that can go out whole; none while others are held back.
        whole_bytes = 0 if self.stalled else self._stream_window
        for call in calls:
            request = call.request
            size = request.size_bytes
            call.stream_id = stream_id = pack(next_id)
            next_id += 2
            streams[stream_id] = call
            if size <= window and size <= whole_bytes:
                window -= size
                append(stream_id.join(request.pieces[form]))
            else:
                self._window = window
                self._hold_back(call, form)
                window = self._window
                whole_bytes = 0 if self.stalled else self._stream_window
            form |= 1
        self._window = window
        self._next_id = next_id
        self._form = form
        if next_id > frames.LAST_STREAM_ID:
            self.used_up = True

    def frame(self, kind: int, flags: int, stream_id: bytes, payload: bytes) -> None:
        """Send a frame."""
        self.output.append(frames.frame(kind, flags, stream_id, payload))

    def reset(self, stream_id: bytes) -> None:
        """Tell the peer that we have lost interest in a stream (CANCEL)."""
        self.stalled.pop(stream_id, None)
        self.frame(frames.RST_STREAM, 0, stream_id, frames.CANCEL.to_bytes(4, "big"))

    def forget(self, stream_id: bytes) -> bool:
        """A stream has ended; returns whether a part of its body was not sent."""
        return self.stalled.pop(stream_id, None) is not None

    def use_no_table(self) -> None:
        """The peer's header table is too small: send headers without it."""
        # The next block says so (RFC 7541 §4.2).
        self._form = 2

    def set_stream_window(self, size: int) -> None:
        """The peer's SETTINGS_INITIAL_WINDOW_SIZE, for open streams too (§6.9.2)."""
        grown = size - self._stream_window
        self._stream_window = size
        for body in self.stalled.values():
            body.window += grown

    def grow_window(self, stream_id: bytes, grown: int) -> None:
        """The peer's WINDOW_UPDATE, of a stream or of the connection."""
        if stream_id == frames.CONNECTION:
            self._window += grown
        elif (body := self.stalled.get(stream_id)) is not None:
            body.window += grown
        if self.stalled:
            self.pump()

    def pump(self) -> None:
        """Send of the held-back bodies what the windows allow, oldest first."""
        for stream_id, body in [*self.stalled.items()]:
            data = body.call.request.data
            left = len(data) - body.sent_bytes
            while left > 0:
                size = min(left, FRAME_BYTES, self._window, body.window)
                if size <= 0:
                    break
                chunk = data[body.sent_bytes : body.sent_bytes + size]
                left -= size
                body.sent_bytes += size
                body.window -= size
                self._window -= size
                flags = 0 if left else frames.END_STREAM
                self.frame(frames.DATA, flags, stream_id, chunk)
            if left == 0:
                del self.stalled[stream_id]
            if self._window <= 0:
                return

    def clear(self) -> None:
        """The connection is gone."""
        self.streams.clear()
        self.stalled.clear()

    def _hold_back(self, call: Call, form: int) -> None:
        block = call.request.blocks[form]
        self.frame(frames.HEADERS, frames.END_HEADERS, call.stream_id, block)
        self.stalled[call.stream_id] = _Stalled(call, self._stream_window)
        self.pump()
