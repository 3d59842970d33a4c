"""Parse and validate a ModelInferRequest: complete, before anything is queued.

Nothing that a caller sends may fail its neighbours in a batch, so names, datatypes,
shapes, byte counts and limits are all checked here. Every error says what was wrong
and what was expected. This is the thorough path; `batcher.rpc.header` lets a request
whose header was seen before skip it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from batcher.errors import InvalidRequest, Unsupported
from batcher.rpc import messages
from batcher.rpc.datatypes import CONTENTS_FIELDS
from batcher.rpc.signature import ModelSignature, TensorSignature

MAX_PARAMETERS: Final = 256
MAX_ID_BYTES: Final = 65_536
MAX_NAMES_SHOWN: Final = 16
MAX_EMPTY_VOLUME: Final = 1 << 24
"""The most that the other axes of an empty tensor may multiply to: its shape costs no
bytes, but outputs may have every axis except the empty one."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The request parameters that the daemon heeds.

    Attributes:
        timeout_us: the longest wait in the queue, 0 for the model's default.
        priority: 1 is the highest, 0 the model's default.
        empty_final_response: whether a stream's last answer may be an empty one.
    """

    timeout_us: int = 0
    priority: int = 0
    empty_final_response: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that fits the model's signature.

    Attributes:
        rows: size of the batch axis (1 for a model that does not batch).
        shapes: per model input, in the model's order, the whole shape as sent.
        outputs: indices of the outputs asked for, in the order they are answered.
        parameters: the request parameters.
        data: per model input its elements as raw bytes; for BYTES the serialized form.
        objects: per model input, for BYTES, an object array of `bytes`; else None.
        raw_order: model input index of every raw entry, in the order they were sent;
            empty when the contents were typed.
    """

    rows: int
    shapes: tuple[Shape, ...]
    outputs: tuple[int, ...]
    parameters: RequestParameters
    data: list[bytes] = field(repr=False)
    objects: list[Any] | None = field(repr=False)
    raw_order: tuple[int, ...]


def parse(payload: bytes) -> messages.ModelInferRequest:
    """The message of `payload`.

    Raises:
        InvalidRequest: it is not a ModelInferRequest.
    """
    try:
        return messages.ModelInferRequest.FromString(payload)
    except Exception as error:  # protobuf's DecodeError, or UnicodeDecodeError
        raise InvalidRequest(f"the message is no ModelInferRequest: {error}") from error


def validate(
    request: messages.ModelInferRequest, model: ModelSignature
) -> ParsedRequest:
    """Checks a request against its model, and takes it apart.

    Raises:
        InvalidRequest: it can never be served as it is.
        Unsupported: it asks for something that is not built or is switched off.
    """
    if len(request.id) > MAX_ID_BYTES:
        raise InvalidRequest(
            f"the request id has {len(request.id)} characters; at most {MAX_ID_BYTES}"
        )
    parameters = _parameters(request)
    tensors = _inputs_in_order(request, model)
    shapes = tuple(tuple(t.shape) for t in tensors)
    for signature, tensor, shape in zip(model.inputs, tensors, shapes, strict=True):
        _check_type_and_shape(model, signature, tensor, shape)
    rows = _rows(model, shapes)
    _check_named_axes(model, shapes)
    outputs = _outputs(request, model)
    data, raw_order = _data(request, model, tensors, shapes)
    objects: list[Any] | None = None
    if any(t.datatype == "BYTES" for t in model.inputs):
        objects = [
            _elements(s, d, shape) if s.datatype == "BYTES" else None
            for s, d, shape in zip(model.inputs, data, shapes, strict=True)
        ]
        if model.utf8_strings:
            _check_utf8(model, objects)
    return ParsedRequest(rows, shapes, outputs, parameters, data, objects, raw_order)


# -- names, shapes ----------------------------------------------------------------


