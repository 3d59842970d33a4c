"""Request bodies: serialised ModelInferRequests, and how to make them.

A body is bytes with a weight; the functions make one from a server's metadata, from
numpy arrays and files, or from raw bytes. Nothing here sends load. The message classes
and grpcio are imported where they are used: a worker process needs neither.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from batcher.errors import BatcherError, ConfigError
from batcher.tuning.plan import Body as Body

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from batcher.rpc.messages import ModelInferRequest

_NUMPY_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
_NUMPY_TYPES: Final = {name: np.dtype(kind) for kind, name in _NUMPY_NAMES.items()}
_ITEM_BYTES: Final = {
    **{name: kind.itemsize for name, kind in _NUMPY_TYPES.items()},
    "BF16": 2,
}

_WORD_BYTES: Final = 12  # a random string's
_MESSAGE_BYTES: Final = 2**31 - 1  # of protobuf
_METADATA_TIMEOUT_S: Final = 10.0


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read `name:1,128`: an input and its shape; `name:` is a scalar.

    Raises:
        ConfigError: it is not of that form.
    """
    name, colon, dims = text.rpartition(":")
    try:
        shape = tuple(int(dim) for dim in dims.split(",")) if dims else ()
    except ValueError:
        shape = (-1,)
    if not name or not colon or min(shape, default=0) < 0:
        raise ConfigError(f"shape {text!r}: give it as name:1,128")
    return name, shape


def body_from_metadata(
    target: str,
    model: str,
    *,
    version: str = "",
    shapes: Mapping[str, Sequence[int]] | None = None,
    rows: int | None = None,
    seed: int = 0,
) -> Body:
    """A body of random values for a model that a server describes.

    Args:
        target: the server, `host:port` or `unix:PATH`.
        model: name of the model.
        version: of the model; empty leaves the choice to the server.
        shapes: shapes of inputs by name, where the metadata's are not fixed or not
            wanted; other dynamic dimensions are 1, and the body says that they are
            `guessed`.
        rows: the first dimension of the other inputs, where it is dynamic; None
            takes 1.
        seed: of the values. Floats are normal, integers 0 or 1 (valid as a token, a
            mask and a segment alike), strings random words of 8 letters.

    Raises:
        BatcherError: the server cannot be reached or does not know the model.
        ConfigError: a shape is for no input, has another number of dimensions, or
            makes a request too large; or no input takes `rows`.
    """
    from batcher.rpc.messages import ModelMetadataRequest, ModelMetadataResponse
    from batcher.tuning.unary import call

    metadata = call(
        target,
        "ModelMetadata",
        ModelMetadataRequest(name=model, version=version),
        ModelMetadataResponse,
        timeout_s=_METADATA_TIMEOUT_S,
    )
    shapes = dict(shapes or {})
    random = np.random.default_rng(seed)
    tensors = []
    guessed = []
    for declared in metadata.inputs:
        dims = [int(dim) for dim in declared.shape]
        shape = tuple(shapes.pop(declared.name, ()))
        if not shape:
            first = [(rows or 1) if dim < 0 else dim for dim in dims[:1]]
            if min(dims[1:], default=0) < 0:
                guessed.append(declared.name)
            shape = (*first, *(1 if dim < 0 else dim for dim in dims[1:]))
        if len(shape) != len(dims) or any(
            dim not in (-1, given) for dim, given in zip(dims, shape, strict=True)
        ):
            raise ConfigError(
                f"input {declared.name!r} of model {model!r} has the shape {dims} "
                f"(-1 is any size), not {list(shape)}"
            )
        _check_size(declared.name, declared.datatype, shape)
        raw = _random_raw(random, declared.datatype, math.prod(shape))
        tensors.append((declared.name, declared.datatype, shape, raw))
    if shapes:
        names = ", ".join(t.name for t in metadata.inputs)
        raise ConfigError(
            f"shape for {', '.join(shapes)}, but model {model!r} has the inputs {names}"
        )
    if rows is not None and all(shape[:1] != (rows,) for _, _, shape, _ in tensors):
        sent = ", ".join(f"{name} {list(shape)}" for name, _, shape, _ in tensors)
        raise ConfigError(
            f"rows is {rows}, but no input of model {model!r} takes it, as the first "
            f"sizes are fixed or given: {sent or 'it has no inputs'}"
        )
    return replace(_body(model, version, tensors), guessed=tuple(guessed))


