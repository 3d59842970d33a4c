"""From a request's shapes to groups, buckets and cuts; and the rules of a model."""

from __future__ import annotations

from typing import Any

import pytest

from batcher.config import AxisConfig
from batcher.config.schema import OutputAxisConfig
from batcher.errors import ConfigError, InvalidRequest
from batcher.serving.shapes import ModelShapes, cut_size

from .parts import spec

IDS = spec("ids", "INT64", "N", "S")
MASK = spec("mask", "INT64", "N", "S")
HIDDEN = spec("hidden", "FP32", "N", "S", 8)
POOLED = spec("pooled", "FP32", "N", 8)
STEPS = spec("steps", "FP32", "N", None, 3)

PAD = {"ids": 0.0, "mask": 0.0}
CUT = {"hidden": OutputAxisConfig(axis=1)}


def shapes(
    *, batched: bool = True, inputs: Any = (IDS, MASK), outputs: Any = (HIDDEN, POOLED)
) -> Any:
    """Makes the rules of a model with these tensors and one axis table, `S`."""

    def make(name: str = "S", **config: Any) -> ModelShapes:
        axes = {name: AxisConfig(**config)} if config else {}
        return ModelShapes(inputs, outputs, batched, axes)

    return make


def buckets(**more: Any) -> ModelShapes:
    """Ids and mask padded to 4, 8 or 16."""
    rules: ModelShapes = shapes()(buckets=(4, 8, 16), pad=PAD, outputs=CUT, **more)
    return rules


# -- fits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "bucket"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)]
)
def test_a_size_goes_up_to_the_next_bucket(size: int, bucket: int) -> None:
    """A row is padded to the smallest bucket that holds it, all inputs alike."""
    fit = buckets().fit(((3, size), (3, size)))

    assert fit.group.in_tails == ((bucket,), (bucket,))
    assert fit.group.in_row_bytes == (8 * bucket, 8 * bucket)
    assert fit.taken == ((size,), (size,))
    assert fit.exact is (size == bucket)


def test_outputs_of_a_padded_axis_are_cut_back() -> None:
    """The output that has the axis is cut to the request's own size, others are not."""
    fit = buckets().fit(((1, 5), (1, 5)))

    assert fit.cuts == (((1, 5),), ())
    assert fit.group.cell(2).outputs == [(2, 8, 8), (2, 8)]


def test_a_full_bucket_needs_no_cut() -> None:
    """What fills its bucket is copied and answered as it is."""
    fit = buckets().fit(((1, 8), (1, 8)))

    assert (fit.exact, fit.cuts) == (True, ((), ()))


def test_sizes_of_one_bucket_share_a_group() -> None:
    """Requests of different length may share a batch when their bucket is the same."""
    rules = buckets()
    tails = {n: rules.fit(((1, n), (1, n))).group.in_tails for n in range(1, 17)}

    assert [n for n in tails if tails[n] == tails[5]] == [5, 6, 7, 8]


def test_a_size_beyond_the_largest_bucket_is_refused() -> None:
    """What no bucket holds is the caller's error, with both numbers."""
    with pytest.raises(
        InvalidRequest, match="axis 'S' has 17 elements; it must have at most 16"
    ):
        buckets().fit(((1, 17), (1, 17)))


def test_a_size_beyond_the_largest_bucket_may_be_truncated() -> None:
    """With `too_long = "truncate"` a longer row loses its end."""
    fit = buckets(too_long="truncate").fit(((1, 40), (1, 40)))

    assert fit.exact is False
    assert fit.group.in_tails == ((16,), (16,))
    assert fit.taken == ((16,), (16,))
    assert fit.cuts == (((1, 16),), ())


@pytest.mark.parametrize("size", [3, 7])
def test_listed_sizes_are_run_as_they_are(size: int) -> None:
    """With `sizes` nothing is padded: each size is a group of its own."""
    fit = shapes()(sizes=(3, 7)).fit(((1, size), (1, size)))

    assert (fit.exact, fit.group.in_tails) == (True, ((size,), (size,)))


