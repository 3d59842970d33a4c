"""Comparison of answers with what is expected of them.

Works on gRPC message bytes; the message classes are imported when first needed.
"""

from __future__ import annotations


def raw_outputs(data: bytes | bytearray) -> tuple[bytes, ...]:
    """The `raw_output_contents` of a ModelInferResponse with its gRPC prefix.

    Raises:
        ValueError: there is no whole, uncompressed and well-formed message.
    """
    from google.protobuf.message import DecodeError

    from batcher.rpc.messages import ModelInferResponse

    if len(data) < 5 or len(data) - 5 != int.from_bytes(data[1:5], "big"):
        raise ValueError(f"{len(data)} bytes, which is not one whole message")
    if data[0]:
        raise ValueError("a compressed message, though none was accepted")
    try:
        message = ModelInferResponse.FromString(bytes(data[5:]))
    except DecodeError as fault:
        raise ValueError("not a ModelInferResponse") from fault
    return tuple(message.raw_output_contents)


def difference(data: bytes | bytearray, expected: tuple[bytes, ...]) -> str:
    """What is wrong with an answer; empty when nothing is."""
    try:
        outputs = raw_outputs(data)
    except ValueError as fault:
        return str(fault)
    if len(outputs) != len(expected):
        return f"{len(outputs)} raw outputs, expected {len(expected)}"
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if len(output) != len(wanted):
            return f"output {i} has {len(output)} bytes, expected {len(wanted)}"
        if output != wanted:
            pairs = enumerate(zip(output, wanted, strict=True))
            place = next(j for j, (x, y) in pairs if x != y)
            return f"output {i} differs from byte {place} on"
    return ""
