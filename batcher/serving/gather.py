"""Copy the rows of a batch into a slot's staging: once, straight from the messages."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from batcher.scheduling import Batch
from batcher.serving.fits import GroupFit, RequestFit
from batcher.serving.request import InferRequest
from batcher.serving.shapes import ModelShapes
from engines import Staging

_JOIN_BYTES: Final = 4096
"""Up to here a second copy is cheaper than the views it would take to avoid it."""


def gather(batch: Batch, staging: Staging, shapes: ModelShapes) -> None:
    """Fills the inputs of `staging` with the rows of `batch`, padded to its rung.

    Spare rows are copies of row 0: real values, since zeros can divide by zero.
    """
    requests: list[InferRequest] = batch.requests  # type: ignore[assignment]
    first = requests[0].plan
    plans = {request.plan for request in requests}  # one, mostly
    exact = all(plan.fit.exact for plan in plans)
    # Whole requests with one header have their rows at the same place.
    alike = len(plans) == 1 and first.rows <= batch.group.max_rows
    fit: GroupFit = first.fit.group
    for index, spec in enumerate(shapes.inputs):
        if spec.dtype == "BYTES":
            staging.objects[index] = _objects(batch, requests, index)
            continue
        row_bytes = fit.in_row_bytes[index]
        view = staging.reserve_input(index, batch.rung * row_bytes)
        if exact and alike and first.spans[index][1] <= _JOIN_BYTES:
            end = _copy_alike(requests, *first.spans[index], view)
        elif exact:
            end = _copy_exact(requests, index, view, row_bytes)
        else:
            end = _copy_padded(batch, staging, shapes, index)
        if batch.rung > batch.rows and row_bytes:
            spare = batch.rung - batch.rows
            view[end : end + spare * row_bytes] = bytes(view[:row_bytes]) * spare


def _copy_alike(
    requests: list[InferRequest], offset: int, size: int, view: memoryview
) -> int:
    """Copies `size` bytes at `offset` of every request; returns the bytes written."""
    if len(requests) == 1:
        start = requests[0].base + offset
        view[:size] = requests[0].payload[start : start + size]
        return size
    joined = b"".join(
        [r.payload[(start := r.base + offset) : start + size] for r in requests]
    )
    view[: len(joined)] = joined
    return len(joined)


def _copy_exact(
    requests: list[InferRequest], index: int, view: memoryview, row_bytes: int
) -> int:
    """Copies rows that need no padding; returns the bytes written."""
    if row_bytes <= _JOIN_BYTES:
        joined = b"".join([_rows(r, index, row_bytes) for r in requests])
        view[: len(joined)] = joined
        return len(joined)
    at = 0
    for request in requests:
        rows = _rows(request, index, row_bytes)
        view[at : at + len(rows)] = rows
        at += len(rows)
    return at


def _rows(request: InferRequest, index: int, row_bytes: int) -> bytes | memoryview:
    """The bytes of a request's rows of one input."""
    offset, size = request.plan.spans[index]
    start = request.base + offset
    if request.parent is not None:
        start += request.first_row * row_bytes
        size = request.rows * row_bytes
    if size <= _JOIN_BYTES:
        return request.payload[start : start + size]
    return memoryview(request.payload)[start : start + size]


def _copy_padded(
    batch: Batch, staging: Staging, shapes: ModelShapes, index: int
) -> int:
    """Copies rows of different lengths, and fills them up with the pad value."""
    requests: list[InferRequest] = batch.requests  # type: ignore[assignment]
    group: GroupFit = requests[0].plan.fit.group
    array = staging.input_array(index, group.cell(batch.rung).inputs[index])
    pad = shapes.pad_values[index]
    spec = shapes.inputs[index]
    row = 0
    for request in requests:
        fit: RequestFit = request.plan.fit
        sent = request.plan.shapes[index]
        tail = sent[1:] if shapes.batched else sent
        offset, _ = request.plan.spans[index]
        count = request.rows * math.prod(tail)
        start = request.base + offset
        start += request.first_row * math.prod(tail) * spec.itemsize
        rows: Any = np.frombuffer(request.payload, spec.numpy, count, start)
        target = array[row : row + request.rows] if shapes.batched else array
        used = tuple(slice(size) for size in fit.taken[index])
        if fit.taken[index] != group.in_tails[index]:
            target[...] = pad
        if shapes.batched:
            used = (slice(None), *used)
            tail = (request.rows, *tail)
        target[used] = rows.reshape(tail)[used]
        row += request.rows
    return batch.rows * group.in_row_bytes[index]


def _objects(batch: Batch, requests: list[InferRequest], index: int) -> Any:
    """The BYTES elements of all rows, as one object array."""
    arrays = []
    for request in requests:
        array = request.plan.objects[index]  # type: ignore[index]
        if request.parent is not None:
            array = array[request.first_row : request.first_row + request.rows]
        arrays.append(array)
    if batch.rung > batch.rows:
        spare = arrays[0][:1]
        arrays.extend([spare] * (batch.rung - batch.rows))
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
