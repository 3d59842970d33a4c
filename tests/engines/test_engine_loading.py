"""Opening model files: what is taken, and why the rest is not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import engines
from engines import EngineLoadError

WEIGHT = np.arange(512 * 512, dtype=np.float32).reshape(512, 512) / 1e5
ONES = np.ones((1, 512), np.float32)


def graph_of(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: list[onnx.TensorProto] | None = None,
) -> onnx.ModelProto:
    """A model of these parts."""
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


def external(folder: Path, operator: str = "MatMul") -> Path:
    """A model whose weight of 1 MB lies in `weights.bin` beside it."""
    by_rows = operator == "MatMul"
    kind = TensorProto.FLOAT if by_rows else TensorProto.INT64
    axes: list[str | int | None] = ["N", 512] if by_rows else ["N"]
    order = ["x", "w"] if by_rows else ["w", "x"]
    model = graph_of(
        [helper.make_node(operator, order, ["y"])],
        [helper.make_tensor_value_info("x", kind, axes)],
        [helper.make_tensor_value_info("y", 1, ["N", 512])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    folder.mkdir(parents=True)
    path = folder / "model.onnx"
    onnx.save(
        model,
        str(path),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    return path


def relocate(path: Path, location: str) -> None:
    """Says in a model's file that its weights are at `location`."""
    model = onnx.load(str(path), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())


def refusal(path: Path | str) -> str:
    """The text with which a file is refused; one line that starts with its path."""
    with pytest.raises(EngineLoadError) as caught:
        engines.open(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


# -- weights in files of their own ----------------------------------------------------


def test_external_weights_load_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path finds its weights beside the model, wherever one is."""
    external(tmp_path / "a")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")

    engine = engines.open("../a/model.onnx")

    np.testing.assert_allclose(engine.run({"x": ONES})["y"], ONES @ WEIGHT, rtol=1e-4)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_external_weights_load_through_a_link(tmp_path: Path, kind: str) -> None:
    """A link to the model, or to its folder, finds the weights beside the target."""
    path = external(tmp_path / "a")
    link = tmp_path / "link.onnx"
    link.symlink_to(path if kind == "file" else path.parent)

    engine = engines.open(link if kind == "file" else link / "model.onnx")

    np.testing.assert_allclose(engine.run({"x": ONES})["y"], ONES @ WEIGHT, rtol=1e-4)


def test_external_weights_load_from_a_cache_of_links(tmp_path: Path) -> None:
    """Model and weights may both be links to files of other names (Hugging Face)."""
    path = external(tmp_path / "blobs")
    path.rename(path.with_name("0a1b"))
    path.with_name("weights.bin").rename(path.with_name("2c3d"))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.onnx").symlink_to("../blobs/0a1b")
    (snapshot / "weights.bin").symlink_to("../blobs/2c3d")

    engine = engines.open(snapshot / "model.onnx")

    np.testing.assert_allclose(engine.run({"x": ONES})["y"], ONES @ WEIGHT, rtol=1e-4)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """A model without its weight file says which file is missing."""
    path = external(tmp_path / "a")
    weights = path.with_name("weights.bin")
    weights.unlink()

    assert str(weights) in refusal(path)


def test_cut_weights_are_refused(tmp_path: Path) -> None:
    """A weight file that is too short is found at load."""
    path = external(tmp_path / "a")
    os.truncate(path.with_name("weights.bin"), 100)

    text = refusal(path)

    assert "file_length: 100" in text
    assert str(WEIGHT.nbytes) in text


@pytest.mark.parametrize("how", ["parent", "absolute", "link"])
def test_weights_outside_the_models_folder_are_refused(
    tmp_path: Path, how: str
) -> None:
    """No model reads a file elsewhere: by `..`, by a full path, or through a link."""
    path = external(tmp_path / "a" / "b")
    outside = tmp_path / "a" / "outside.bin"
    shutil.move(path.with_name("weights.bin"), outside)
    if how == "link":
        path.with_name("weights.bin").symlink_to(outside)
    else:
        relocate(path, "../outside.bin" if how == "parent" else str(outside))

    assert "External data path" in refusal(path) or "not allowed" in refusal(path)


def test_a_models_file_may_be_replaced_while_it_is_served(tmp_path: Path) -> None:
    """What was loaded is independent of the file: overwritten, cut, or gone."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    engine = engines.open(path)
    x = np.zeros((1, 4), np.float32)
    actual = []

    path.write_bytes(models.twin_b().SerializeToString())
    actual.append(engine.run({"x": x})["y"][0, 0])
    os.truncate(path, 0)
    actual.append(engine.run({"x": x})["y"][0, 0])
    path.unlink()
    actual.append(engine.run({"x": x})["y"][0, 0])

    assert actual == [1.0, 1.0, 1.0]


@pytest.mark.xfail(
    strict=True, reason="ONNX Runtime maps weight files: cutting one is a SIGBUS"
)
def test_a_weight_file_may_be_cut_while_it_is_served(tmp_path: Path) -> None:
    """What was loaded is independent of its weight file too (in a process apart)."""
    path = external(tmp_path / "a", "Gather")
    code = (
        "import os, sys, engines\n"
        "engine = engines.open(sys.argv[1])\n"
        "os.truncate(sys.argv[2], 0)\n"
        "engine.run({'x': [0, 511]})\n"
    )

    weights = str(path.with_name("weights.bin"))
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), weights], check=False, timeout=60
    )

    assert ended.returncode != -signal.SIGBUS


