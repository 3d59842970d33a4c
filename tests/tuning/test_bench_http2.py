"""The HTTP/2 connection, byte by byte: what a peer may do and what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hpack import Decoder, Encoder

from batcher.errors import ConfigError
from batcher.tuning import frames
from batcher.tuning.calls import INFER_PATH, Call, CallRequest
from batcher.tuning.frames import FRAME
from batcher.tuning.headers import (
    INTERNAL,
    OK,
    PENDING,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    UNPROCESSED,
    request_blocks,
    timeout_value,
)
from batcher.tuning.http2 import Connection

if TYPE_CHECKING:
    from batcher.tuning.headers import Metadata

HEAD = [(":status", "200"), ("content-type", "application/grpc")]
MESSAGE = b"\0\0\0\0\x03abc"
END = frames.END_HEADERS | frames.END_STREAM


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """A frame of a stream by number, 0 for the connection."""
    return frames.frame(kind, flags, stream_id.to_bytes(4, "big"), payload)


def make_call(size_bytes: int = 10, *, keep: bool = False) -> Call:
    """A call of a message of `size_bytes`; `keep` collects the answer."""
    blocks = request_blocks("host:1", INFER_PATH, None, ())
    call = Call(CallRequest(blocks, b"m" * size_bytes, None, 0), 0, 0, False)
    call.payload = bytearray() if keep else None
    return call


def number(call: Call) -> int:
    """The number of a call's stream."""
    return int.from_bytes(call.stream_id, "big")


def taken(connection: Connection) -> bytes:
    """What the connection had to send."""
    data = b"".join(connection.output)
    connection.output.clear()
    return data


def connected(*settings: tuple[int, int]) -> Connection:
    """A connection whose peer has sent its settings."""
    connection = Connection()
    payload = b"".join(frames.SETTING.pack(*pair) for pair in settings)
    connection.receive(frame(frames.SETTINGS, 0, 0, payload))
    taken(connection)
    return connection


def plain_encoder() -> Encoder:
    """A server's header encoder that heeds our table size of 0."""
    encoder = Encoder()
    encoder.header_table_size = 0
    return encoder


def answer(
    encoder: Encoder, stream_id: int, *, status: str = "0", message: bytes = MESSAGE
) -> bytes:
    """A usual answer."""
    return (
        frame(frames.HEADERS, frames.END_HEADERS, stream_id, encoder.encode(HEAD))
        + frame(frames.DATA, 0, stream_id, message)
        + frame(
            frames.HEADERS, END, stream_id, encoder.encode([("grpc-status", status)])
        )
    )


def sent_frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream id and payload of each frame in `data`."""
    found = []
    while data:
        word, flags, stream_id = FRAME.unpack_from(data)
        end = 9 + (word >> 8)
        number = int.from_bytes(stream_id, "big")
        found.append((word & 0xFF, flags, number, data[9:end]))
        data = data[end:]
    return found


def test_a_connection_opens_with_preface_settings_and_a_wide_window() -> None:
    """We ask for no header table and no push, and give all the window there is."""
    output = taken(Connection())

    assert output.startswith(frames.PREFACE)
    (settings, window) = sent_frames(output.removeprefix(frames.PREFACE))
    pairs = dict(frames.SETTING.iter_unpack(settings[3]))
    assert pairs == {
        frames.HEADER_TABLE_SIZE: 0,
        frames.ENABLE_PUSH: 0,
        frames.INITIAL_WINDOW_SIZE: 2**31 - 1,
    }
    assert window[0] == frames.WINDOW_UPDATE


@pytest.mark.parametrize("settings", [(), ((frames.HEADER_TABLE_SIZE, 0),)])
def test_a_peer_reads_the_same_headers_from_every_request(
    settings: tuple[tuple[int, int], ...],
) -> None:
    """With a header table or without, each request's block says the same."""
    connection = connected(*settings)
    decoder = Decoder()

    connection.submit([make_call(), make_call(), make_call()])

    blocks = [
        payload
        for kind, _, _, payload in sent_frames(taken(connection))
        if kind == frames.HEADERS
    ]
    fields: list[dict[object, object]] = [
        {field[0]: field[1] for field in decoder.decode(block)} for block in blocks
    ]
    assert fields[0] == fields[1] == fields[2]
    assert fields[0][":path"] == INFER_PATH
    assert fields[0][":authority"] == "host:1"
    assert fields[0]["te"] == "trailers"
    assert len(decoder.header_table.dynamic_entries) == (0 if settings else 5)


