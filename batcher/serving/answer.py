"""Give each caller its own rows back: outputs of a batch into answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batcher.errors import EngineFailure
from batcher.rpc import response
from batcher.rpc.header import InferPlan
from batcher.rpc.request import Shape
from batcher.serving.request import InferRequest
from batcher.serving.shapes import ModelShapes


class BatchOutputs:
    """The outputs of one batch, ready to be cut into rows.

    Args:
        arrays: as the engine gave them.
        rung: rows that were run.
        shapes: the model's rules.

    Raises:
        EngineFailure: an output has other rows than the batch.
    """

    __slots__ = ("_arrays", "_flat", "_row_bytes", "_shapes", "_strings", "tails")

    def __init__(self, arrays: Sequence[Any], rung: int, shapes: ModelShapes) -> None:
        self._shapes = shapes
        # BYTES have another size in every answer.
        self._strings = any(spec.dtype == "BYTES" for spec in shapes.outputs)
        self._arrays = arrays
        self._flat: list[memoryview | None] = []
        self._row_bytes: list[int] = []
        tails = []
        for spec, array in zip(shapes.outputs, arrays, strict=True):
            if shapes.batched and (not array.ndim or len(array) != rung):
                raise EngineFailure(
                    f"output {spec.name!r} has shape {list(array.shape)} for a batch "
                    f"of {rung} rows: the model does not batch on axis 0 (set "
                    "max_batch = 1)"
                )
            tails.append(array.shape[1:] if shapes.batched else array.shape)
            if spec.dtype == "BYTES":
                self._flat.append(None)
                self._row_bytes.append(0)
                continue
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._flat.append(flat.data)
            rows = rung if shapes.batched else 1
            self._row_bytes.append(flat.nbytes // rows)
        self.tails: tuple[Shape, ...] = tuple(tails)

    def answer(self, head: bytes, request: InferRequest, row: int) -> bytes:
        """The encoded answer of a request whose first row is `row` of the batch."""
        plan = request.plan
        if not plan.fit.exact or self._strings:
            return encode(head, request, self.chunks(request, row))
        described = plan.meta.get(self.tails)
        if described is None:
            described = self._describe(plan)
        parts = [head, request.id_field]
        end = row + plan.rows
        for index, before in described:
            parts.append(before)
            if index >= 0:
                size = self._row_bytes[index]
                flat = self._flat[index]
                parts.append(flat[row * size : end * size])  # type: ignore[index,arg-type]
        return b"".join(parts)

    def chunks(self, request: InferRequest, row: int) -> list[tuple[Any, Shape]]:
        """Per wanted output, the bytes and the shape of the request's rows."""
        plan = request.plan
        result: list[tuple[Any, Shape]] = []
        for index in plan.outputs:
            array = self._arrays[index]
            if self._shapes.batched:
                array = array[row : row + request.rows]
            for axis, size in plan.fit.cuts[index]:
                array = array[(slice(None),) * axis + (slice(size),)]
            if self._shapes.outputs[index].dtype == "BYTES":
                result.append((response.serialize_bytes(array), array.shape))
            else:
                result.append((array.tobytes(), array.shape))
        return result

    def _describe(self, plan: InferPlan) -> list[tuple[int, bytes]]:
        """What stands before each output's bytes: (output, bytes), in order.

        The entry with the output -1 has no bytes behind it. Kept with the plan.
        """
        batched = self._shapes.batched
        shapes = [
            (plan.rows, *self.tails[i]) if batched else self.tails[i]
            for i in plan.outputs
        ]
        described = [(-1, response.describe(plan.signature, plan.outputs, shapes))]
        rows = plan.rows if batched else 1
        for index in plan.outputs:
            size = self._row_bytes[index] * rows
            described.append((index, response.raw_prefix(size)))
        # The first output's prefix joins the descriptions: one part less to copy.
        if len(described) > 1:
            index, before = described[1]
            described[:2] = [(index, described[0][1] + before)]
        if len(plan.meta) >= 64:  # data-dependent output shapes must not pile up
            plan.meta.clear()
        plan.meta[self.tails] = described
        return described


def encode(
    head: bytes, request: InferRequest, chunks: Sequence[tuple[Any, Shape]]
) -> bytes:
    """An answer whose outputs have these bytes and shapes."""
    plan = request.plan
    shapes = [shape for _, shape in chunks]
    parts = [
        head,
        request.id_field,
        response.describe(plan.signature, plan.outputs, shapes),
    ]
    for data, _ in chunks:
        parts.append(response.raw_prefix(len(data)))
        parts.append(data)
    return b"".join(parts)


def joined(request: InferRequest) -> list[tuple[Any, Shape]]:
    """The outputs of a split request, put together from its parts."""
    parts: list[InferRequest] = request.parts or []  # type: ignore[assignment]
    result: list[tuple[Any, Shape]] = []
    for position in range(len(request.plan.outputs)):
        pieces = [(part.chunks or [])[position] for part in parts]
        tail = pieces[0][1][1:]
        result.append((b"".join(data for data, _ in pieces), (request.rows, *tail)))
    return result
