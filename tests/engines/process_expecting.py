"""An engine for processes whose runs tell what their context has expected."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from engines.base import Array, Engine, ExecutionContext, Launch, PipelinedContext
from engines.errors import EngineRunError
from engines.tensors import Shape, TensorSpec

# First values that do more than count.
UNEXPECTED, KILLED = -1, -2

FACTS: Final = 4
"""Elements of an output: the first value of the input; whether these very lists were
expected; how many lists were; and how many shapes were warmed before the last was."""


class Expecting(Engine):
    """Its runs give `FACTS`.

    Args:
        dtype: of its only input; with "BYTES" the first value counts as 0.
    """

    backend = "expecting"
    outputs = (TensorSpec("facts", "INT64", ("N",)),)

    def __init__(self, dtype: str = "INT64") -> None:
        self.inputs = (TensorSpec("x", dtype, ("N",)),)

    def create_context(self) -> ExecutionContext:
        return ExpectingContext()


class ExpectingContext(PipelinedContext):
    """See `Expecting`; expects nothing that begins with `UNEXPECTED`."""

    def __init__(self) -> None:
        self._expected: list[tuple[Any, Any]] = []
        self._warmed = 0
        self._warmed_before = 0

    def warm(self, shapes: Sequence[Shape]) -> None:
        self._warmed += 1

    def expect(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> None:
        if inputs[0][0] == UNEXPECTED:
            raise EngineRunError("no graph can be made of it")
        self._warmed_before = self._warmed
        if not self._knows(inputs, outputs):
            self._expected.append((inputs, outputs))

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        value = inputs[0][0]
        number = 0 if isinstance(value, bytes) else int(value)
        if number == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        known = self._knows(inputs, outputs)
        facts = [number, known, len(self._expected), self._warmed_before]
        return Counted(facts, outputs[0])

    def _knows(self, inputs: Any, outputs: Any) -> bool:
        return any(i is inputs and o is outputs for i, o in self._expected)


class Counted(Launch):
    """A run of `Expecting`."""

    def __init__(self, facts: list[int], output: Array | None) -> None:
        self._facts = facts
        self._output = np.zeros(FACTS, np.int64) if output is None else output

    def wait(self) -> tuple[list[Array], int]:
        self._output[:] = self._facts
        return [self._output], 1
