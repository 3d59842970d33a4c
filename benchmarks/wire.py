"""The one request that every benchmark sends, and reading what comes back.

A few lines of the protobuf wire format by hand, so that the load generator depends on
neither the daemon's message classes nor a peer's. No sockets, no processes here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

SERVICE: Final = "/inference.GRPCInferenceService"
INFER: Final = f"{SERVICE}/ModelInfer"
STATISTICS: Final = f"{SERVICE}/ModelStatistics"

MODEL: Final = "fake"
VALUES: Final = tuple(float(i + 1) for i in range(16))
PAYLOAD: Final = struct.pack("<16f", *VALUES)
"""The input tensor, FP32[1, 16]. A right answer holds the same 64 bytes."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def infer_request(model: str = MODEL, tensor: str = "INPUT0") -> bytes:
    """A serialized `ModelInferRequest` with one row."""
    shape = _varint(1) + _varint(len(VALUES))
    described = (
        _bytes_field(1, tensor.encode())
        + _bytes_field(2, b"FP32")
        + _bytes_field(3, shape)
    )
    return (
        _bytes_field(1, model.encode())
        + _bytes_field(5, described)
        + _bytes_field(7, PAYLOAD)
    )


def grpc_frame(message: bytes) -> bytes:
    """The message as it stands in a gRPC request body: not compressed, with length."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def statistics_request(model: str = MODEL) -> bytes:
    """A serialized `ModelStatisticsRequest`."""
    return _bytes_field(1, model.encode())


def rows_and_batches(statistics_reply: bytes) -> tuple[int, int]:
    """`inference_count` and `execution_count`, added up over the model's versions."""
    rows = batches = 0
    for number, value in _fields(statistics_reply):
        if number != 1 or not isinstance(value, bytes):
            continue
        for inner, count in _fields(value):
            if isinstance(count, int):
                rows += count if inner == 4 else 0
                batches += count if inner == 5 else 0
    return rows, batches


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, varint()
            continue
        length = {1: 8, 5: 4}.get(kind) or varint()
        yield number, message[at : at + length]
        at += length
