"""Engines that tests open in processes of their own; imports little, for quick starts.

The first value of the first input says what a run does; see `Scripted`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines.base import Array, Engine, ExecutionContext, Launch, PipelinedContext
from engines.errors import EngineDeadError, EngineLoadError, EngineRunError
from engines.tensors import Shape, TensorSpec

X, Y = TensorSpec("x", "INT64", ("N",)), TensorSpec("y", "INT64", ("N",))

# First values that are no echo.
RUN_ERROR, DEAD, KILLED, EXITS, SEGFAULT, HANGS, BUG, MEETS, SIGNALLED, PRINTS = range(
    -10, 0
)
WAIT_S = 30


class Scripted(Engine):
    """Gives its input back, unless its first value says otherwise.

    Args:
        pipelined: whether its contexts are.
    """

    backend = "scripted"
    inputs = (X,)
    outputs = (Y,)

    def __init__(self, *, pipelined: bool = False) -> None:
        self.pipelined = pipelined
        self.barrier = threading.Barrier(2)
        self.saved = 0
        self.threads: list[int] = []
        self.costs_path = Path("costs.json")

    def create_context(self) -> ExecutionContext:
        return PipelinedScript(self) if self.pipelined else Script(self)

    def save_warm(self) -> None:
        self.saved += 1
        if self.saved > 1:
            raise OSError("disk full")

    def obey(self, value: int) -> None:
        """Does what a first value asks for."""
        if value == RUN_ERROR:
            raise EngineRunError("no such row")
        if value == DEAD:
            raise EngineDeadError("the device is lost")
        if value == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if value == EXITS:
            os._exit(3)
        if value == SEGFAULT:
            ctypes.string_at(0)
        if value == HANGS:
            threading.Event().wait()
        if value == BUG:
            raise ValueError("oops")
        if value == MEETS:  # needs two contexts that run at the same time
            self.barrier.wait(WAIT_S)
        if value == SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        if value == PRINTS:
            os.write(1, b"printed by native code\n")
            sys.stdout.write("printed\n")
            sys.stdout.flush()


class Script(ExecutionContext):
    """See `Scripted`."""

    def __init__(self, engine: Scripted) -> None:
        self._engine = engine
        self._entered: list[int] = []

    def enter_thread(self) -> None:
        self._entered.append(threading.get_ident())

    def execute(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        if inputs[0].size:
            self._engine.obey(int(inputs[0][0]))
        return [echo(inputs[0], outputs[0])]

    def warm(self, shapes: Sequence[Shape]) -> None:
        assert threading.get_ident() in self._entered
        if shapes[0] == (0,):
            raise EngineRunError("no profile holds (0,)")

    def output_shapes(self, shapes: Sequence[Shape]) -> list[Shape | None] | None:
        return [shapes[0], None]


class PipelinedScript(PipelinedContext):
    """See `Scripted`; a run that holds 1 ends only when another one was launched."""

    def __init__(self, engine: Scripted) -> None:
        self.engine = engine
        self.launched = threading.Semaphore(0)

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        value = int(inputs[0][0])
        if value in (RUN_ERROR, BUG):
            self.engine.obey(value)
        if value == 2:
            self.launched.release()
        return Scheduled(self, inputs[0], outputs[0])


class Scheduled(Launch):
    """A run of `PipelinedScript`."""

    def __init__(self, context: PipelinedScript, x: Array, y: Array | None) -> None:
        self._context, self._x, self._y = context, x, y

    def wait(self) -> tuple[list[Array], int]:
        value = int(self._x[0])
        if value == 1 and not self._context.launched.acquire(timeout=WAIT_S):
            raise EngineRunError("nothing was launched behind this run")
        self._context.engine.obey(value)
        return [echo(self._x, self._y)], 12_345


def echo(x: Array, y: Array | None) -> Array:
    """`x` in the array `y`, or in a new one where there is none or it does not fit."""
    if y is None or y.shape != x.shape:
        return x.copy()
    np.copyto(y, x)
    return y


class NoMore(Scripted):
    """Has room for one context."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def create_context(self) -> ExecutionContext:
        if self.used:
            raise EngineLoadError("no memory for one more")
        self.used = True
        return Only(self)


class Only(Script):
    """The context of `NoMore`."""

    def __init__(self, engine: NoMore) -> None:
        super().__init__(engine)
        self._owner = engine

    def close(self) -> None:
        self._owner.used = False


class Adopting(Engine):
    """A run gives the bytes of buffers that are adopted, and of those released."""

    backend = "adopting"
    inputs = (X,)
    outputs = (Y,)

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.adopted: dict[int, int] = {}
        self.released = 0
        self.changed = threading.Condition()

    def create_context(self) -> ExecutionContext:
        return Counting(self)

    def adopt_buffer(self, view: memoryview) -> None:
        if self.refuses:
            raise EngineRunError("no more memory can be locked")
        address = np.frombuffer(view, np.uint8).ctypes.data
        assert address % 4096 == 0
        with self.changed:
            self.adopted[address] = len(view)

    def release_buffer(self, view: memoryview) -> None:
        address = np.frombuffer(view, np.uint8).ctypes.data
        bytes(view)  # it is still there
        with self.changed:
            assert self.adopted.pop(address) == len(view)
            self.released += len(view)
            self.changed.notify_all()


class Counting(ExecutionContext):
    """See `Adopting`; waits until at least as many bytes as its input says are free."""

    def __init__(self, engine: Adopting) -> None:
        self._engine = engine

    def execute(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        engine = self._engine
        with engine.changed:
            engine.changed.wait_for(
                lambda: engine.released >= int(inputs[0][0]), WAIT_S
            )
            return [np.array([sum(engine.adopted.values()), engine.released])]


# -- recipes that are more than a class -----------------------------------------------


def refuse(text: str) -> Engine:
    """Cannot be opened, and says why."""
    raise EngineLoadError(text)


def crash(value: int) -> Engine:
    """The process ends while the engine is opened."""
    engine = Scripted()
    engine.obey(value)
    return engine


def stall(pipe: Path) -> Engine:
    """Tells its process by a named pipe, and is never done."""
    pipe.write_text(f"{os.getpid()}\n")
    threading.Event().wait()
    raise AssertionError


def loaded() -> Engine:
    """Its back end is the list of what the process has imported."""
    engine = Scripted()
    engine.backend = " ".join(sys.modules)
    return engine


def numbered() -> Engine:
    """Its back end is the number of its process."""
    engine = Scripted()
    engine.backend = str(os.getpid())
    return engine


def talkative() -> Engine:
    """Logs, and warns, at several levels."""
    log = logging.getLogger("process_engines.talk")
    log.debug("not asked for")
    log.warning("%d of %s", 3, "these")
    logging.getLogger("process_engines.quiet").debug("asked for")
    log.info("x" * 100_000)
    log.error("with extras", extra={"lock": threading.Lock(), "kind": "odd"})
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("caught")
    warnings.warn("mind the gap", stacklevel=1)
    return Scripted()


def value(context: ExecutionContext, first: int, *rest: int) -> Any:
    """The output of a run of these values, as a list."""
    (output,) = context.execute([np.array([first, *rest])], [None])
    return output.tolist()


def array(engine: Engine, *values: int) -> Array:
    """An array of these values in a host buffer."""
    made = np.frombuffer(engine.host_buffer(8 * len(values)), np.int64)
    made[:] = values
    return made
