"""Run times: measured on an engine whose times are known, kept as a file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import (
    Cell,
    Engine,
    EngineRunError,
    ExecutionContext,
    FakeEngine,
    FakeOptions,
    TensorSpec,
    costs,
)
from engines.base import Array, Launch, PipelinedContext
from engines.costs import CellCost, from_json, measure, to_json

MS = 1_000_000
COSTS = [
    CellCost(((1, 4), (1,)), 1, 1_500, 20),
    CellCost(((8, 4), (8,)), 2, 9_000_000, 0),
    CellCost((), 1, 0, 0),
]


def cell(rows: int) -> Cell:
    """A batch of some rows."""
    return Cell([(rows, 2)], [(rows, 2)])


def fake(dtype: str = "INT64", **options: Any) -> FakeEngine:
    """An engine that echoes x [N, 2]."""
    x, y = (TensorSpec(name, dtype, ("N", 2)) for name in "xy")
    return FakeEngine(FakeOptions(inputs=(x,), outputs=(y,), **options))


def measured(engine: Engine, *rows: int, contexts: int = 1) -> list[CellCost]:
    """The costs of batches on new contexts."""
    made = [engine.create_context() for _ in range(contexts)]
    return measure(engine, made, [cell(r) for r in rows])


class Paired(Engine):
    """A context's first run takes the device 1,000 ns, the next 10, 20, 30 and 40.

    Args:
        meet: once two contexts are used, a run on each waits for the other's.
        takes_s: how long the host waits for one.
        failing, fails_at: the runs of this context fail from this one on.
    """

    backend = "paired"
    inputs = outputs = (TensorSpec("x", "INT64", ("N", 2)),)

    def __init__(
        self,
        *,
        meet: bool = False,
        takes_s: float = 0,
        failing: int = -1,
        fails_at: int = 0,
    ) -> None:
        self.meet = meet
        self.barrier = threading.Barrier(2)
        self.takes_s = takes_s
        self.failing = failing
        self.fails_at = fails_at
        self.made = 0
        self.runs = 0
        self.entered: list[int] = []

    def create_context(self) -> ExecutionContext:
        self.made += 1
        return PairedContext(self, self.made - 1)


class PairedContext(PipelinedContext):
    """See `Paired`."""

    def __init__(self, engine: Paired, number: int) -> None:
        self._engine = engine
        self._number = number
        self._runs = 0
        self._met = False

    def enter_thread(self) -> None:
        self._engine.entered.append(self._number)

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        engine = self._engine
        assert not inputs[0].any()
        if self._number == engine.failing and self._runs >= engine.fails_at:
            raise EngineRunError("no such row")
        self._runs += 1
        engine.runs += 1
        if engine.meet and len(engine.entered) > 1 and not self._met:
            self._met = True
            engine.barrier.wait(30)
        time.sleep(engine.takes_s)
        run_ns = 10 * (self._runs - 1) or 1_000
        return Timed([array for array in outputs if array is not None], run_ns)


class Timed(Launch):
    """A run of `Paired`."""

    def __init__(self, outputs: list[Array], run_ns: int) -> None:
        self._result = outputs, run_ns

    def wait(self) -> tuple[list[Array], int]:
        return self._result


# -- measured -------------------------------------------------------------------------


def test_the_time_of_a_run_is_found() -> None:
    """Per cell and per number of busy contexts, at least what was slept."""
    found = measured(fake(base_ms=2, per_row_us=500), 1, 8, contexts=2)

    assert [(c.inputs, c.busy) for c in found] == [
        (((rows, 2),), busy) for rows in (1, 8) for busy in (1, 2)
    ]
    for cost in found:
        assert cost.device_ns >= (2 + 0.5 * cost.inputs[0][0]) * MS
        assert cost.host_ns == 0  # all of it counts as the device's


@pytest.mark.parametrize(("limit_ns", "runs"), [(MS, 1), (60_000 * MS, 5)])
def test_long_runs_are_run_once(
    limit_ns: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a large model is not kept from being served; others are run again."""
    monkeypatch.setattr(costs, "_LONG_NS", limit_ns)
    engine = Paired(takes_s=0.002)

    assert len(measured(engine, 1)) == 1
    assert engine.runs == runs


def test_the_device_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its median counts, without the first run; what passes for the caller beyond that
    is the host's."""
    monkeypatch.setattr(costs, "_LONG_NS", 60_000 * MS)
    engine = Paired()
    (cost,) = measured(engine, 1)

    assert cost.device_ns == 25
    assert cost.host_ns > 0
    assert engine.entered == [0]


def test_contexts_run_beside_each_other() -> None:
    """The runs of two contexts meet, from threads that have entered them."""
    engine = Paired(meet=True)
    found = measured(engine, 1, contexts=2)

    assert [c.busy for c in found] == [1, 2]
    assert sorted(engine.entered) == [0, 0, 1]


@pytest.mark.parametrize(
    "engine", [fake(fail_value=0), fake("BYTES"), fake(cold_ms=0.001)]
)
def test_cells_that_fail_are_left_out(engine: FakeEngine) -> None:
    """Zeros that are no input, types without zeros, shapes that were not warmed."""
    assert measured(engine, 1, 2, contexts=2) == []


@pytest.mark.parametrize("rows", [1 << 60, 1 << 62])
def test_cells_that_no_memory_holds_are_left_out(rows: int) -> None:
    """The others are measured."""
    found = measured(fake(), rows, 1)

    assert [c.inputs for c in found] == [((1, 2),)]


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_cell_that_fails_on_one_context_has_no_cost_beside_it(fails_at: int) -> None:
    """What the other one has taken was not beside it, or not all the time."""
    engine = Paired(failing=1, fails_at=fails_at)

    found = measured(engine, 1, contexts=2)

    assert [(c.inputs, c.busy) for c in found] == [(((1, 2),), 1)]


# -- kept -----------------------------------------------------------------------------


def test_costs_are_read_as_they_were_written() -> None:
    """Shapes are tuples again."""
    assert from_json(to_json(COSTS)) == COSTS
    assert from_json(to_json([])) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 2, "costs": []}',
        '{"format": 1, "costs": null}',
        '{"format": 1, "costs": [{}]}',
        '{"format": 1, "costs": ["inputs"]}',
        to_json(COSTS)[:-20],
        to_json(COSTS).replace("9000000", "Infinity"),
        to_json(COSTS).replace("9000000", "NaN"),
        to_json(COSTS).replace("9000000", "null"),
        to_json(COSTS).replace("[\n    [\n     1,", '[\n    [\n     "a",'),
        "[" * 100_000,
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    """Whatever is wrong with them, so that times are measured again."""
    with pytest.raises(ValueError, match=r"."):
        from_json(text)


@settings(deadline=None)
@given(at=st.integers(0, len(to_json(COSTS)) - 1), letter=st.characters())
def test_damage_gives_costs_or_an_error(at: int, letter: str) -> None:
    """Never another exception, and never something that is no cost."""
    text = to_json(COSTS)
    try:
        found = from_json(text[:at] + letter + text[at + 1 :])
    except ValueError:
        return
    json.loads(to_json(found))
    assert all(
        isinstance(size, int) for c in found for shape in c.inputs for size in shape
    )