@pytest.mark.parametrize("size", [0, 4, 8])
def test_sizes_not_listed_are_refused_with_the_list(size: int) -> None:
    """A size that is not listed is the caller's error; those that are are named."""
    with pytest.raises(InvalidRequest, match=rf"has {size} .* one of \[3, 7\]"):
        shapes()(sizes=(3, 7)).fit(((1, size), (1, size)))


def test_without_rules_every_shape_is_a_group() -> None:
    """Nothing is padded unless the model's file says so."""
    fit = shapes()().fit(((2, 5), (2, 5)))

    assert (fit.exact, fit.group.in_tails) == (True, ((5,), (5,)))
    assert fit.group.cell(4).inputs == [(4, 5), (4, 5)]


def test_inputs_that_disagree_on_an_axis_are_named() -> None:
    """Where the file says two axes are one, requests must give both the same size."""
    inputs = (spec("a", "FP32", "N", None), spec("b", "FP32", "N", None))
    rules = shapes(inputs=inputs, outputs=(POOLED,))(
        "len", buckets=(8,), pad={"a": 0.0, "b": 0.0}, inputs={"a": 1, "b": 1}
    )

    with pytest.raises(
        InvalidRequest, match="inputs disagree on axis 'len': 'a': 3, 'b': 4"
    ):
        rules.fit(((1, 3), (1, 4)))


def test_two_axes_are_padded_independently() -> None:
    """Height and width have their own buckets, pad values and cuts."""
    image = spec("image", "UINT8", "N", 3, "H", "W")
    boxes = spec("boxes", "FP32", "N", "H8", "W8")
    rules = ModelShapes(
        (image,),
        (boxes,),
        True,
        {
            "H": AxisConfig(
                buckets=(32, 64),
                pad={"image": 7.0},
                outputs={"boxes": OutputAxisConfig(axis=1, ratio=0.125)},
            ),
            "W": AxisConfig(
                buckets=(48, 96),
                pad={"image": 7.0},
                outputs={"boxes": OutputAxisConfig(axis=2, ratio=0.125)},
            ),
        },
    )

    fit = rules.fit(((2, 3, 33, 48),))

    assert fit.group.in_tails == ((3, 64, 48),)
    assert fit.taken == ((3, 33, 48),)
    assert fit.cuts == (((1, 5),),)
    assert fit.exact is False
    assert rules.pad_values == [7.0]


def test_a_model_that_does_not_batch_keeps_its_whole_shapes() -> None:
    """Without a batch axis, axis 0 is an axis like any other, also of a scalar."""
    inputs = (spec("x", "FP32", "T", 2), spec("sr", "INT64"))
    rules = ModelShapes(
        inputs,
        (spec("y", "FP32", "T"), spec("z", "FP32")),
        False,
        {"T": AxisConfig(buckets=(4,), pad={"x": 0.0})},
    )

    fit = rules.fit(((3, 2), ()))

    assert fit.group.cell(1).inputs == ((4, 2), ())
    assert fit.group.cell(1).outputs == ((4,), ())
    assert fit.taken == ((3, 2), ())


# -- what is known of outputs ---------------------------------------------------------


def test_output_shapes_follow_the_names_of_axes() -> None:
    """An output's axis that an input has by name has its (padded) size."""
    fit = buckets().fit(((1, 3), (1, 3)))

    assert fit.group.out_tails == ((4, 8), (8,))


def test_an_output_with_an_unnamed_axis_is_unknown() -> None:
    """An axis that nothing says anything of makes the output's shape unknown."""
    fit = shapes(outputs=(STEPS, POOLED))().fit(((1, 3), (1, 3)))

    assert fit.group.cell(2).outputs == [None, (2, 8)]


def test_no_output_is_predicted_when_the_warm_up_said_so() -> None:
    """Where the names turned out to lie, every output's shape is unknown."""
    rules = shapes()()
    rules.predict_outputs = False

    assert rules.fit(((1, 3), (1, 3))).group.cell(2).outputs == [None, None]


