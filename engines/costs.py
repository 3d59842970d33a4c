"""How long runs take, alone and beside others: measured before a model is served.

The device's own time comes from the back end (CUDA events on a GPU), the host's from
the clock around a run. Runs beside others take longer, since they share the device.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from engines.base import Array, Engine, ExecutionContext, PipelinedContext
from engines.errors import EngineError
from engines.staging import Cell, Staging
from engines.tensors import Shape

_RUNS: Final = 5  # of each cell; the first warms caches and is not counted
_LONG_NS: Final = 50_000_000  # what takes longer is run once


@dataclass(frozen=True, slots=True)
class CellCost:
    """The time of one kind of run.

    Attributes:
        inputs: the shape of every input.
        busy: how many contexts were running such a cell at the same time.
        device_ns: median time on the device.
        host_ns: median of what passes for the caller beyond that.
    """

    inputs: tuple[Shape, ...]
    busy: int
    device_ns: int
    host_ns: int


def measure(
    engine: Engine, contexts: Sequence[ExecutionContext], cells: Sequence[Cell]
) -> list[CellCost]:
    """Runs every cell on 1, 2, … all of the contexts at once.

    Args:
        engine: of the contexts.
        contexts: which no other thread uses meanwhile.
        cells: warm ones; inputs are zeros, of which some networks are faster than of
            real values.

    Returns:
        One cost for each cell and number of contexts; cells that fail are left out.
    """
    runs = [_Runs(engine, context) for context in contexts]
    costs = []
    for cell in cells:
        for busy in range(1, len(runs) + 1):
            threads = [
                threading.Thread(target=run.times, args=(cell,)) for run in runs[:busy]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            times = [pair for run in runs[:busy] for pair in run.taken]
            if all(run.taken for run in runs[:busy]):  # else they were not beside it
                device_ns = statistics.median(device for device, _ in times)
                whole_ns = statistics.median(whole for _, whole in times)
                host_ns = max(whole_ns - device_ns, 0)
                shapes = tuple(tuple(shape) for shape in cell.inputs)
                costs.append(CellCost(shapes, busy, int(device_ns), int(host_ns)))
    return costs


class _Runs:
    """Runs on one context, with buffers of their own."""

    def __init__(self, engine: Engine, context: ExecutionContext) -> None:
        self._context = context
        self._staging = Staging(0, engine.inputs, engine.outputs, engine.host_buffer)
        self.taken: list[tuple[int, int]] = []

    def times(self, cell: Cell) -> None:
        """Sets `taken`: (time on the device, for the caller) of each run, in ns."""
        self.taken = []
        self._context.enter_thread()
        try:
            arrays = self._staging.arrays(cell)
            for view in self._staging.inputs:
                np.frombuffer(view, np.uint8)[:] = 0
            for number in range(_RUNS):
                started_ns = time.monotonic_ns()
                device_ns = self._run(arrays.inputs, arrays.outputs)
                whole_ns = time.monotonic_ns() - started_ns
                if number or whole_ns > _LONG_NS:
                    self.taken.append((device_ns or whole_ns, whole_ns))
                if whole_ns > _LONG_NS:
                    return
        except (EngineError, MemoryError, ValueError):
            self.taken = []  # zeros are no input for this network, or there are none

    def _run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> int:
        if isinstance(self._context, PipelinedContext):
            return self._context.launch(inputs, outputs).wait()[1]
        self._context.execute(inputs, outputs)
        return 0


def to_json(costs: Sequence[CellCost]) -> str:
    """As a file; `from_json` reads it."""
    return json.dumps({"format": 1, "costs": [asdict(c) for c in costs]}, indent=1)


def from_json(text: str) -> list[CellCost]:
    """Reads what `to_json` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        body: Any = json.loads(text)
        if body["format"] != 1:
            raise ValueError("another format")
        return [
            CellCost(
                tuple(tuple(map(int, shape)) for shape in c["inputs"]),
                int(c["busy"]),
                int(c["device_ns"]),
                int(c["host_ns"]),
            )
            for c in body["costs"]
        ]
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no table of costs: {error!r}") from error
