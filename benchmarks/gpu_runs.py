"""Runs of an engine without a server: back to back, one at a time, through slots.

What `benchmarks.bare` measures with; a TensorRT engine also without any copies, and
with marks on the device that tell how long it was idle between runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

import engines
from engines import Cell, Engine, EngineError, ExecutionContext, Slot, cuda
from engines.base import PipelinedContext
from engines.slot import STAGINGS
from engines.tensors import Shape, element_count

_SKIPPED: Final = 20  # batches of each slot before a measurement
_MOST: Final = 4000  # runs that are queued at a time
_ALONE: Final = 200
_DEPTH: Final = 2  # runs under way in a slot: one on the device, one queued


# -- alone on the device ----------------------------------------------------------


class BareLoop:
    """Runs of an engine on one stream with nothing around them.

    Args:
        engine: a `TensorRTEngine`.
    """

    def __init__(self, engine: Any) -> None:
        cuda.use(engine.device)
        self._engine = engine
        self._stream = cuda.Stream()
        self._block = cuda.DeviceBuffer(engine.activation_bytes)
        self._contexts: dict[int, Any] = {}
        sizes = (*engine.input_bytes, *engine.output_bytes)
        self._buffers = [cuda.DeviceBuffer(size) for size in sizes]

    def measure(self, arrays: Sequence[np.ndarray], seconds: float) -> dict[str, float]:
        """Runs one cell back to back.

        Args:
            arrays: the inputs; they are copied once.
            seconds: about how long.

        Returns:
            `graph_us`, a run's time on average, and `plain_us`, the same without a
            graph.

        Raises:
            EngineRunError: it cannot be run, or not be captured.
        """
        shapes = [array.shape for array in arrays]
        context = self._context(self._engine.profile_for(shapes))
        inputs, outputs = self._engine.inputs, self._engine.outputs
        for spec, buffer in zip((*inputs, *outputs), self._buffers, strict=True):
            context.set_tensor_address(spec.name, buffer.pointer)
        for spec, array, buffer in zip(inputs, arrays, self._buffers, strict=False):
            context.set_input_shape(spec.name, array.shape)
            locked = np.frombuffer(cuda.pinned(array.nbytes), np.uint8)
            locked[:] = array.reshape(-1).view(np.uint8)
            cuda.copy_to_device(
                buffer.pointer, locked.ctypes.data, array.nbytes, self._stream
            )
            self._stream.synchronize()

        def plain() -> None:
            if not context.execute_async_v3(self._stream.number):
                raise engines.EngineRunError("the run was refused (see the log)")

        plain()  # specialises the kernels
        self._stream.synchronize()
        with cuda.capture(self._stream) as captured:
            plain()
        graph = captured[0]
        plain_us = self._back_to_back(plain, seconds / 3)
        graph_us = self._back_to_back(lambda: graph.launch(self._stream), seconds)
        graph.close()
        return {"graph_us": graph_us, "plain_us": plain_us}

    def close(self) -> None:
        """Gives the memory back."""
        self._contexts.clear()
        for buffer in (*self._buffers, self._block):
            buffer.close()

    def _back_to_back(self, enqueue: Callable[[], None], seconds: float) -> float:
        """Microseconds of a run."""
        elapsed, runs = 0.0, _SKIPPED
        for _ in range(2):  # the first only tells how many
            begun = time.perf_counter()
            for _ in range(runs):
                enqueue()
            self._stream.synchronize()
            elapsed = (time.perf_counter() - begun) / runs
            runs = max(10, min(_MOST, round(seconds / elapsed)))
        return elapsed * 1e6

    def _context(self, profile: int) -> Any:
        context = self._contexts.get(profile)
        if context is None:
            context = self._contexts[profile] = self._engine.new_context()
            context.set_device_memory(self._block.pointer, self._block.size)
            context.set_optimization_profile_async(profile, self._stream.number)
            self._stream.synchronize()
        return context


# -- one at a time ----------------------------------------------------------------


def alone(
    engine: Engine, context: ExecutionContext, cell: Cell, arrays: Sequence[np.ndarray]
) -> float:
    """Median microseconds of a run from host memory to host memory.

    Args:
        engine: whose host memory is used.
        context: warmed for the cell.
        cell: its shapes.
        arrays: the inputs.
    """

    def placed(shape: Shape, dtype: np.dtype) -> np.ndarray:
        count = element_count(shape)
        view = engine.host_buffer(count * dtype.itemsize)
        return np.frombuffer(view, dtype, count).reshape(shape)

    inputs = [placed(array.shape, array.dtype) for array in arrays]
    for mine, array in zip(inputs, arrays, strict=True):
        mine[...] = array
    outputs = [
        None if shape is None else placed(shape, spec.numpy)
        for spec, shape in zip(engine.outputs, cell.outputs, strict=True)
    ]
    if isinstance(context, PipelinedContext):
        context.expect(inputs, outputs)
    taken: list[float] = []
    until = time.perf_counter() + 1.0
    while len(taken) < _ALONE and time.perf_counter() < until:
        begun = time.perf_counter()
        context.execute(inputs, outputs)
        taken.append(time.perf_counter() - begun)
    return median(taken) * 1e6


# -- through slots ----------------------------------------------------------------


class Feeder:
    """Keeps slots saturated from one thread.

    Args:
        engine: the network.
        contexts: one per slot; the slots close them.
    """

    def __init__(self, engine: Engine, contexts: Sequence[ExecutionContext]) -> None:
        self._done = threading.Semaphore(0)
        self._slots = [
            Slot(engine, f"bare-{number}", self._done.release, context)
            for number, context in enumerate(contexts)
        ]

    def load(self, cell: Cell, arrays: Sequence[np.ndarray]) -> None:
        """Warms a cell, and fills every staging with its inputs once.

        Raises:
            EngineError: the cell cannot be run.
        """
        for slot in self._slots:
            _warm(slot, cell)
            stagings = [slot.acquire() for _ in range(STAGINGS)]
            for staging in stagings:
                for position, array in enumerate(arrays):
                    data = array.reshape(-1).view(np.uint8)
                    staging.reserve_input(position, data.size)[: data.size] = data.data
                slot.release(staging)

    def run(
        self, count: int, cell: Cell, seconds: float, most: float = math.inf
    ) -> tuple[float, float]:
        """Runs batches of a loaded cell in the first `count` slots.

        Args:
            count: how many slots.
            cell: the one that was loaded last.
            seconds: how long, after some batches that do not count.
            most: batches after which it ends in any case.

        Returns:
            Batches per second, and the CPU microseconds of this process per batch.

        Raises:
            EngineError: a run failed.
        """
        slots = self._slots[:count]
        for slot in slots:
            for _ in range(_DEPTH):
                slot.start(slot.acquire(), cell)
        under_way = _DEPTH * count
        done, skipped = 0, _SKIPPED * count
        begun = begun_cpu = math.inf
        ended = ended_cpu = 0.0
        counted = 0
        failed: EngineError | None = None
        while under_way:
            self._done.acquire()
            for slot in slots:
                for completion in slot.completions():
                    under_way -= 1
                    done += 1
                    failed = failed or completion.error
                    if not counted and failed is None:
                        slot.start(slot.acquire(), cell)
                        under_way += 1
                    slot.release(completion.staging)
            now = time.perf_counter()
            if done >= skipped and begun == math.inf:
                begun, begun_cpu, skipped = now, time.process_time(), done
            elif not counted and (now - begun >= seconds or done >= most):
                ended, ended_cpu = now, time.process_time()
                counted = done - skipped
        if failed is not None:
            raise failed
        return counted / (ended - begun), (ended_cpu - begun_cpu) / counted * 1e6

    def close(self) -> None:
        """Ends the slots."""
        for slot in self._slots:
            slot.close()


def _warm(slot: Slot, cell: Cell) -> None:
    warmed = threading.Event()
    errors: list[EngineError | None] = []

    def then(error: EngineError | None) -> None:
        errors.append(error)
        warmed.set()

    slot.warm(cell, then)
    warmed.wait()
    if errors[0] is not None:
        raise errors[0]


class Gaps:
    """Marks when runs begin and end on the device, and tells how long it was idle.

    Args:
        lanes: of TensorRT, all of one device; no runs may be under way.
    """

    MOST: Final = 4000
    """Runs of a lane that can be marked."""

    def __init__(self, lanes: Sequence[Any]) -> None:
        self._origin = cuda.Event(timed=True)
        self._begins = [_Marks(self.MOST) for _ in lanes]
        self._ends = [_Marks(self.MOST) for _ in lanes]
        for lane, begins, ends in zip(lanes, self._begins, self._ends, strict=True):
            for buffers in lane._sets:
                buffers.began = _MarkingEvent(begins)
                buffers.ended = _MarkingEvent(ends)

    def begin(self) -> None:
        """Marks runs from now on."""
        stream = cuda.Stream()
        self._origin.record(stream)
        stream.synchronize()
        for marks in (*self._begins, *self._ends):
            marks.begin()

    def end(self) -> dict[str, float]:
        """Marks no more; all marked runs have ended.

        Returns:
            Microseconds between runs (`p50_us`, `p99_us`, `max_us`), and the `share` of
            the time that they take. With several lanes, of the time when none runs.
            The first runs of each lane do not count.

        Raises:
            EngineRunError: too few were marked.
        """
        runs: list[tuple[int, int]] = []
        for begins, ends in zip(self._begins, self._ends, strict=True):
            runs += zip(
                begins.end(self._origin)[_SKIPPED:],
                ends.end(self._origin)[_SKIPPED:],
                strict=True,
            )
        if len(runs) < 3:
            raise engines.EngineRunError(f"only {len(runs)} runs were marked")
        runs.sort()
        idle_us, until_ns = [], runs[0][1]
        for began_ns, ended_ns in runs[1:]:
            idle_us.append(max(0, began_ns - until_ns) / 1e3)
            until_ns = max(until_ns, ended_ns)
        idle_us.sort()
        return {
            "p50_us": idle_us[len(idle_us) // 2],
            "p99_us": idle_us[int(len(idle_us) * 0.99)],
            "max_us": idle_us[-1],
            "share": sum(idle_us) * 1e3 / (until_ns - runs[0][0]),
        }


class _Marks:
    """Events that are recorded one after the other, each once.

    Args:
        most: how many. They are made now: to make one would be a part of the gap.
    """

    def __init__(self, most: int) -> None:
        self._events = [cuda.Event(timed=True) for _ in range(most)]
        self._next = most

    def begin(self) -> None:
        self._next = 0

    def record(self, stream: cuda.Stream) -> None:
        if self._next < len(self._events):
            self._events[self._next].record(stream)
            self._next += 1

    def end(self, origin: cuda.Event) -> list[int]:
        """The ns from `origin` to each that was recorded."""
        found = [event.elapsed_ns(origin) for event in self._events[: self._next]]
        self._next = len(self._events)
        return found


class _MarkingEvent(cuda.Event):
    """An event of a lane that records a mark of ours, too."""

    __slots__ = ("_ours",)

    def __init__(self, marks: _Marks) -> None:
        super().__init__(timed=True)
        self._ours = marks

    def record(self, stream: cuda.Stream) -> None:
        super().record(stream)
        self._ours.record(stream)
