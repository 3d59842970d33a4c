"""Models in 16 bits: what they compute, what they keep, and that they are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import networks
import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import TensorProto, helper, numpy_helper

import engines
from engines import EngineLoadError
from engines.base import Array
from engines.tensorrt import onnxfile, precision
from engines.tensorrt.build import build
from engines.tensorrt.checks import Comparison, Precision, check
from engines.tensorrt.module import TensorRT
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.precision import ModelPrecision, convert_file, needs_conversion
from engines.tensorrt.profiles import AxisSizes, grid
from engines.tensorrt.samples import random_samples, vocabulary_sizes

NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "conv": networks.conv,
    "transformer": networks.transformer,
    "seq": models.seq,
}
LENGTHS = {"conv": {}, "transformer": {"S": (4, 16)}, "seq": {"S": (4, 16)}}


def converted(
    made: onnx.ModelProto, kind: ModelPrecision, folder: Path, **more: Any
) -> onnx.ModelProto:
    """The model as it is written in another precision."""
    file = onnxfile.read(models.save(made, folder / "model.onnx"))
    path = convert_file(file, kind, folder / f"{kind}.onnx", **more)
    return onnx.load(path)


def types(values: Any) -> dict[str, int]:
    """Element types by name."""
    return {v.name: v.type.tensor_type.elem_type for v in values}


def compare_with_original(
    name: str, made: onnx.ModelProto, candidate: Any, kind: Precision, path: Path
) -> Comparison:
    """Runs the original in ONNX Runtime and the candidate on the same samples."""
    engine = engines.open(models.save(made, path))
    axes = [AxisSizes(axis, sizes) for axis, sizes in LENGTHS[name].items()]
    shapes = grid(engine.inputs, rungs=(1, 4), axes=axes).corners()
    samples = random_samples(engine.inputs, shapes, vocabularies=vocabulary_sizes(made))
    return check(engine.run, candidate, samples, kind)


@pytest.mark.parametrize("name", NETWORKS)
def test_fp16_computes_the_same(name: str, tmp_path: Path) -> None:
    """ONNX Runtime runs the converted model; its inputs and outputs are as before."""
    made = NETWORKS[name]()
    model = converted(made, "fp16", tmp_path)
    engine = engines.open(tmp_path / "fp16.onnx")

    result = compare_with_original(
        name, made, engine.run, "fp16", tmp_path / "original.onnx"
    )

    onnx.checker.check_model(model, full_check=True)
    assert result.passed, result.table()
    assert types(model.graph.input) == types(made.graph.input)
    assert types(model.graph.output) == types(made.graph.output)
    assert TensorProto.FLOAT not in {
        t.data_type for t in model.graph.initializer if t.dims and t.dims[0] > 1
    }


def test_a_real_model_computes_the_same_in_fp16(tmp_path: Path, rtx: TensorRT) -> None:
    """Magika's, of 3 MB: converted, compared in ONNX Runtime, and built."""
    magika = pytest.importorskip("magika")
    source = Path(magika.__file__).parent / "models/standard_v3_3/model.onnx"
    file = onnxfile.read(source)
    path = convert_file(file, "fp16", tmp_path / "fp16.onnx")
    shapes = grid(file.inputs, rungs=(1, 8)).corners()
    samples = random_samples(file.inputs, shapes, vocabularies={"bytes": 257})

    result = check(engines.open(source).run, engines.open(path).run, samples, "fp16")
    plan = build(
        path,
        BuildOptions(flavour="tensorrt_rtx", profiles=networks.profiles(path)),
    )

    assert result.passed, result.table()
    assert plan.startswith(b"vtrt")


@pytest.mark.parametrize("name", ["transformer", "seq"])
def test_bf16_computes_the_same(name: str, tmp_path: Path) -> None:
    """ONNX's reference evaluator runs it (ONNX Runtime's CPU has no bfloat16)."""
    made = NETWORKS[name]()
    model = converted(made, "bf16", tmp_path)
    evaluator = onnx.reference.ReferenceEvaluator(model)
    names = [value.name for value in model.graph.output]

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, evaluator.run(None, dict(inputs)), strict=True))

    result = compare_with_original(name, made, run, "bf16", tmp_path / "original.onnx")

    assert result.passed, result.table()
    assert TensorProto.FLOAT16 not in {t.data_type for t in model.graph.initializer}


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_was_converted_is_built(
    name: str, kind: ModelPrecision, tmp_path: Path, rtx: TensorRT
) -> None:
    """A strongly typed network is consistent, and its plan another than fp32's."""
    made = NETWORKS[name]()
    converted(made, kind, tmp_path)
    original, path = tmp_path / "model.onnx", tmp_path / f"{kind}.onnx"
    options = BuildOptions(
        flavour="tensorrt_rtx",
        profiles=networks.profiles(original, (1, 4), **LENGTHS[name]),
    )

    assert build(path, options) != build(original, options)