def test_answers_split_anywhere_are_put_together() -> None:
    """Bytes may come one at a time: the calls end once each, and whole."""
    connection = connected()
    calls = [make_call(keep=True) for _ in range(4)]
    connection.submit(calls)
    encoder = plain_encoder()
    data = b"".join(answer(encoder, number(call)) for call in calls)

    finished = [
        call for i in range(len(data)) for call in connection.receive(data[i : i + 1])
    ]

    assert finished == calls
    assert [call.code for call in calls] == [OK] * 4
    assert all(bytes(call.payload or b"") == MESSAGE for call in calls)


def test_answers_that_come_together_are_read_in_one_go() -> None:
    """A run of usual answers, of messages of any length, then an error among them."""
    connection = connected()
    calls = [make_call(keep=True) for _ in range(6)]
    connection.submit(calls)
    encoder = plain_encoder()
    messages = [b"\0" + bytes([0, 0, 0, n]) + b"x" * n for n in (3, 0, 9, 3, 5, 1)]
    data = b"".join(
        answer(
            encoder,
            number(call),
            message=message,
            status="8" if call is calls[4] else "0",
        )
        for call, message in zip(calls, messages, strict=True)
    )

    assert connection.receive(data) == calls

    assert [call.code for call in calls] == [OK, OK, OK, OK, RESOURCE_EXHAUSTED, OK]
    assert [bytes(call.payload or b"") for call in calls] == messages


def test_a_peer_that_keeps_a_header_table_is_understood() -> None:
    """Blocks that refer to a table in use are decoded with it, not by their bytes."""
    connection = connected()
    encoder = Encoder()
    texts = []
    for i in range(300):
        call = make_call()
        connection.submit([call])
        # 300 different messages, and every third twice, turn the table over.
        fields = [("grpc-status", "3"), ("grpc-message", f"fault%20{i // 3}")]
        block = encoder.encode([*HEAD, *fields])
        (done,) = connection.receive(frame(frames.HEADERS, END, number(call), block))
        texts.append(done.text)

    assert texts == [f"fault {i // 3}" for i in range(300)]


def test_padding_priority_and_continuation() -> None:
    """Parts of a frame that carry nothing are left out; a block may be in pieces."""
    connection = connected()
    call = make_call(keep=True)
    connection.submit([call])
    encoder = plain_encoder()
    head, trailers = encoder.encode(HEAD), encoder.encode([("grpc-status", "0")])
    padded = frames.PADDED | frames.PRIORITY | frames.END_HEADERS
    data = (
        frame(frames.HEADERS, padded, 1, b"\x02" + b"\0" * 5 + head + b"\0\0")
        + frame(frames.DATA, frames.PADDED, 1, b"\x03" + MESSAGE + b"\0\0\0")
        + frame(frames.HEADERS, frames.END_STREAM, 1, trailers[:2])
        + frame(frames.CONTINUATION, 0, 1, trailers[2:4])
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, trailers[4:])
    )

    assert connection.receive(data) == [call]

    assert call.code == OK
    assert bytes(call.payload or b"") == MESSAGE


