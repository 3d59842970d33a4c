"""Runs in an engine's process: arrays in shared memory and elsewhere, and calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import process_engines as scripts
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_engines import Adopting, Scripted, array, value

import engines
from engines import (
    Cell,
    EngineLoadError,
    EngineRunError,
    FakeEngine,
    FakeOptions,
    Slot,
    TensorSpec,
)
from engines.base import PipelinedContext
from engines.process import ProcessContext, ProcessEngine, open_in_process

WAIT_S = 30
LARGE = 100_000  # elements that no packet of a socket holds


@pytest.fixture(scope="module")
def scripted() -> Iterator[ProcessEngine]:
    """A `Scripted` in a process; no test ends it."""
    engine = open_in_process(Scripted, name="scripted")
    yield engine
    assert engine.lost is None
    engine.close()


@pytest.fixture(scope="module")
def pipelined() -> Iterator[ProcessEngine]:
    """The same with pipelined contexts."""
    engine = open_in_process(partial(Scripted, pipelined=True), name="pipelined")
    yield engine
    assert engine.lost is None
    engine.close()


@pytest.fixture
def context(scripted: ProcessEngine) -> Iterator[ProcessContext]:
    """A context of `scripted`."""
    made = scripted.create_context()
    yield made
    made.close()


# -- arrays ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, LARGE])
@pytest.mark.parametrize("shared_in", [True, False])
@pytest.mark.parametrize("shared_out", [True, False, None])
def test_arrays_may_lie_anywhere(
    scripted: ProcessEngine,
    context: ProcessContext,
    size: int,
    shared_in: bool,
    shared_out: bool | None,
) -> None:
    """In shared memory or not, given or not: a run gives its own answer, twice."""
    x: Any = np.arange(1, size + 1)
    if shared_in:
        x = array(scripted, *x)
    y = array(scripted, *[0] * size) if shared_out else np.zeros(size, np.int64)

    for _ in range(2):
        x += 1
        outputs = [None if shared_out is None else y]
        (actual,) = context.execute([x], outputs)

        assert (actual is y) == (shared_out is not None)
        assert actual.tolist() == x.tolist()
        actual[:] = 0  # it is the caller's


def test_outputs_that_do_not_fit_are_new(
    scripted: ProcessEngine, context: ProcessContext
) -> None:
    """What the engine gives instead of a given array comes back, whole."""
    for y in (array(scripted, 7, 7, 7), np.full(3, 7)):
        (actual,) = context.execute([array(scripted, 1, 2)], [y])

        assert actual.tolist() == [1, 2]
        assert y.tolist() == [7, 7, 7]


def test_arrays_without_elements_run(
    scripted: ProcessEngine, context: ProcessContext
) -> None:
    """Host buffers of no bytes are buffers, too."""
    empty = np.frombuffer(scripted.host_buffer(0), np.int64)

    for y in (empty, np.empty(0, np.int64), None):
        (actual,) = context.execute([empty], [y])
        assert actual.shape == (0,)
        assert actual.dtype == np.int64


def test_parts_of_a_buffer_and_strided_arrays_run(
    scripted: ProcessEngine, context: ProcessContext
) -> None:
    """An array is known by where it lies; one that is no block is copied."""
    whole = array(scripted, *range(1, 9))
    strided = whole[4::2]

    context.execute([whole[:2]], [whole[2:4]])
    context.execute([whole[:2]], [strided])

    assert whole.tolist() == [1, 2, 1, 2, 1, 6, 2, 8]


def test_strings_and_numbers_run_together() -> None:
    """BYTES travel beside arrays in shared memory."""
    tensors = [
        tuple(TensorSpec(f"{name}{d}", d, ("N",)) for d in ("BYTES", "INT64"))
        for name in "xy"
    ]
    options = FakeOptions(inputs=tensors[0], outputs=tensors[1])
    engine = open_in_process(partial(FakeEngine, options), name="strings")
    run = engine.create_context().execute
    strings = np.array([b"", b"\xff" * LARGE], object)
    y = array(engine, 0, 0)

    for _ in range(2):
        texts, numbers = run([strings, array(engine, 3, 4)], [None, y])

        assert texts.tolist() == strings.tolist()
        assert numbers is y
        assert y.tolist() == [3, 4]
    engine.close()


def test_engines_may_have_many_tensors() -> None:
    """More than one call of the system takes."""
    tensors = [
        tuple(TensorSpec(f"{name}{i}", "INT64", ("N",)) for i in range(1_100))
        for name in "xy"
    ]
    options = FakeOptions(inputs=tensors[0], outputs=tensors[1])
    engine = open_in_process(partial(FakeEngine, options), name="wide")

    given: dict[str, Any] = {f"x{i}": [i] for i in range(1_100)}
    actual = engine.run(given)

    assert [actual[f"y{i}"].tolist() for i in range(1_100)] == [
        [i] for i in range(1_100)
    ]
    engine.close()


def test_buffers_larger_than_the_machine_are_refused(scripted: ProcessEngine) -> None:
    """As any other memory, and before anything is written to them."""
    for size in (1 << 50, 1 << 65):
        with pytest.raises(MemoryError, match=str(size)):
            scripted.host_buffer(size)


def test_an_engine_adopts_and_releases_every_buffer() -> None:
    """It hears of memory before a run uses it, and again when nobody does."""
    engine = open_in_process(Adopting, name="adopting")
    context = engine.create_context()
    nothing_free, first_free = array(engine, 0), array(engine, 8)
    large = array(engine, *[0] * 1_000)

    assert context.execute([large], [None])[0].tolist() == [8 + 8 + 8_000, 0]
    assert context.execute([nothing_free], [None])[0].tolist() == [8_016, 0]
    del nothing_free
    assert context.execute([first_free], [None])[0].tolist() == [8_008, 8]
    part = large[-1:]
    del large
    assert value(context, 0) == [8_008, 8]
    del part
    assert value(context, 8_008) == [8, 8_008]
    engine.close()


def test_buffers_that_are_not_adopted_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Slower, and with a warning; they are not released either."""
    engine = open_in_process(partial(Adopting, refuses=True), name="refusing")
    x = array(engine, 0)

    assert engine.create_context().execute([x], [None])[0].tolist() == [0, 0]
    del x
    engine.close()
    assert "no more memory can be locked" in caplog.text
    assert "Traceback" not in caplog.text


