"""An engine in a process of its own: what crashes there, crashes there only.

    engine = open_in_process(partial(engines.open, "model.onnx"), name="model")

It is an engine like any other. Runs of arrays that lie in its host buffers cost one
small message each way; arrays that lie elsewhere are copied.
"""

from __future__ import annotations

import pickle
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from engines.base import Array, Engine, Launch, PipelinedContext
from engines.errors import (
    EngineDeadError,
    EngineLoadError,
    EngineLostError,
    EngineRunError,
)
from engines.process_arrays import KnownSets, input_place, output_place, received
from engines.process_child import ChildProcess
from engines.process_logs import levels
from engines.process_memory import LentMemory
from engines.process_wire import (
    BUFFER,
    CALL,
    CONTEXT,
    DEFINE,
    DONE,
    EXPECT,
    FORGET,
    FREED,
    HEAD,
    NOTHING,
    OPEN,
    RUN,
    RUN_ONCE,
    SAVE,
    Messages,
    connection,
)
from engines.tensors import Shape

_CLOSE_S: Final = 5.0  # a context's turn to give back what it holds


def open_in_process(
    recipe: Callable[[], Engine],
    *,
    name: str,
    on_lost: Callable[[str], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> ProcessEngine:
    """Opens an engine in a new process, however long that takes. Linux only.

    Args:
        recipe: makes the engine there; pickled, so a function of a module that can be
            imported, or a `functools.partial` of one.
        name: of the engine, for messages, threads and lists of processes.
        on_lost: called once, on a thread of the engine, when the process has ended by
            itself or its engine is dead; told how. May close the engine.
        cancelled: asked while waiting.

    Raises:
        EngineLoadError: of the recipe; or the process ended while it was at it; or
            `cancelled` said so.
    """
    if sys.platform != "linux":
        raise EngineLoadError(f"{name}: engines in processes of their own need Linux")
    try:
        pickled = pickle.dumps(recipe)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EngineLoadError(
            f"{name}: the recipe cannot be sent to a process ({error}): give a "
            "function of a module, or a partial of one"
        ) from error
    child = ChildProcess(name, on_lost)
    settings = {
        "levels": levels(),
        "recipe": pickled,
        "switch_interval_s": sys.getswitchinterval(),
    }
    try:
        facts = child.request(OPEN, settings, cancelled=cancelled)
        child.opened()
    except BaseException as error:
        child.kill()
        child.close()
        if isinstance(error, EngineLostError):
            raise EngineLoadError(f"{error} while it was opened") from None
        raise
    return ProcessEngine(child, facts)


class ProcessEngine(Engine):
    """An engine in another process; made by `open_in_process`.

    Once that process has ended, for whatever reason, every run raises
    `EngineLostError`, those under way too. Memory that it has given out stays.

    Attributes:
        memory: its host buffers.
    """

    def __init__(self, child: ChildProcess, facts: dict[str, Any]) -> None:
        self._child = child
        for fact, value in facts.items():
            setattr(self, fact, value)
        self._contexts = 0
        memory = child.memory

        def lend(number: int, size: int, descriptor: int) -> None:
            try:
                memory.send(BUFFER, number, size, descriptor=descriptor)
            except OSError:  # lost, or as good as: the next run says so
                memory.shut()

        self.memory = LentMemory(lend, partial(child.tell, FREED))
        # As an engine in a thread goes with the last reference to it.
        weakref.finalize(self, child.abandon)

    @property
    def lost(self) -> str | None:
        """Why nothing can be run any more, or None."""
        return self._child.lost

    def create_context(self) -> ProcessContext:
        try:
            ours, theirs = connection(quick=True)
        except OSError as error:
            raise EngineLoadError(
                f"{self._child.name}: no context can be made: {error}"
            ) from error
        number = self._contexts
        self._contexts += 1
        try:
            self._child.request(CONTEXT, value=number, descriptor=theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ProcessContext(self, self._child, ours, number)

    def host_buffer(self, size: int) -> memoryview:
        return self.memory.allocate(size)

    def save_warm(self) -> None:
        self._child.request(SAVE)

    def close(self) -> None:
        self._child.close()


class ProcessContext(PipelinedContext):
    """A context of an engine in another process."""

    def __init__(
        self,
        engine: ProcessEngine,
        child: ChildProcess,
        messages: Messages,
        number: int,
    ) -> None:
        self._engine = engine  # lives as long as its contexts
        self._child = child
        self.messages = messages
        self._closed = False
        self._runs = 0
        self._sets = KnownSets(lambda known: child.tell(FORGET, known, number))
        child.enter(messages)

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        if self._child.lost is not None:
            raise self.loss()
        key = (*map(id, inputs), *map(id, outputs))
        return self._launch(key, self._sets.get(key), inputs, outputs)

    def try_launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch | None:
        key = (*map(id, inputs), *map(id, outputs))
        known = self._sets.get(key)
        if known is None:  # to describe it, and maybe send the values, takes longer
            return None
        if self._child.lost is not None:
            raise self.loss()
        return self._launch(key, known, inputs, outputs)

    def _launch(
        self,
        key: tuple[int, ...],
        known: int | None,
        inputs: Sequence[Array],
        outputs: Sequence[Array | None],
    ) -> Launch:
        self._runs = number = self._runs + 1
        try:
            if known is None:
                self._describe(number, key, inputs, outputs)
            else:
                head = HEAD.pack(number, known, RUN, NOTHING)
                self.messages.socket.send(head)
        except OSError as error:
            if self._closed:
                raise self.loss() from None
            raise self._child.unsent(error) from None
        return _ProcessLaunch(self, number, inputs, outputs)

    def warm(self, shapes: Sequence[Shape]) -> None:
        self._call("warm", shapes)

    def expect(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> None:
        key = (*map(id, inputs), *map(id, outputs))
        content = self._places(inputs, outputs)
        if any(place is array for place, array in zip(content[0], inputs, strict=True)):
            return  # it is described anew for each run
        known = self._sets.get(key)
        if known is None:
            try:
                known = self._define(key, content, inputs, outputs)
            except OSError as error:
                raise self._child.unsent(error) from None
        self._call(EXPECT, known)

    def output_shapes(self, shapes: Sequence[Shape]) -> list[Shape | None] | None:
        result: list[Shape | None] | None = self._call("output_shapes", shapes)
        return result

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._sets.clear()
        messages = self.messages
        try:
            # What was launched is run; then the other end closes, too.
            messages.socket.shutdown(socket.SHUT_WR)
            messages.socket.settimeout(_CLOSE_S)
            while messages.receive() is not None:
                pass
        except OSError:  # lost
            pass
        self._child.leave(messages)
        messages.close()

    def loss(self) -> EngineDeadError:
        """Why the connection has ended."""
        if self._closed:
            return EngineDeadError(f"{self._child.name}: the context is closed")
        return self._child.loss()

    def failure(self, name: str, text: str) -> Exception:
        """The error that a run has ended with."""
        return self._child.failure(name, text)

    def _describe(
        self,
        number: int,
        key: tuple[int, ...],
        inputs: Sequence[Array],
        outputs: Sequence[Array | None],
    ) -> None:
        """Launches a run of arrays that the worker does not know."""
        content = self._places(inputs, outputs)
        if any(place is array for place, array in zip(content[0], inputs, strict=True)):
            self.messages.send(RUN_ONCE, number, 0, content)
        else:
            self.messages.send(RUN, number, self._define(key, content, inputs, outputs))

    def _places(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> tuple[list[Any], list[Any]]:
        memory = self._engine.memory
        return (
            [input_place(array, memory) for array in inputs],
            [output_place(array, memory) for array in outputs],
        )

    def _define(
        self,
        key: tuple[int, ...],
        content: tuple[list[Any], list[Any]],
        inputs: Sequence[Array],
        outputs: Sequence[Array | None],
    ) -> int:
        """Tells the worker of arrays that it can see; returns their number."""
        known = self._sets.new_number()
        self.messages.send(DEFINE, known, 0, content)
        self._sets.add(key, known, [*inputs, *outputs])
        return known

    def _call(self, method: str, *arguments: object) -> Any:
        # On the connection of the runs, since it is for the thread that launches them.
        return self._child.request(CALL, (method, arguments), messages=self.messages)


class _ProcessLaunch(Launch):
    """A run that was sent."""

    __slots__ = ("_arrays", "_context", "_number")

    def __init__(
        self,
        context: ProcessContext,
        number: int,
        inputs: Sequence[Array],
        outputs: Sequence[Array | None],
    ) -> None:
        self._context: ProcessContext | None = context
        self._number = number
        self._arrays = inputs, outputs  # theirs is the memory that the run uses

    def wait(self) -> tuple[list[Array], int]:
        context, self._context = self._context, None
        if context is None:
            raise EngineRunError("this run has been waited for already")
        messages = context.messages
        while True:
            head = messages.receive()
            if head is None:
                raise context.loss()
            number, run_ns, kind, extra = head
            if number == self._number:
                break
            messages.content(extra)  # of a run that nobody has waited for
        outputs: Any = self._arrays[1]
        if extra == NOTHING:
            return [*outputs], run_ns
        try:
            content = messages.content(extra)
        except OSError:
            raise context.loss() from None
        if kind == DONE:
            return received(outputs, content), run_ns
        raise context.failure(*content)
