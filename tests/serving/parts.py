"""Requests, batches and answers without a daemon around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx

import engines
from batcher.config import AxisConfig
from batcher.rpc import messages, response
from batcher.rpc.header import InferPlan, locate
from batcher.rpc.request import parse, validate
from batcher.rpc.signature import ModelSignature, TensorSignature
from batcher.scheduling import NEVER, Batch, Group
from batcher.serving.answer import BatchOutputs
from batcher.serving.gather import gather
from batcher.serving.request import InferRequest
from batcher.serving.shapes import ModelShapes
from engines import DTYPES, Engine, Staging, TensorSpec

Arrays = Mapping[str, Any]


def spec(name: str, dtype: str, *axes: int | str | None) -> TensorSpec:
    """A tensor of an engine."""
    return TensorSpec(name, dtype, axes)


def signature_of(
    engine: Engine, *, batched: bool = True, name: str = "m"
) -> ModelSignature:
    """What callers see of an engine: batches of up to 8 rows."""

    def tensors(specs: Sequence[TensorSpec]) -> tuple[TensorSignature, ...]:
        return tuple(TensorSignature(s.name, s.dtype, s.shape) for s in specs)

    return ModelSignature(
        name=name,
        version="1",
        platform="test",
        inputs=tensors(engine.inputs),
        outputs=tensors(engine.outputs),
        batched=batched,
        max_batch=8 if batched else 1,
        max_rows=64 if batched else 1,
    )


def raw(array: Any) -> bytes:
    """The bytes of an array on the wire."""
    if array.dtype == object:
        return response.serialize_bytes(array)
    return bytes(array.tobytes())


def unraw(data: bytes, datatype: str, shape: Sequence[int]) -> Any:
    """The array of bytes from the wire."""
    if datatype != "BYTES":
        return np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    items = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape)


def payload_of(
    signature: ModelSignature,
    inputs: Arrays,
    *,
    outputs: Sequence[str] = (),
    id_: str = "",
    timeout_us: int = 0,
) -> bytes:
    """The serialized request with these arrays."""
    message = messages.ModelInferRequest(model_name=signature.name, id=id_)
    if timeout_us:
        message.parameters["timeout"].int64_param = timeout_us
    for name, array in inputs.items():
        kind = signature.inputs[signature.input_index[name]].type
        message.inputs.add(name=name, datatype=kind.name, shape=array.shape)
        message.raw_input_contents.append(raw(array))
    for name in outputs:
        message.outputs.add(name=name)
    return message.SerializeToString()


class Harness:
    """One model's way from requests to answers, a step at a time."""

    def __init__(
        self,
        model: onnx.ModelProto,
        folder: Path,
        *,
        axes: dict[str, AxisConfig] | None = None,
        batched: bool = True,
        predicted: bool = True,
    ) -> None:
        self.engine = engines.open(models.save(model, folder / "model.onnx"))
        self.shapes = ModelShapes(
            self.engine.inputs, self.engine.outputs, batched, axes or {}
        )
        self.shapes.predict_outputs = predicted
        self.signature = signature_of(self.engine, batched=batched)
        self.context = self.engine.create_context()
        self.staging = Staging(
            0, self.engine.inputs, self.engine.outputs, self.engine.host_buffer
        )

    def request(self, **inputs: Any) -> InferRequest:
        """A raw request for all outputs."""
        return self.request_for((), inputs)

    def request_for(self, outputs: Sequence[str], inputs: Arrays) -> InferRequest:
        """A raw request for some outputs; its contents lie in the message."""
        payload = payload_of(self.signature, inputs, outputs=outputs)
        message = parse(payload)
        parsed = validate(message, self.signature)
        header = locate(payload, message, parsed)
        assert header is not None
        plan = InferPlan(None, self.signature, parsed, header.spans)
        plan.fit = self.shapes.fit(parsed.shapes)
        return InferRequest(plan, payload, header.base, b"", None, None, NEVER, NEVER)

    def batch(self, *requests: InferRequest, rung: int | None = None) -> Batch:
        """A batch of these requests, padded to `rung` rows."""
        rows = sum(request.rows for request in requests)
        tails = {request.plan.fit.group.in_tails for request in requests}
        assert len(tails) == 1, "they are not of one group"
        group = Group(tails.pop(), (rung or rows,))
        return Batch(group, list(requests), rows)

    def run(self, batch: Batch) -> BatchOutputs:
        """Gathers and runs a batch as a slot does."""
        requests: list[InferRequest] = batch.requests  # type: ignore[assignment]
        gather(batch, self.staging, self.shapes)
        fit = requests[0].plan.fit.group
        arrays = self.staging.arrays(fit.cell(batch.rung))
        outputs = self.context.execute(arrays.inputs, arrays.outputs)
        return BatchOutputs(outputs, batch.rung, self.shapes)

    def gathered(self, batch: Batch) -> list[Any]:
        """Copies of the input arrays that a batch is run with."""
        requests: list[InferRequest] = batch.requests  # type: ignore[assignment]
        gather(batch, self.staging, self.shapes)
        shapes = requests[0].plan.fit.group.cell(batch.rung).inputs
        return [
            np.array(self.staging.input_array(i, shape))
            for i, shape in enumerate(shapes)
        ]

    def answers(self, batch: Batch) -> list[dict[str, Any]]:
        """Each request's outputs by name, in order, as its caller reads them."""
        ran = self.run(batch)
        head = response.head(self.signature)
        found = []
        row = 0
        requests: list[InferRequest] = batch.requests  # type: ignore[assignment]
        for request in requests:
            layout = ran.layout(request.plan)
            found.append(decoded(ran.answer(head, request, row, layout)))
            row += request.rows
        return found


def decoded(answer: bytes) -> dict[str, Any]:
    """An encoded answer's outputs by name."""
    message = messages.ModelInferResponse.FromString(answer)
    assert len(message.outputs) == len(message.raw_output_contents)
    return {
        output.name: unraw(data, output.datatype, output.shape)
        for output, data in zip(
            message.outputs, message.raw_output_contents, strict=True
        )
    }


def same(actual: Any, expected: Any) -> bool:
    """Whether two arrays are equal bit for bit, shape and dtype included."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    if actual.dtype == object:
        return bool(actual.tolist() == expected.tolist())
    return bool(actual.tobytes() == expected.tobytes())