def _inputs_in_order(
    request: messages.ModelInferRequest, model: ModelSignature
) -> list[Any]:
    expected = model.input_index
    found: list[Any] = [None] * len(expected)
    for tensor in request.inputs:
        index = expected.get(tensor.name)
        if index is None:
            raise InvalidRequest(
                f"unexpected input {_quoted(tensor.name)} for model "
                f"{_quoted(model.name)}: its inputs are {_names(list(expected))}"
            )
        if found[index] is not None:
            raise InvalidRequest(f"input {_quoted(tensor.name)} is given twice")
        found[index] = tensor
    missing = [n for n, i in expected.items() if found[i] is None]
    if missing:
        raise InvalidRequest(
            f"missing input {_names(missing)} of model {_quoted(model.name)}: "
            f"expected {len(expected)} inputs, got {len(request.inputs)}"
        )
    return found


def _check_type_and_shape(
    model: ModelSignature, signature: TensorSignature, tensor: Any, shape: Shape
) -> None:
    name = _quoted(signature.name)
    if tensor.datatype != signature.datatype:
        raise InvalidRequest(
            f"input {name} has datatype {_quoted(tensor.datatype)}, but model "
            f"{_quoted(model.name)} expects {signature.datatype}"
        )
    expected = signature.axes
    fits = len(shape) == len(expected) and all(
        size >= 0 and (size == axis or not isinstance(axis, int))
        for size, axis in zip(shape, expected, strict=True)
    )
    if not fits:
        note = " (-1: any size; the first axis is the batch)" if model.batched else ""
        if any(size < 0 for size in shape):
            note += ", no size below 0"
        raise InvalidRequest(
            f"unexpected shape for input {name} of model {_quoted(model.name)}: "
            f"expected {signature.wire_shape}{note}, got {_shown(shape)}"
        )
    if 0 in shape and _count(tuple(size or 1 for size in shape)) > MAX_EMPTY_VOLUME:
        raise InvalidRequest(
            f"input {name} of shape {_shown(shape)} is empty; its other axes may "
            f"multiply to {MAX_EMPTY_VOLUME} at most"
        )
    if tensor.parameters:
        _check_tensor_parameters(name, tensor.parameters)


def _rows(model: ModelSignature, shapes: tuple[Shape, ...]) -> int:
    if not model.batched:
        return 1
    rows = shapes[0][0]
    for signature, shape in zip(model.inputs, shapes, strict=True):
        if shape[0] != rows:
            raise InvalidRequest(
                f"the inputs disagree on the batch: {_quoted(model.inputs[0].name)} "
                f"has {rows} rows, {_quoted(signature.name)} has {shape[0]}"
            )
    if rows < 1:
        raise InvalidRequest("the batch has 0 rows; at least 1 is needed")
    if rows > model.max_rows:
        raise InvalidRequest(
            f"a request of {rows} rows is too large for model {_quoted(model.name)}: "
            f"batch-size must be <= {model.max_rows} (runs of up to "
            f"{model.max_batch} rows)"
        )
    return rows


def _check_named_axes(model: ModelSignature, shapes: tuple[Shape, ...]) -> None:
    """Axes of one name have one size, whatever input they are of."""
    seen: dict[str, tuple[int, str]] = {}
    for signature, shape in zip(model.inputs, shapes, strict=True):
        for axis, size in zip(signature.axes, shape, strict=True):
            if not isinstance(axis, str):
                continue
            known = seen.setdefault(axis, (size, signature.name))
            if known[0] != size:
                raise InvalidRequest(
                    f"axis {_quoted(axis)} has {known[0]} elements in input "
                    f"{_quoted(known[1])} but {size} in {_quoted(signature.name)}"
                )


def _outputs(
    request: messages.ModelInferRequest, model: ModelSignature
) -> tuple[int, ...]:
    if not request.outputs:
        return tuple(range(len(model.outputs)))
    wanted: dict[int, None] = {}
    for output in request.outputs:
        index = model.output_index.get(output.name)
        if index is None:
            raise InvalidRequest(
                f"unexpected output {_quoted(output.name)} for model "
                f"{_quoted(model.name)}: its outputs are "
                f"{_names(list(model.output_index))}"
            )
        if index in wanted:
            raise InvalidRequest(
                f"duplicate output: {_quoted(output.name)} is asked for twice"
            )
        wanted[index] = None
        if output.parameters:
            if "classification" in output.parameters:
                raise Unsupported("the classification extension is not built")
            _check_tensor_parameters(_quoted(output.name), output.parameters)
    return tuple(wanted)


