"""The process in which an engine lives, seen from the one that started it.

Started afresh (never forked: threads and CUDA do not survive that), and not through
`multiprocessing`, which would run the caller's main module again. A thread of this
process starts it, hears its answers and its log, and notices its end.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

from engines.errors import (
    EngineDeadError,
    EngineLoadError,
    EngineLostError,
    EngineRunError,
)
from engines.process_logs import log_here
from engines.process_wire import (
    ANSWER,
    CLOSE,
    FAILURE,
    HEAD,
    LOG,
    NOTHING,
    Head,
    Messages,
    connection,
    described,
    error_of,
)

_log = logging.getLogger(__name__)

_CLOSE_S: Final = 5.0  # for closing the engine, before the process is ended
_END_S: Final = 2.0  # from the end of a connection to that of the process
_STUCK_S: Final = 10.0  # a driver can hold a process that was ended
_ASKED_EVERY_S: Final = 0.1

# The path first, so that nothing is imported from elsewhere. The signals go to all
# processes of a terminal or a service; the parent decides what they mean for this one.
_CODE: Final = (
    "import sys; sys.path[:] = sys.argv[5:]; import signal; "
    "[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; "
    "from engines.worker import main; main()"
)

Answers = SimpleQueue[tuple[int, Any] | None]


class ChildProcess:
    """See the module's text.

    Args:
        name: of the engine, for messages, threads and lists of processes.
        on_lost: called once, on a thread of this object, if the process ends after
            `opened` and before `close`; told how.

    Attributes:
        name: as given.
        memory: where buffers are told of.

    Raises:
        EngineLoadError: it cannot be started.
    """

    def __init__(self, name: str, on_lost: Callable[[str], None] | None) -> None:
        self.name = name
        self._on_lost = on_lost
        try:
            self._control, control = connection()
            self.memory, memory = connection()
        except OSError as error:
            raise _no_process(name, error) from error
        self._numbers = itertools.count()
        self._waiting: dict[int, Answers] = {}
        self._contexts: weakref.WeakSet[Messages] = weakref.WeakSet()
        self._untold: deque[bytes] = deque()
        self._lock = threading.RLock()  # `abandon` may come in between
        self._lost: str | None = None
        self._opened = self._closing = False
        self._is_loss = False  # for `on_lost`
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        started: SimpleQueue[Exception | None] = SimpleQueue()
        self._watcher = threading.Thread(
            target=self._watch,
            args=(started, control, memory),
            name=f"{name}-process",
            daemon=True,
        )
        self._watcher.start()
        failed = started.get()
        if failed is not None:
            raise _no_process(name, failed) from failed

    @property
    def lost(self) -> str | None:
        """Why nothing can be run any more, or None."""
        return self._lost

    def opened(self) -> None:
        """From now on the end of the process is told to `on_lost`.

        Raises:
            EngineLostError: it has ended before.
        """
        with self._lock:
            if self._lost is None:
                self._opened = True
                return
        raise self.loss()

    def request(
        self,
        kind: int,
        content: object = None,
        *,
        messages: Messages | None = None,
        value: int = 0,
        descriptor: int | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        """Sends a message on `messages` (default: control) and gives the answer.

        Raises:
            EngineLostError: the process has ended, or its engine is dead.
            EngineLoadError: `cancelled` said so.
            Exception: what the process answers with.
        """
        number = next(self._numbers)
        answers: Answers = SimpleQueue()
        self._waiting[number] = answers  # before the look whether it is lost
        try:
            if self._lost is not None:
                raise self.loss()
            try:
                (messages or self._control).send(
                    kind, number, value, content, descriptor=descriptor
                )
            except OSError as error:
                raise self.unsent(error) from None
            answer = self._answer(answers, cancelled)
        finally:
            del self._waiting[number]
        if answer is None:
            raise self.loss()
        if answer[0] == ANSWER:
            return answer[1]
        raise self.failure(*answer[1])

    def failure(self, name: str, text: str) -> Exception:
        """The error that the process has told of; a dead engine is lost with it."""
        error = error_of(name, text)
        if isinstance(error, EngineDeadError):
            self.lose(text)
            return self.loss()
        return error

    def loss(self) -> EngineLostError:
        """How the process was lost, by somebody who has noticed that it was."""
        if self._lost is None and not self._ended.wait(_END_S):
            self.lose(f"{self.name}: the engine's process does not answer any more")
        return EngineLostError(self._lost)

    def unsent(self, error: OSError) -> EngineLostError | EngineRunError:
        """What it means that nothing could be sent."""
        if isinstance(error, ConnectionError):
            return self.loss()
        return EngineRunError(f"{self.name}: nothing can be sent: {error}")

    def lose(self, text: str) -> None:
        """Ends the process because nothing can be run in it any more."""
        self._note(text)
        self.kill()

    def tell(self, kind: int, number: int, value: int = 0) -> None:
        """Tells that something is no more: from wherever, without waiting or locking.

        Where there is no room for it, it goes with the next.
        """
        untold = self._untold
        untold.append(HEAD.pack(number, value, kind, NOTHING))
        try:
            while untold:
                message = untold.popleft()
                try:
                    self.memory.socket.send(message, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    untold.append(message)
                    return
        except (IndexError, OSError):  # another thread has sent it; all is gone
            pass

    def enter(self, context: Messages) -> None:
        """Whoever reads on `context` is woken when the process is lost."""
        with self._lock:
            self._contexts.add(context)

    def leave(self, context: Messages) -> None:
        """Undoes `enter`."""
        with self._lock:
            self._contexts.discard(context)

    def kill(self) -> None:
        """Ends the process now; does not wait for it."""
        if self._process is not None:
            self._process.kill()
        self._control.shut()  # wakes the watcher, even if a driver holds the process
        self._wake()

    def abandon(self) -> None:
        """Ends the process, since nobody refers to its engine any more."""
        with self._lock:
            self._closing = True
        self.lose(f"{self.name}: the engine is closed")

    def close(self) -> None:
        """Lets the process close the engine and end, and waits for it."""
        with self._lock:
            first, self._closing = not self._closing, True
            self._note(f"{self.name}: the engine is closed")
        if first:
            try:
                self._control.send(CLOSE)
            except OSError:  # it has ended already
                pass
        if not self._ended.wait(_CLOSE_S):
            _log.warning("%s: the engine's process is slow to end: killed", self.name)
            self.kill()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()

    # -- the watcher's thread ---------------------------------------------------------

    def _watch(
        self,
        started: SimpleQueue[Exception | None],
        control: socket.socket,
        memory: socket.socket,
    ) -> None:
        # The kernel ends the process with the *thread* that has started it, so that
        # thread has to be this one.
        try:
            self._process = process = self._spawn(control.fileno(), memory.fileno())
        except Exception as error:
            self._control.close()
            self.memory.close()
            started.put(error)
            return
        finally:
            control.close()
            memory.close()
        started.put(None)
        self._listen(process.pid)
        self._finish(process)

    def _spawn(self, control: int, memory: int) -> subprocess.Popen[bytes]:
        path = [os.path.abspath(entry) for entry in sys.path]
        numbers = [str(number) for number in (os.getpid(), control, memory)]
        try:
            os.fstat(2)
            output = 2  # what a library prints must not get into the caller's output
        except OSError:
            output = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-c", _CODE, self.name, *numbers, *path],
            stdin=subprocess.DEVNULL,
            stdout=output,
            pass_fds=(control, memory),
            start_new_session=True,
        )

    def _listen(self, pid: int) -> None:
        """Takes messages until the process has ended, or is to be given up."""
        control = self._control.socket.fileno()
        poller = select.poll()
        poller.register(control, select.POLLIN)
        # The connection alone would not do: a process that it has started can hold it.
        try:
            ending = os.pidfd_open(pid)
        except OSError:  # a sandbox that does not know it
            ending = -1
        try:
            if ending >= 0:
                poller.register(ending, select.POLLIN)
            while control in {ready for ready, _ in poller.poll()}:
                head = self._control.receive()
                if head is None:
                    return
                try:
                    self._take(head)
                except OSError:  # it has ended in the middle of a message
                    return
        finally:
            if ending >= 0:
                os.close(ending)

    def _take(self, head: Head) -> None:
        number, _, kind, extra = head
        try:
            content = self._control.content(extra)
            if kind == LOG:
                log_here(content)
                return
        except OSError:
            raise
        except Exception as error:
            _log.exception("%s: a message of its process is lost", self.name)
            kind, content = FAILURE, described(error, EngineRunError)
        answers = self._waiting.get(number)
        if answers is not None:
            answers.put((kind, content))

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        code: int | None = None
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(_STUCK_S)
            except subprocess.TimeoutExpired:
                _log.error("%s: process %d does not end", self.name, process.pid)
        self._note(f"{self.name}: the engine's process {_how(code)}")
        self._wake()
        self._ended.set()
        self._control.close()
        self.memory.close()
        if self._is_loss and self._on_lost is not None:
            try:
                self._on_lost(self._lost or "")
            except Exception:
                _log.exception("%s: nobody has heard of its loss", self.name)

    def _note(self, end: str) -> None:
        """Notes why nothing can be run any more, if that is new."""
        with self._lock:
            if self._lost is None:
                self._lost = end
                self._is_loss = self._opened and not self._closing

    def _wake(self) -> None:
        """Whoever waits for the process is told that there is nothing to wait for."""
        with self._lock:
            contexts = list(self._contexts)
        for context in contexts:
            context.shut()
        for answers in list(self._waiting.values()):
            answers.put(None)

    def _answer(
        self, answers: Answers, cancelled: Callable[[], bool] | None
    ) -> tuple[int, Any] | None:
        if cancelled is None:
            return answers.get()
        while True:
            try:
                return answers.get(timeout=_ASKED_EVERY_S)
            except Empty:
                if cancelled():
                    raise EngineLoadError(f"{self.name}: given up") from None


def _no_process(name: str, error: Exception) -> EngineLoadError:
    return EngineLoadError(f"{name}: no process can be started: {error}")


def _how(code: int | None) -> str:
    if code is None:
        return "has closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (as the kernel does when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
