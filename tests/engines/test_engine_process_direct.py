"""Runs that an engine's process was told of beforehand, and launches with one call."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from process_engines import array
from process_expecting import FACTS, KILLED, UNEXPECTED, Expecting

from engines import (
    Cell,
    EngineError,
    EngineLostError,
    EngineRunError,
    Slot,
)
from engines.base import Launch, PipelinedContext
from engines.process import ProcessContext, ProcessEngine, open_in_process

WAIT_S = 30


@pytest.fixture(scope="module")
def expecting() -> Iterator[ProcessEngine]:
    """An `Expecting` in a process; no test ends it."""
    engine = open_in_process(Expecting, name="expecting")
    yield engine
    assert engine.lost is None
    engine.close()


@pytest.fixture
def context(expecting: ProcessEngine) -> Iterator[ProcessContext]:
    """A context of `expecting`."""
    made = expecting.create_context()
    yield made
    made.close()


def arrays(engine: ProcessEngine, value: int = 7) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of a run."""
    return [array(engine, value)], [array(engine, *[0] * FACTS)]


# -- expected -------------------------------------------------------------------------


def test_what_is_expected_is_what_is_run(
    expecting: ProcessEngine, context: ProcessContext
) -> None:
    """The engine meets the very lists again that it was told of; of others it does
    not."""
    inputs, outputs = arrays(expecting)
    others = arrays(expecting, 8)

    context.expect(inputs, outputs)

    assert context.execute(inputs, outputs)[0].tolist() == [7, True, 1, 0]
    assert context.execute(*others)[0].tolist() == [8, False, 1, 0]
    assert outputs[0].tolist() == [7, True, 1, 0]


def test_arrays_that_were_run_can_be_expected_later(
    expecting: ProcessEngine, context: ProcessContext
) -> None:
    """Once or twice: they are told of once."""
    inputs, outputs = arrays(expecting)

    assert context.execute(inputs, outputs)[0].tolist() == [7, False, 0, 0]
    context.expect(inputs, outputs)
    context.expect([*inputs], [*outputs])
    assert context.execute(inputs, outputs)[0].tolist() == [7, True, 1, 0]


def test_errors_of_the_engine_come_back(
    expecting: ProcessEngine, context: ProcessContext
) -> None:
    """What cannot be worked out beforehand is run all the same."""
    inputs, outputs = arrays(expecting, UNEXPECTED)

    with pytest.raises(EngineRunError, match=r"^no graph can be made of it$"):
        context.expect(inputs, outputs)
    assert context.execute(inputs, outputs)[0].tolist() == [UNEXPECTED, False, 0, 0]


def test_values_outside_of_host_buffers_are_not_expected(
    expecting: ProcessEngine, context: ProcessContext
) -> None:
    """They go along with every run, in arrays that are new each time."""
    inputs, outputs = [np.array([7])], [array(expecting, *[0] * FACTS)]

    context.expect(inputs, outputs)

    assert context.try_launch(inputs, outputs) is None
    assert context.execute(inputs, outputs)[0].tolist() == [7, False, 0, 0]
    assert context.try_launch(inputs, outputs) is None


def test_strings_are_not_expected() -> None:
    """Nor are they launched with one call, even when they were run before."""
    engine = open_in_process(partial(Expecting, "BYTES"), name="strings")
    context = engine.create_context()
    inputs: list[Any] = [np.array([b"a", b"bc"], object)]
    outputs = [array(engine, *[0] * FACTS)]

    context.expect(inputs, outputs)

    for _ in range(2):
        assert context.try_launch(inputs, outputs) is None
        assert context.execute(inputs, outputs)[0].tolist() == [0, False, 0, 0]
    engine.close()


def test_outputs_of_unknown_shape_may_be_expected(
    expecting: ProcessEngine, context: ProcessContext
) -> None:
    """The inputs are told of; the output comes back as a new array."""
    inputs = [array(expecting, 7)]
    context.expect(inputs, [None])

    launch = context.try_launch(inputs, [None])

    assert launch is not None
    assert launch.wait()[0][0].tolist() == [7, True, 1, 0]


# -- launched with one call -----------------------------------------------------------


@pytest.mark.parametrize("before", ["expected", "run"])
def test_known_arrays_are_launched_with_one_call(
    expecting: ProcessEngine, context: ProcessContext, before: str
) -> None:
    """And unknown ones are not: nothing has begun then."""
    inputs, outputs = arrays(expecting)
    assert context.try_launch(inputs, outputs) is None
    if before == "expected":
        context.expect(inputs, outputs)
    else:
        context.execute(inputs, outputs)

    for value in (8, 9):
        inputs[0][0] = value
        launch = context.try_launch(inputs, outputs)

        assert launch is not None
        assert launch.wait() == ([outputs[0]], 1)
        assert outputs[0].tolist()[:2] == [value, before == "expected"]


def test_direct_launches_and_others_take_turns(
    expecting: ProcessEngine, context: ProcessContext
) -> None:
    """Two are under way, of both kinds; each ends with its own answer."""
    known, new = arrays(expecting, 1), arrays(expecting, 2)
    context.expect(*known)
    first = context.try_launch(*known)
    second = context.launch(*new)

    assert first is not None
    assert [each.wait()[0][0].tolist()[:2] for each in (first, second)] == [
        [1, True],
        [2, False],
    ]