# -- contents ---------------------------------------------------------------------


def _data(
    request: messages.ModelInferRequest,
    model: ModelSignature,
    tensors: list[Any],
    shapes: tuple[Shape, ...],
) -> tuple[list[bytes], tuple[int, ...]]:
    """Raw bytes per model input, and which raw entry belongs to which."""
    raw = request.raw_input_contents
    if not raw:
        return [
            _typed(s, t, shape)
            for s, t, shape in zip(model.inputs, tensors, shapes, strict=True)
        ], ()
    for tensor in tensors:
        if tensor.HasField("contents"):
            raise InvalidRequest(
                f"input {_quoted(tensor.name)} has typed contents, but the request "
                f"has raw_input_contents too; use one of them for all inputs"
            )
    if len(raw) != len(tensors):
        raise InvalidRequest(
            f"expected {len(tensors)} raw_input_contents, one per input in their "
            f"order, got {len(raw)}"
        )
    order = tuple(model.input_index[t.name] for t in request.inputs)
    data: list[bytes] = [b""] * len(tensors)
    for index, content in zip(order, raw, strict=True):
        signature, shape = model.inputs[index], shapes[index]
        itemsize = signature.type.itemsize
        if itemsize and len(content) != _count(shape) * itemsize:
            raise InvalidRequest(
                f"input {_quoted(signature.name)} has {len(content)} bytes, but "
                f"{signature.datatype} of shape {_shown(shape)} is "
                f"{_count(shape) * itemsize} bytes"
            )
        if signature.datatype == "BOOL" and content.strip(b"\x00\x01"):
            raise InvalidRequest(
                f"input {_quoted(signature.name)} holds a byte that is no BOOL "
                "(only 0 and 1 are)"
            )
        data[index] = content
    return data, order


def _typed(signature: TensorSignature, tensor: Any, shape: Shape) -> bytes:
    """The typed contents of an input in raw form."""
    name = _quoted(signature.name)
    kind = signature.type
    contents = tensor.contents
    for other in CONTENTS_FIELDS:
        if other != kind.field and len(getattr(contents, other)):
            use = kind.field or "raw_input_contents"
            raise InvalidRequest(
                f"input {name} is {kind.name}, but its contents are in {other}; "
                f"use {use}"
            )
    if kind.field is None:
        raise InvalidRequest(
            f"input {name} is {kind.name}, which has no typed contents; "
            "use raw_input_contents"
        )
    values = getattr(contents, kind.field)
    if len(values) != _count(shape):
        given = "no data" if not len(values) else f"{len(values)} elements"
        raise InvalidRequest(
            f"input {name} has {given} in {kind.field}, but shape {_shown(shape)} "
            f"has {_count(shape)}"
        )
    if kind.numpy is None:
        return b"".join(len(v).to_bytes(4, "little") + v for v in values)
    if kind.name.startswith(("INT", "UINT")):
        limits = np.iinfo(kind.numpy)
        bad = [v for v in values if not limits.min <= v <= limits.max]
        if bad:
            raise InvalidRequest(
                f"input {name}: {bad[0]} is outside the range of {kind.name} "
                f"({limits.min} to {limits.max})"
            )
    return np.array(values, dtype=kind.numpy).tobytes()


def _elements(signature: TensorSignature, data: bytes, shape: Shape) -> Any:
    """The elements of a serialized BYTES tensor, as an object array of `bytes`."""
    expected = _count(shape)
    name = _quoted(signature.name)
    items: list[bytes] = []
    at, end = 0, len(data)
    while at < end:
        if at + 4 > end:
            raise InvalidRequest(
                f"input {name}: {end - at} stray bytes after {len(items)} elements; "
                f"expected {expected} elements, each behind its 4-byte length"
            )
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4
        if size > end - at:
            raise InvalidRequest(
                f"input {name}: element {len(items)} says it has {size} bytes, but "
                f"{end - at} are left; expected {expected} elements"
            )
        items.append(data[at : at + size])
        at += size
        if len(items) > expected:
            break
    if len(items) != expected:
        more = "more than " if len(items) > expected else ""
        found = expected if more else len(items)
        raise InvalidRequest(
            f"input {name}: expected {expected} elements for shape {_shown(shape)}, "
            f"found {more}{found}"
        )
    array = np.empty(expected, dtype=object)
    array[:] = items
    return array.reshape(shape)


