"""Images as bytes: the baked model against numpy, through ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import networks
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import engines
from engines import EngineLoadError, TensorSpec
from engines.tensorrt import onnxfile
from engines.tensorrt.build import build
from engines.tensorrt.module import TensorRT
from engines.tensorrt.onnxfile import save_whole
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.precision import convert_file
from engines.tensorrt.uint8 import Normalization, bake, parse

IMAGENET = "0.0171:0.0175:0.0174,123.7:116.3:103.5"
BYTES = np.random.default_rng(1).integers(0, 256, (2, 3, 16, 16), np.uint8)


def baked(
    made: onnx.ModelProto, text: str, folder: Path, **more: Any
) -> engines.Engine:
    """The model with bytes as input, opened."""
    file = onnxfile.read(models.save(made, folder / "model.onnx"))
    save_whole(bake(file, parse(text), **more), folder / "baked.onnx")
    return engines.open(folder / "baked.onnx")


@pytest.mark.parametrize("text", ["0.00392156862745098,0", "0.5,127.5", IMAGENET])
def test_bytes_give_what_normalized_floats_gave(text: str, tmp_path: Path) -> None:
    """The model's outputs are those of the original on numpy's normalization."""
    made = networks.conv()
    engine = baked(made, text, tmp_path)
    original = engines.open(tmp_path / "model.onnx")

    got = engine.run({"image": BYTES})["scores"]
    wanted = original.run({"image": parse(text).apply(BYTES, 1)})["scores"]

    assert engine.inputs == (TensorSpec("image", "UINT8", ("N", 3, 16, 16)),)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def passed_through(shape: list[int | str], dtype: int = 1) -> onnx.ModelProto:
    """x -> y = x."""
    return networks.model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [networks.value_info("x", dtype, shape)],
        [networks.value_info("y", dtype, shape)],
        [],
    )


@settings(max_examples=30, deadline=None)
@given(
    scale=st.floats(0.001, 10),
    mean=st.floats(-300, 300),
    value=st.integers(0, 255),
)
def test_the_arithmetic_is_numpys(
    scale: float, mean: float, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """(x - mean) * scale in FP32, to the last bit."""
    engine = baked(
        passed_through(["N", 1, 2]), f"{scale},{mean}", tmp_path_factory.mktemp("u8")
    )
    given_bytes = np.full((1, 1, 2), value, np.uint8)

    got = engine.run({"x": given_bytes})["y"]

    wanted = Normalization((scale,), (mean,)).apply(given_bytes, 1)
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("shape", "channel_axis"),
    [(["N", 8, 8, 3], 3), (["N", 3, 8, 8], 1), (["N", "C", 8, 8], 1)],
)
def test_channels_are_found(
    shape: list[int | str], channel_axis: int, tmp_path: Path
) -> None:
    """Planar or interleaved: the axis that has as many channels as numbers."""
    engine = baked(passed_through(shape), "1:2:4,0", tmp_path)
    sizes = [{"N": 2, "C": 3}.get(str(size), size) for size in shape]
    ones = np.ones([int(size) for size in sizes], np.uint8)

    got = engine.run({"x": ones})["y"]

    assert np.moveaxis(got, channel_axis, -1).reshape(-1, 3)[0].tolist() == [1, 2, 4]


def test_an_fp16_input_is_normalized_in_fp32(tmp_path: Path) -> None:
    """255 times a scale would lose bits in half; it is rounded once, at the end."""
    engine = baked(passed_through(["N", 1, 2], TensorProto.FLOAT16), "0.1,3", tmp_path)
    given_bytes = np.array([[[7, 255]]], np.uint8)

    got = engine.run({"x": given_bytes})["y"]

    wanted = parse("0.1,3").apply(given_bytes, 1).astype(np.float16)
    assert got.dtype == np.float16
    assert got.tolist() == wanted.tolist()


def test_the_baked_model_is_converted_and_built(tmp_path: Path, rtx: TensorRT) -> None:
    """Bytes in, fp16 inside, external weights: all of it together."""
    source = networks.save(networks.conv(), tmp_path / "a" / "m.onnx", external=True)
    made = bake(onnxfile.read(source), parse(IMAGENET))
    save_whole(made, tmp_path / "baked.onnx")
    file = onnxfile.read(tmp_path / "baked.onnx")
    path = convert_file(file, "fp16", tmp_path / "fp16.onnx")
    profiles = networks.profiles(path)

    plan = build(path, BuildOptions(flavour="tensorrt_rtx", profiles=profiles))

    assert onnxfile.read(path).inputs[0].dtype == "UINT8"
    assert plan.startswith(b"vtrt")


@pytest.mark.parametrize(
    "text", ["", "1", "1,2,3", "a,b", "1,nan", "0,1", "inf,1", "1:2,3:4:5", "1;2,3"]
)
def test_other_texts_are_refused(text: str) -> None:
    """What is wanted is said."""
    with pytest.raises(EngineLoadError, match="input-u8"):
        parse(text)


@pytest.mark.parametrize(
    ("make", "more", "expected"),
    [
        (models.probe, {}, "0 inputs look like images"),
        (models.emb, {"inputs": ["ids"]}, "input 'ids' is no float input"),
        (models.probe, {"inputs": ["y"]}, r"no input 'y' .*\(it has x\)"),
        (lambda: passed_through(["N", 3, 3, 3]), {}, "which axis of input 'x'"),
        (lambda: passed_through(["N", 4, 8, 8]), {}, "which axis of input 'x'"),
    ],
)
def test_a_model_where_it_is_not_clear_is_refused(
    make: Any, more: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Which input and which axis must be known."""
    with pytest.raises(EngineLoadError, match=expected):
        baked(make(), "1:2:4,0", tmp_path, **more)


def test_it_is_not_baked_twice(tmp_path: Path) -> None:
    """The input is UINT8 already, and no float input."""
    baked(networks.conv(), "1,0", tmp_path)
    file = onnxfile.read(tmp_path / "baked.onnx")

    with pytest.raises(EngineLoadError, match="is no float input"):
        bake(file, parse("1,0"), inputs=["image"])
