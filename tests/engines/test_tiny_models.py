"""The tiny models of `tests.models` load, and compute what their builders say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

import engines
from engines import EngineRunError

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
N = np.full((3, 1), 3)
POS = np.arange(3).reshape(3, 1)
IDS = np.array([[1, 2, 0], [4, 5, 6]])
MASK = np.array([[1, 1, 0], [1, 1, 1]])

CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "probe": (models.probe(), {"x": X}, {"y": X + X, "n": N, "pos": POS}),
    "probe-fixed": (
        models.probe(1),
        {"x": X[:1]},
        {"y": X[:1] * 2, "n": np.array([[1]]), "pos": np.array([[0]])},
    ),
    "slow": (
        models.slow(8),
        {"x": X, "iters": np.array([[1], [7], [0]])},
        {"y": X, "n": N, "pos": POS},
    ),
    "emb": (
        models.emb(),
        {"ids": np.array([[0], [9], [1]])},
        {
            "y": np.array([[0, 1, 2, 3], [36, 37, 38, 39], [4, 5, 6, 7]], np.float32),
            "n": N,
            "pos": POS,
        },
    ),
    "seq": (
        models.seq(),
        {"ids": IDS, "mask": MASK},
        {
            "y": np.stack(
                [
                    models.seq_table()[[1, 2]].mean(axis=0),
                    models.seq_table()[[4, 5, 6]].mean(axis=0),
                ]
            ),
            "rawsum": np.array([[6], [18]], np.float32),
            "len": np.array([[3], [3]]),
            "n": np.array([[2], [2]]),
            "pos": np.array([[0], [1]]),
        },
    ),
    "baked": (models.baked(), {"x": X}, {"y": X.reshape(1, 12)}),
    "baked-promised": (models.baked("N"), {"x": X}, {"y": X.reshape(1, 12)}),
    "mixrow": (models.mixrow(), {"x": X}, {"y": X - X.mean(axis=0)}),
    "names": (models.names(), {"x:0": X}, {"onnx::Shape_422": X + X, "a/b": -X}),
    "scal": (models.scal(), {"x": X, "sr": np.array(3)}, {"y": X * 3}),
    "ax1": (
        models.ax1(),
        {"x": X, "st": np.arange(18, dtype=np.float32).reshape(2, 3, 3)},
        {
            "y": X + np.array([[33], [51], [69]], np.float32),
            "stN": -np.arange(18, dtype=np.float32).reshape(2, 3, 3),
        },
    ),
    "nz": (
        models.nz(),
        {"x": np.array([[0, 1, 0, 2], [3, 0, 0, 0]])},
        {"where": np.array([[0, 0, 1], [1, 3, 0]])},
    ),
    "nz-transposed": (
        models.nz(transposed=True),
        {"x": np.array([[0, 1, 0, 2], [3, 0, 0, 0]])},
        {"where": np.array([[0, 1], [0, 3], [1, 0]])},
    ),
    "i64": (
        models.i64(),
        {"v": np.array([[2**63 - 2], [-(2**63)]])},
        {"w": np.array([[2**63 - 1], [-(2**63) + 1]])},
    ),
    "twin_a": (models.twin_a(), {"x": X}, {"y": X + 1}),
    "twin_b": (models.twin_b(), {"x": X}, {"y": X + 2}),
    "twin_w": (
        models.twin_w(),
        {"x": X.reshape(2, 6)[:, :5]},
        {"y": X.reshape(2, 6)[:, :5] + 1},
    ),
    "tile": (models.tile(7), {"x": X}, {"y": np.tile(X, (1, 7))}),
}


@pytest.mark.parametrize("case", CASES)
def test_model_computes_what_its_builder_says(case: str, tmp_path: Path) -> None:
    """Every output of every model has the documented values, dtype included."""
    model, inputs, expected = CASES[case]
    engine = engines.open(models.save(model, tmp_path / "model.onnx"))

    actual = engine.run(inputs)

    assert list(actual) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, strict=True)


@pytest.mark.parametrize("kind", models.ID_TYPES)
def test_identity_model_has_its_datatype(kind: str, tmp_path: Path) -> None:
    """`id_<type>` takes [N, D] of its type and gives the same back."""
    datatype = models.ID_TYPES[kind][0]
    path = models.save(models.identity(kind), tmp_path / "model.onnx")
    engine = engines.open(path)
    value = np.array([[0, 1], [1, 0]]).astype(engines.DTYPES[datatype])
    if datatype == "BYTES":
        value = np.array([[b"", b"a"], ["é".encode(), b"\x00"]], dtype=object)

    actual = engine.run({"x": value})["y"]

    assert [(s.dtype, s.shape) for s in (*engine.inputs, *engine.outputs)] == [
        (datatype, ("N", "D"))
    ] * 2
    assert (actual.dtype, actual.tolist()) == (value.dtype, value.tolist())


def test_emb_fails_on_its_poison(tmp_path: Path) -> None:
    """Id 99 of `emb` makes the run fail, whoever else is in the batch."""
    engine = engines.open(models.save(models.emb(), tmp_path / "model.onnx"))

    with pytest.raises(EngineRunError, match="99"):
        engine.run({"ids": np.array([[0], [99]])})


def test_every_model_is_small_and_of_the_documented_version() -> None:
    """The models are tiny, of opset 17 and IR 8, and twins share a graph name."""
    built = {name: build() for name, build in models.BUILDERS.items()}

    assert {m.ir_version for m in built.values()} == {8}
    assert {m.opset_import[0].version for m in built.values()} == {17}
    assert {built[f"twin_{c}"].graph.name for c in "abw"} == {"main_graph"}
    assert max(len(m.SerializeToString()) for m in built.values()) < 100_000