@pytest.mark.parametrize(
    ("fields", "message", "code", "text"),
    [
        ([(":status", "200"), ("grpc-status", "14")], b"", UNAVAILABLE, ""),
        (
            [*HEAD, ("grpc-status", "3"), ("grpc-message", "gr%C3%B6%C3%9Fe")],
            b"",
            3,
            "größe",
        ),
        ([(":status", "503")], b"", UNAVAILABLE, "HTTP status 503"),
        ([(":status", "418")], b"", UNKNOWN, "HTTP status 418"),
        ([*HEAD, ("grpc-status", "0")], b"", INTERNAL, "status OK without a message"),
        (HEAD, b"", UNKNOWN, "the answer ended without grpc-status"),
    ],
)
def test_trailers_only_answers(
    fields: list[tuple[str, str]], message: bytes, code: int, text: str
) -> None:
    """An answer of one header block is an error with gRPC's code for it."""
    connection = connected()
    call = make_call()
    connection.submit([call])

    connection.receive(frame(frames.HEADERS, END, 1, plain_encoder().encode(fields)))

    assert (call.code, call.text) == (code, text)


def test_an_answer_of_a_proxy_keeps_its_http_status() -> None:
    """What follows a bad head, a page of HTML, does not hide it."""
    connection = connected()
    call = make_call()
    connection.submit([call])
    block = plain_encoder().encode([(":status", "502"), ("content-type", "text/html")])
    head = frame(frames.HEADERS, frames.END_HEADERS, 1, block)

    connection.receive(head + frame(frames.DATA, frames.END_STREAM, 1, b"<html>"))

    assert (call.code, call.text) == (UNAVAILABLE, "HTTP status 502")


def test_a_large_body_waits_for_both_windows() -> None:
    """DATA stays within stream and connection windows, in frames of 16 KiB at most."""
    connection = connected((frames.INITIAL_WINDOW_SIZE, 20_000))
    connection.submit([make_call(100_000), make_call(10)])

    def data_bytes() -> dict[int, int]:
        sent: dict[int, int] = {}
        for kind, _, stream_id, payload in sent_frames(taken(connection)):
            if kind == frames.DATA:
                assert len(payload) <= 16_384
                sent[stream_id] = sent.get(stream_id, 0) + len(payload)
        return sent

    def grow(stream_id: int, size: int) -> None:
        update = frame(frames.WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))
        connection.receive(update)

    assert data_bytes() == {1: 20_000, 3: 15}
    grow(1, 60_000)
    assert data_bytes() == {1: 65_535 - 20_015}
    grow(0, 100_000)
    assert data_bytes() == {1: 80_000 - 65_535 + 15}
    larger = frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 50_000)
    connection.receive(frame(frames.SETTINGS, 0, 0, larger))
    assert data_bytes() == {1: 20_005}


def test_an_answer_before_the_whole_body_ends_the_sending() -> None:
    """A server may refuse a body halfway: the rest is not sent, the stream reset."""
    connection = connected((frames.INITIAL_WINDOW_SIZE, 100))
    call = make_call(1000)
    connection.submit([call])
    taken(connection)
    block = plain_encoder().encode([*HEAD, ("grpc-status", "8")])

    connection.receive(frame(frames.HEADERS, END, 1, block))

    assert call.code == RESOURCE_EXHAUSTED
    kinds = [kind for kind, *_ in sent_frames(taken(connection))]
    assert kinds == [frames.RST_STREAM]
    connection.receive(frame(frames.WINDOW_UPDATE, 0, 1, (900).to_bytes(4, "big")))
    assert taken(connection) == b""


def test_calls_over_the_stream_limit_wait() -> None:
    """With 2 streams allowed, the third call goes out when one has ended."""
    connection = connected((frames.MAX_CONCURRENT_STREAMS, 2))
    calls = [make_call() for _ in range(3)]
    connection.submit(calls)

    assert [*connection.streams.values()] == calls[:2]

    connection.receive(answer(plain_encoder(), 1))

    assert [*connection.streams.values()] == calls[1:]