# -- files that are no models ---------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there, or is a folder, is said to be none."""
    folder = tmp_path / "folder.onnx"
    folder.mkdir()

    assert refusal(tmp_path / "none.onnx").endswith(": no such file")
    assert refusal(folder).endswith(": no such file")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"not a model", models.probe().SerializeToString()[:-50]],
    ids=["empty", "zeros", "text", "cut"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """What is no model, or only a part of one, is refused with a reason."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    assert len(refusal(path)) > len(str(path)) + 10


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A file that no back end takes says by its ending what it is."""
    path = tmp_path / "model.engine"
    path.write_bytes(b"x")

    assert refusal(path).endswith("no engine for files ending in '.engine'")


def test_an_operator_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A model that the runtime cannot run is refused with the operator's name."""
    x, y = (helper.make_tensor_value_info(name, 1, ["N"]) for name in "xy")
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="nowhere")
    path = models.save(graph_of([node], [x], [y]), tmp_path / "model.onnx")

    assert "Frobnicate" in refusal(path)


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_sequence_is_refused_at_load(tmp_path: Path, side: str) -> None:
    """A sequence cannot travel over the protocol: the text names tensor and type."""
    tensor = helper.make_tensor_value_info("t", 1, ["N"])
    sequence = helper.make_tensor_sequence_value_info("s", 1, None)
    index = numpy_helper.from_array(np.array(0), "i")
    if side == "input":
        node = helper.make_node("SequenceAt", ["s", "i"], ["t"])
        model = graph_of([node], [sequence], [tensor], [index])
    else:
        node = helper.make_node("SequenceConstruct", ["t"], ["s"])
        model = graph_of([node], [tensor], [sequence])
    path = models.save(model, tmp_path / "model.onnx")

    text = refusal(path)

    assert "tensor 's' has the type seq(tensor(float))" in text
    assert "tensor(int64)" in text


def test_an_8_bit_float_is_refused_at_load(tmp_path: Path) -> None:
    """A datatype that the protocol has no name for is refused with both names."""
    kind = TensorProto.FLOAT8E4M3FN
    x = helper.make_tensor_value_info("x", kind, ["N"])
    y = helper.make_tensor_value_info("y", 1, ["N"])
    node = helper.make_node("Cast", ["x"], ["y"], to=1)
    graph = helper.make_graph([node], "graph", [x], [y])
    opset = [helper.make_opsetid("", 19)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=9)
    path = models.save(model, tmp_path / "model.onnx")

    assert "tensor 'x' has the type tensor(float8e4m3fn)" in refusal(path)