# -- runs -----------------------------------------------------------------------------


def test_a_failed_run_leaves_the_others_alone(pipelined: ProcessEngine) -> None:
    """Errors keep their class and text; what is no engine's error is a run's."""
    for engine_context in (pipelined.create_context(), pipelined.create_context()):
        for order, says in (
            (scripts.RUN_ERROR, "^no such row$"),
            (scripts.BUG, "^ValueError: oops$"),
        ):
            with pytest.raises(EngineRunError, match=says):
                value(engine_context, order)
            assert value(engine_context, 7) == [7]


def test_contexts_run_at_the_same_time(scripted: ProcessEngine) -> None:
    """Two runs that wait for each other both end."""
    launches = []
    for _ in range(2):
        context: PipelinedContext = scripted.create_context()
        launches.append(context.launch([np.array([scripts.MEETS])], [None]))

    outputs = [launch.wait()[0][0].tolist() for launch in launches]

    assert outputs == [[scripts.MEETS]] * 2


def test_the_next_run_is_launched_behind_the_one_under_way(
    pipelined: ProcessEngine,
) -> None:
    """A slot's second run reaches the engine before the first has ended."""
    rung = threading.Semaphore(0)
    slot = Slot(pipelined, "slot", rung.release)
    cell = Cell([(1,)], [(1,)])
    for first in (1, 2):
        staging = slot.acquire()
        staging.reserve_input(0, 8)[:8] = np.int64(first).tobytes()
        slot.start(staging, cell)
    for _ in range(2):
        assert rung.acquire(timeout=WAIT_S)
    done = slot.completions()
    slot.close()

    assert [(c.error, c.outputs[0].tolist()) for c in done] == [
        (None, [1]),
        (None, [2]),
    ]
    assert [c.ended_ns - c.started_ns for c in done] == [12_345] * 2
    assert all(c.arrays is not None for c in done)


def test_runs_are_waited_for_once_or_never(context: ProcessContext) -> None:
    """A run that nobody waits for does not confuse the next one."""
    context.launch([np.array([1, 1])], [None])
    context.launch([np.array([2] * LARGE)], [None])
    third = context.launch([np.array([3])], [None])

    assert third.wait()[0][0].tolist() == [3]
    with pytest.raises(EngineRunError, match="waited for already"):
        third.wait()


