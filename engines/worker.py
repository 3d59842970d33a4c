"""The process in which an engine lives: opens it, and runs what it is told to run.

Started by `engines.process_child`, with two connections: control (calls that may take
long, answered in turn) and memory (buffers, which must not wait behind them). Each
context has a connection and a thread of its own, and a second thread where it is
pipelined.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Final

from engines.base import Engine, ExecutionContext, Launch, PipelinedContext
from engines.errors import EngineLoadError, EngineRunError
from engines.process_arrays import RunArrays
from engines.process_logs import forward
from engines.process_memory import BorrowedMemory
from engines.process_wire import (
    ANSWER,
    BUFFER,
    CALL,
    CLOSE,
    CONTEXT,
    DEFINE,
    DONE,
    EXPECT,
    FAILED,
    FAILURE,
    FORGET,
    FREED,
    HEAD,
    NOTHING,
    RUN,
    SAVE,
    Messages,
    described,
)

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_CLOSE_S: Final = 2.0  # for a context's runs to end; the other side waits 5


def main() -> None:
    """Serves one engine; arguments: name, pid of the parent, two descriptors."""
    parent, control, memory = map(int, sys.argv[2:5])
    end_with(parent)
    ends = []
    for descriptor in (control, memory):
        os.set_inheritable(descriptor, False)
        ends.append(Messages(socket.socket(fileno=descriptor)))
    if sys.stderr is not None:
        faulthandler.enable()
    code = 0
    try:
        Worker(*ends).serve()
    except Exception:
        _log.critical("the engine's process cannot go on", exc_info=True)
        code = 1
    # Without the interpreter's own end, which waits for threads and libraries.
    os._exit(code)


def end_with(parent: int) -> None:
    """Has the kernel end this process with its parent, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)


class Worker:
    """One engine and its contexts.

    Args:
        control, memory: the connections.
    """

    def __init__(self, control: Messages, memory: Messages) -> None:
        self._control = control
        self._memory = memory
        self._contexts: dict[int, ServedContext] = {}

    def serve(self) -> None:
        """Opens the engine, and does what comes until the connection ends."""
        engine = self._open()
        if engine is None:
            return
        buffers = BorrowedMemory(engine.adopt_buffer, engine.release_buffer)
        threading.Thread(
            target=self._keep, args=(buffers,), name="buffers", daemon=True
        ).start()
        self._control.send(
            ANSWER, 0, 0, {fact: getattr(engine, fact) for fact in facts()}
        )
        while (head := self._control.receive()) is not None:
            number, value, kind, _ = head
            if kind == CLOSE:
                self._close(engine, buffers)
                return
            try:
                if kind == CONTEXT:
                    self._add_context(value, engine, buffers)
                elif kind == SAVE:
                    engine.save_warm()
            except Exception as error:
                fail(self._control, number, error)
            else:
                self._control.send(ANSWER, number)

    def _open(self) -> Engine | None:
        head = self._control.receive()
        if head is None:
            return None
        settings = self._control.content(head[3])
        sys.setswitchinterval(settings["switch_interval_s"])
        forward(self._control, settings["levels"])
        try:
            try:
                recipe = pickle.loads(settings["recipe"])
            except Exception as error:
                raise EngineLoadError(
                    f"the engine's process cannot load its recipe ({error}): it must "
                    "be of a module that can be imported, and not the main one"
                ) from error
            engine: Engine = recipe()
            return engine
        except Exception as error:
            if not isinstance(error, EngineLoadError):
                _log.exception("the engine cannot be opened")
            content = described(error, EngineLoadError)
            self._control.send(FAILURE, 0, 0, content)
            return None

    def _keep(self, buffers: BorrowedMemory) -> None:
        try:
            self._keep_buffers(buffers)
        except Exception:
            _log.critical("the engine's process gets no memory", exc_info=True)
        os._exit(1)  # nothing that is in shared memory could be run

    def _keep_buffers(self, buffers: BorrowedMemory) -> None:
        memory = self._memory
        while (head := memory.receive()) is not None:
            number, value, kind, _ = head
            if kind == BUFFER:
                buffers.add(number, value, memory.descriptor())
            elif kind == FREED:
                buffers.remove(number)
            elif kind == FORGET and value in self._contexts:
                self._contexts[value].forget(number)

    def _add_context(self, key: int, engine: Engine, buffers: BorrowedMemory) -> None:
        messages = Messages(
            socket.socket(fileno=self._control.descriptor()), quick=True
        )
        contexts = self._contexts
        contexts[key] = ServedContext(
            engine.create_context(),
            messages,
            buffers,
            self._control,
            lambda: contexts.pop(key, None),
        )
        contexts[key].start()

    def _close(self, engine: Engine, buffers: BorrowedMemory) -> None:
        contexts = list(self._contexts.values())
        ended = [context.close() for context in contexts]
        if all(ended):
            buffers.clear()
            engine.close()