def test_inputs_and_outputs_can_be_converted_too(tmp_path: Path) -> None:
    """With `keep_io` off, images travel as halves."""
    model = converted(networks.conv(), "fp16", tmp_path, keep_io=False)

    assert types(model.graph.input) == {"image": TensorProto.FLOAT16}
    assert types(model.graph.output) == {"scores": TensorProto.FLOAT16}


def test_nodes_can_be_kept_in_fp32(tmp_path: Path) -> None:
    """What overflows in half is named, and stays."""
    model = converted(
        networks.transformer(), "fp16", tmp_path, keep_nodes=["attention_scores"]
    )

    (node,) = [n for n in model.graph.node if n.name == "attention_scores"]
    assert all("cast_to_fp32" in name for name in node.input)


def test_bf16_keeps_what_fp16_cannot_hold(tmp_path: Path) -> None:
    """Weights of 1e6 and 1e-20 come from the FP32 values, not by way of fp16."""
    made = networks.conv()
    weight = np.float32([1e6, 1e-20] * 4).reshape(8)
    made.graph.initializer.append(numpy_helper.from_array(weight, "large"))
    made.graph.node.append(helper.make_node("Mul", ["scores", "large"], ["product"]))
    made.graph.output.append(networks.value_info("product", 1, ["N", 8]))

    model = converted(made, "bf16", tmp_path)

    (tensor,) = [t for t in model.graph.initializer if t.name == "large"]
    held = numpy_helper.to_array(tensor).astype(np.float32)
    assert tensor.data_type == TensorProto.BFLOAT16
    np.testing.assert_allclose(held, weight, rtol=0.004)


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    """A table that two nodes read is converted once, not written twice."""
    made = networks.transformer()
    made.graph.node.append(
        helper.make_node("Gather", ["table", "input_ids"], ["again"])
    )
    made.graph.output.append(networks.value_info("again", 1, ["N", "S", 16]))

    model = converted(made, "fp16", tmp_path)

    tables = [t for t in model.graph.initializer if list(t.dims) == [50, 16]]
    assert [t.name for t in tables] == ["table"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.identity("fp16"),
        lambda: models.identity("bf16"),
        lambda: models.i64(),
    ],
)
def test_models_that_hold_halves_are_left_alone(
    make: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    """So are those without floats: the file itself is built."""
    file = onnxfile.read(models.save(make(), tmp_path / "model.onnx"))

    path = convert_file(file, "fp16", tmp_path / "other.onnx")

    assert path == tmp_path / "model.onnx"
    assert not (tmp_path / "other.onnx").exists()


def test_fp32_takes_the_file_as_it_is(tmp_path: Path) -> None:
    """Nothing is written."""
    file = onnxfile.read(models.save(networks.conv(), tmp_path / "model.onnx"))

    assert convert_file(file, "fp32", tmp_path / "other.onnx") == file.path
    assert needs_conversion(file.model)


def test_external_weights_are_converted_and_written_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is too large for one message keeps its weights in a file."""
    monkeypatch.setattr(onnxfile, "MAX_MESSAGE", 100)
    monkeypatch.setattr(precision, "MAX_MESSAGE", 100)
    made = networks.conv()
    source = networks.save(made, tmp_path / "a" / "model.onnx", external=True)
    target = tmp_path / "b" / "fp16.onnx"

    path = convert_file(onnxfile.read(source), "fp16", target)
    result = compare_with_original(
        "conv", made, engines.open(path).run, "fp16", tmp_path / "original.onnx"
    )

    assert result.passed, result.table()
    assert onnxfile.read(path).weight_files == (tmp_path / "b" / "fp16.onnx.weights",)
    assert [p.name for p in (tmp_path / "b").iterdir() if p.suffix == ".tmp"] == []


def test_constants_written_as_numbers_are_converted(tmp_path: Path) -> None:
    """`value_float` is another spelling of `value`."""
    made = networks.conv()
    made.graph.node.append(helper.make_node("Constant", [], ["two"], value_float=2.0))
    made.graph.node.append(helper.make_node("Mul", ["scores", "two"], ["twice"]))
    made.graph.output.append(networks.value_info("twice", 1, ["N", 8]))

    model = converted(made, "fp16", tmp_path)

    onnx.checker.check_model(model, full_check=True)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    """It is built as it is; the order is convert, then quantize."""
    with pytest.raises(EngineLoadError, match=r"quantized \(node 'quantize_a_0'\)"):
        converted(networks.conv(qdq=TensorProto.INT8), "fp16", tmp_path)


def test_an_old_opset_has_no_bfloat16(tmp_path: Path) -> None:
    """The text says which to export with."""
    made = networks.conv()
    made.opset_import[0].version = 11

    with pytest.raises(EngineLoadError, match=r"opset 11 has no bfloat16.*13 or n"):
        converted(made, "bf16", tmp_path)
