"""Device memory as arithmetic, and what a lane counts without a device."""

from __future__ import annotations

import numpy as np
import pytest

from engines.base import Array
from engines.tensorrt.buffers import SETS, Course, Ended, LaneCell, address_of
from engines.tensorrt.memory import MemoryNeed

MIB = 1 << 20
NEED = MemoryNeed(
    weights=100 * MIB, activation=20 * MIB, buffers=6 * MIB, graphs=8 * MIB, lanes=3
)


# -- memory ---------------------------------------------------------------------------


def test_a_lane_needs_activations_and_buffers() -> None:
    """Weights and graphs count once, the rest for every lane."""
    assert NEED.total == (100 + 3 * (20 + 6) + 8) * MIB


def test_the_sum_can_be_followed() -> None:
    """Every term is in the text."""
    assert NEED.text() == (
        "186 MiB = 100 of weights + 3 lanes x (20 of activations + 6 of buffers) + "
        "8 of graphs"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (1, "<1"), (MIB - 1, "<1"), (MIB, "1"), (1000 * MIB + 7, "1000")],
)
def test_small_sizes_are_not_told_as_nothing(size: int, text: str) -> None:
    """What is below a MiB is said to be; and one lane is a lane."""
    need = MemoryNeed(weights=size, activation=0, buffers=0, graphs=0, lanes=1)

    assert need.text() == (
        f"{text} MiB = {text} of weights + 1 lane x (0 of activations + 0 of buffers) "
        "+ 0 of graphs"
    )


def test_a_refusal_names_what_is_missing_and_the_way_out() -> None:
    """The model, the GPU, the lane, what it takes and what there is."""
    text = NEED.refusal("resnet", device=1, free=25 * MIB, total=16_000 * MIB)

    assert text.startswith("resnet: GPU 1 has not the memory for lane 3: it takes 26 ")
    assert "25 of 16000 MiB are free" in text
    assert NEED.text() in text
    assert "Use fewer slots, a smaller max_batch or shorter buckets" in text


# -- a lane's books -------------------------------------------------------------------


def test_a_run_is_alone_when_nothing_else_is_under_way() -> None:
    """The first is, the second behind it is not, and the next after both again."""
    course = Course()

    assert course.begin()
    assert not course.begin()
    course.end()
    assert not course.begin()
    course.end()
    course.end()
    assert course.begin()


def test_a_run_that_was_not_launched_does_not_count() -> None:
    """Alone or behind another one, the next finds what the failed one has found."""
    course = Course()
    for expected in (True, False):
        assert course.begin() == expected
        course.undo()
        assert course.begin() == expected


def cell(*outputs: tuple[int, ...] | None) -> LaneCell:
    """A cell whose outputs have these shapes."""
    return LaneCell(None, ((1, 4),), outputs, along=True)


def test_a_cell_is_known_when_all_its_outputs_are() -> None:
    """One output whose shape the values decide is enough to wait for each run."""
    assert cell((1, 2), ()).known
    assert not cell((1, 2), None).known


def test_a_new_cell_runs_plainly() -> None:
    """It has a place for a graph per buffer set, and nothing to drop."""
    made = cell((1,))
    made.drop_graphs()

    assert made.graphs == [None] * SETS
    assert (made.plain_ns, made.graph_ns, made.expected_ns) == (0, 0, 0)


def test_a_run_that_has_ended_is_waited_for_at_once() -> None:
    """With the very outputs and the time it was given."""
    outputs: list[Array] = [np.zeros(3)]

    given, run_ns = Ended(outputs, 5).wait()

    assert given is outputs
    assert run_ns == 5


def test_an_array_begins_where_its_values_do() -> None:
    """Also a part of another one."""
    whole = np.zeros(8, np.int64)

    assert address_of(whole[3:]) == whole.ctypes.data + 24