@pytest.mark.parametrize("batched", [True, False])
def test_an_answer_that_no_message_holds_is_refused(batched: bool) -> None:
    """An output beyond 2 GiB is the caller's error, told before anything is run."""
    rules = shapes(
        batched=batched,
        inputs=(spec("x", "INT8", "N", "S"),),
        outputs=(spec("y", "FP32", "N", "S", "S"),),
    )()

    with pytest.raises(InvalidRequest) as caught:
        rules.fit(((2, 16_384),))

    assert "output 'y' would be of 2147483648 bytes" in str(caught.value)
    assert "a message holds 2147483647" in str(caught.value)
    assert rules.fit(((2, 16_383),)).exact is True


@pytest.mark.parametrize(
    ("size", "ratio", "expected"),
    [
        (16, 1.0, 16),
        (5, 0.125, 1),
        (8, 0.125, 1),
        (9, 0.125, 2),
        (0, 0.5, 0),
        (3, 2.0, 6),
        (3, 1 / 3, 1),
        (70, 0.1, 7),
        (100, 0.07, 7),
        (71, 0.1, 8),
        (49, 1 / 49, 1),
    ],
)
def test_output_sizes_are_rounded_up(size: int, ratio: float, expected: int) -> None:
    """A part of an element is one more, but not what binary fractions make up."""
    assert cut_size(size, ratio) == expected


# -- tables that do not fit the model -------------------------------------------------

BYTES = spec("text", "BYTES", "N", "S")

