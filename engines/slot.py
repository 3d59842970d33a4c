"""A slot: what runs one batch at a time, reached only through buffers and doorbells.

The owner takes a free `Staging`, writes the inputs into it, rings `start`, and is rung
back by `on_done`; then `completions` says what has ended. Three stagings per slot: one
batch runs, the inputs of the next lie ready, and the outputs of the last are read.

The engine side is a thread, or two where the context is pipelined: one launches the
next run while the other waits for the one under way. (A run that is launched with one
call is launched by the owner itself.) What crosses the seam are indices, shapes and
bytes in flat buffers, so that it can be a process with the buffers in shared memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeVar

from engines.base import (
    Array,
    Engine,
    ExecutionContext,
    Launch,
    PipelinedContext,
)
from engines.errors import EngineDeadError, EngineError, EngineRunError
from engines.staging import Arrays, Cell, Staging


def _nobody() -> None:
    """Nobody waits for completions yet."""


_Error = TypeVar("_Error", bound=BaseException)
_Result = TypeVar("_Result")

STAGINGS: Final = 3


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
        on_done: see below; may be set later, before the first `start`.
        context: what runs happen in; the slot closes it. Default: a new one.

    Attributes:
        on_done: rung from the slot's thread after every run; must be quick, must not
            raise, and may be called once for several runs.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        on_done: Callable[[], None] = _nobody,
        context: ExecutionContext | None = None,
    ) -> None:
        self.engine = engine
        self.dead: EngineDeadError | None = None
        self.on_done = on_done
        self._context = context or engine.create_context()
        self._pipelined = (
            self._context if isinstance(self._context, PipelinedContext) else None
        )
        self._stagings = [
            Staging(i, engine.inputs, engine.outputs, engine.host_buffer)
            for i in range(STAGINGS)
        ]
        self._free = list(self._stagings)
        # How many orders the launching thread has yet to deal with. While it has none,
        # a run that is launched with one call need not go through it.
        self._ordered = 0
        self._ordering = threading.Lock()
        self._start: SimpleQueue[_Run | _Warm | None] = SimpleQueue()
        self._done: deque[Completion] = deque()
        self._launched: SimpleQueue[_Launched | None] = SimpleQueue()
        loops = [self._run]
        if self._pipelined is not None:
            loops = [partial(self._launch, self._pipelined), self._wait]
        self._threads = [
            threading.Thread(target=loop, name=name, daemon=True) for loop in loops
        ]
        for thread in self._threads:
            thread.start()

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
        except (MemoryError, ValueError, EngineError) as error:
            # A shape that no memory holds.
            self.fail(staging, error)
        else:
            self._begin(_Run(staging, arrays))

    def _begin(self, run: _Run) -> None:
        context = self._pipelined
        if context is not None and self.dead is None:
            with self._ordering:
                if not self._ordered:
                    launch, error = self._attempt(
                        run,
                        lambda: context.try_launch(
                            run.arrays.inputs, run.arrays.outputs
                        ),
                    )
                    if launch is not None or error is not None:
                        self._launched.put(_Launched(run, launch, error))
                        return
        self._order(run)

    def _order(self, order: _Run | _Warm) -> None:
        with self._ordering:
            self._ordered += 1
            self._start.put(order)

    def _dealt_with(self) -> None:
        with self._ordering:
            self._ordered -= 1

    def fail(self, staging: Staging, cause: Exception) -> None:
        """Lets the run of `staging` fail in its turn: its inputs cannot be filled."""
        self._order(_Run(staging, Arrays([], []), _run_error(cause)))

    def warm(self, cell: Cell, then: Callable[[EngineError | None], None]) -> None:
        """Warms a cell between two runs; `then` is told on the slot's thread."""
        self._order(_Warm(cell, then))

    def reserve(self, *cells: Cell) -> None:
        """Makes the buffers large enough for cells, before there are runs.

        All at once: a buffer that grows later undoes what is expected of those before
        (seen: three of four cells of BERT-base lost their graphs so).

        Raises:
            MemoryError, EngineError: there is not the memory.
        """
        for staging in self._stagings:
            for cell in cells:
                staging.arrays(cell)
            if self._pipelined is not None:
                for cell in cells:
                    arrays = staging.arrays(cell)
                    self._pipelined.expect(arrays.inputs, arrays.outputs)

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
        for thread in self._threads:
            thread.join()
        self._context.close()

    # -- the engine side --------------------------------------------------------------

    def _run(self) -> None:
        """Runs one batch after the other."""
        self._context.enter_thread()
        execute = self._context.execute
        while (run := self._start.get()) is not None:
            if isinstance(run, _Warm):
                self._warm(run)
                continue
            arrays = run.arrays
            started_ns = time.monotonic_ns()
            outputs, error = self._attempt(
                run, partial(execute, arrays.inputs, arrays.outputs)
            )
            self._complete(run, outputs, error, started_ns, time.monotonic_ns())
            del run, arrays, outputs  # they would keep the buffers of BYTES alive

    def _launch(self, context: PipelinedContext) -> None:
        """Begins runs as they come; `_wait` ends them."""
        context.enter_thread()
        while (run := self._start.get()) is not None:
            if isinstance(run, _Warm):
                self._warm(run)
                self._dealt_with()
                continue
            arrays = run.arrays
            launch, error = self._attempt(
                run, partial(context.launch, arrays.inputs, arrays.outputs)
            )
            self._launched.put(_Launched(run, launch, error))
            self._dealt_with()
            del run, arrays
        self._launched.put(None)

    def _wait(self) -> None:
        self._context.enter_thread()
        while (launched := self._launched.get()) is not None:
            run, launch, error = launched
            outputs, run_ns = None, 0
            if launch is not None:
                ended, error = self._attempt(run, launch.wait)
                if ended is not None:
                    outputs, run_ns = ended
            now_ns = time.monotonic_ns()
            self._complete(run, outputs, error, now_ns - run_ns, now_ns)
            del launched, run, outputs

    def _warm(self, order: _Warm) -> None:
        error: EngineError | None = None
        try:
            self._context.warm(order.cell.inputs)
            self.reserve(order.cell)
        except EngineDeadError as dead:
            self.dead = _bare(dead)
            error = dead
        except EngineError as failed:
            error = _bare(failed)
        except Exception as bug:  # as in `_attempt`
            error = _run_error(bug)
        order.then(error)

    def _attempt(
        self, run: _Run, act: Callable[[], _Result]
    ) -> tuple[_Result | None, EngineError | None]:
        """What `act` gives, or why it does not."""
        try:
            if self.dead is not None:
                raise self.dead
            if run.error is not None:
                raise run.error
            return act(), None
        except EngineDeadError as dead:
            self.dead = _bare(dead)
            return None, dead
        except EngineError as failed:
            return None, _bare(failed)
        except Exception as bug:  # a back end must not take its slot with it
            return None, _run_error(bug)

    def _complete(
        self,
        run: _Run,
        outputs: list[Array] | None,
        error: EngineError | None,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        own = outputs is not None and all(map(is_, outputs, run.arrays.outputs))
        self._done.append(
            Completion(
                run.staging,
                outputs or [],
                run.arrays if own else None,
                error,
                started_ns,
                ended_ns,
            )
        )
        self.on_done()


class _Run(NamedTuple):
    staging: Staging
    arrays: Arrays
    error: EngineRunError | None = None  # why it cannot even be tried


class _Warm(NamedTuple):
    cell: Cell
    then: Callable[[EngineError | None], None]


class _Launched(NamedTuple):
    run: _Run
    launch: Launch | None
    error: EngineError | None


def _run_error(cause: Exception) -> EngineRunError:
    error = EngineRunError(f"{type(cause).__name__}: {cause}")
    error.__cause__ = _bare(cause)
    return error


def _bare(error: _Error) -> _Error:
    """The error without the frames it has passed: they would keep a run's buffers."""
    return error.with_traceback(None)
