"""Slots: runs in order on a thread, reached through stagings and a doorbell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

import engines
from engines import (
    Cell,
    Completion,
    Engine,
    EngineDeadError,
    EngineRunError,
    ExecutionContext,
    FakeEngine,
    FakeOptions,
    Slot,
    Staging,
    TensorSpec,
)

X = TensorSpec("x", "INT64", ("N", 2))
Y = TensorSpec("y", "INT64", ("N", 2))


def bytes_of(size: int) -> memoryview:
    """A buffer."""
    return memoryview(bytearray(size))


class Scripted(Engine):
    """A back end of its own: each run does what the script says, or echoes."""

    backend = "scripted"
    inputs = (X,)
    outputs = (Y,)

    def __init__(self, *script: Exception | None) -> None:
        self.script = list(script)
        self.closed = 0

    def create_context(self) -> ExecutionContext:
        return ScriptedContext(self)


class ScriptedContext(ExecutionContext):
    """See `Scripted`."""

    def __init__(self, engine: Scripted) -> None:
        self.engine = engine

    def execute(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        error = self.engine.script.pop(0) if self.engine.script else None
        if error is not None:
            raise error
        return [np.array(inputs[0])]

    def close(self) -> None:
        self.engine.closed += 1


class Lane:
    """A slot whose doorbell can be waited for."""

    def __init__(self, engine: Engine) -> None:
        self.rung = threading.Semaphore(0)
        self.ringers: set[str] = set()
        self.slot = Slot(engine, "lane", self._on_done)

    def _on_done(self) -> None:
        self.ringers.add(threading.current_thread().name)
        self.rung.release()

    def start(self, *rows: int) -> Staging:
        """Starts a run whose rows hold these numbers."""
        staging = self.slot.acquire()
        values = np.repeat(np.array(rows, np.int64), 2)
        view = staging.reserve_input(0, values.nbytes)
        view[: values.nbytes] = values.tobytes()
        shape = (len(rows), 2)
        self.slot.start(staging, Cell([shape], [shape]))
        return staging

    def wait(self, runs: int = 1) -> list[Completion]:
        """The completions of this many runs."""
        for _ in range(runs):
            assert self.rung.acquire(timeout=30)
        return list(self.slot.completions())


@pytest.fixture
def echo() -> Iterator[Lane]:
    """A lane that echoes."""
    lane = Lane(FakeEngine(FakeOptions(inputs=(X,), outputs=(Y,))))
    yield lane
    lane.slot.close()


def first_column(completion: Completion) -> list[int]:
    """What the rows of a completion hold."""
    column: list[int] = completion.outputs[0][:, 0].tolist()
    return column


def test_runs_end_in_the_order_they_were_started(echo: Lane) -> None:
    """Three runs started at once come back one after the other, each with its rows."""
    stagings = [echo.start(1), echo.start(2, 3), echo.start(4)]

    done = echo.wait(3)

    assert [first_column(c) for c in done] == [[1], [2, 3], [4]]
    assert [c.staging for c in done] == stagings
    assert [c.error for c in done] == [None] * 3


def test_times_lie_in_order(echo: Lane) -> None:
    """Start and end are on the monotonic clock, and runs do not overlap."""
    before_ns = time.monotonic_ns()
    echo.start(1)
    echo.start(2)

    first, second = echo.wait(2)

    times = [first.started_ns, first.ended_ns, second.started_ns, second.ended_ns]
    assert times == sorted(times)
    assert before_ns <= times[0] <= times[-1] <= time.monotonic_ns()


def test_the_doorbell_rings_from_the_slots_thread(echo: Lane) -> None:
    """The bell rings once per run, on the thread that carries the slot's name."""
    for value in (1, 2):
        echo.start(value)
        echo.wait()

    assert echo.ringers == {"lane"}
    assert echo.rung.acquire(blocking=False) is False


def test_completions_are_handed_over_once(echo: Lane) -> None:
    """What was taken does not come again."""
    echo.start(1)

    assert len(echo.wait()) == 1
    assert not echo.slot.completions()


