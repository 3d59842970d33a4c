"""Give each caller its own rows back: outputs of a batch into answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batcher.errors import EngineFailure, PayloadTooLarge
from batcher.rpc import response
from batcher.rpc.header import InferPlan
from batcher.rpc.request import Shape
from batcher.serving.request import InferRequest
from batcher.serving.shapes import ModelShapes
from engines import Completion

Layout = tuple[tuple[bytes, int], ...]
"""Per wanted output: what stands before its bytes in the answer, and its index."""


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

    def layout(self, plan: InferPlan) -> Layout | None:
        """What answers to requests of this plan are made of.

        None where rows must be cut or have no fixed size; then `chunks` has them.
        """
        if not plan.fit.exact or self._strings:
            return None
        known: Layout | None = plan.meta.get(self.tails)
        return known if known is not None else self._describe(plan)

    def answer(
        self, head: bytes, request: InferRequest, row: int, layout: Layout | None
    ) -> bytes:
        """The encoded answer of a request whose first row is `row` of the batch.

        `layout` is that of the request's plan.
        """
        if layout is None:
            return encode(head, request, self.chunks(request, row))
        end = row + request.rows
        if len(layout) == 1:  # the usual case, in one go
            before, index = layout[0]
            size = self._row_bytes[index]
            rows = self._flat[index][row * size : end * size]  # type: ignore[index]
            return b"".join((head, request.id_field, before, rows))
        parts = [head, request.id_field]
        for before, index in layout:
            size = self._row_bytes[index]
            parts.append(before)
            # The views of outputs with a layout are there: they hold no BYTES.
            parts.append(self._flat[index][row * size : end * size])  # type: ignore[index,arg-type]
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

    def _describe(self, plan: InferPlan) -> Layout:
        """Makes the layout of a plan's answers, and keeps it with the plan."""
        batched = self._shapes.batched
        shapes = [
            (plan.rows, *self.tails[i]) if batched else self.tails[i]
            for i in plan.outputs
        ]
        before = response.describe(plan.signature, plan.outputs, shapes)
        rows = plan.rows if batched else 1
        pieces = []
        for index in plan.outputs:
            before += response.raw_prefix(self._row_bytes[index] * rows)
            pieces.append((before, index))
            before = b""
        if len(plan.meta) >= 64:  # data-dependent output shapes must not pile up
            plan.meta.clear()
        layout = plan.meta[self.tails] = tuple(pieces)
        return layout


def batch_outputs(
    completion: Completion, rung: int, shapes: ModelShapes
) -> BatchOutputs:
    """The outputs of a run; the same object where the slot's buffers are used again.

    Raises:
        EngineFailure: an output has other rows than the batch.
    """
    arrays = completion.arrays
    if arrays is None:
        return BatchOutputs(completion.outputs, rung, shapes)
    if arrays.derived is None:
        arrays.derived = BatchOutputs(completion.outputs, rung, shapes)
    known: BatchOutputs = arrays.derived
    return known


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
    """The outputs of a split request, put together from its parts.

    Raises:
        EngineFailure: the parts' outputs differ in shape.
    """
    parts: list[InferRequest] = request.parts or []  # type: ignore[assignment]
    result: list[tuple[Any, Shape]] = []
    for position in range(len(request.plan.outputs)):
        pieces = [(part.chunks or [])[position] for part in parts]
        tail = pieces[0][1][1:]
        if any(shape[1:] != tail for _, shape in pieces):
            name = request.plan.signature.outputs[request.plan.outputs[position]].name
            raise EngineFailure(
                f"output {name!r} has rows of different shapes, and the request was "
                f"run in {len(parts)} parts: they are no tensor together"
            )
        result.append((b"".join(data for data, _ in pieces), (request.rows, *tail)))
    return result


def whole_answer(head: bytes, whole: InferRequest, limit: int) -> bytes:
    """The answer to a request whose parts have all run.

    Raises:
        BatcherError: it is larger than `limit` bytes, or cannot be encoded.
    """
    answer = encode(head, whole, joined(whole))
    if len(answer) > limit:
        raise too_large(answer, limit)
    return answer


def too_large(answer: bytes, limit: int) -> PayloadTooLarge:
    """The refusal of an answer with more than `limit` bytes."""
    return PayloadTooLarge(f"the answer has {len(answer)} bytes; the limit is {limit}")