def test_arrays_that_are_no_more_are_not_known(
    expecting: ProcessEngine, context: ProcessContext
) -> None:
    """New ones in their place are told of anew, whatever their `id` is."""
    for value in range(20):
        inputs, outputs = arrays(expecting, value)
        assert context.try_launch(inputs, outputs) is None
        context.expect(inputs, outputs)
        launch = context.try_launch(inputs, outputs)
        assert launch is not None
        assert launch.wait()[0][0].tolist()[:2] == [value, True]
        del inputs, outputs, launch
        gc.collect()


def test_a_lost_process_is_noticed_by_a_direct_launch() -> None:
    """It raises, as `launch` does, and so does `expect`."""
    engine = open_in_process(Expecting, name="killed")
    context = engine.create_context()
    inputs, outputs = arrays(engine)
    context.expect(inputs, outputs)
    inputs[0][0] = KILLED
    launch = context.try_launch(inputs, outputs)

    assert launch is not None
    with pytest.raises(EngineLostError, match="SIGKILL"):
        launch.wait()
    with pytest.raises(EngineLostError, match="SIGKILL"):
        context.try_launch(inputs, outputs)
    for each in ((inputs, outputs), arrays(engine)):
        with pytest.raises(EngineLostError, match="SIGKILL"):
            context.expect(*each)
    engine.close()


def test_a_closed_context_launches_nothing(expecting: ProcessEngine) -> None:
    """The engine and its other contexts go on."""
    closed, other = expecting.create_context(), expecting.create_context()
    inputs, outputs = arrays(expecting)
    closed.expect(inputs, outputs)
    closed.close()

    assert closed.try_launch(inputs, outputs) is None
    with pytest.raises(EngineError):
        closed.expect(inputs, outputs)
    assert other.execute(inputs, outputs)[0].tolist()[0] == 7
    assert expecting.lost is None
    other.close()


# -- in a slot ------------------------------------------------------------------------


class Watched(PipelinedContext):
    """Another context, and the threads that have launched runs in it with one call."""

    def __init__(self, inner: ProcessContext) -> None:
        self.inner = inner
        self.direct: list[int] = []
        self.refused = 0

    def try_launch(self, inputs: Any, outputs: Any) -> Launch | None:
        launch = self.inner.try_launch(inputs, outputs)
        if launch is None:
            self.refused += 1
        else:
            self.direct.append(threading.get_ident())
        return launch

    def launch(self, inputs: Any, outputs: Any) -> Launch:
        return self.inner.launch(inputs, outputs)

    def expect(self, inputs: Any, outputs: Any) -> None:
        self.inner.expect(inputs, outputs)

    def warm(self, shapes: Any) -> None:
        self.inner.warm(shapes)

    def close(self) -> None:
        self.inner.close()


CELL = Cell([(1,)], [(FACTS,)])


class Bench:
    """A slot of an engine in a process, used by one thread."""

    def __init__(self, engine: ProcessEngine) -> None:
        self.context = Watched(engine.create_context())
        self._rung = threading.Semaphore(0)
        self.slot = Slot(engine, "slot", self._rung.release, self.context)

    def facts(self) -> list[list[int]]:
        """What a run in each of the three stagings gives."""
        given = []
        for value, staging in enumerate([self.slot.acquire() for _ in range(3)]):
            staging.reserve_input(0, 8)[:8] = np.int64(value).tobytes()
            self.slot.start(staging, CELL)
            assert self._rung.acquire(timeout=WAIT_S)
            (done,) = self.slot.completions()
            given.append(done.outputs[0].tolist())
        return given


def test_reserved_batches_are_launched_by_the_caller(expecting: ProcessEngine) -> None:
    """In all three stagings, with the lists that the engine has expected."""
    bench = Bench(expecting)
    bench.slot.reserve(CELL)
    facts = bench.facts()
    bench.slot.close()

    assert facts == [[value, True, 3, 0] for value in range(3)]
    assert bench.context.direct == [threading.get_ident()] * 3


def test_warmed_batches_are_expected_after_that(expecting: ProcessEngine) -> None:
    """The engine makes its kernels first, and what it works out of them then."""
    bench = Bench(expecting)
    told: SimpleQueue[EngineError | None] = SimpleQueue()
    bench.slot.warm(CELL, told.put)
    error = told.get(timeout=WAIT_S)
    facts = bench.facts()
    bench.slot.close()

    assert error is None
    assert facts == [[value, True, 3, 1] for value in range(3)]
    assert bench.context.refused == 0


def test_other_batches_are_not_launched_by_the_caller(expecting: ProcessEngine) -> None:
    """Their arrays have to be described first, by the launching thread."""
    bench = Bench(expecting)
    facts = bench.facts()
    bench.slot.close()

    assert facts == [[value, False, 0, 0] for value in range(3)]
    assert bench.context.direct == []
    assert bench.context.refused > 0