def test_three_stagings_can_be_filled_at_once(echo: Lane) -> None:
    """One runs, one lies ready, one is read: a fourth is there after a release."""
    stagings = [echo.slot.acquire() for _ in range(3)]

    with pytest.raises(IndexError):
        echo.slot.acquire()
    echo.slot.release(stagings[1])

    assert sorted(s.index for s in stagings) == [0, 1, 2]
    assert echo.slot.acquire() is stagings[1]


def test_outputs_stay_while_the_other_stagings_run(echo: Lane) -> None:
    """The outputs of a run keep their values until its staging is released."""
    echo.start(1)
    (kept,) = echo.wait()

    for value in (2, 3, 4, 5):
        staging = echo.start(value)
        (done,) = echo.wait()
        echo.slot.release(staging)
        assert first_column(done) == [value]

    assert first_column(kept) == [1]


def test_an_engine_error_ends_its_run_only() -> None:
    """The completion of a failed run has the error and no outputs; the next is fine."""
    error = EngineRunError("no")
    lane = Lane(Scripted(error, None))
    lane.start(1)
    lane.start(2)

    failed, good = lane.wait(2)
    lane.slot.close()

    assert (failed.error, failed.outputs) == (error, [])
    assert failed.started_ns <= failed.ended_ns
    assert (good.error, first_column(good)) == (None, [2])
    assert lane.slot.dead is None


def test_a_dead_engine_fails_everything_after() -> None:
    """After the engine's death no run is tried any more; each ends with the reason."""
    death = EngineDeadError("gone")
    engine = Scripted(death)
    lane = Lane(engine)
    for value in (1, 2, 3):
        lane.start(value)

    done = lane.wait(3)
    lane.slot.close()

    assert [c.error for c in done] == [death] * 3
    assert lane.slot.dead is death


def test_a_bug_in_a_back_end_does_not_take_its_slot_along() -> None:
    """Any other exception becomes a run error that names it, with its cause."""
    bug = ValueError("oops")
    lane = Lane(Scripted(bug, MemoryError()))
    for value in (1, 2, 3):
        lane.start(value)

    first, second, third = lane.wait(3)
    lane.slot.close()

    assert isinstance(first.error, EngineRunError)
    assert str(first.error) == "ValueError: oops"
    assert first.error.__cause__ is bug
    assert str(second.error) == "MemoryError: "
    assert first_column(third) == [3]


@pytest.mark.parametrize("fault", [ValueError("oops"), EngineRunError("NaN")])
def test_a_failed_run_keeps_no_buffers_alive(fault: Exception) -> None:
    """Its error knows nothing of the frames it came through, which know the buffers."""
    lane = Lane(Scripted(fault))
    lane.start(1)
    (failed,) = lane.wait()
    lane.slot.close()

    assert failed.error is not None
    assert failed.error.__traceback__ is None
    assert fault.__traceback__ is None


def test_a_shape_that_cannot_be_made_does_not_take_the_slot_along(echo: Lane) -> None:
    """Sizes that no memory holds fail their run, and the next one is fine."""
    staging = echo.slot.acquire()
    echo.slot.start(staging, Cell([(1 << 60, 2)], [None]))
    echo.start(7)

    failed, good = echo.wait(2)

    assert isinstance(failed.error, EngineRunError)
    assert first_column(good) == [7]


def test_closing_runs_what_was_started() -> None:
    """`close` returns after every run that was started, and closes the context."""
    engine = Scripted()
    lane = Lane(engine)
    for value in (1, 2, 3):
        lane.start(value)

    lane.slot.close()

    assert [first_column(c) for c in lane.slot.completions()] == [[1], [2], [3]]
    assert engine.closed == 1
    assert "lane" not in [t.name for t in threading.enumerate()]


# -- stagings -------------------------------------------------------------------------


def staging(*dtypes: str) -> Staging:
    """A staging with one input and one output of each datatype."""
    specs = [TensorSpec(f"t{i}", dtype, ("N", 2)) for i, dtype in enumerate(dtypes)]
    return Staging(0, specs, specs, bytes_of)


def test_buffers_grow_and_are_kept() -> None:
    """A buffer is made for the largest batch and then used for all smaller ones."""
    owner = staging("INT64")
    small = owner.reserve_input(0, 16)
    large = owner.reserve_input(0, 160)

    again = owner.reserve_input(0, 16)

    assert (len(small), len(large)) == (16, 160)
    assert again is large


