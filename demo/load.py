"""The callers of the demo: tritonclient, in a process of its own.

So that the callers take no time from whoever reports. Every answer is compared with the
one that was expected.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np

_TIMEOUT_S = 60.0


class CallersError(Exception):
    """The callers' process has ended; its own traceback says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Callers that each send the next request when the last is answered."""

    address: str
    model: str
    rows: Sequence[Any]
    """Inputs of one row; the callers take them in turn."""
    expected: Sequence[Any]
    """The right answer to each."""
    callers: int
    seconds: float
    """After so long no more is sent, and the measurement ends with the last answer; 0
    sends every row once instead."""


@dataclass(slots=True)
class LoadResult:
    """What the callers saw, and what the daemon says it did for them."""

    turns: list[float] = field(default_factory=list)
    """Answers per second of every measurement that was added."""
    seconds: float = 0.0
    """From the first request to the last answer. A window of fixed length would miss or
    hit a whole batch at its ends, where a run takes long."""
    latencies_s: list[float] = field(default_factory=list)
    """Of all answers."""
    answers: list[Any] = field(default_factory=list)
    """One per row, where every row was sent once."""
    max_difference: float = 0.0
    """The largest of all answers."""
    errors: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    """Processor time of the callers."""
    runs: Counter[int] = field(default_factory=Counter)
    """Batches by their rows."""
    run_ns: Counter[int] = field(default_factory=Counter)
    """Nanoseconds they ran, summed by their rows."""

    def add(self, other: LoadResult) -> None:
        """Takes in another measurement of the same thing."""
        self.turns.append(len(other.latencies_s) / other.seconds)
        self.seconds += other.seconds
        self.latencies_s += other.latencies_s
        self.max_difference = max(self.max_difference, other.max_difference)
        self.errors += other.errors
        self.cpu_s += other.cpu_s
        self.runs += other.runs
        self.run_ns += other.run_ns


class Callers:
    """The process that the load comes from; ended when the block is left."""

    def __enter__(self) -> Callers:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def run(self, load: Load) -> LoadResult:
        """Makes the load and says what came of it.

        Raises:
            CallersError: the process has died.
        """
        try:
            self._pipe.send(load)
            result: LoadResult = self._pipe.recv()
        except (EOFError, OSError):
            raise CallersError("the process of the callers has ended") from None
        return result


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    while True:
        try:
            load = pipe.recv()
        except EOFError:
            return
        pipe.send(asyncio.run(_run(load)))


async def _run(load: Load) -> LoadResult:
    import tritonclient.grpc.aio as grpcclient
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype

    client = grpcclient.InferenceServerClient(load.address)
    description = await client.get_model_metadata(load.model)
    name, answer_name = description.inputs[0].name, description.outputs[0].name
    requests = []
    for row in load.rows:
        tensor = grpcclient.InferInput(name, row.shape, np_to_triton_dtype(row.dtype))
        requests.append(tensor.set_data_from_numpy(row))
    before = await _statistics(client, load.model)
    result = LoadResult()
    once = not load.seconds
    if once:
        result.answers = [None] * len(requests)
    numbers = range(len(requests))
    turns = iter(numbers) if once else itertools.cycle(numbers)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    end = begin + (load.seconds or _TIMEOUT_S)

    async def caller() -> None:
        while (sent := time.perf_counter()) < end:
            turn = next(turns, None)
            if turn is None:
                return
            try:
                answer = await client.infer(
                    load.model, [requests[turn]], client_timeout=_TIMEOUT_S
                )
            except InferenceServerException as error:
                result.errors[str(error)] += 1
                await asyncio.sleep(0.1)
                continue
            result.latencies_s.append(time.perf_counter() - sent)
            values = answer.as_numpy(answer_name)
            difference = _difference(values, load.expected[turn])
            result.max_difference = max(result.max_difference, difference)
            if once:
                result.answers[turn] = values

    await asyncio.gather(*(caller() for _ in range(load.callers)))
    result.seconds = time.perf_counter() - begin
    result.cpu_s = time.process_time() - cpu_begin
    for rows, (count, run_ns) in (await _statistics(client, load.model)).items():
        earlier_count, earlier_ns = before.get(rows, (0, 0))
        result.runs[rows] = count - earlier_count
        result.run_ns[rows] = run_ns - earlier_ns
    await client.close()
    return result


def _difference(values: Any, expected: Any) -> float:
    """The largest absolute difference; infinite where they cannot be compared."""
    if values.shape != expected.shape:
        return math.inf
    difference = float(np.abs(values - expected).max())
    return math.inf if math.isnan(difference) else difference


async def _statistics(client: Any, model: str) -> dict[int, tuple[int, int]]:
    """By rows of the batch: how many were run, and for how long (nanoseconds)."""
    answer = await client.get_inference_statistics(model)
    return {
        int(size.batch_size): (size.compute_infer.count, size.compute_infer.ns)
        for stats in answer.model_stats
        for size in stats.batch_stats
    }
