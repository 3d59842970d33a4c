"""HTTP/2 frames: their names, numbers and the bytes of their headers.

Constants and pure functions over bytes; what a connection does with a frame is in
`http2`. RFC 9113 is cited as §.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client says first (§3.4)."""

FRAME_BYTES: Final = 16_384
"""Longest frame sent and taken: every peer takes this much (§4.2)."""

DATA: Final = 0
HEADERS: Final = 1
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4

REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8

MAX_WINDOW: Final = 2**31 - 1
DEFAULT_WINDOW: Final = 65_535
DEFAULT_TABLE: Final = 4096
LAST_STREAM_ID: Final = 2**31 - 1

FRAME: Final = Struct(">IB4s")
"""A frame header: length and kind in one word, flags, stream id.

Stream ids are kept as the four bytes that they are on the wire: they are dictionary
keys and parts of frames much more often than numbers.
"""

STREAM_ID: Final = Struct(">I")

CONNECTION: Final = b"\0\0\0\0"
"""In the place of a stream id: the frame is about the whole connection."""

SETTING: Final = Struct(">HI")


class ProtocolError(Exception):
    """The peer broke HTTP/2; the connection cannot be used on."""


def frame_start(length: int, kind: int, flags: int) -> bytes:
    """The five bytes of a frame header that come before the stream id."""
    return length.to_bytes(3, "big") + bytes((kind, flags))


def frame(kind: int, flags: int, stream_id: bytes, payload: bytes) -> bytes:
    """A whole frame."""
    return frame_start(len(payload), kind, flags) + stream_id + payload


def opening() -> bytes:
    """What a connection of ours begins with.

    We ask for an empty header table, so that a response's header block can be told by
    its bytes, and open the windows wide: how fast answers are taken must not be a
    part of what is measured.
    """
    settings = (
        (HEADER_TABLE_SIZE, 0),
        (ENABLE_PUSH, 0),
        (INITIAL_WINDOW_SIZE, MAX_WINDOW),
    )
    pairs = b"".join(SETTING.pack(*pair) for pair in settings)
    grow = (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big")
    return (
        PREFACE
        + frame(SETTINGS, 0, CONNECTION, pairs)
        + frame(WINDOW_UPDATE, 0, CONNECTION, grow)
    )


def unpadded(payload: bytes) -> bytes:
    """The payload of a padded frame without its padding (§6.1).

    Raises:
        ProtocolError: there is more padding than payload.
    """
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]
