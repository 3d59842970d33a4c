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
from operator import is_
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from engines.base import Array, Engine
from engines.errors import EngineDeadError, EngineError, EngineRunError
from engines.tensors import Shape, TensorSpec, element_count

_Error = TypeVar("_Error", bound=BaseException)

STAGINGS: Final = 3
_MAX_KNOWN: Final = 64  # cells whose arrays a staging keeps


class Cell:
    """The shapes of one kind of batch.

    Compared by identity: keep one for each kind, since stagings keep what they make for
    it.

    Args:
        inputs: per input, the shape of the whole batch.
        outputs: per output, the same; None where it is not known beforehand.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(
        self, inputs: Sequence[Shape], outputs: Sequence[Shape | None]
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs


class Arrays:
    """The buffers of a staging, seen in the shapes of one cell.

    Attributes:
        inputs, outputs: what a context executes.
        derived: for the owner of the slot, to keep what it has made of `outputs`.
    """

    __slots__ = ("derived", "inputs", "outputs")

    def __init__(self, inputs: list[Array], outputs: list[Array | None]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.derived: Any = None


class Staging:
    """One set of input and output buffers, flat, growing to the largest batch seen.

    Attributes:
        index: its number within the slot.
        inputs: per input a byte view to write rows into (BYTES: unused).
        objects: per BYTES input the array of Python bytes to run, else None.
    """

    __slots__ = (
        "_known",
        "_specs_in",
        "_specs_out",
        "index",
        "inputs",
        "objects",
        "outputs",
    )

    def __init__(
        self, index: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        self.index = index
        self._specs_in = inputs
        self._specs_out = outputs
        self.inputs = [memoryview(bytearray()) for _ in inputs]
        self.outputs = [memoryview(bytearray()) for _ in outputs]
        self.objects: list[Array | None] = [None] * len(inputs)
        self._known: dict[Cell, Arrays] = {}

    def arrays(self, cell: Cell) -> Arrays:
        """The buffers in the shapes of `cell`, made larger where they must be.

        Raises:
            MemoryError, ValueError: a shape that no memory holds.
        """
        known = self._known.get(cell)
        if known is not None:
            return known
        made = Arrays(
            [self.input_array(i, shape) for i, shape in enumerate(cell.inputs)],
            [self.output_array(i, shape) for i, shape in enumerate(cell.outputs)],
        )
        if all(spec.dtype != "BYTES" for spec in self._specs_in):
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[cell] = made
        return made

    def reserve_input(self, position: int, size: int) -> memoryview:
        """The byte view of input `position`, at least `size` bytes long."""
        if len(self.inputs[position]) < size:
            self._known.clear()
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
            self._known.clear()
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
        arrays: those of the run if `outputs` are its own, so that what was `derived`
            from them still holds; else None.
        error: why it failed, or None.
        started_ns, ended_ns: of the run, on `time.monotonic_ns`.
    """

    staging: Staging
    outputs: list[Array]
    arrays: Arrays | None
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

    def start(self, staging: Staging, cell: Cell) -> None:
        """Rings the engine side: run what lies in `staging`, after what runs now."""
        # The arrays are made here, so that nothing but the run itself is left to do
        # between two runs.
        try:
            arrays = staging.arrays(cell)
        except (MemoryError, ValueError) as error:  # a shape that no memory holds
            self.fail(staging, error)
        else:
            self._start.put(_Run(staging, arrays))

    def fail(self, staging: Staging, cause: Exception) -> None:
        """Lets the run of `staging` fail in its turn: its inputs cannot be filled."""
        self._start.put(_Run(staging, Arrays([], []), _run_error(cause)))

    def completions(self) -> Sequence[Completion]:
        """What has ended since the last call, in order."""
        if not self._done:
            return ()
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
        arrays = run.arrays
        started_ns = time.monotonic_ns()
        error: EngineError | None = None
        outputs: list[Array] = []
        kept: Arrays | None = None
        try:
            if self.dead is not None:
                raise self.dead
            if run.error is not None:
                raise run.error
            outputs = self._context.execute(arrays.inputs, arrays.outputs)
            if all(map(is_, outputs, arrays.outputs)):
                kept = arrays
        except EngineDeadError as dead:
            self.dead = error = _bare(dead)
        except EngineError as failed:
            error = _bare(failed)
        except Exception as bug:  # a back end must not take its slot with it
            error = _run_error(bug)
        ended_ns = time.monotonic_ns()
        return Completion(run.staging, outputs, kept, error, started_ns, ended_ns)


class _Run(NamedTuple):
    staging: Staging
    arrays: Arrays
    error: EngineRunError | None = None  # why it cannot even be tried


def _run_error(cause: Exception) -> EngineRunError:
    error = EngineRunError(f"{type(cause).__name__}: {cause}")
    error.__cause__ = _bare(cause)
    return error


def _bare(error: _Error) -> _Error:
    """The error without the frames it has passed: they would keep a run's buffers."""
    return error.with_traceback(None)
