"""Profiles: from the batches that will be run to boxes of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import EngineLoadError, Profile, TensorSpec
from engines.tensorrt.profiles import AxisSizes, check_profiles, grid, make_profiles
from engines.tensors import Shape

IMAGE = TensorSpec("image", "FP32", ("N", 3, 224, 224))
IDS = TensorSpec("ids", "INT64", ("N", "S"))
MASK = TensorSpec("mask", "INT64", ("N", "S"))
LADDER = (1, 2, 4, 8, 16, 32, 64)


def holds(profile: Profile, shapes: Mapping[str, Shape]) -> bool:
    """Whether every shape lies in the profile."""
    return all(
        a <= size <= b
        for name, shape in shapes.items()
        for a, size, b in zip(profile.min[name], shape, profile.max[name], strict=True)
    )


def boxes(profiles: tuple[Profile, ...], name: str) -> list[tuple[Shape, ...]]:
    """(min, opt, max) of one input, per profile."""
    return [(p.min[name], p.opt[name], p.max[name]) for p in profiles]


def test_a_short_ladder_is_one_profile() -> None:
    """Rungs within a factor of 16 share a profile, tuned for the largest."""
    made = make_profiles(grid([TensorSpec("x", "FP32", ("N", 4))], rungs=[1, 4, 16]))

    assert boxes(made, "x") == [((1, 4), (16, 4), (16, 4))]


def test_a_long_ladder_is_split_in_the_middle() -> None:
    """Small and large batches of images get a profile each, without a gap between."""
    made = make_profiles(grid([IMAGE], rungs=(*LADDER, 128)))

    assert [[shape[0] for shape in box] for box in boxes(made, "image")] == [
        [1, 4, 8],
        [9, 128, 128],
    ]


def test_the_grid_of_batch_and_length_is_split_along_both() -> None:
    """Rungs to 64 and 16 to 512 tokens make the four quarters of the grid."""
    cells = grid([IDS, MASK], rungs=LADDER, axes=[AxisSizes("S", (16, 64, 128, 512))])

    made = make_profiles(cells)

    assert boxes(made, "ids") == [
        ((1, 16), (4, 64), (8, 64)),
        ((1, 65), (4, 512), (8, 512)),
        ((9, 16), (64, 64), (64, 64)),
        ((9, 65), (64, 512), (64, 512)),
    ]
    assert boxes(made, "mask") == boxes(made, "ids")


def test_a_limit_of_one_never_splits() -> None:
    """Whoever wants a single profile gets the whole grid in it."""
    cells = grid([IDS], rungs=LADDER, axes=[AxisSizes("S", (16, 512))])

    assert boxes(make_profiles(cells, limit=1), "ids") == [
        ((1, 16), (64, 512), (64, 512))
    ]


def test_a_static_model_gets_one_profile() -> None:
    """Without dynamic axes, min, opt and max are the model's shapes."""
    made = make_profiles(grid([TensorSpec("x", "FP32", (1, 4))], rungs=[1]))

    assert boxes(made, "x") == [((1, 4), (1, 4), (1, 4))]


def test_scalars_and_batches_on_other_axes_are_taken() -> None:
    """The batch is found on axis 1 by its name; a scalar input has no sizes."""
    inputs = [
        TensorSpec("x", "FP32", ("N", 4)),
        TensorSpec("state", "FP32", (2, "N", 3)),
        TensorSpec("rate", "INT64", ()),
    ]

    (made,) = make_profiles(grid(inputs, rungs=[1, 8]))

    assert made.max == {"x": (8, 4), "state": (2, 8, 3), "rate": ()}


def test_an_axis_can_be_said_by_number() -> None:
    """An axis without a name is bounded by saying which of which input it is."""
    spec = TensorSpec("x", "FP32", ("N", None))

    (made,) = make_profiles(
        grid([spec], rungs=[2], axes=[AxisSizes("width", (10, 20), {"x": 1})])
    )

    assert (made.min["x"], made.max["x"]) == ((2, 10), (2, 20))


def test_corners_are_every_rung_at_both_ends() -> None:
    """A plan is compared at each batch size with the shortest and longest length."""
    cells = grid([IDS], rungs=(1, 8), axes=[AxisSizes("S", (64, 16, 32))])

    assert [shapes["ids"] for shapes in cells.corners()] == [
        (1, 16),
        (1, 64),
        (8, 16),
        (8, 64),
    ]


