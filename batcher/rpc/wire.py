"""The few protobuf encoding rules that the hot path applies by hand.

Source: the protobuf encoding guide. A length-delimited field is its tag, the length as
a varint, and the bytes. Only field numbers below 16 are used, so a tag is one byte.
"""

from __future__ import annotations

from typing import Final

MODEL_NAME: Final = 0x0A  # field 1, length-delimited; also of the response
MODEL_VERSION: Final = 0x12  # field 2
REQUEST_ID: Final = 0x1A  # field 3
RAW_INPUT: Final = 0x3A  # ModelInferRequest.raw_input_contents, field 7
RAW_OUTPUT: Final = 0x32  # ModelInferResponse.raw_output_contents, field 6


def varint(value: int) -> bytes:
    """`value` (not negative) as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def prefix(tag: int, length: int) -> bytes:
    """Tag and length of a field of `length` bytes."""
    return bytes((tag,)) + varint(length)


def field(tag: int, value: bytes) -> bytes:
    """A whole length-delimited field; nothing for an empty value (proto3 default)."""
    return prefix(tag, len(value)) + value if value else b""


def id_span(payload: bytes) -> tuple[int, int]:
    """Where the id field of a serialized ModelInferRequest lies: start and end.

    Serializers write fields in the order of their numbers: name, version, id. Start
    equals end where no id follows. Only meaningful for such a message, with fields of
    less than 128 bytes; the caller checks the result against a real parse once.

    Raises:
        IndexError: the message is not of that form.
    """
    at = payload[1] + 2
    if payload[at] == MODEL_VERSION:
        at += payload[at + 1] + 2
    if payload[at] != REQUEST_ID:
        return at, at
    length = payload[at + 1]
    if length > 0x7F:  # a varint of two bytes
        raise IndexError
    return at, at + length + 2