class ServedContext:
    """A context, and the threads that run what comes on its connection.

    Args:
        context: what runs happen in; closed when the connection ends.
        messages: the connection.
        buffers: where shared arrays lie.
        control: where calls are answered.
        ended: called when the connection has ended and the context is closed.
    """

    def __init__(
        self,
        context: ExecutionContext,
        messages: Messages,
        buffers: BorrowedMemory,
        control: Messages,
        ended: Callable[[], object],
    ) -> None:
        self._context = context
        self._messages = messages
        self._buffers = buffers
        self._control = control
        self._ended = ended
        self._sets: dict[int, RunArrays | Exception] = {}
        self._launched: SimpleQueue[_Launched | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="runs", daemon=True)

    def start(self) -> None:
        """Begins to run what comes."""
        self._thread.start()

    def forget(self, number: int) -> None:
        """A set of arrays will not be run any more."""
        self._sets.pop(number, None)

    def close(self) -> bool:
        """Ends the connection; whether the runs that are under way end, too."""
        self._messages.shut()
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        context = self._context
        try:
            context.enter_thread()
            if isinstance(context, PipelinedContext):
                waiter = threading.Thread(target=self._wait, name="waits", daemon=True)
                waiter.start()
                try:
                    self._launch(context)
                finally:
                    self._launched.put(None)
                    waiter.join()
            else:
                self._execute(context)
        finally:
            self._sets.clear()
            context.close()
            self._ended()
            self._messages.close()  # only now does the other side go on

    def _execute(self, context: ExecutionContext) -> None:
        for number, run in self._runs():
            try:
                if isinstance(run, Exception):
                    raise run
                started_ns = time.monotonic_ns()
                results = context.execute(run.inputs, run.outputs)
                run_ns = time.monotonic_ns() - started_ns
                self._answer(number, run, results, run_ns)
            except Exception as error:
                self._refuse(number, error)
            del run
            results = []

    def _launch(self, context: PipelinedContext) -> None:
        for number, run in self._runs():
            launch = None
            if not isinstance(run, Exception):
                try:
                    launch = context.launch(run.inputs, run.outputs)
                except Exception as error:
                    run = error.with_traceback(None)
            self._launched.put((number, run, launch))
            del run, launch

    def _wait(self) -> None:
        try:
            self._context.enter_thread()
            while (item := self._launched.get()) is not None:
                number, run, launch = item
                try:
                    if isinstance(run, Exception):
                        raise run
                    assert launch is not None
                    results, run_ns = launch.wait()
                    self._answer(number, run, results, run_ns)
                except Exception as error:
                    self._refuse(number, error)
                del item, run, launch
                results = []
        finally:
            self._messages.shut()

    def _runs(self) -> Iterator[tuple[int, RunArrays | Exception]]:
        """The runs that are asked for, in order; what else is asked for is done."""
        messages, sets = self._messages, self._sets
        while (head := messages.receive()) is not None:
            number, known, kind, extra = head
            if kind == RUN:
                yield number, sets.get(known) or EngineRunError("unknown arrays")
                continue
            if kind == CALL:
                self._call(number, *messages.content(extra))
            elif kind == DEFINE:
                sets[number] = self._arrays(extra)
            else:
                yield number, self._arrays(extra)

    def _arrays(self, extra: int) -> RunArrays | Exception:
        try:
            inputs, outputs = self._messages.content(extra)
            return RunArrays(inputs, outputs, self._buffers)
        except Exception as error:
            return error.with_traceback(None)

    def _call(self, number: int, method: str, arguments: Any) -> None:
        try:
            result = None
            if method == EXPECT:
                self._expect(*arguments)
            else:
                result = getattr(self._context, method)(*arguments)
        except Exception as error:
            fail(self._control, number, error)
        else:
            self._control.send(ANSWER, number, 0, result)

    def _expect(self, known: int) -> None:
        run = self._sets.get(known)
        if isinstance(self._context, PipelinedContext) and isinstance(run, RunArrays):
            self._context.expect(run.inputs, run.outputs)

    def _answer(self, number: int, run: RunArrays, results: Any, run_ns: int) -> None:
        sent = run.to_send(results)
        try:
            if sent is None:
                head = HEAD.pack(number, run_ns, DONE, NOTHING)
                self._messages.socket.send(head)
            else:
                self._messages.send(DONE, number, run_ns, sent)
        except ConnectionError:  # nobody waits for it any more
            pass

    def _refuse(self, number: int, error: Exception) -> None:
        content = described(error, EngineRunError)
        try:
            self._messages.send(FAILED, number, 0, content)
        except ConnectionError:
            pass


_Launched = tuple[int, RunArrays | Exception, Launch | None]
"""The number of a run, with what it is of and the launch, or with why there is none."""


def facts() -> list[str]:
    """What every engine says of itself: the attributes that `Engine` declares."""
    return [name for name in Engine.__annotations__ if not name.startswith("_")]


def fail(control: Messages, number: int, error: Exception) -> None:
    """Answers a request with an error."""
    control.send(FAILURE, number, 0, described(error, EngineRunError))