@pytest.mark.parametrize(
    ("inputs", "rungs", "expected"),
    [
        pytest.param(
            [IDS, MASK], [1], r"'ids' \[N, S\]: axis 1 \('S'\).*\[axes\.S\] / buckets",
            id="named",
        ),
        pytest.param(
            [TensorSpec("x", "FP32", ("N", None))],
            [1],
            r"axis 1 \(without a name\).*inputs = \{ x = 1 \}",
            id="unnamed",
        ),
        pytest.param([IMAGE], [], "axis 0 .*max_batch = 32", id="batch"),
        pytest.param(
            [TensorSpec("x", "FP32", ("N", "2*w"))], [1], r'\[axes\."2\*w"\]', id="odd"
        ),
    ],
)  # fmt: skip
def test_an_axis_without_limits_is_refused(
    inputs: list[TensorSpec], rungs: list[int], expected: str
) -> None:
    """The text names the axis and the lines of model.toml that would bound it."""
    with pytest.raises(EngineLoadError, match=expected):
        grid(inputs, rungs=rungs)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (AxisSizes("T", (8,)), r"no input has an axis named 'T' \(named axes: N, S\)"),
        (AxisSizes("S", ()), "at least one is needed"),
        (AxisSizes("S", (0, 8)), "none below 1"),
        (AxisSizes("S", (8,), {"idz": 1}), "no input 'idz'"),
        (AxisSizes("S", (8,), {"ids": 5}), "axis 5 of input 'ids' .* is not dynamic"),
        (AxisSizes("S", (8,), {"ids": 0}), "cannot be both the batch and 'S'"),
    ],
)
def test_sizes_that_belong_nowhere_are_refused(axis: AxisSizes, expected: str) -> None:
    """A name, an input or an axis that is not there is named with what there is."""
    with pytest.raises(EngineLoadError, match=expected):
        grid([IDS], rungs=[1], axes=[axis])


def profile(**changes: Any) -> Profile:
    """A valid profile of `IDS` with some of its shapes changed."""
    shapes: dict[str, Any] = {"min": (1, 8), "opt": (2, 16), "max": (4, 32), **changes}
    return Profile(
        **{k: v if isinstance(v, dict) else {"ids": v} for k, v in shapes.items()}
    )


@pytest.mark.parametrize(
    ("given_profile", "expected"),
    [
        (profile(max={"Ids": (4, 32)}), r"no input 'Ids' \(it has ids \[N, S\]\)"),
        (profile(opt={}), "no opt shape for input 'ids'"),
        (profile(max=(4, 32, 1)), r"has 3 axes, but the input has 2: \[N, S\]"),
        (profile(min=(3, 8)), "axis 0 has min 3, opt 2, max 4"),
        (profile(opt=(2, 64)), "axis 1 has min 8, opt 64, max 32"),
        (profile(min=(0, 8)), "axis 0 of min .* is below 1"),
    ],
)
def test_profiles_that_do_not_fit_are_refused(
    given_profile: Profile, expected: str
) -> None:
    """Wrong names, ranks and orders are found before TensorRT sees them."""
    with pytest.raises(EngineLoadError, match=expected):
        check_profiles([IDS], [profile(), given_profile])


def test_a_profile_cannot_change_a_fixed_axis() -> None:
    """An axis that the model fixes has its size in every profile."""
    spec = TensorSpec("ids", "INT64", ("N", 16))

    with pytest.raises(EngineLoadError, match=r"axis 1 of min .* must be 16"):
        check_profiles([spec], [profile()])


sizes = st.lists(st.integers(1, 4096), min_size=1, max_size=8)


@given(rungs=sizes, lengths=sizes, limit=st.integers(1, 9))
def test_every_cell_is_in_a_profile(
    rungs: list[int], lengths: list[int], limit: int
) -> None:
    """Whatever the sizes, each cell and each size in between has a profile.

    And every profile is valid, tuned for a cell, and no more are made than allowed.
    """
    cells = grid([IDS, MASK], rungs=rungs, axes=[AxisSizes("S", tuple(lengths))])

    made = make_profiles(cells, limit=limit)

    check_profiles([IDS, MASK], made)
    assert 1 <= len(made) <= limit
    assert all(any(holds(p, cell) for p in made) for cell in cells.cells())
    assert all(p.opt in cells.cells() for p in made)
    between = [
        cells.shapes((rows, length))
        for rows in (min(rungs), (min(rungs) + max(rungs)) // 2, max(rungs))
        for length in (min(lengths), (min(lengths) + max(lengths)) // 2, max(lengths))
    ]
    assert all(any(holds(p, cell) for p in made) for cell in between)
