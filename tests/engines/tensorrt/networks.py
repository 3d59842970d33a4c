"""Small networks of the kinds that are served: a convolution net and a transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from engines.base import Profile
from engines.tensorrt import onnxfile
from engines.tensorrt.profiles import AxisSizes, grid, make_profiles


def conv(
    *, batch: int | str = "N", qdq: int | None = None, layers: int = 3
) -> onnx.ModelProto:
    """image FP32 [N, 3, 16, 16] -> scores FP32 [N, 8]: convolutions, pooled.

    With `qdq` every convolution's activations and weights go through Q/DQ nodes with a
    zero point of that type.
    """
    rng = np.random.default_rng(5)
    nodes, constants, value, width = [], [], "image", 3
    for i in range(layers):
        weight = rng.normal(0, 0.3, (8, width, 3, 3)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"weight_{i}"))
        given, weight_name = value, f"weight_{i}"
        if qdq is not None:
            zero = helper.make_tensor(f"zero_{i}", qdq, [], [0])
            int8 = helper.make_tensor(f"zero_w_{i}", TensorProto.INT8, [], [0])
            scale = numpy_helper.from_array(np.float32(0.05), f"scale_{i}")
            constants += [zero, int8, scale]
            for source, made, zero_name in (
                (value, "a", f"zero_{i}"),
                (f"weight_{i}", "w", f"zero_w_{i}"),
            ):
                nodes += [
                    helper.make_node(
                        "QuantizeLinear",
                        [source, f"scale_{i}", zero_name],
                        [f"{made}q_{i}"],
                        name=f"quantize_{made}_{i}",
                    ),
                    helper.make_node(
                        "DequantizeLinear",
                        [f"{made}q_{i}", f"scale_{i}", zero_name],
                        [f"{made}_{i}"],
                    ),
                ]
            given, weight_name = f"a_{i}", f"w_{i}"
        nodes += [
            helper.make_node(
                "Conv",
                [given, weight_name],
                [f"conv_{i}"],
                pads=[1, 1, 1, 1],
                name=f"layer_{i}",
            ),
            helper.make_node("Relu", [f"conv_{i}"], [f"relu_{i}"]),
        ]
        value, width = f"relu_{i}", 8
    nodes += [
        helper.make_node("GlobalAveragePool", [value], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["scores"]),
    ]
    return model(
        nodes,
        [value_info("image", TensorProto.FLOAT, [batch, 3, 16, 16])],
        [value_info("scores", TensorProto.FLOAT, [batch, 8])],
        constants,
    )


def transformer(*, width: int = 16, vocabulary: int = 50) -> onnx.ModelProto:
    """input_ids, attention_mask INT64 [N, S] -> hidden FP32 [N, S, width].

    One layer: embedding, one head of attention over the masked tokens, LayerNorm, a
    feed-forward net of twice the width with Gelu by Erf, as exporters write it.
    """
    rng = np.random.default_rng(6)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        values = rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        return numpy_helper.from_array(values, name)

    def number(name: str, value: Any) -> onnx.TensorProto:
        return numpy_helper.from_array(np.asarray(value), name)

    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["x"]),
        node("Cast", ["attention_mask"], ["mask_f"], to=TensorProto.FLOAT),
        node("Sub", ["one", "mask_f"], ["absent"]),
        node("Mul", ["absent", "minus"], ["penalty"]),
        node("Unsqueeze", ["penalty", "axis_1"], ["penalty_3"]),
        *(node("MatMul", ["x", f"w_{p}"], [p]) for p in "qkv"),
        node("Transpose", ["k"], ["k_t"], perm=[0, 2, 1]),
        node("MatMul", ["q", "k_t"], ["raw"], name="attention_scores"),
        node("Mul", ["raw", "scale"], ["scaled"]),
        node("Add", ["scaled", "penalty_3"], ["masked"]),
        node("Softmax", ["masked"], ["weights"], axis=-1),
        node("MatMul", ["weights", "v"], ["mixed"]),
        node("Add", ["x", "mixed"], ["residual"]),
        node("LayerNormalization", ["residual", "gamma", "beta"], ["normed"]),
        node("MatMul", ["normed", "w_up"], ["up"]),
        node("Div", ["up", "sqrt_2"], ["up_scaled"]),
        node("Erf", ["up_scaled"], ["erf"]),
        node("Add", ["erf", "one"], ["erf_1"]),
        node("Mul", ["up", "erf_1"], ["up_2"]),
        node("Mul", ["up_2", "half"], ["gelu"]),
        node("MatMul", ["gelu", "w_down"], ["down"]),
        node("Add", ["normed", "down"], ["hidden"]),
    ]
    constants = [
        weight("table", vocabulary, width),
        *(weight(f"w_{p}", width, width) for p in "qkv"),
        weight("w_up", width, 2 * width),
        weight("w_down", 2 * width, width),
        number("gamma", np.ones(width, np.float32)),
        number("beta", np.zeros(width, np.float32)),
        number("one", np.float32(1)),
        number("minus", np.float32(-10000)),
        number("scale", np.float32(width**-0.5)),
        number("sqrt_2", np.float32(2**0.5)),
        number("half", np.float32(0.5)),
        number("axis_1", np.array([1])),
    ]
    tokens = [
        value_info(name, TensorProto.INT64, ["N", "S"])
        for name in ("input_ids", "attention_mask")
    ]
    hidden = value_info("hidden", TensorProto.FLOAT, ["N", "S", width])
    return model(nodes, tokens, [hidden], constants)


def value_info(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: list[onnx.TensorProto],
    opset: int = 17,
) -> onnx.ModelProto:
    """A checked model."""
    graph = helper.make_graph(nodes, "network", inputs, outputs, constants)
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    )
    onnx.checker.check_model(made, full_check=True)
    return made


def save(made: onnx.ModelProto, path: Path, *, external: bool = False) -> Path:
    """Writes a model, its weights in `<name>.weights` beside it if `external`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copy = onnx.ModelProto.FromString(made.SerializeToString())
    onnx.save(  # which moves the weights out of what it is given
        copy,
        str(path),
        save_as_external_data=external,
        location=path.with_suffix(".weights").name,
        size_threshold=100,  # axes and the like stay in the graph, as exporters do
    )
    return path


def profiles(
    path: Path, rungs: tuple[int, ...] = (1, 2, 4), **axes: tuple[int, ...]
) -> tuple[Profile, ...]:
    """The default profiles of a model for some rungs and sizes of axes."""
    sizes = [AxisSizes(name, each) for name, each in axes.items()]
    return make_profiles(grid(onnxfile.read(path).inputs, rungs=rungs, axes=sizes))
