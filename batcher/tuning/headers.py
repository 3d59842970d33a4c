"""HTTP/2 header blocks of gRPC calls: those we send, made once, and those we read.

Every request of a body has the same header block, so it is encoded once, by `hpack`,
and sent as bytes; a response's block is decoded once and then recognised by its bytes.
The status codes of gRPC and their mappings live here too. No sockets and no frames.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple

from batcher.errors import ConfigError
from batcher.tuning.frames import END_HEADERS, END_STREAM, HEADERS, frame_start

if TYPE_CHECKING:
    from collections.abc import Iterable

Metadata = tuple[tuple[str, str | bytes], ...]
"""Metadata of a call; the value of a `-bin` key is bytes."""

CODE_NAMES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""gRPC's status codes by their number."""

OK: Final = 0
CANCELLED: Final = 1
UNKNOWN: Final = 2
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

PENDING: Final = -1
"""In the place of a code: not known yet."""

UNPROCESSED: Final = -2
"""In the place of a code: the server has not looked at the call (GOAWAY, or
REFUSED_STREAM), which may be sent once more."""

# gRPC over HTTP/2, "HTTP2 Transport Mapping", "Errors".
RESET_CODES: Final = {8: CANCELLED, 11: RESOURCE_EXHAUSTED, 12: 7}
"""gRPC code of an RST_STREAM by HTTP/2 error code; INTERNAL for any other, but for
REFUSED_STREAM, which is UNPROCESSED."""

# gRPC, "HTTP to gRPC Status Code Mapping": for an answer that is not gRPC's.
_HTTP_CODES: Final = {
    b"400": INTERNAL,
    b"401": 16,
    b"403": 7,
    b"404": 12,
    b"429": UNAVAILABLE,
    b"502": UNAVAILABLE,
    b"503": UNAVAILABLE,
    b"504": UNAVAILABLE,
}

MAX_BLOCK_BYTES: Final = 16_384
"""Longest request header block: it must fit one frame of the smallest maximum size."""

PREFIX_BYTES: Final = 5
"""What gRPC puts before a message: whether it is compressed, and its length."""

_CACHED_BLOCKS: Final = 1024
_KEY = re.compile(r"[a-z0-9_.-]+")
_RESERVED: Final = frozenset({"te", "content-type", "user-agent", "host", "connection"})


def code_name(code: int) -> str:
    """The name of a gRPC status code, or `CODE_<n>` for one that gRPC has not."""
    return CODE_NAMES[code] if 0 <= code < len(CODE_NAMES) else f"CODE_{code}"


def timeout_value(deadline_us: int) -> str:
    """A `grpc-timeout` value for `deadline_us` microseconds (at most 8 digits)."""
    if deadline_us < 10**8:
        return f"{deadline_us}u"
    if deadline_us < 10**11:
        return f"{-(-deadline_us // 1000)}m"
    return f"{-(-deadline_us // 10**6)}S"


def request_blocks(
    authority: str, path: str, deadline_us: int | None, metadata: Metadata
) -> tuple[bytes, bytes, bytes, bytes]:
    """The four forms of a call's request header block.

    In order: the first block of a connection, which puts the fields that all calls
    share into the peer's table; every later one, which refers to them; and the same
    two for a peer with a table too small for that, which leave it empty.

    Raises:
        ConfigError: a metadata key that gRPC does not allow, or metadata too long.
    """
    shared = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "batcher-bench"),
    ]
    # Never indexed: what differs by body must not move the shared fields' indexes.
    own = [NeverIndexedHeaderTuple(key, value) for key, value in _own(metadata)]
    if deadline_us is not None:
        own.insert(
            0, NeverIndexedHeaderTuple("grpc-timeout", timeout_value(deadline_us))
        )
    indexing = Encoder()
    first = indexing.encode([*shared, *own])
    later = indexing.encode([*shared, *own])
    plain = Encoder()
    plain.header_table_size = 0
    literal = [NeverIndexedHeaderTuple(*field) for field in shared]
    plain_first = plain.encode([*literal, *own])
    plain_later = plain.encode([*literal, *own])
    if len(plain_first) > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"metadata makes a header block of {len(plain_first)} bytes; at most "
            f"{MAX_BLOCK_BYTES} can be sent"
        )
    return first, later, plain_first, plain_later


def _own(metadata: Metadata) -> list[tuple[str, str]]:
    """Metadata as header fields; binary values in base64 (gRPC over HTTP/2)."""
    fields = []
    for key, value in metadata:
        if (
            not _KEY.fullmatch(key)
            or key.startswith("grpc-")
            or key in _RESERVED
            or isinstance(value, bytes) != key.endswith("-bin")
        ):
            raise ConfigError(
                f"metadata {key!r}: a key is lower case, not reserved by gRPC, and its "
                "value is bytes exactly when it ends in -bin"
            )
        if isinstance(value, bytes):
            value = base64.b64encode(value).rstrip(b"=").decode()
        elif not value.isascii() or not value.isprintable():
            raise ConfigError(f"metadata {key!r}: the value is not printable ASCII")
        fields.append((key, value))
    return fields