def _check_size(name: str, datatype: str, shape: tuple[int, ...]) -> None:
    size_bytes = math.prod(shape) * _ITEM_BYTES.get(datatype, _WORD_BYTES)
    if size_bytes > _MESSAGE_BYTES or max(shape, default=0) >= 2**63:
        raise ConfigError(
            f"input {name!r} of shape {list(shape)} has {size_bytes:,} bytes; a "
            f"message has at most {_MESSAGE_BYTES:,}"
        )


def body_from_arrays(
    model: str, arrays: Mapping[str, np.ndarray], *, version: str = ""
) -> Body:
    """A body of numpy arrays by input name; arrays of strings or bytes are BYTES.

    Raises:
        ConfigError: an array's dtype is none of the protocol's.
    """
    tensors = []
    for name, array in arrays.items():
        if array.dtype.kind in "US" or (
            array.dtype.kind == "O"
            and all(isinstance(item, str | bytes) for item in array.flat)
        ):
            raw = _bytes_raw(
                [x.encode() if isinstance(x, str) else bytes(x) for x in array.flat]
            )
            tensors.append((name, "BYTES", array.shape, raw))
            continue
        datatype = _NUMPY_NAMES.get(array.dtype.name)
        if datatype is None:
            raise ConfigError(
                f"input {name!r}: dtype {array.dtype} is not one of the protocol's "
                f"({', '.join(_NUMPY_NAMES)}, strings)"
            )
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        tensors.append((name, datatype, array.shape, little.tobytes()))
    return _body(model, version, tensors)


def body_from_npz(model: str, path: Path, *, version: str = "") -> Body:
    """A body of an `.npz` file: each array is the input of its name.

    Raises:
        ConfigError: the file cannot be read, or holds pickled objects.
    """
    try:
        # Not by its path: numpy leaves it open when it is damaged.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as fault:
        # numpy, zipfile and zlib have errors of their own for files that are damaged.
        raise ConfigError(f"body {path}: no .npz file ({fault})") from fault
    return body_from_arrays(model, arrays, version=version)


def _body(
    model: str,
    version: str,
    tensors: list[tuple[str, str, tuple[int, ...], bytes]],
) -> Body:
    from batcher.rpc.messages import ModelInferRequest

    request: ModelInferRequest = ModelInferRequest(
        model_name=model, model_version=version
    )
    for name, datatype, shape, raw in tensors:
        tensor = request.inputs.add(name=name, datatype=datatype)
        tensor.shape.extend(shape)
        request.raw_input_contents.append(raw)
    shapes = " ".join(f"{name}{list(shape)}" for name, _, shape, _ in tensors)
    return Body(message=request.SerializeToString(), label=shapes)


def _random_raw(random: np.random.Generator, datatype: str, size: int) -> bytes:
    if datatype == "BYTES":
        words = random.integers(97, 123, size=(size, 8), dtype=np.uint8)
        return _bytes_raw([word.tobytes() for word in words])
    if datatype == "BF16":
        # The high half of a little-endian float32 (protocol notes §1.3).
        halves = random.standard_normal(size, dtype=np.float32).view("<u2")
        return halves[1::2].tobytes()
    kind = _NUMPY_TYPES.get(datatype)
    if kind is None:
        raise BatcherError(f"the model has an input of unknown datatype {datatype!r}")
    if kind.kind == "f":
        return random.standard_normal(size).astype(kind).tobytes()
    return random.integers(0, 2, size=size).astype(kind).tobytes()


def _bytes_raw(items: Sequence[bytes]) -> bytes:
    """BYTES on the wire: each element after its length, 4 bytes little-endian."""
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)
