"""Converts a model's floats to 16 bits before it is built.

TensorRT for RTX and TensorRT 11 take the precision from the ONNX file, so it is the
file that is converted. What becomes what (and which operators stay FP32) is decided by
ONNX Runtime's `transformers.float16`; here is only what it leaves open: big models,
bfloat16, the order of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from engines.errors import EngineLoadError
from engines.tensorrt.modelfile import OnnxFile
from engines.tensorrt.onnxfile import MAX_MESSAGE, all_tensors, save_whole

ModelPrecision = Literal["fp32", "fp16", "bf16"]

_HALF: Final = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_BF16_OPSET: Final = 13  # the first in which the common operators take bfloat16


def convert_file(
    file: OnnxFile,
    precision: ModelPrecision,
    target: Path,
    *,
    keep_io: bool = True,
    keep_nodes: Sequence[str] = (),
) -> Path:
    """Writes a model in another precision, with its weights beside it if they are big.

    Args:
        file: the model.
        precision: "fp32" takes it as it is.
        target: where to write it.
        keep_io: whether inputs and outputs keep their types.
        keep_nodes: names of nodes that stay FP32.

    Returns:
        `target`, or the given model where there was nothing to convert.

    Raises:
        EngineLoadError: it cannot be converted; says why.
    """
    if precision == "fp32" or not needs_conversion(file.model):
        return file.folder_of
    model = convert(file, precision, keep_io=keep_io, keep_nodes=keep_nodes)
    save_whole(model, target)
    return target


def needs_conversion(model: onnx.ModelProto) -> bool:
    """Whether a model is all FP32: one that holds 16-bit floats was made so by choice,
    and what it keeps in FP32 is there for a reason."""
    types = _types(model)
    return TensorProto.FLOAT in types and not types.intersection(_HALF)


def _types(model: onnx.ModelProto) -> set[int]:
    """Of everything that is stored, goes in or out, or is cast to."""
    types: set[int] = {tensor.data_type for tensor in all_tensors(model)}
    types |= {
        value.type.tensor_type.elem_type
        for value in (*model.graph.input, *model.graph.output)
    }
    types |= {
        attribute.i
        for node in _nodes(model.graph)
        if node.op_type == "Cast"
        for attribute in node.attribute
        if attribute.name == "to"
    }
    return types


def lowest_precision(model: onnx.ModelProto) -> Literal["fp32", "fp16", "bf16", "int8"]:
    """The coarsest arithmetic that a model asks for, by the types that it holds."""
    if any(node.op_type == "QuantizeLinear" for node in _nodes(model.graph)):
        return "int8"
    types = _types(model)
    if TensorProto.BFLOAT16 in types:
        return "bf16"
    return "fp16" if TensorProto.FLOAT16 in types else "fp32"


def convert(
    file: OnnxFile,
    precision: Literal["fp16", "bf16"],
    *,
    keep_io: bool = True,
    keep_nodes: Sequence[str] = (),
) -> onnx.ModelProto:
    """The model in another precision, in memory; arguments as for `convert_file`."""
    from onnxruntime.transformers import float16

    _check(file, precision)
    model = onnx.ModelProto()
    model.CopyFrom(file.model)
    if model.functions:
        model = inliner.inline_local_functions(model)
    _constants_as_tensors(model)
    try:
        model = _with_types(file, model)
        original = _floats(model) if precision == "bf16" else {}
        converted: onnx.ModelProto = float16.convert_float_to_float16(
            model,
            keep_io_types=keep_io,
            disable_shape_infer=True,
            node_block_list=list(keep_nodes),
        )
    except Exception as error:  # onnx's, and assertions of the converter
        raise EngineLoadError(
            f"{file.path}: cannot be converted to {precision}: "
            f"{type(error).__name__}: {error}; convert it at export, or build it as "
            "it is"
        ) from error
    if precision == "bf16":
        _retype(converted, original)
    _sort(converted.graph)
    return converted


def _with_types(file: OnnxFile, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its weights, and the types of all values that can be told."""
    folder = str(file.folder_of.parent)
    size = sum(path.stat().st_size for path in file.weight_files)
    if size < MAX_MESSAGE:  # shapes and axes may be among the weights
        onnx.load_external_data_for_model(model, folder)
        return onnx.shape_inference.infer_shapes(model)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.load_external_data_for_model(model, folder)
    return model


