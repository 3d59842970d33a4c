"""Lets images travel as bytes: the cast and normalisation move into the model.

A float input of an image is four times (FP16: twice) as large on the wire and on the
way to the GPU as the bytes it was made of. `bake` puts `(x - mean) * scale` in front of
the network, computed in FP32, and makes the input UINT8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from engines.errors import EngineLoadError
from engines.tensorrt.modelfile import OnnxFile

_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_PREFIX: Final = "input_u8"


@dataclass(frozen=True, slots=True)
class Normalization:
    """`(x - mean) * scale` of bytes x: 0 to 255.

    Attributes:
        scale, mean: one number, or one per channel.
    """

    scale: tuple[float, ...]
    mean: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """For a plan's key."""
        return {"scale": list(self.scale), "mean": list(self.mean)}

    def apply(self, array: np.ndarray, channel_axis: int) -> np.ndarray:
        """What `bake` computes, by numpy in FP32 (for comparisons).

        Args:
            array: UINT8, of the input's shape.
            channel_axis: of per-channel numbers.
        """
        scale, mean = (
            np.asarray(values, np.float32).reshape(
                _shape(values, array.ndim, channel_axis)
            )
            for values in (self.scale, self.mean)
        )
        return (array.astype(np.float32) - mean) * scale


def parse(text: str) -> Normalization:
    """Reads `SCALE,MEAN`, each a number or one per channel with colons between.

    "0.017,114" or "0.0171:0.0175:0.0174,123.7:116.3:103.5".

    Raises:
        EngineLoadError: it is not of that form.
    """
    parts = text.split(",")
    try:
        scale, mean = (tuple(float(v) for v in part.split(":")) for part in parts)
    except ValueError:
        raise EngineLoadError(
            f"input-u8 {text!r}: must be SCALE,MEAN (each one number, or one per "
            "channel as in 0.0171:0.0175:0.0174,123.7:116.3:103.5); the model gets "
            "(byte - MEAN) * SCALE"
        ) from None
    if not all(map(math.isfinite, (*scale, *mean))) or 0.0 in scale:
        raise EngineLoadError(
            f"input-u8 {text!r}: numbers must be finite, and no scale 0"
        )
    if len(scale) > 1 and len(mean) > 1 and len(scale) != len(mean):
        raise EngineLoadError(
            f"input-u8 {text!r}: {len(scale)} scales and {len(mean)} means"
        )
    return Normalization(scale, mean)


def bake(
    file: OnnxFile,
    normalization: Normalization,
    *,
    inputs: Sequence[str] = (),
    channel_axis: int | None = None,
) -> onnx.ModelProto:
    """The model with UINT8 inputs, its external weights loaded.

    Args:
        file: the model.
        normalization: what to put in front.
        inputs: which; empty: the only float input with three axes or more.
        channel_axis: of per-channel numbers; None: 1, or the last where that is the one
            with so many channels.

    Raises:
        EngineLoadError: it is not clear which input or axis is meant.
    """
    model = onnx.ModelProto()
    model.CopyFrom(file.model)
    onnx.load_external_data_for_model(model, str(file.folder_of.parent))
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
    front: list[onnx.NodeProto] = []
    for number, name in enumerate(_chosen(file, inputs)):
        value = next(v for v in model.graph.input if v.name == name)
        dtype = value.type.tensor_type.elem_type
        if dtype not in _FLOATS:
            raise EngineLoadError(
                f"{file.path}: input {name!r} is no float input, and stays as it is"
            )
        axis = _channel_axis(file, name, normalization, channel_axis)
        rank = len(value.type.tensor_type.shape.dim)
        prefix = f"{_PREFIX}_{number}"
        if any(other.startswith(f"{prefix}_") for other in taken):
            raise EngineLoadError(f"{file.path}: its input was made UINT8 before")
        value.type.tensor_type.elem_type = TensorProto.UINT8
        for kind, numbers in (
            ("mean", normalization.mean),
            ("scale", normalization.scale),
        ):
            array = np.asarray(numbers, np.float32).reshape(_shape(numbers, rank, axis))
            model.graph.initializer.append(
                numpy_helper.from_array(array, f"{prefix}_{kind}")
            )
        made = f"{prefix}_normalized"
        front += [
            helper.make_node(
                "Cast", [name], [f"{prefix}_float"], to=TensorProto.FLOAT, name=prefix
            ),
            helper.make_node(
                "Sub", [f"{prefix}_float", f"{prefix}_mean"], [f"{prefix}_centred"]
            ),
            helper.make_node("Mul", [f"{prefix}_centred", f"{prefix}_scale"], [made]),
        ]
        if dtype != TensorProto.FLOAT:
            cast = helper.make_node("Cast", [made], [f"{prefix}_input"], to=dtype)
            front.append(cast)
            made = f"{prefix}_input"
        _rename(model.graph, name, made)
    nodes = [*front, *model.graph.node]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    return model


def _chosen(file: OnnxFile, inputs: Sequence[str]) -> list[str]:
    names = [spec.name for spec in file.inputs]
    for name in inputs:
        if name not in names:
            raise EngineLoadError(
                f"{file.path}: no input {name!r} to make UINT8 of (it has "
                f"{', '.join(names)})"
            )
    if inputs:
        return list(dict.fromkeys(inputs))
    images = [
        spec.name
        for spec in file.inputs
        if len(spec.shape) >= 3 and spec.dtype in ("FP32", "FP16", "BF16")
    ]
    if len(images) != 1:
        raise EngineLoadError(
            f"{file.path}: {len(images)} inputs look like images "
            f"({', '.join(images) or 'none'}); name the one to make UINT8 of"
        )
    return images


def _channel_axis(
    file: OnnxFile, name: str, normalization: Normalization, given: int | None
) -> int:
    shape = next(spec.shape for spec in file.inputs if spec.name == name)
    channels = max(len(normalization.scale), len(normalization.mean))
    if channels == 1:
        return 0
    last = len(shape) - 1
    candidates = [a for a in dict.fromkeys((1, last)) if 0 <= a <= last]
    if given is not None:
        candidates = [given % len(shape)]
    fitting = [a for a in candidates if shape[a] == channels]
    fitting = fitting or [a for a in candidates if not isinstance(shape[a], int)]
    if len(fitting) != 1:
        raise EngineLoadError(
            f"{file.path}: which axis of input {name!r} {list(shape)} has the "
            f"{channels} channels? Say it with a channel axis"
        )
    return fitting[0]


def _shape(values: Sequence[float], rank: int, axis: int) -> tuple[int, ...]:
    if len(values) == 1:
        return ()
    return tuple(len(values) if i == axis else 1 for i in range(rank))


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Lets the nodes read another value, in subgraphs too; outputs keep their names."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name == old:
                node.input[position] = new
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, old, new)