class Head(NamedTuple):
    """What a response's header block says."""

    code: int
    """The status if the call ends with this block (UNKNOWN when it has none)."""

    text: str
    """The status' text; may be empty."""

    has_status: bool
    """Whether the block carries `grpc-status`."""

    bad_http: bool
    """Whether the block is the head of an answer that is not gRPC's (not 200)."""


class UsualAnswer:
    """How an answer looks around its message, when that is one DATA frame.

    The tuples are what `stream_id.join` makes the bytes before and after it of.
    """

    def __init__(self, head: bytes, trailers: bytes) -> None:
        self.blocks = (head, trailers)
        """The header blocks of both ends."""
        self.length_at = 9 + len(head)
        """Where DATA's length stands, in bytes from the answer's start."""
        self.message_at = self.length_at + 9
        """Where the message begins."""
        self.openings = _Openings(head)
        """By DATA's length as on the wire: the same in bytes, and what comes before."""
        last = frame_start(len(trailers), HEADERS, END_HEADERS | END_STREAM)
        self.closing = (last, trailers)
        """What comes after the message."""
        self.closing_bytes = 9 + len(trailers)
        """The length of that."""


class _Openings(dict[bytes, tuple[int, tuple[bytes, ...]]]):
    """See `UsualAnswer.openings`; made as they are needed."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def __missing__(self, length: bytes) -> tuple[int, tuple[bytes, ...]]:
        size_bytes = int.from_bytes(length, "big")
        first = frame_start(len(self._head), HEADERS, END_HEADERS)
        opening: tuple[bytes, ...] = (first, self._head + length + b"\0\0", b"")
        if len(length) != 3 or size_bytes < PREFIX_BYTES:
            # Not a whole message, so not a usual answer: no stream id fits here.
            opening = (b"\xff" * 9, b"")
        if len(self) >= _CACHED_BLOCKS:
            self.clear()
        self[length] = (size_bytes, opening)
        return self[length]


class HeadReader:
    """Decodes the response header blocks of one connection.

    We ask the peer for an empty table, and then a block means the same every time. A
    peer may ignore that, so what a block means is relied on only as long as the table
    has not changed since; a block that changes it is decoded each time.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, Head] = {}
        """Blocks whose meaning is known; the caller looks here first."""
        self.usual: UsualAnswer | None = None
        """How the last OK answer looked, while that can be relied on."""
        self._decoder = Decoder()
        self._usual_head = b""

    def decode(self, block: bytes) -> Head:
        """Decode a block that is not in `known`.

        Raises:
            HPACKError: the block is malformed; the connection cannot be used on.
        """
        before = self._table()
        try:
            head = _head(self._decoder.decode(block, raw=True))
        except ValueError as fault:
            raise HPACKError(str(fault)) from fault
        after = self._table()
        if before[:2] != after[:2] or before[2] is not after[2]:
            self.known.clear()
            self.usual = None
            self._usual_head = b""
            return head
        if len(self.known) >= _CACHED_BLOCKS:
            self.known.clear()
        self.known[block] = head
        return head

    def note_head(self, block: bytes) -> None:
        """An answer began with this block."""
        if block in self.known:
            self._usual_head = block

    def note_trailers(self, block: bytes) -> None:
        """An answer ended OK with this block; the next ones may look the same."""
        head = self._usual_head
        if not head or block not in self.known:
            return
        if self.usual is None or self.usual.blocks != (head, block):
            self.usual = UsualAnswer(head, block)

    def _table(self) -> tuple[int, int, object]:
        """The table's limit, its length and its newest entry (by identity)."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return table.maxsize, len(entries), entries[0] if entries else None


def _head(fields: Iterable[tuple[bytes | str, bytes | str]]) -> Head:
    """Read the fields that decide a call's status.

    Raises:
        ValueError: `grpc-status` is not a number.
    """
    http = b""
    status: bytes | None = None
    text = ""
    for name, value in fields:
        raw = value if isinstance(value, bytes) else value.encode()
        if name == b":status":
            http = raw
        elif name == b"grpc-status":
            status = raw
        elif name == b"grpc-message":
            text = unquote_to_bytes(raw).decode("utf-8", "replace")
    if status is not None:
        return Head(int(status), text, True, False)
    if http not in (b"", b"200"):
        code = _HTTP_CODES.get(http, UNKNOWN)
        return Head(code, f"HTTP status {http.decode('latin-1')}", False, True)
    return Head(UNKNOWN, "the answer ended without grpc-status", False, False)
