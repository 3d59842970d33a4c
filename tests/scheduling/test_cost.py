"""The cost table of a group: what it learns, and what it predicts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling import CostRow

from .helpers import MS


def make_row(runs_ns: dict[int, int]) -> CostRow:
    """A row that has seen one run of each rung."""
    row = CostRow()
    for rung, run_ns in runs_ns.items():
        row.record(rung, run_ns)
    return row


def test_nothing_measured() -> None:
    """A row that has seen no run predicts nothing."""
    assert CostRow().estimate_ns(4) is None


def test_first_run_counts_whole() -> None:
    """The first run of a rung is the prediction for it."""
    assert make_row({4: 5 * MS}).estimate_ns(4) == 5 * MS


@pytest.mark.parametrize(
    ("run_ns", "expected"),
    [
        (1_600, 1_600),
        (3_200, 1_700),  # 1/16 of the way
        (0, 1_500),
        (8_000, 2_000),  # five times the mean: the most that counts
        (8_001, 2_000),
        (900_000_000, 2_000),
    ],
)
def test_a_run_moves_the_mean(run_ns: int, expected: int) -> None:
    """A run moves the mean by a sixteenth, an outlier by no more than 4/16 of it."""
    row = make_row({4: 1_600})
    row.record(4, run_ns)

    assert row.estimate_ns(4) == expected


def test_follows_a_lasting_change() -> None:
    """A run time that stays ten times as long is learnt, although it is clamped."""
    row = make_row({4: 1_000})
    for _ in range(200):
        row.record(4, 10_000)

    assert row.estimate_ns(4) in range(9_990, 10_001)


def test_run_of_no_time() -> None:
    """A first run that a coarse clock measured as 0 does not clamp all that follow."""
    row = make_row({4: 0})
    for _ in range(200):
        row.record(4, MS)

    assert row.estimate_ns(4) in range(MS * 99 // 100, MS + 1)


@pytest.mark.parametrize(
    ("rung", "expected"),
    [
        (1, 100),  # below all: what the smallest takes, an upper bound
        (4, 100),
        (5, 150),  # between two: on the line
        (6, 200),
        (8, 300),
        (9, 337),  # above all: in proportion
        (16, 600),
    ],
)
def test_interpolates(rung: int, expected: int) -> None:
    """A rung that was not measured is predicted from its measured neighbours."""
    assert make_row({8: 300, 4: 100}).estimate_ns(rung) == expected


@pytest.mark.parametrize(
    ("rung", "expected"), [(1, 10), (2, 10), (3, 10), (4, 10), (5, 10), (8, 14)]
)
def test_never_below_a_smaller_rung(rung: int, expected: int) -> None:
    """A rung costs no less than any smaller one, however noisy the measurements."""
    assert make_row({1: 10, 2: 5, 4: 7}).estimate_ns(rung) == expected


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**12)), min_size=1),
    st.lists(st.integers(1, 128), min_size=2),
)
def test_monotone(measured: list[tuple[int, int]], rungs: list[int]) -> None:
    """Whatever was measured, a larger batch is never predicted to be faster."""
    row = CostRow()
    for rung, run_ns in measured:
        row.record(rung, run_ns)

    estimates = [row.estimate_ns(rung) or 0 for rung in sorted(rungs)]

    assert estimates == sorted(estimates)
