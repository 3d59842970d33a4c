"""The load-generating processes of a run, seen from the process that started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Final

from batcher.errors import BatcherError
from batcher.tuning.plan import WorkerCounts, WorkerResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from batcher.tuning.plan import WorkerPlan

    Pipe = connection.Connection

_CONNECT_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 10.0
_END_TIMEOUT_S: Final = 2.0


class Fleet:
    """Processes that each run one plan; a context manager, which ends them.

    Raises, from every method that listens to them:
        BatcherError: a process could not connect, failed or died; it says which.
    """

    def __init__(self, plans: Sequence[WorkerPlan]) -> None:
        self.counts = [WorkerCounts(0, 0, 0) for _ in plans]
        """The processes' latest counts."""
        self.results: list[WorkerResult | None] = [None for _ in plans]
        """The processes' results, None before they end."""
        self._ready = [False for _ in plans]
        self._pipes: list[Pipe] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for plan in plans:
            ours, theirs = connection.Pipe()
            self._processes.append(_spawn(theirs))
            theirs.close()
            ours.send(plan)
            self._pipes.append(ours)

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
            # A process whose pipe is closed ends by itself.
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

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
                code = self._processes[index].wait(_END_TIMEOUT_S)
                raise BatcherError(
                    f"load process {index} died (exit code {code})"
                ) from None
            if kind == "counts":
                self.counts[index] = value
            elif kind == "ready":
                self._ready[index] = True
            elif kind == "result":
                self.results[index] = value
            else:
                raise BatcherError(f"load process {index}: {value}")


def _spawn(pipe: Pipe) -> subprocess.Popen[bytes]:
    """Start a process that runs the plan it is sent through `pipe`.

    Not by `multiprocessing`: its processes first import the main program again, which
    for a command-line tool takes longer than all that the load needs.
    """
    fd = pipe.fileno()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-c"),
            f"from batcher.tuning.worker import serve; serve({fd})",
        ],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=(fd,),
        # Not in the terminal's group: Ctrl-C is for us, and we tell them to stop.
        process_group=0,
    )
