"""Outputs compared in numbers, and the samples they are compared on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import models
import networks
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import engines
from engines import EngineLoadError, TensorSpec
from engines.tensorrt.checks import Comparison, Precision, check, compare
from engines.tensorrt.profiles import AxisSizes, grid
from engines.tensorrt.samples import load_samples, random_samples, vocabulary_sizes

RNG = np.random.default_rng(0)
SCORES = RNG.normal(0, 1, (64, 10)).astype(np.float32)


def compared(
    reference: Any, candidate: Any, precision: Precision = "fp16"
) -> Comparison:
    """The comparison of one output."""
    return compare(
        {"y": np.asarray(reference)}, {"y": np.asarray(candidate)}, precision
    )


# -- the comparison -------------------------------------------------------------------


def test_equal_outputs_pass_in_every_precision() -> None:
    """No error, a cosine of 1, and all rows agree."""
    for precision in ("fp32", "fp16", "bf16", "fp8", "int8"):
        (output,) = compared(SCORES, SCORES, precision).outputs

        assert (output.max_abs, output.mean_error, output.top1) == (0, 0, 1)
        assert output.cosine == pytest.approx(1)
        assert output.problems == ()


@pytest.mark.parametrize(
    ("dtype", "precision"), [(np.float16, "fp16"), (ml_dtypes.bfloat16, "bf16")]
)
def test_rounding_passes_for_its_own_precision(
    dtype: Any, precision: Precision
) -> None:
    """What storing an output in 16 bits rounds off is within the thresholds."""
    assert compared(SCORES, SCORES.astype(dtype).astype(np.float32), precision).passed


def test_an_error_may_pass_in_one_precision_and_fail_in_another() -> None:
    """2 % of noise is what bfloat16 does in a deep network, and fp32 never."""
    noise = RNG.normal(1, 0.02, SCORES.shape).astype(np.float32)

    assert compared(SCORES, SCORES * noise, "bf16").passed
    assert not compared(SCORES, SCORES * noise, "fp32").passed


def test_the_numbers_are_what_they_say() -> None:
    """Of [3, 4] and [3, 4.5]: errors, scales and cosine by hand."""
    (output,) = compared(np.float32([3, 4]), np.float32([3, 4.5])).outputs

    assert output.max_abs == 0.5
    assert output.mean_abs == 0.25
    assert output.max_error == 0.125
    assert output.mean_error == pytest.approx(0.5 / 7)
    assert output.cosine == pytest.approx(27 / (5 * np.hypot(3, 4.5)))
    assert output.problems == (
        "max error 0.125 is above 0.03",
        "mean error 0.0714 is above 0.01",
        "cosine 0.998460 is below 0.999",
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda y: np.zeros_like(y), "cosine 0.000000 is below"),
        (lambda y: -y, "cosine -1.000000 is below"),
        (lambda y: np.roll(y, 1, axis=0), "cosine"),
        (lambda y: np.where(y > 2, np.nan, y).astype(y.dtype), "NaN or infinite"),
        (lambda y: np.where(y > 2, np.inf, y).astype(y.dtype), "NaN or infinite"),
        (lambda y: y[:-1], r"has shape \[63, 10\], and the reference \[64, 10\]"),
        (lambda y: y.astype(np.float16), "is float16, and the reference float32"),
        (lambda y: y + np.float32(0.5), "mean error"),
    ],
)
def test_what_is_wrong_is_said(change: Any, expected: str) -> None:
    """Zeros, signs, mixed-up rows, NaN, shapes, dtypes and offsets are all noticed."""
    result = compared(SCORES, change(SCORES))

    assert not result.passed
    assert any(__import__("re").search(expected, p) for p in result.problems)


def test_rows_that_are_mixed_up_lose_their_winners() -> None:
    """Top-1 agreement is reported, and judged where the winner is clear."""
    sure = np.eye(10, dtype=np.float32)[RNG.integers(0, 10, 100)] + SCORES.max() * 0
    (output,) = compared(sure, np.roll(sure, 1, axis=1)).outputs

    assert output.top1 == 0
    assert any("agreement 0.0000" in p for p in output.problems)


def test_close_races_are_not_held_against_a_plan() -> None:
    """Two scores that differ by less than the allowed error may change places."""
    reference = np.float32([[1.0, 0.999], [1.0, 0.999]])
    (output,) = compared(reference, reference[:, ::-1].copy()).outputs

    assert (output.top1, output.agreement, output.problems) == (0, 1, ())


def test_integers_must_be_equal() -> None:
    """Their share of equal values counts, and the largest difference is exact."""
    reference = np.array([0, 2**63, 5, 7], np.uint64)
    candidate = np.array([1, 2**63, 5, 7], np.uint64)
    (output,) = compared(reference, candidate).outputs

    assert (output.agreement, output.max_abs) == (0.75, 1)
    assert output.problems == ("agreement 0.7500 is below 0.98",)


def test_equal_nan_and_infinity_are_no_error() -> None:
    """What the reference has too is left out of the numbers."""
    values = np.float32([[np.nan, np.inf, -np.inf, 2]])
    (output,) = compared(values, values).outputs

    assert (output.nonfinite, output.max_abs, output.problems) == (0, 0, ())


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (), (1,)])
def test_empty_and_scalar_outputs_can_be_compared(shape: tuple[int, ...]) -> None:
    """Shapes without elements or axes make no trouble."""
    assert compared(np.ones(shape, np.float32), np.ones(shape, np.float32)).passed


def test_outputs_that_are_missing_or_too_many_fail() -> None:
    """Both sides must name the same."""
    result = compare({"a": SCORES}, {"b": SCORES}, "fp16")

    assert result.problems == [
        "output 'a': the candidate has no such output",
        "output 'b': the reference has no such output",
    ]


def test_no_samples_are_no_pass() -> None:
    """Nothing compared is nothing shown."""
    result = check(dict, dict, [], "fp16")

    assert not result.passed
    assert result.problems == ["nothing was compared"]


def test_one_bad_sample_among_good_ones_fails() -> None:
    """The worst counts: a good average hides nothing."""
    result = compare(
        [{"y": SCORES}] * 5, [{"y": SCORES}] * 4 + [{"y": SCORES[::-1]}], "fp16"
    )

    assert result.samples == 5
    assert not result.passed


def test_the_table_can_be_read() -> None:
    """One output a line, the limits, and the verdict with its reasons."""
    lines = compared(np.float32([3, 4]), np.float32([3, 4.5])).table().splitlines()

    assert lines[0].split()[:2] == ["output", "max"]
    assert lines[1].split() == (
        ["y", "5.00e-01", "2.50e-01", "1.2e-01", "7.1e-02", "0.998460", "1.000"]
    )
    assert lines[2].startswith("(fp16 limit)")
    assert lines[3].startswith("1 samples, FAILED: output 'y': max error 0.125")


def test_the_numbers_can_be_kept_as_json() -> None:
    """Infinities stand as text, since JSON has none."""
    result = compared(np.zeros(4, np.float32), np.ones(4, np.float32))

    kept = json.loads(json.dumps(result.to_json(), allow_nan=False))

    assert kept["passed"] is False
    assert kept["outputs"][0]["max_error"] == "inf"


floats = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, max_side=5),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@given(floats)
def test_anything_equals_itself(values: np.ndarray) -> None:
    """Whatever the floats, an output passes against itself in the strictest way."""
    result = compared(values, values, "fp32")

    assert result.passed, result.table()


@given(floats, st.data())
def test_a_nan_never_passes(values: np.ndarray, data: st.DataObject) -> None:
    """One value that becomes NaN fails, wherever it is."""
    index = data.draw(st.integers(0, values.size - 1))
    candidate = values.copy()
    candidate.flat[index] = np.nan
    if np.isnan(values.flat[index]):
        return

    assert not compared(values, candidate, "int8").passed


# -- samples --------------------------------------------------------------------------


def test_a_transformer_is_compared_with_itself(tmp_path: Path) -> None:
    """End to end with ONNX Runtime: corners, vocabulary, masks."""
    model = networks.transformer()
    engine = engines.open(networks.save(model, tmp_path / "model.onnx"))
    cells = grid(engine.inputs, rungs=(1, 4), axes=[AxisSizes("S", (2, 9))])
    done: list[int] = []

    result = check(
        engine.run,
        engine.run,
        random_samples(
            engine.inputs, cells.corners(), vocabularies=vocabulary_sizes(model)
        ),
        "fp32",
        progress=done.append,
    )

    assert result.passed, result.table()
    assert (result.samples, done) == (4, [1, 2, 3, 4])


def test_vocabularies_are_those_of_the_tables() -> None:
    """Ids stay within the table they are looked up in; masks have none."""
    assert vocabulary_sizes(networks.transformer(vocabulary=50)) == {"input_ids": 50}
    assert vocabulary_sizes(models.emb()) == {"ids": 10}
    assert vocabulary_sizes(models.seq()) == {"ids": 100}
    assert vocabulary_sizes(networks.conv()) == {}


def sample(spec: TensorSpec, shape: tuple[int, ...], **more: Any) -> np.ndarray:
    """A random sample of one input."""
    (made,) = random_samples([spec], [{spec.name: shape}], **more)
    return made[spec.name]


def test_ids_are_within_their_vocabulary() -> None:
    """Or 0 and 1 where none is known."""
    ids = TensorSpec("ids", "INT64", ("N", "S"))

    known = sample(ids, (50, 50), vocabularies={"ids": 7})
    unknown = sample(ids, (50, 50))

    assert (known.min(), known.max(), known.dtype) == (0, 6, np.int64)
    assert set(np.unique(unknown)) == {0, 1}


def test_masks_are_ones_and_then_zeros() -> None:
    """Every row keeps its first token; the first row keeps all."""
    mask = sample(TensorSpec("attention_mask", "INT64", ("N", "S")), (20, 9))

    assert mask[0].tolist() == [1] * 9
    assert (mask[:, 0] == 1).all()
    assert (np.diff(mask, axis=1) <= 0).all()
    assert mask.min() == 0


@pytest.mark.parametrize("dtype", [d for d in engines.DTYPES if d != "BYTES"])
def test_samples_have_their_dtype_and_are_repeatable(dtype: str) -> None:
    """The same seed, the same sample; another seed, another."""
    spec = TensorSpec("x", dtype, ("N", 64))

    first, again = sample(spec, (2, 64), seed=3), sample(spec, (2, 64), seed=3)
    other = sample(spec, (2, 64), seed=4)

    assert (first.dtype, first.shape) == (spec.numpy, (2, 64))
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_strings_cannot_be_made_up() -> None:
    """The text asks for samples."""
    with pytest.raises(EngineLoadError, match="give samples"):
        sample(TensorSpec("x", "BYTES", ("N",)), (1,))


def npz(path: Path, **arrays: Any) -> Path:
    """An `.npz` file."""
    np.savez(path, **arrays)
    return path


X = TensorSpec("x", "FP32", ("N", 2))


def test_given_samples_are_read(tmp_path: Path) -> None:
    """One sample under the inputs' names, or several with numbers."""
    one, two = np.zeros((1, 2), np.float32), np.ones((3, 2), np.float32)

    single = load_samples(npz(tmp_path / "a.npz", x=one), [X])
    several = load_samples(npz(tmp_path / "b.npz", **{"x.1": two, "x.0": one}), [X])

    assert [s["x"].tolist() for s in single] == [one.tolist()]
    assert [s["x"].tolist() for s in several] == [one.tolist(), two.tolist()]


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"y": np.zeros((1, 2), np.float32)}, "no input 'y'"),
        ({"x": np.zeros((1, 2))}, r"must be float32 \[-1, 2\]; the array is float64"),
        ({"x": np.zeros((1, 3), np.float32)}, r"the array is float32 \[1, 3\]"),
        ({"x": np.zeros(2, np.float32)}, r"the array is float32 \[2\]"),
        ({"x": np.array([{"evil": 1}], object)}, r"no \.npz file of arrays"),
        ({}, "it holds no arrays"),
    ],
)
def test_samples_that_do_not_fit_are_refused(
    arrays: Mapping[str, Any], expected: str, tmp_path: Path
) -> None:
    """Names, dtypes and shapes are checked; pickles are never loaded."""
    with pytest.raises(EngineLoadError, match=expected):
        load_samples(npz(tmp_path / "x.npz", **arrays), [X])


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    """And so is one that is missing."""
    (tmp_path / "x.npz").write_bytes(b"PK\3\4 no zip")

    for name in ("x.npz", "absent.npz"):
        with pytest.raises(EngineLoadError, match=name):
            load_samples(tmp_path / name, [X])