def _check_utf8(model: ModelSignature, objects: list[Any]) -> None:
    for signature, array in zip(model.inputs, objects, strict=True):
        for index, item in enumerate(() if array is None else array.reshape(-1)):
            try:
                item.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(
                    f"input {_quoted(signature.name)}: element {index} is no UTF-8, "
                    f"which model {_quoted(model.name)}'s engine needs: {error}"
                ) from None


# -- parameters -------------------------------------------------------------------

_DEFAULT_PARAMETERS: Final = RequestParameters()
_SEQUENCE: Final = ("sequence_id", "sequence_start", "sequence_end")


def _parameters(request: messages.ModelInferRequest) -> RequestParameters:
    parameters = request.parameters
    if not parameters:
        return _DEFAULT_PARAMETERS
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequest(
            f"{len(parameters)} request parameters; at most {MAX_PARAMETERS}"
        )
    timeout_us = priority = 0
    final = False
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if name == "timeout":
            timeout_us = _integer(name, value, kind)
        elif name == "priority":
            priority = _integer(name, value, kind)
            if priority >= 1 << 32:
                raise InvalidRequest(f"priority {priority} is above {(1 << 32) - 1}")
        elif name in _SEQUENCE:
            _check_sequence(name, value, kind)
        elif name == "triton_enable_empty_final_response":
            if kind != "bool_param":
                raise _wrong_kind(name, "a bool", kind)
            final = value.bool_param
        elif name.startswith("triton_"):
            raise InvalidRequest(
                f"parameter {_quoted(name)}: names starting with triton_ are reserved"
            )
    return RequestParameters(timeout_us, priority, final)


def _integer(name: str, value: Any, kind: str | None) -> int:
    if kind not in ("int64_param", "uint64_param"):
        raise _wrong_kind(name, "an integer", kind)
    number = int(getattr(value, kind))
    if number < 0:
        raise InvalidRequest(f"parameter {name} must not be negative, got {number}")
    return number


def _check_sequence(name: str, value: Any, kind: str | None) -> None:
    kinds = ("bool_param",)
    if name == "sequence_id":
        kinds = ("int64_param", "uint64_param", "string_param")  # type: ignore[assignment]
    if kind not in kinds:
        wanted = "an integer or a string" if name == "sequence_id" else "a bool"
        raise _wrong_kind(name, wanted, kind)
    if getattr(value, kind):
        raise Unsupported(f"parameter {name}: stateful sequences are not built")


def _check_tensor_parameters(name: str, parameters: Any) -> None:
    if "shared_memory_region" in parameters:
        raise Unsupported(f"tensor {name}: client shared memory is not built")
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        if key in parameters:
            raise InvalidRequest(
                f"tensor {name}: {key} is given without shared_memory_region"
            )


def _wrong_kind(name: str, wanted: str, kind: str | None) -> InvalidRequest:
    given = kind.removesuffix("_param") if kind else "no value"
    return InvalidRequest(f"parameter {name} must be {wanted}, got {given}")


# -- texts ------------------------------------------------------------------------


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _quoted(name: str) -> str:
    """A name for an error text: one line, bounded."""
    return repr(name if len(name) <= 200 else name[:200] + "…")


def _names(names: list[str]) -> str:
    shown = ", ".join(_quoted(n) for n in names[:MAX_NAMES_SHOWN])
    more = len(names) - MAX_NAMES_SHOWN
    return shown + (f" and {more} more" if more > 0 else "")


def _shown(shape: Shape) -> str:
    if len(shape) <= 32:
        return str(list(shape))
    return f"{list(shape[:32])}… ({len(shape)} axes)"