def test_runs_of_a_closed_context_fail(scripted: ProcessEngine) -> None:
    """The others go on."""
    closed, other = scripted.create_context(), scripted.create_context()
    x, y = array(scripted, 1), array(scripted, 0)
    closed.execute([x], [y])
    closed.close()

    with pytest.raises(engines.EngineDeadError, match="the context is closed"):
        closed.execute([x], [y])
    assert value(other, 7) == [7]
    other.close()


def test_threads_may_allocate_and_free_at_the_same_time(
    scripted: ProcessEngine,
) -> None:
    """Each thread's runs find their own buffers, however the calls interleave."""
    wrong: list[Any] = []

    def run_many(first: int) -> None:
        context = scripted.create_context()
        for number in range(first, first + 100):
            x, y = array(scripted, number), array(scripted, 0)
            try:
                context.execute([x], [y])
            except Exception as error:
                wrong.append(error)
            if y != number:
                wrong.append((number, y))
        context.close()

    threads = [threading.Thread(target=run_many, args=(i * 100,)) for i in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that calls do interleave
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    sys.setswitchinterval(interval_s)

    assert wrong == []


Steps = list[tuple[int, int, int, bool]]


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 1),  # context
            st.integers(0, 2),  # buffer of it
            st.integers(1, 5),  # rows
            st.booleans(),  # new buffers first
        ),
        max_size=30,
    )
)
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_interleaved_runs_give_their_own_answers(
    scripted: ProcessEngine, steps: Steps
) -> None:
    """Two contexts, each with two runs under way, over buffers that come and go."""
    contexts = [scripted.create_context() for _ in range(2)]
    buffers = [[new_pair(scripted) for _ in range(3)] for _ in range(2)]
    queued: list[list[Any]] = [[], []]

    def end(which: int) -> None:
        launch, x, y = queued[which].pop(0)
        assert launch.wait()[0][0] is y
        assert y.tolist() == x.tolist()

    for number, (which, index, rows, renew) in enumerate(steps, 1):
        if renew:
            buffers[which][index] = new_pair(scripted)
        pair = buffers[which][index]
        while len(queued[which]) > 1 or any(
            np.shares_memory(x, pair[0]) for _, x, _ in queued[which]
        ):
            end(which)
        x, y = (half[:rows] for half in pair)
        x[:] = range(number, number + rows)
        y[:] = 0
        queued[which].append((contexts[which].launch([x], [y]), x, y))
    for which in (0, 1):
        while queued[which]:
            end(which)
        contexts[which].close()


def new_pair(engine: ProcessEngine) -> tuple[Any, Any]:
    """An input and an output, side by side in a new buffer."""
    both = np.frombuffer(engine.host_buffer(80), np.int64).reshape(2, 5)
    return both[0], both[1]


# -- calls ----------------------------------------------------------------------------


def test_warming_and_shapes_are_asked_of_the_context(context: ProcessContext) -> None:
    """On the thread that launches its runs; errors come back."""
    context.warm([(3,)])

    assert context.output_shapes([(3,)]) == [(3,), None]
    with pytest.raises(EngineRunError, match=r"no profile holds \(0,\)"):
        context.warm([(0,)])
    assert value(context, 7) == [7]


def test_warming_does_not_mix_with_runs_under_way(context: ProcessContext) -> None:
    """Its answer goes to whoever asked, while another thread waits for a run."""
    launch = context.launch([np.array([7])], [None])

    context.warm([(3,)])

    assert launch.wait()[0][0].tolist() == [7]


def test_what_was_warmed_is_saved_by_the_engine() -> None:
    """The call arrives, and so does why it fails."""
    engine = open_in_process(Scripted, name="saved")
    engine.save_warm()

    with pytest.raises(EngineRunError, match="OSError: disk full"):
        engine.save_warm()
    engine.close()


def test_contexts_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    """The engine's own error says why, and those that there are go on."""
    engine = open_in_process(scripts.NoMore, name="few")
    context = engine.create_context()

    with pytest.raises(EngineLoadError, match="no memory for one more"):
        engine.create_context()
    assert value(context, 7) == [7]
    context.close()
    assert value(engine.create_context(), 8) == [8]  # its room is free again
    engine.close()