MISFITS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "an axis that is not there": (
        shapes(),
        {"name": "length", "buckets": (4,), "pad": PAD},
        (
            "axes.length: no input has an axis of that name",
            "dynamic are 'ids' axis 1: S, 'mask' axis 1: S",
            "axes.length.inputs",
        ),
    ),
    "no dynamic axis at all": (
        shapes(inputs=(spec("x", "FP32", "N", 4),), outputs=(POOLED,)),
        {"buckets": (4,), "pad": {"x": 0.0}},
        ("axes.S: no input", "none is dynamic"),
    ),
    "the batch axis": (
        shapes(),
        {"name": "N", "buckets": (4,), "pad": PAD},
        ("axes.N: no input has an axis of that name",),
    ),
    "an input that is not there": (
        shapes(),
        {"buckets": (4,), "pad": PAD, "inputs": {"idz": 1}},
        ("axes.S.inputs: no 'idz'", "['ids', 'mask']"),
    ),
    "an axis number that is not there": (
        shapes(),
        {"buckets": (4,), "pad": PAD, "inputs": {"ids": 2}},
        ("axes.S.inputs.ids = 2", "['N', 'S']", "is not there"),
    ),
    "the batch's axis number": (
        shapes(),
        {"buckets": (4,), "pad": PAD, "inputs": {"ids": 0}},
        ("axes.S.inputs.ids = 0", "or the batch"),
    ),
    "a fixed axis": (
        shapes(inputs=(spec("x", "FP32", "N", 4),), outputs=(POOLED,)),
        {"buckets": (4,), "pad": {"x": 0.0}, "inputs": {"x": 1}},
        ("axes.S.inputs.x = 1", "not dynamic"),
    ),
    "a pad value for an unknown input": (
        shapes(),
        {"buckets": (4,), "pad": {**PAD, "tokens": 0.0}},
        ("axes.S.pad: no 'tokens'", "['ids', 'mask']"),
    ),
    "no pad value": (
        shapes(),
        {"buckets": (4,), "pad": {"ids": 0.0}},
        ("axes.S.pad: a value for input 'mask' is needed",),
    ),
    "padded strings": (
        shapes(inputs=(BYTES,), outputs=(POOLED,)),
        {"buckets": (4,), "pad": {"text": 0.0}},
        ("axes.S: input 'text' is BYTES, which cannot be padded",),
    ),
    "an unknown output": (
        shapes(),
        {"buckets": (4,), "pad": PAD, "outputs": {"y": OutputAxisConfig(axis=1)}},
        ("axes.S.outputs: no 'y'", "['hidden', 'pooled']"),
    ),
    "an output axis that is not there": (
        shapes(),
        {"buckets": (4,), "pad": PAD, "outputs": {"pooled": OutputAxisConfig(axis=2)}},
        ("axes.S.outputs.pooled.axis = 2", "only 2 axes"),
    ),
    "an output that follows another table": (
        shapes(),
        {
            "buckets": (4,),
            "pad": PAD,
            "outputs": {"hidden": OutputAxisConfig(axis=1, follows="T")},
        },
        ("axes.S.outputs.hidden.follows = 'T'", "only be 'S'"),
    ),
    "a fraction for integers": (
        shapes(),
        {"buckets": (4,), "pad": {"ids": 0.5, "mask": 0.0}},
        ("axes.S.pad.ids = 0.5", "INT64", "cannot hold"),
    ),
    "no number for integers": (
        shapes(),
        {"buckets": (4,), "pad": {"ids": float("nan"), "mask": 0.0}},
        ("axes.S.pad.ids = nan", "INT64"),
    ),
    "a value outside the range": (
        shapes(inputs=(spec("x", "UINT8", "N", "S"),), outputs=(POOLED,)),
        {"buckets": (4,), "pad": {"x": 256.0}},
        ("axes.S.pad.x = 256", "UINT8"),
    ),
    "2 for a BOOL": (
        shapes(inputs=(spec("x", "BOOL", "N", "S"),), outputs=(POOLED,)),
        {"buckets": (4,), "pad": {"x": 2.0}},
        ("axes.S.pad.x = 2", "BOOL"),
    ),
    "a value that overflows FP16": (
        shapes(inputs=(spec("x", "FP16", "N", "S"),), outputs=(POOLED,)),
        {"buckets": (4,), "pad": {"x": 1e6}},
        ("axes.S.pad.x = 1e+06", "FP16"),
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_table_that_does_not_fit_is_refused(case: str) -> None:
    """What the file says and the model has not is named, with what it has."""
    make, config, says = MISFITS[case]

    with pytest.raises(ConfigError) as caught:
        make(**config)

    text = str(caught.value)
    assert [piece for piece in says if piece not in text] == [], text


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT8", -128.0),
        ("UINT8", 255.0),
        ("BOOL", 1.0),
        ("FP32", float("-inf")),
        ("FP16", float("nan")),
        ("FP16", 65504.0),
        ("BF16", 1e30),
    ],
)
def test_pad_values_of_the_datatype_are_taken(datatype: str, value: float) -> None:
    """The extreme values of a type, and infinities of floats, can be padded with."""
    make = shapes(inputs=(spec("x", datatype, "N", "S"),), outputs=(POOLED,))

    rules = make(buckets=(4,), pad={"x": value})

    assert repr(rules.pad_values) == repr([value])


def test_two_tables_about_one_axis_are_refused() -> None:
    """An axis cannot have two lists of buckets; both tables are named."""
    table = AxisConfig(buckets=(4,), pad=PAD)
    other = AxisConfig(buckets=(8,), pad=PAD, inputs={"mask": 1})

    with pytest.raises(
        ConfigError, match=r"axes\.S and axes\.T are both about axis 1 of input 'mask'"
    ):
        ModelShapes((IDS, MASK), (POOLED,), True, {"S": table, "T": other})


def test_two_pad_values_for_one_input_are_refused() -> None:
    """An input has one pad value, whichever of its axes is padded."""
    image = spec("image", "FP32", "N", "H", "W")
    tables = {
        "H": AxisConfig(buckets=(4,), pad={"image": 0.0}),
        "W": AxisConfig(buckets=(4,), pad={"image": 1.0}),
    }

    with pytest.raises(
        ConfigError,
        match=r"axes\.H\.pad and axes\.W\.pad give input 'image' .* 0 and 1",
    ):
        ModelShapes((image,), (POOLED,), True, tables)