def _check(file: OnnxFile, precision: str) -> None:
    quantized = [n for n in _nodes(file.model.graph) if n.op_type == "QuantizeLinear"]
    if quantized:
        raise EngineLoadError(
            f"{file.path}: the model is quantized (node {quantized[0].name!r}), and is "
            f"built as it is; convert to {precision} before quantizing it"
        )
    opset = max(
        (o.version for o in file.model.opset_import if o.domain in ("", "ai.onnx")),
        default=0,
    )
    if precision == "bf16" and opset < _BF16_OPSET:
        raise EngineLoadError(
            f"{file.path}: opset {opset} has no bfloat16; export it with opset "
            f"{_BF16_OPSET} or newer, or use fp16"
        )


def _constants_as_tensors(model: onnx.ModelProto) -> None:
    """Writes `value_float(s)` as `value`: the converter knows that one only."""
    for node in _nodes(model.graph):
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name in ("value_float", "value_floats"):
                floats = attribute.f if attribute.name[-1] == "t" else attribute.floats
                array = np.asarray(floats, np.float32)
                tensor = numpy_helper.from_array(array, node.output[0])
                attribute.CopyFrom(helper.make_attribute("value", tensor))


def _floats(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """The FP32 weights and constants, by the name of their value."""
    known = {}
    for tensor, name in _named_tensors(model.graph):
        if tensor.data_type == TensorProto.FLOAT:
            known[name] = TensorProto()
            known[name].CopyFrom(tensor)
    return known


def _retype(model: onnx.ModelProto, original: dict[str, TensorProto]) -> None:
    """Makes bfloat16 of what was made float16, from the values before that."""
    for tensor, name in _named_tensors(model.graph):
        if tensor.data_type == TensorProto.FLOAT16:
            array = numpy_helper.to_array(original.get(name, tensor))
            rounded = array.astype(np.float32).astype(ml_dtypes.bfloat16)
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
                value.type.tensor_type.elem_type = TensorProto.BFLOAT16
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype", "output_dtype") and (
                    attribute.i == TensorProto.FLOAT16
                ):
                    attribute.i = TensorProto.BFLOAT16


def _sort(graph: onnx.GraphProto) -> None:
    """Puts the nodes in an order in which they can run (the converter appends)."""
    made_by = {name: i for i, node in enumerate(graph.node) for name in node.output}
    order: list[int] = []
    state = [0] * len(graph.node)  # 1: its sources are being placed, 2: placed
    for start in range(len(graph.node)):
        stack = [start]
        while stack:
            index = stack[-1]
            if state[index] == 0:
                state[index] = 1
                sources = _sources(graph.node[index])
                needed = {made_by[name] for name in sources if name in made_by}
                stack += [i for i in sorted(needed, reverse=True) if state[i] == 0]
            else:
                stack.pop()
                if state[index] == 1:
                    state[index] = 2
                    order.append(index)
    nodes = [graph.node[i] for i in order]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _sources(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, in its subgraphs too."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _sources(inner)
            yield from (value.name for value in graph.output)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
            for inner in attribute.graphs:
                yield from _graphs(inner)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for each in _graphs(graph):
        yield from each.node


def _named_tensors(graph: onnx.GraphProto) -> Iterator[tuple[Any, str]]:
    """Weights, and tensors in attributes (those by what their node makes)."""
    for each in _graphs(graph):
        for tensor in each.initializer:
            yield tensor, tensor.name
        for node in each.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t, node.output[0]
