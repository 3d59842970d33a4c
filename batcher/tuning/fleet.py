"""The load-generating processes of a run, seen from the process that started them."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from contextlib import contextmanager
from multiprocessing import connection
from typing import TYPE_CHECKING, Final

from batcher.errors import BatcherError
from batcher.tuning import worker
from batcher.tuning.plan import WorkerCounts, WorkerResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    from batcher.tuning.plan import WorkerPlan

    Pipe = connection.Connection

_CONNECT_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 10.0


class Fleet:
    """Processes that each run one plan; a context manager, which ends them.

    Raises, from every method that listens to them:
        BatcherError: a process could not connect, failed or died; it says which.
    """

    def __init__(self, plans: Sequence[WorkerPlan]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.counts = [WorkerCounts(0, 0, 0) for _ in plans]
        """The processes' latest counts."""
        self.results: list[WorkerResult | None] = [None for _ in plans]
        """The processes' results, None before they end."""
        self._ready = [False for _ in plans]
        self._pipes: list[Pipe] = []
        self._processes: list[BaseProcess] = []
        with _sigint_ignored():
            for plan in plans:
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=worker.main,
                    args=(plan, theirs),
                    name=f"batcher-bench-{plan.index}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def done(self) -> bool:
        """Whether all processes have given their results."""
        return all(result is not None for result in self.results)

    def await_ready(self) -> None:
        """Wait until all connections of all processes are up."""
        give_up_at = time.monotonic() + _CONNECT_TIMEOUT_S
        while not all(self._ready):
            self.listen(0.1)
            if time.monotonic() > give_up_at:
                raise BatcherError(
                    f"the load processes did not connect in {_CONNECT_TIMEOUT_S:g} s"
                )

    def start(self, at_ns: int) -> None:
        """Have all processes begin at one instant of CLOCK_MONOTONIC."""
        for pipe in self._pipes:
            pipe.send(("start", at_ns))

    def stop(self) -> None:
        """End the run now, and wait for the results so far."""
        for pipe, result in zip(self._pipes, self.results, strict=True):
            if result is None:
                pipe.send(("stop", 0))
        give_up_at = time.monotonic() + _STOP_TIMEOUT_S
        while not self.done and time.monotonic() < give_up_at:
            self.listen(0.1)

    def listen(self, timeout_s: float) -> None:
        """Take what the processes have to say, waiting at most `timeout_s` seconds."""
        open_pipes = [
            pipe
            for pipe, result in zip(self._pipes, self.results, strict=True)
            if result is None
        ]
        for pipe in connection.wait(open_pipes, timeout_s):
            index = self._pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, value = self._pipes[index].recv()
            except (EOFError, ConnectionError):
                process = self._processes[index]
                process.join(1.0)
                raise BatcherError(
                    f"load process {index} died (exit code {process.exitcode})"
                ) from None
            if kind == "counts":
                self.counts[index] = value
            elif kind == "ready":
                self._ready[index] = True
            elif kind == "result":
                self.results[index] = value
            else:
                raise BatcherError(f"load process {index}: {value}")


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Processes started here never see Ctrl-C: their parent tells them to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # An ignored signal is inherited, from the first instruction of the child on.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
