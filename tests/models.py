"""Tiny ONNX models whose outputs tell how they were served; made anew by every test.

Each builder returns a valid model (opset 17, IR 8). Unless it says otherwise, axis 0 of
every tensor is the dynamic batch axis "N", and a model has two witnesses: `n` INT64
[N, 1], the rows of the run that served a row, and `pos` INT64 [N, 1], the row's place
in that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Axes = Sequence[int | str | None]

FLOAT: Final = TensorProto.FLOAT
INT64: Final = TensorProto.INT64

ID_TYPES: Final[dict[str, tuple[str, int]]] = {
    "bool": ("BOOL", TensorProto.BOOL),
    "int8": ("INT8", TensorProto.INT8),
    "int16": ("INT16", TensorProto.INT16),
    "int32": ("INT32", TensorProto.INT32),
    "int64": ("INT64", TensorProto.INT64),
    "uint8": ("UINT8", TensorProto.UINT8),
    "uint16": ("UINT16", TensorProto.UINT16),
    "uint32": ("UINT32", TensorProto.UINT32),
    "uint64": ("UINT64", TensorProto.UINT64),
    "fp16": ("FP16", TensorProto.FLOAT16),
    "bf16": ("BF16", TensorProto.BFLOAT16),
    "fp32": ("FP32", TensorProto.FLOAT),
    "fp64": ("FP64", TensorProto.DOUBLE),
    "string": ("BYTES", TensorProto.STRING),
}
"""Suffix of an `id_…` model to (datatype of the protocol, type of ONNX)."""


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Writes the model, with the folders above it; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


# -- the models -------------------------------------------------------------------


def probe(batch: int | str = "N") -> onnx.ModelProto:
    """x FP32 [N, 4] -> y = x + x, and the witnesses; `batch=1` fixes the batch axis."""
    return _model(
        "probe",
        [helper.make_node("Add", ["x", "x"], ["y"]), *_witnesses("x")],
        [_tensor("x", FLOAT, [batch, 4])],
        [_tensor("y", FLOAT, [batch, 4]), *_witness_outputs(batch)],
        _witness_constants(),
    )


def slow(size: int = 128) -> onnx.ModelProto:
    """x FP32 [N, 4], iters INT64 [N, 1] -> y = x, after max(iters) turns of a loop.

    A run costs the same whatever its rows: a turn is one MatMul and Tanh of
    `size` x `size`, some 20,000 turns a second on one core by default.
    """
    scale = 1.5 / size**0.5  # keeps the state alive: denormals would be slower
    weight = np.random.default_rng(3).normal(0, scale, (size, size)).astype(np.float32)
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state_in", "weight"], ["product"]),
            helper.make_node("Tanh", ["product"], ["state_out"]),
            helper.make_node("Identity", ["go_in"], ["go_out"]),
        ],
        "turn",
        [
            _tensor("turn", INT64, []),
            _tensor("go_in", TensorProto.BOOL, []),
            _tensor("state_in", FLOAT, [size, size]),
        ],
        [
            _tensor("go_out", TensorProto.BOOL, []),
            _tensor("state_out", FLOAT, [size, size]),
        ],
    )
    nodes = [
        helper.make_node("ReduceMax", ["iters"], ["turns"], keepdims=0),
        helper.make_node("Loop", ["turns", "", "weight"], ["state"], body=body),
        helper.make_node("ReduceMean", ["state"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero_f"], ["nothing"]),
        helper.make_node("Add", ["x", "nothing"], ["y"]),
        *_witnesses("x"),
    ]
    return _model(
        "slow",
        nodes,
        [_tensor("x", FLOAT, ["N", 4]), _tensor("iters", INT64, ["N", 1])],
        [_tensor("y", FLOAT, ["N", 4]), *_witness_outputs()],
        [
            numpy_helper.from_array(weight, "weight"),
            numpy_helper.from_array(np.array(0.0, np.float32), "zero_f"),
            *_witness_constants(),
        ],
    )


def emb() -> onnx.ModelProto:
    """ids INT64 [N, 1] -> y FP32 [N, 4], rows of a table of 10: id 99 fails the run.

    Row `id` of the table is [4 id, 4 id + 1, 4 id + 2, 4 id + 3].
    """
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    return _model(
        "emb",
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("Squeeze", ["rows", "one"], ["y"]),
            *_witnesses("ids"),
        ],
        [_tensor("ids", INT64, ["N", 1])],
        [_tensor("y", FLOAT, ["N", 4]), *_witness_outputs()],
        [numpy_helper.from_array(table, "table"), *_witness_constants()],
    )


def seq_table() -> np.ndarray:
    """The embedding table of `seq`, [100, 8]."""
    return np.random.default_rng(7).normal(0, 1, (100, 8)).astype(np.float32)


def seq() -> onnx.ModelProto:
    """ids, mask INT64 [N, S] -> y FP32 [N, 8], the masked mean of `seq_table()[ids]`.

    `rawsum` FP32 [N, 1] = sum(ids + 1) and `len` INT64 [N, 1] = S betray padding.
    """
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["mask"], ["mask_f"], to=FLOAT),
        helper.make_node("Unsqueeze", ["mask_f", "two"], ["mask_3"]),
        helper.make_node("Mul", ["rows", "mask_3"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "one"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["mask_f", "one"], ["given"], keepdims=1),
        helper.make_node("Max", ["given", "one_f"], ["count"]),
        helper.make_node("Div", ["total", "count"], ["y"]),
        helper.make_node("Add", ["ids", "one"], ["ids_1"]),
        helper.make_node("Cast", ["ids_1"], ["ids_f"], to=FLOAT),
        helper.make_node("ReduceSum", ["ids_f", "one"], ["rawsum"], keepdims=1),
        *_witnesses("ids"),
        helper.make_node("Gather", ["dims", "one"], ["width"]),
        helper.make_node("Expand", ["width", "column"], ["len"]),
    ]
    return _model(
        "seq",
        nodes,
        [_tensor("ids", INT64, ["N", "S"]), _tensor("mask", INT64, ["N", "S"])],
        [
            _tensor("y", FLOAT, ["N", 8]),
            _tensor("rawsum", FLOAT, ["N", 1]),
            _tensor("len", INT64, ["N", 1]),
            *_witness_outputs(),
        ],
        [
            numpy_helper.from_array(seq_table(), "table"),
            numpy_helper.from_array(np.array([2]), "two"),
            numpy_helper.from_array(np.array(1.0, np.float32), "one_f"),
            *_witness_constants(),
        ],
    )


def baked(first: int | str = 1) -> onnx.ModelProto:
    """x FP32 [N, 4] -> y FP32 [1, 4N]: the batch is baked in.

    With `first="N"` the file promises a batch axis that the run does not keep.
    """
    # The first size is computed, so that nobody infers it to be 1.
    nodes = [
        helper.make_node("Shape", ["x"], ["dims"]),
        helper.make_node("Gather", ["dims", "zero"], ["rows"]),
        helper.make_node("Sub", ["rows", "rows"], ["nothing"]),
        helper.make_node("Add", ["nothing", "one"], ["row"]),
        helper.make_node("Concat", ["row", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    if first == 1:
        nodes = [helper.make_node("Reshape", ["x", "flat"], ["y"])]
    return _model(
        "baked",
        nodes,
        [_tensor("x", FLOAT, ["N", 4])],
        [_tensor("y", FLOAT, [first, "M"])],
        [
            numpy_helper.from_array(np.array([0]), "zero"),
            numpy_helper.from_array(np.array([1]), "one"),
            numpy_helper.from_array(np.array([-1]), "rest"),
            numpy_helper.from_array(np.array([1, -1]), "flat"),
        ],
    )


def mixrow() -> onnx.ModelProto:
    """x FP32 [N, 4] -> y = x - mean(x over the rows): rows depend on each other."""
    return _model(
        "mixrow",
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0]),
            helper.make_node("Sub", ["x", "mean"], ["y"]),
        ],
        [_tensor("x", FLOAT, ["N", 4])],
        [_tensor("y", FLOAT, ["N", 4])],
    )


def names() -> onnx.ModelProto:
    """'x:0' FP32 [N, 4] -> 'onnx::Shape_422' = 2x and 'a/b' = -x, as exporters name."""
    return _model(
        "names",
        [
            helper.make_node("Add", ["x:0", "x:0"], ["onnx::Shape_422"]),
            helper.make_node("Neg", ["x:0"], ["a/b"]),
        ],
        [_tensor("x:0", FLOAT, ["N", 4])],
        [
            _tensor("onnx::Shape_422", FLOAT, ["N", 4]),
            _tensor("a/b", FLOAT, ["N", 4]),
        ],
    )


def scal() -> onnx.ModelProto:
    """x FP32 [N, 4], sr INT64 [] (a scalar) -> y = x * sr."""
    return _model(
        "scal",
        [
            helper.make_node("Cast", ["sr"], ["rate"], to=FLOAT),
            helper.make_node("Mul", ["x", "rate"], ["y"]),
        ],
        [_tensor("x", FLOAT, ["N", 4]), _tensor("sr", INT64, [])],
        [_tensor("y", FLOAT, ["N", 4])],
    )


def ax1() -> onnx.ModelProto:
    """x FP32 [N, 4], st FP32 [2, N, 3] -> y = x + sum(st over 0 and 2), stN = -st."""
    return _model(
        "ax1",
        [
            helper.make_node("ReduceSum", ["st", "axes"], ["sums"], keepdims=0),
            helper.make_node("Unsqueeze", ["sums", "one"], ["column"]),
            helper.make_node("Add", ["x", "column"], ["y"]),
            helper.make_node("Neg", ["st"], ["stN"]),
        ],
        [_tensor("x", FLOAT, ["N", 4]), _tensor("st", FLOAT, [2, "N", 3])],
        [_tensor("y", FLOAT, ["N", 4]), _tensor("stN", FLOAT, [2, "N", 3])],
        [
            numpy_helper.from_array(np.array([0, 2]), "axes"),
            numpy_helper.from_array(np.array([1]), "one"),
        ],
    )


def nz(*, transposed: bool = False) -> onnx.ModelProto:
    """x FP32 [N, 4] -> where INT64 [2, K], the places of what is not zero.

    `transposed` gives [K, 2]: a first axis that looks like a batch and is none.
    """
    nodes = [helper.make_node("NonZero", ["x"], ["where"])]
    shape: Axes = [2, "K"]
    if transposed:
        nodes[0].output[0] = "places"
        nodes.append(helper.make_node("Transpose", ["places"], ["where"], perm=[1, 0]))
        shape = ["K", 2]
    return _model(
        "nz",
        nodes,
        [_tensor("x", FLOAT, ["N", 4])],
        [_tensor("where", INT64, shape)],
    )


def i64() -> onnx.ModelProto:
    """v INT64 [N, 1] -> w = v + 1, exact over the whole range of 64 bits."""
    return _model(
        "i64",
        [helper.make_node("Add", ["v", "one"], ["w"])],
        [_tensor("v", INT64, ["N", 1])],
        [_tensor("w", INT64, ["N", 1])],
        [numpy_helper.from_array(np.array([1]), "one")],
    )


def identity(kind: str) -> onnx.ModelProto:
    """x [N, D] -> y = x, of a type of `ID_TYPES`: bool, int8, …, fp16, bf16, string."""
    number = ID_TYPES[kind][1]
    return _model(
        f"id_{kind}",
        [helper.make_node("Identity", ["x"], ["y"])],
        [_tensor("x", number, ["N", "D"])],
        [_tensor("y", number, ["N", "D"])],
    )


def twin_a() -> onnx.ModelProto:
    """x FP32 [N, 4] -> y = x + 1; the graph's name is its twins' too."""
    return _twin(1, 4)


def twin_b() -> onnx.ModelProto:
    """x FP32 [N, 4] -> y = x + 2; the graph's name is its twins' too."""
    return _twin(2, 4)


def twin_w() -> onnx.ModelProto:
    """x FP32 [N, 5] -> y = x + 1; the graph's name is its twins' too."""
    return _twin(1, 5)


def tile(times: int = 1000) -> onnx.ModelProto:
    """x FP32 [N, 4] -> y FP32 [N, 4 * times], x repeated: much more out than in."""
    return _model(
        "tile",
        [helper.make_node("Tile", ["x", "times"], ["y"])],
        [_tensor("x", FLOAT, ["N", 4])],
        [_tensor("y", FLOAT, ["N", 4 * times])],
        [numpy_helper.from_array(np.array([1, times]), "times")],
    )


BUILDERS: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "probe": probe,
    "slow": slow,
    "emb": emb,
    "seq": seq,
    "baked": baked,
    "mixrow": mixrow,
    "names": names,
    "scal": scal,
    "ax1": ax1,
    "nz": nz,
    "i64": i64,
    "twin_a": twin_a,
    "twin_b": twin_b,
    "twin_w": twin_w,
    "tile": tile,
    **{f"id_{kind}": partial(identity, kind) for kind in ID_TYPES},
}
"""Every model by its name."""


# -- parts ------------------------------------------------------------------------


def _twin(addend: int, width: int) -> onnx.ModelProto:
    return _model(
        "main_graph",
        [helper.make_node("Add", ["x", "addend"], ["y"])],
        [_tensor("x", FLOAT, ["N", width])],
        [_tensor("y", FLOAT, ["N", width])],
        [numpy_helper.from_array(np.array(addend, np.float32), "addend")],
    )


def _witnesses(source: str) -> list[onnx.NodeProto]:
    """Nodes that make `n` and `pos` from the first size of `source`."""
    return [
        helper.make_node("Shape", [source], ["dims"]),
        helper.make_node("Gather", ["dims", "zero"], ["rows_1"]),
        helper.make_node("Concat", ["rows_1", "one"], ["column"], axis=0),
        helper.make_node("Expand", ["rows_1", "column"], ["n"]),
        helper.make_node("Squeeze", ["rows_1"], ["rows_0"]),
        helper.make_node("Range", ["zero_0", "rows_0", "one_0"], ["places"]),
        helper.make_node("Reshape", ["places", "column"], ["pos"]),
    ]


def _witness_constants() -> list[onnx.TensorProto]:
    return [
        numpy_helper.from_array(np.array([0]), "zero"),
        numpy_helper.from_array(np.array([1]), "one"),
        numpy_helper.from_array(np.array(0), "zero_0"),
        numpy_helper.from_array(np.array(1), "one_0"),
    ]


def _witness_outputs(batch: int | str = "N") -> list[onnx.ValueInfoProto]:
    return [_tensor("n", INT64, [batch, 1]), _tensor("pos", INT64, [batch, 1])]


def _tensor(name: str, kind: int, shape: Axes) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    used = {value for node in nodes for value in node.input}
    graph = helper.make_graph(
        nodes, name, inputs, outputs, [c for c in constants if c.name in used]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.checker.check_model(model)
    return model