def test_goaway_hands_back_what_the_server_has_not_looked_at() -> None:
    """Streams up to the last id go on, later and waiting ones can be sent again."""
    connection = connected((frames.MAX_CONCURRENT_STREAMS, 2))
    seen, unseen, waiting = calls = [make_call() for _ in range(3)]
    connection.submit(calls)
    goaway = (1).to_bytes(4, "big") + (0).to_bytes(4, "big") + b"bye"

    returned = connection.receive(frame(frames.GOAWAY, 0, 0, goaway))

    assert connection.draining
    assert connection.handed_back
    assert returned == [unseen, waiting]
    assert [call.code for call in calls] == [PENDING, UNPROCESSED, UNPROCESSED]
    assert waiting.text == "GOAWAY with error 0: bye"
    assert connection.receive(answer(plain_encoder(), 1)) == [seen]


@pytest.mark.parametrize(
    ("error", "code"),
    [(7, UNPROCESSED), (8, 1), (11, RESOURCE_EXHAUSTED), (2, INTERNAL)],
)
def test_a_reset_has_the_code_that_grpc_gives_it(error: int, code: int) -> None:
    """RST_STREAM's error becomes gRPC's code; a refused stream can be sent again."""
    connection = connected()
    call = make_call()
    connection.submit([call])

    reset = frame(frames.RST_STREAM, 0, 1, error.to_bytes(4, "big"))

    assert connection.receive(reset) == [call]
    assert (call.code, call.text) == (code, f"RST_STREAM with error {error}")


def test_a_ping_is_answered_with_its_own_bytes() -> None:
    """A server that asks whether we are there hears so."""
    connection = connected()

    connection.receive(frame(frames.PING, 0, 0, b"12345678"))

    pong = (frames.PING, frames.ACK, 0, b"12345678")
    assert sent_frames(taken(connection)) == [pong]


def test_the_connection_window_is_refilled() -> None:
    """After a gigabyte of answers the peer gets the window back."""
    connection = connected()
    call = make_call()
    connection.submit([call])
    taken(connection)
    connection._unacknowledged = 2**30 - 4

    connection.receive(frame(frames.DATA, 0, 1, MESSAGE))

    ((kind, _, stream_id, payload),) = sent_frames(taken(connection))
    assert (kind, stream_id) == (frames.WINDOW_UPDATE, 0)
    assert int.from_bytes(payload, "big") == 2**30 + 4


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak HTTP/2"),
        (frame(frames.PING, 0, 0, b"12345678"), "first frame is not SETTINGS"),
    ],
)
def test_a_peer_that_does_not_speak_http2(data: bytes, fault: str) -> None:
    """The fault is kept in words, and nothing is raised."""
    connection = Connection()

    connection.receive(data)

    assert fault in connection.error
    assert not connection.ready


def test_broken_frames_end_the_connection_after_what_was_good() -> None:
    """Calls that ended before the fault are returned with it."""
    connection = connected()
    calls = [make_call(), make_call()]
    connection.submit(calls)
    garbage = frame(frames.HEADERS, END, 3, b"\xff\xff\xff\xff\xff")

    assert connection.receive(answer(plain_encoder(), 1) + garbage) == calls[:1]
    assert "HTTP/2 protocol error" in connection.error
    assert connection.close("lost") == calls[1:]
    assert (calls[1].code, calls[1].text) == (UNAVAILABLE, "lost")


def test_timeout_values_have_at_most_eight_digits() -> None:
    """Longer deadlines take a coarser unit, rounded up (gRPC over HTTP/2)."""
    values = [timeout_value(us) for us in (1, 99_999_999, 100_000_001, 10**11 + 1)]

    assert values == ["1u", "99999999u", "100001m", "100001S"]


@pytest.mark.parametrize(
    "metadata",
    [
        (("Upper", "x"),),
        (("grpc-timeout", "1S"),),
        (("te", "x"),),
        (("key-bin", "text"),),
        (("key", b"bytes"),),
        (("key", "line\nbreak"),),
        (("key", "x" * 20_000),),
    ],
)
def test_metadata_that_cannot_be_sent_is_refused(metadata: Metadata) -> None:
    """A key or value that gRPC does not allow is a configuration error."""
    with pytest.raises(ConfigError, match="metadata"):
        request_blocks("host:1", INFER_PATH, None, metadata)
