"""Where only warmed sizes may run: what is warm when, and what is run until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.config import AxisConfig
from batcher.errors import ConfigError
from batcher.scheduling import POLICIES, PolicyOptions, Scheduler
from batcher.serving.loader import LoadedModel, load, seed_costs
from batcher.serving.opening import on_each
from batcher.serving.readying import (
    Tails,
    bisected,
    close_all,
    make_ready,
    rung_ladder,
)
from batcher.serving.repository import ModelSource
from batcher.serving.shapes import ModelShapes
from batcher.serving.warming import Warming
from batcher.serving.warmup import warm_up
from engines import (
    EngineError,
    EngineLoadError,
    ExecutionContext,
    FakeEngine,
    FakeOptions,
    TensorSpec,
)
from engines.base import Launch, PipelinedContext

COLD = """
engine = "fake"
max_batch = {max_batch}
[slots]
count = {slots}
[fake]
cold_ms = {cold_ms}
inputs = [{{ name = "x", dtype = "INT64", shape = [-1] }}]
outputs = [{{ name = "y", dtype = "INT64", shape = [-1] }}]
[axes.length]
buckets = [2, 8]
pad = {{ x = 0 }}
inputs = {{ x = 1 }}
outputs = {{ y = {{ axis = 1 }} }}
"""

Loaded = Iterator[LoadedModel]


def load_cold(
    folder: Path, *, max_batch: int = 16, slots: int = 2, cold_ms: float = 1.0
) -> LoadedModel:
    """A fake model on which only warmed sizes run."""
    config = folder / "model.toml"
    config.write_text(COLD.format(max_batch=max_batch, slots=slots, cold_ms=cold_ms))
    return load(ModelSource("m", "1", None, config), {})


@pytest.fixture
def cold(tmp_path: Path) -> Loaded:
    """Loaded, and closed at the end."""
    model = load_cold(tmp_path)
    yield model
    close_all(model.slots, model.engines)


def tails(length: int) -> Tails:
    """The shapes of a row of this length."""
    return ((length,),)


def test_the_ends_of_every_bucket_are_warm_at_first(cold: LoadedModel) -> None:
    """The smallest rung (1), the next (rows are compared on it) and the largest."""
    assert cold.rungs == (1, 2, 4, 8, 12, 16)
    assert cold.warm == {tails(2): (1, 16), tails(8): (1, 16)}
    assert {rung for _, rung in cold.cold} == {2, 4, 8, 12}
    assert len(cold.cold) == 8


def test_every_slot_can_run_what_is_warm(cold: LoadedModel) -> None:
    """Slots that were made later have been warmed like the first."""
    for slot in cold.slots:
        done = threading.Semaphore(0)
        slot.on_done = done.release
        for shapes, rungs in cold.warm.items():
            for rung in rungs:
                cell = cold.shapes.group(shapes).cell(rung)
                slot.start(slot.acquire(), cell)
                done.acquire()
                (completion,) = slot.completions()
                assert completion.error is None
                slot.release(completion.staging)


def test_the_rest_is_warmed_on_every_slot(cold: LoadedModel) -> None:
    """Each cell is told once, when all slots can run it; then the thread ends."""
    told: list[tuple[Tails, int]] = []
    errors: list[EngineError] = []

    def check(shapes: Tails, rung: int, run_ns: int) -> None:
        told.append((shapes, rung))
        assert run_ns > 0
        for slot in cold.slots:
            done = threading.Semaphore(0)
            slot.on_done = done.release
            slot.start(slot.acquire(), cold.shapes.group(shapes).cell(rung))
            done.acquire()
            (completion,) = slot.completions()
            if completion.error is not None:
                errors.append(completion.error)
            slot.release(completion.staging)

    warming = Warming(cold, check, lambda: True)
    warming.start()
    warming._thread.join(10)

    assert told == list(cold.cold)
    assert errors == []
    warming.stop()


def test_warming_gives_way_and_ends_when_asked(tmp_path: Path) -> None:
    """With callers waiting it takes a fifth of the time; stop waits for one cell."""
    model = load_cold(tmp_path, cold_ms=20.0, slots=1)
    told: list[float] = []
    rung = threading.Semaphore(0)

    def note(shapes: Tails, rows: int, run_ns: int) -> None:
        told.append(time.monotonic())
        rung.release()

    warming = Warming(model, note, lambda: False)
    warming.start()
    for _ in range(3):
        assert rung.acquire(timeout=10)
    warming.stop()

    assert told[2] - told[1] > 0.08  # 20 ms of it are the warming's
    assert len(told) <= 4  # of 8
    assert not warming._thread.is_alive()
    close_all(model.slots, model.engines)


def test_costs_are_of_all_slots_busy(cold: LoadedModel) -> None:
    """Warm cells have a first estimate, from runs beside each other."""
    scheduler = Scheduler(POLICIES["eager"](PolicyOptions()), slots=2, max_queue=8)

    groups = seed_costs(cold, lambda t: scheduler.group(t, cold.warm[t]))

    assert {cost.busy for cost in cold.costs} == {1, 2}
    assert len(groups) == 4
    assert all(group.cost.estimate_ns(1) for group in groups)


def test_an_axis_without_sizes_is_refused(tmp_path: Path) -> None:
    """Nothing could be warmed: the error says what to add."""
    config = tmp_path / "model.toml"
    text = COLD.format(max_batch=4, slots=1, cold_ms=1)
    config.write_text(text[: text.index("[axes")])

    with pytest.raises((ConfigError, EngineLoadError), match=r"axis 1 of input 'x'"):
        load(ModelSource("m", "1", None, config), {})


@given(st.integers(1, 300), st.integers(0, 299))
def test_a_ladder_wastes_a_third_at_most(most: int, offset: int) -> None:
    """From 1 to the largest; of any batch above 8 at most a third is padding."""
    ladder = rung_ladder(1, most)
    rows = 1 + offset % most

    assert (ladder[0], ladder[-1]) == (1, most)
    assert list(ladder) == sorted(set(ladder))
    rung = next(r for r in ladder if r >= rows)
    assert rung < 2 * rows
    if rows > 8:
        assert rung - rows < rung / 3 + 1e-9 or rung == most


def test_a_ladder_begins_where_the_plan_does() -> None:
    """A plan whose profiles begin at 4 rows has no smaller rung."""
    assert rung_ladder(4, 24) == (4, 8, 12, 16, 24)
    assert rung_ladder(1, 1) == (1,)
    assert rung_ladder(1, 48)[-3:] == (24, 32, 48)


@given(st.lists(st.integers(), unique=True, max_size=40))
def test_bisection_has_all_and_the_ends_first(values: list[int]) -> None:
    """Nothing twice, nothing left out; then always the widest gap is halved."""
    order = bisected(values)

    assert sorted(order) == sorted(values)
    assert order[:1] == values[:1]
    assert order[1:2] == values[-1:][: len(values) - 1]


def test_run_times_survive_a_restart(tmp_path: Path) -> None:
    """What was measured is kept where the engine says, and read the next time."""
    from batcher.serving.readying import _costs

    model = load_cold(tmp_path, slots=1)
    engine = model.engines[0]
    engine.costs_path = tmp_path / "costs.json"
    cells = [model.shapes.group(t).cell(r) for t, rs in model.warm.items() for r in rs]
    context = engine.create_context()
    for cell in cells:
        context.warm(cell.inputs)

    first = _costs(engine, [context], cells)
    again = _costs(engine, [context], cells)
    engine.costs_path.write_text("{")
    mended = _costs(engine, [context], cells)

    assert first == again
    assert len(mended) == len(first) == 4
    assert np.all([c.device_ns > 0 for c in mended])
    close_all(model.slots, model.engines)


class Expecting(FakeEngine):
    """Its contexts are pipelined, and keep the lists that they were told to expect."""

    def create_context(self) -> ExecutionContext:  # type: ignore[override]
        return ExpectingContext(super().create_context())


class ExpectingContext(PipelinedContext):
    """See `Expecting`."""

    def __init__(self, inner: ExecutionContext) -> None:
        self.inner = inner
        self.expected: list[Any] = []

    def warm(self, shapes: Sequence[Any]) -> None:
        self.inner.warm(shapes)

    def expect(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.expected.append(inputs)

    def launch(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Launch:
        results = self.inner.execute(inputs, outputs)

        class Done(Launch):
            def wait(self) -> tuple[list[Any], int]:
                return results, 1

        return Done()


def test_what_was_worked_out_is_what_is_run() -> None:
    """The lists that a context was told to expect are those of the slot's runs, for
    every warm cell and staging: no buffer grows afterwards."""
    tensors = [TensorSpec(name, "INT64", ("N", "L")) for name in "xy"]
    engine = Expecting(
        FakeOptions(inputs=(tensors[0],), outputs=(tensors[1],), cold_ms=0.001)
    )
    axis = AxisConfig(buckets=(2, 8, 64), pad={"x": 0.0}, outputs={})
    shapes = ModelShapes(engine.inputs, engine.outputs, True, {"L": axis})
    context = engine.create_context()
    warmed = warm_up(engine, context, shapes, (1, 4, 16))

    ready = make_ready("m", [engine], context, shapes, (1, 4, 16), warmed, per_engine=1)

    (slot,) = ready.slots
    assert isinstance(slot._context, ExpectingContext)
    expected = {id(inputs) for inputs in slot._context.expected}
    for staging in slot._stagings:
        for row, rungs in ready.warm.items():
            for rung in rungs:
                arrays = staging.arrays(shapes.group(row).cell(rung))
                assert id(arrays.inputs) in expected
    assert len(expected) == 3 * 6
    close_all(ready.slots, [engine])


def test_slots_of_several_devices_take_turns() -> None:
    """Each device has its slots, and the first batches go to different devices."""
    tensors = [TensorSpec(name, "INT64", ("N", 2)) for name in "xy"]
    options = FakeOptions(inputs=(tensors[0],), outputs=(tensors[1],), cold_ms=0.001)
    engines = [Expecting(options) for _ in range(3)]
    shapes = ModelShapes(engines[0].inputs, engines[0].outputs, True, {})
    context = engines[0].create_context()
    warmed = warm_up(engines[0], context, shapes, (1, 4))

    ready = make_ready("m", engines, context, shapes, (1, 4), warmed, per_engine=2)

    assert [slot.engine for slot in ready.slots] == engines * 2
    assert {cost.busy for cost in ready.costs} == {1, 2}  # on the first device
    for slot in ready.slots:
        done = threading.Semaphore(0)
        slot.on_done = done.release
        slot.start(slot.acquire(), shapes.group(((2,),)).cell(4))
        done.acquire()
        (completion,) = slot.completions()
        assert completion.error is None
    close_all(ready.slots, engines)


def test_engines_are_opened_on_every_device_or_on_none() -> None:
    """The first is made alone; if one fails, the others are closed."""
    closed: list[int] = []
    order: list[int] = []

    class Device(FakeEngine):
        def __init__(self, index: int) -> None:
            spec = TensorSpec("x", "INT64", ("N", 2))
            super().__init__(FakeOptions(inputs=(spec,), outputs=(spec,)))
            self.index = index

        def close(self) -> None:
            closed.append(self.index)

    def make(device: int) -> Device:
        order.append(device)
        if device == 7:
            raise EngineLoadError("device 7 is full")
        return Device(device)

    made = on_each([3, 1, 2], make)
    assert [engine.index for engine in made if isinstance(engine, Device)] == [3, 1, 2]
    assert order[0] == 3
    with pytest.raises(EngineLoadError, match="device 7 is full"):
        on_each([0, 7, 5], make)
    assert sorted(closed) == [0, 5]


def test_slots_that_are_closed_do_not_hold_it(tmp_path: Path) -> None:
    """A model that is lost while it is warmed can be given up."""
    model = load_cold(tmp_path)
    warming = Warming(model, lambda *_: None, lambda: True)
    for slot in model.slots:
        slot.close()

    warming.start()
    warming.stop()

    assert not warming._thread.is_alive()
    close_all((), model.engines)
