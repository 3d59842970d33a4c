"""A slot: what runs one batch at a time, reached only through buffers and doorbells.

The owner takes a free `Staging`, writes the inputs into it, rings `start`, and is rung
back by `on_done`; then `completions` says what has ended. Three stagings per slot: one
batch runs, the inputs of the next lie ready, and the outputs of the last are read.

The engine side is a thread today. What crosses the seam (indices, shapes, bytes in
flat buffers) is such that it can be a process with the buffers in shared memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, NamedTuple

import numpy as np

from engines.base import Array, Engine
from engines.errors import EngineDeadError, EngineError, EngineRunError
from engines.tensors import Shape, TensorSpec, element_count

STAGINGS: Final = 3


class Staging:
    """One set of input and output buffers, flat, growing to the largest batch seen.

    Attributes:
        index: its number within the slot.
        inputs: per input a byte view to write rows into (BYTES: unused).
        objects: per BYTES input the array of Python bytes to run, else None.
    """

    __slots__ = ("_specs_in", "_specs_out", "index", "inputs", "objects", "outputs")

    def __init__(
        self, index: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        self.index = index
        self._specs_in = inputs
        self._specs_out = outputs
        self.inputs = [memoryview(bytearray()) for _ in inputs]
        self.outputs = [memoryview(bytearray()) for _ in outputs]
        self.objects: list[Array | None] = [None] * len(inputs)

    def reserve_input(self, position: int, size: int) -> memoryview:
        """The byte view of input `position`, at least `size` bytes long."""
        if len(self.inputs[position]) < size:
            self.inputs[position] = _buffer(size)
        return self.inputs[position]

    def input_array(self, position: int, shape: Shape) -> Array:
        """Input `position` as an array of `shape` over the same bytes."""
        objects = self.objects[position]
        if objects is not None:
            return objects
        spec = self._specs_in[position]
        count = element_count(shape)
        view = self.reserve_input(position, count * spec.itemsize)
        return np.frombuffer(view, spec.numpy, count).reshape(shape)

    def output_array(self, position: int, shape: Shape | None) -> Array | None:
        """Where output `position` goes, or None where its shape is not known."""
        spec = self._specs_out[position]
        if shape is None or spec.dtype == "BYTES":
            return None
        count = element_count(shape)
        if len(self.outputs[position]) < count * spec.itemsize:
            self.outputs[position] = _buffer(count * spec.itemsize)
        array = np.frombuffer(self.outputs[position], spec.numpy, count)
        return array.reshape(shape)


def _buffer(size: int) -> memoryview:
    # Numpy's memory is 64-byte aligned on large sizes and not zeroed.
    return np.empty(size, np.uint8).data


class Completion(NamedTuple):
    """A run that has ended.

    Attributes:
        staging: whose buffers hold the outputs; free it with `Slot.release`.
        outputs: one array per output, valid until the release (empty after an error).
        error: why it failed, or None.
        started_ns, ended_ns: of the run, on `time.monotonic_ns`.
    """

    staging: Staging
    outputs: list[Array]
    error: EngineError | None
    started_ns: int
    ended_ns: int


class Slot:
    """One execution context with its stagings and the thread that runs it.

    Args:
        engine: the network.
        name: of the thread, for debuggers.
        on_done: rung from the slot's thread after every run; must be quick, must not
            raise, and may be called once for several runs.
    """

    def __init__(self, engine: Engine, name: str, on_done: Callable[[], None]) -> None:
        self.engine = engine
        self.dead: EngineDeadError | None = None
        self._on_done = on_done
        self._context = engine.create_context()
        self._free = [
            Staging(i, engine.inputs, engine.outputs) for i in range(STAGINGS)
        ]
        self._start: SimpleQueue[_Run | None] = SimpleQueue()
        self._done: deque[Completion] = deque()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def acquire(self) -> Staging:
        """A free staging to fill.

        Raises:
            IndexError: all are in use (the caller starts no more than it may).
        """
        return self._free.pop()

    def release(self, staging: Staging) -> None:
        """Gives a staging back once its outputs were read."""
        self._free.append(staging)

    def start(
        self,
        staging: Staging,
        input_shapes: Sequence[Shape],
        output_shapes: Sequence[Shape | None],
    ) -> None:
        """Rings the engine side: run what lies in `staging`, after what runs now."""
        # The arrays are made here, so that nothing but the run itself is left to do
        # between two runs.
        try:
            inputs = [staging.input_array(i, s) for i, s in enumerate(input_shapes)]
            outputs = [staging.output_array(i, s) for i, s in enumerate(output_shapes)]
        except (MemoryError, ValueError) as error:  # a shape that no memory holds
            self.fail(staging, error)
        else:
            self._start.put(_Run(staging, inputs, outputs))

    def fail(self, staging: Staging, cause: Exception) -> None:
        """Lets the run of `staging` fail in its turn: its inputs cannot be filled."""
        self._start.put(_Run(staging, [], [], _run_error(cause)))

    def completions(self) -> list[Completion]:
        """What has ended since the last call, in order."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Ends the thread after what was started, and closes the context."""
        self._start.put(None)
        self._thread.join()
        self._context.close()

    def _loop(self) -> None:
        while (run := self._start.get()) is not None:
            self._done.append(self._execute(run))
            del run  # a kept reference would keep the buffers of BYTES alive
            self._on_done()

    def _execute(self, run: _Run) -> Completion:
        staging = run.staging
        started_ns = time.monotonic_ns()
        error: EngineError | None = None
        outputs: list[Array] = []
        try:
            if self.dead is not None:
                raise self.dead
            if run.error is not None:
                raise run.error
            outputs = self._context.execute(run.inputs, run.outputs)
        except EngineDeadError as dead:
            self.dead = error = dead
        except EngineError as failed:
            error = failed
        except Exception as bug:  # a back end must not take its slot with it
            error = _run_error(bug)
        ended_ns = time.monotonic_ns()
        return Completion(staging, outputs, error, started_ns, ended_ns)


class _Run(NamedTuple):
    staging: Staging
    inputs: list[Array]
    outputs: list[Array | None]
    error: EngineRunError | None = None  # why it cannot even be tried


def _run_error(cause: Exception) -> EngineRunError:
    error = EngineRunError(f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
