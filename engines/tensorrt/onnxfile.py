"""An ONNX file as the builder sees it: inputs, outputs, where its weights lie.

The graph is read without its external weights, so that a model of many GB costs little
to look at. What TensorRT would refuse late, or change without a word, is refused here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import onnx
from onnx import TensorProto

from engines.errors import EngineLoadError
from engines.tensorrt.modelfile import OnnxFile
from engines.tensorrt.module import TensorRT
from engines.tensorrt.plans import write_whole
from engines.tensors import Axis, TensorSpec

_DTYPES: Final[dict[int, str]] = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT8: "INT8",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.UINT8: "UINT8",
    TensorProto.BOOL: "BOOL",
}
"""Types that TensorRT takes as inputs and outputs, and the protocol has too. (Its
parser takes DOUBLE as well, and makes a FLOAT of it.)"""

MAX_MESSAGE: Final = 1 << 30
"""Bytes up to which a model is written as one message (protobuf's limit is 2 GiB)."""

_ELSEWHERE: Final = 'serve the model with engine = "onnxruntime"'
_INT8: Final = (TensorProto.INT8, TensorProto.INT4)
_UINT8: Final = (TensorProto.UINT8, TensorProto.UINT4)


def read(path: Path) -> OnnxFile:
    """Reads a model's graph and finds its weight files.

    Raises:
        EngineLoadError: it is missing or damaged, its weight files are missing or lie
            outside its folder, or an input or output has a type TensorRT cannot take.
    """
    if not path.is_file():
        raise EngineLoadError(f"{path}: no such file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's and onnx's have no common base
        raise EngineLoadError(
            f"{path}: not an ONNX model, or damaged: {error}"
        ) from error
    if not model.graph.node:
        raise EngineLoadError(f"{path}: not an ONNX model, or an empty one")
    folder_of, weight_files = _weight_files(path, model)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [v for v in model.graph.input if v.name not in weights]
    return OnnxFile(
        path=path,
        folder_of=folder_of,
        model=model,
        inputs=tuple(_spec(path, "input", value) for value in inputs),
        outputs=tuple(_spec(path, "output", value) for value in model.graph.output),
        weight_files=weight_files,
    )


def check_quantization(file: OnnxFile, tensorrt: TensorRT) -> None:
    """Refuses Q/DQ nodes that the flavour cannot run, or runs as something else.

    Raises:
        EngineLoadError: names the first such node.
    """
    constants = _constants(file.model.graph)
    for node in file.model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        kind = _quantized_type(node, constants)
        if kind in _UINT8 and not tensorrt.uint8_quantization:
            raise EngineLoadError(
                f"{file.path}: node {node_name(node)} ({node.op_type}) has an unsigned "
                f"zero point, and {tensorrt} would take it as signed, which gives "
                "other numbers; quantize with symmetric INT8 "
                f"(activation_type=QuantType.QInt8), or {_ELSEWHERE}"
            )
        activation = node.op_type == "QuantizeLinear" and (
            node.input[0] not in constants
        )
        if activation and kind in _INT8 and not tensorrt.int8_activations:
            raise EngineLoadError(
                f"{file.path}: node {node_name(node)} ({node.op_type}) quantizes "
                f"activations to int8, which {tensorrt} cannot run (it takes int8 and "
                "int4 for weights only, and fp8 for both); use fp16, or the "
                f"data-centre TensorRT, or {_ELSEWHERE}"
            )


def save_whole(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model so that a killed writer leaves no half of it under its name.

    Weights go to a file beside it when they would not fit in one message.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(len(tensor.raw_data) for tensor in all_tensors(model))
    if size < MAX_MESSAGE:
        write_whole(path, model.SerializeToString())
        return
    with tempfile.TemporaryDirectory(dir=path.parent, suffix=".tmp") as folder:
        draft = Path(folder) / path.name
        weights = f"{path.name}.weights"
        # onnx appends to what is there: an empty folder it must be.
        onnx.save(model, str(draft), save_as_external_data=True, location=weights)
        draft.with_name(weights).replace(path.with_name(weights))
        draft.replace(path)


def node_name(node: onnx.NodeProto) -> str:
    """What to call a node: its name, or else its first output's."""
    outputs = [name for name in node.output if name]
    return repr(node.name) if node.name else f"that makes {outputs[:1]}"


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in a model: initializers and attributes, subgraphs too."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _graph_tensors(attribute.g)
            for graph in attribute.graphs:
                yield from _graph_tensors(graph)


def _weight_files(path: Path, model: onnx.ModelProto) -> tuple[Path, tuple[Path, ...]]:
    ends: dict[str, int] = {}  # how long each file must be
    for tensor in all_tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        parts = PurePosixPath(location)
        if not location or parts.is_absolute() or ".." in parts.parts:
            raise EngineLoadError(
                f"{path}: the weights {tensor.name!r} are said to be in {location!r}, "
                "which is not below the model's folder; refused"
            )
        try:
            end = int(entries.get("offset", 0)) + int(entries.get("length", 0))
        except ValueError:
            raise EngineLoadError(
                f"{path}: where the weights {tensor.name!r} lie is no number; damaged?"
            ) from None
        ends[location] = max(end, ends.get(location, 0))
    # Weight files lie beside a link (a Hugging Face cache) or beside its target.
    missing = path.parent
    for folder_of in dict.fromkeys((path, path.resolve())):
        files = tuple(folder_of.parent / location for location in ends)
        absent = [file for file in files if not file.is_file()]
        if not absent:
            for file, end in zip(files, ends.values(), strict=True):
                # TensorRT maps these files: past the end it is a SIGBUS.
                if (size := file.stat().st_size) < end:
                    raise EngineLoadError(
                        f"{path}: its weight file {file} has {size} bytes, and the "
                        f"model needs {end}: it is cut short; copy it again"
                    )
            return folder_of, files
        missing = absent[0]
    raise EngineLoadError(f"{path}: its weight file {missing} is missing")


def _spec(path: Path, what: str, value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        kind = value.type.WhichOneof("value") or "nothing"
        raise EngineLoadError(
            f"{path}: {what} {value.name!r} is no tensor ({kind}), which TensorRT "
            f"cannot take; {_ELSEWHERE}"
        )
    dtype = _DTYPES.get(tensor.elem_type)
    if dtype is None:
        name = TensorProto.DataType.Name(tensor.elem_type)
        raise EngineLoadError(
            f"{path}: {what} {value.name!r} has the type {name}, which TensorRT cannot "
            f"take as it is (possible: {', '.join(_DTYPES.values())}); cast it inside "
            f"the model, or {_ELSEWHERE}"
        )
    if not tensor.HasField("shape"):
        if what == "output":  # data-dependent: known once it has run
            return TensorSpec(value.name, dtype, ())
        raise EngineLoadError(
            f"{path}: {what} {value.name!r} has no shape, not even a number of axes; "
            "export the model with one"
        )
    return TensorSpec(value.name, dtype, tuple(_axis(d) for d in tensor.shape.dim))


def _axis(dim: onnx.TensorShapeProto.Dimension) -> Axis:
    if dim.HasField("dim_value"):
        return int(dim.dim_value) if dim.dim_value >= 0 else None
    text = dim.dim_param
    # Some exporters write "-1" or "?" where they mean "any".
    return text if text and text.strip("-?0123456789") else None


def _constants(graph: onnx.GraphProto) -> dict[str, int]:
    """Names of values that do not depend on the inputs, and the type of tensors."""
    known = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                known[node.output[0]] = attribute.t.data_type
        elif node.input and all(not name or name in known for name in node.input):
            known.update(dict.fromkeys(node.output, known[node.input[0]]))
    return known


def _quantized_type(node: onnx.NodeProto, constants: dict[str, int]) -> int:
    if len(node.input) > 2 and node.input[2]:
        return constants.get(node.input[2], 0)
    for attribute in node.attribute:
        if attribute.name == "output_dtype" and attribute.i:
            return int(attribute.i)
    if node.op_type == "QuantizeLinear":
        return int(TensorProto.UINT8)  # the operator's default
    return constants.get(node.input[0], 0)
