"""Signatures and requests, in the fewest words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batcher.rpc import messages
from batcher.rpc.request import ParsedRequest, parse, validate
from batcher.rpc.signature import Axis, ModelSignature, TensorSignature

Input = tuple[str, str, Sequence[int], bytes | None]
"""Name, datatype, shape and raw contents; None for contents that are not raw."""


def tensor(name: str, datatype: str, *axes: Axis) -> TensorSignature:
    """A tensor of these axes, the batch axis included."""
    return TensorSignature(name, datatype, axes)


def model(
    *inputs: TensorSignature,
    outputs: Sequence[TensorSignature] = (),
    batched: bool = True,
    name: str = "m",
) -> ModelSignature:
    """A model with batches of up to 8 rows and requests of up to 16."""
    return ModelSignature(
        name=name,
        version="1",
        platform="fake",
        inputs=inputs,
        outputs=tuple(outputs) or (tensor("y", "FP32", "N"),),
        batched=batched,
        max_batch=8 if batched else 1,
        max_rows=16 if batched else 1,
    )


def request(*inputs: Input, **fields: Any) -> messages.ModelInferRequest:
    """A request with these inputs; raw contents in their order, where there are any."""
    message = messages.ModelInferRequest(model_name="m", **fields)
    for name, datatype, shape, raw in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        if raw is not None:
            message.raw_input_contents.append(raw)
    return message


def checked(
    message: messages.ModelInferRequest, signature: ModelSignature
) -> ParsedRequest:
    """What the daemon makes of the message's bytes."""
    return validate(parse(message.SerializeToString()), signature)


PROBE = model(
    tensor("x", "FP32", "N", 4),
    outputs=(
        tensor("y", "FP32", "N", 4),
        tensor("n", "INT64", "N", 1),
        tensor("pos", "INT64", "N", 1),
    ),
)
SEQ = model(
    tensor("ids", "INT64", "N", "S"),
    tensor("mask", "INT64", "N", "S"),
    outputs=(tensor("y", "FP32", "N", 8),),
)


def probe(*, rows: int = 1, raw: bytes | None = None, **fields: Any) -> Any:
    """A request that `PROBE` takes."""
    contents = bytes(16 * rows) if raw is None else raw
    return request(("x", "FP32", [rows, 4], contents), **fields)


def parameter(value: object) -> messages.InferParameter:
    """A parameter of the kind that fits the Python value; none for None."""
    if value is None:
        return messages.InferParameter()
    if isinstance(value, bool):
        return messages.InferParameter(bool_param=value)
    if isinstance(value, int):
        if value >= 1 << 63:
            return messages.InferParameter(uint64_param=value)
        return messages.InferParameter(int64_param=value)
    if isinstance(value, float):
        return messages.InferParameter(double_param=value)
    return messages.InferParameter(string_param=str(value))
