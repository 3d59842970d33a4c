"""Encode a ModelInferResponse: always raw, one raw entry per output, in their order.

The descriptions of the outputs are encoded by protobuf once per shape; the parts that
differ between answers (id, contents) are joined by hand, so that contents are copied
exactly once, from the engine's buffer into the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batcher.rpc import messages, wire
from batcher.rpc.request import Shape
from batcher.rpc.signature import ModelSignature


def head(model: ModelSignature) -> bytes:
    """The fields before the id: model name and version."""
    return wire.field(wire.MODEL_NAME, model.name.encode()) + wire.field(
        wire.MODEL_VERSION, model.version.encode()
    )


def describe(
    model: ModelSignature, outputs: Sequence[int], shapes: Sequence[Shape]
) -> bytes:
    """The encoded descriptions of the outputs (name, datatype, shape), in order."""
    response = messages.ModelInferResponse()
    for index, shape in zip(outputs, shapes, strict=True):
        signature = model.outputs[index]
        response.outputs.add(
            name=signature.name, datatype=signature.datatype, shape=shape
        )
    return response.SerializeToString()


def raw_prefix(size: int) -> bytes:
    """What stands before the `size` bytes of one output's contents."""
    return wire.prefix(wire.RAW_OUTPUT, size)


def serialize_bytes(elements: Any) -> bytes:
    """The raw form of an object array of `bytes`: each behind its 4-byte length."""
    parts = []
    for item in elements.reshape(-1):
        parts.append(len(item).to_bytes(4, "little"))
        parts.append(item)
    return b"".join(parts)