def test_arrays_lie_over_the_bytes() -> None:
    """What is written to an input's bytes is what its array holds."""
    owner = staging("INT64")
    view = owner.reserve_input(0, 32)
    view[:] = np.arange(4, dtype=np.int64).tobytes()

    array = owner.input_array(0, (2, 2))

    assert array.tolist() == [[0, 1], [2, 3]]
    assert np.shares_memory(array, np.frombuffer(view, np.uint8))


def test_outputs_of_unknown_shape_have_no_array() -> None:
    """BYTES, and outputs whose shape is not known, are made by the engine."""
    owner = staging("INT64", "BYTES")

    assert owner.output_array(0, None) is None
    assert owner.output_array(1, (1, 2)) is None
    known = owner.output_array(0, (3, 2))
    assert known is not None
    assert (known.shape, str(known.dtype)) == ((3, 2), "int64")


@pytest.mark.parametrize("shape", [(1, 0), (0,), ()])
def test_empty_and_scalar_arrays(shape: tuple[int, ...]) -> None:
    """Arrays without elements, and those without axes, have their shape."""
    owner = staging("FP32")

    given = owner.output_array(0, shape)

    assert owner.input_array(0, shape).shape == shape
    assert given is not None
    assert given.shape == shape


def test_onnxruntime_writes_into_the_staging(tmp_path: Path) -> None:
    """Outputs of a known shape lie in the staging's buffer: nothing is copied."""
    engine = engines.open(models.save(models.i64(), tmp_path / "model.onnx"))
    lane = Lane(engine)
    owner = lane.slot.acquire()
    owner.reserve_input(0, 16)[:16] = np.array([5, 6]).tobytes()

    lane.slot.start(owner, Cell([(2, 1)], [(2, 1)]))
    (done,) = lane.wait()
    lane.slot.close()

    assert done.outputs[0].tolist() == [[6], [7]]
    assert np.shares_memory(done.outputs[0], np.frombuffer(owner.outputs[0], np.uint8))


def test_strings_run_from_their_objects(tmp_path: Path) -> None:
    """A BYTES input is the array of objects that was put into the staging."""
    model = models.identity("string")
    lane = Lane(engines.open(models.save(model, tmp_path / "model.onnx")))
    owner = lane.slot.acquire()
    owner.objects[0] = np.array([[b"a", b""]], dtype=object)

    lane.slot.start(owner, Cell([(1, 2)], [(1, 2)]))
    (done,) = lane.wait()
    lane.slot.close()

    assert done.outputs[0].tolist() == [[b"a", b""]]


def test_a_staging_keeps_the_arrays_of_a_cell_until_a_buffer_grows() -> None:
    """The same arrays for a cell; after a larger one, arrays of the new buffer."""
    staging = Staging(0, [X], [Y], bytes_of)
    small = Cell([(2, 2)], [(2, 2)])
    before = staging.arrays(small)

    assert staging.arrays(small) is before

    large = staging.arrays(Cell([(8, 2)], [(8, 2)]))
    after = staging.arrays(small)

    assert after is not before
    assert np.shares_memory(after.inputs[0], large.inputs[0])
    assert after.outputs[0] is not None
    assert large.outputs[0] is not None
    assert np.shares_memory(after.outputs[0], large.outputs[0])


def test_a_staging_keeps_the_arrays_of_some_cells_only() -> None:
    """Thousands of kinds of batches leave no thousands of arrays behind."""
    staging = Staging(0, [X], [Y], bytes_of)
    for _ in range(1000):
        staging.arrays(Cell([(1, 2)], [(1, 2)]))

    assert len(staging._known) <= 512


def test_a_completion_says_whether_outputs_are_the_slots_own(echo: Lane) -> None:
    """Derived data may be kept only for arrays that are used again."""
    staging = echo.start(1)
    (own,) = echo.wait()

    assert own.arrays is not None
    assert own.outputs[0] is own.arrays.outputs[0]

    echo.slot.release(staging)
    staging = echo.slot.acquire()
    staging.reserve_input(0, 16)
    echo.slot.start(staging, Cell([(1, 2)], [None]))
    (foreign,) = echo.wait()

    assert foreign.arrays is None
