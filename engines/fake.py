"""An engine without a network: it echoes its inputs after a known time.

Real enough to measure a server with: a run of `rows` rows takes
`base_ms + rows * per_row_us`, slept outside the interpreter lock, or nothing at all
with both at 0. Output i is input i (or `y = x` cut and repeated to the output's size).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.base import Array, Engine, ExecutionContext
from engines.errors import EngineLoadError, EngineRunError
from engines.tensors import Shape, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """What the engine pretends to be."""

    inputs: tuple[TensorSpec, ...]
    """Inputs; axis 0 is the batch."""

    outputs: tuple[TensorSpec, ...]
    """Outputs; each echoes the input of the same position (the last, if there are
    fewer inputs) and has its dtype."""

    base_ms: float = 0.0
    """Milliseconds of every run."""

    per_row_us: float = 0.0
    """Microseconds a run takes longer per row."""

    sleep: bool = True
    """Whether the time is really slept; False answers at once (for simulations)."""

    fail_value: float | None = None
    """When set, a run whose first input holds this value fails: a poison request."""

    cold_ms: float = 0.0
    """When above 0, as on TensorRT only shapes that were warmed can be run, and to warm
    one takes so many milliseconds (once for all contexts)."""


class FakeEngine(Engine):
    """See the module's text.

    Raises:
        EngineLoadError: no input or output, two of one name, or an output of another
            dtype than its input's.
    """

    backend = "fake"

    def __init__(self, options: FakeOptions) -> None:
        if not options.inputs or not options.outputs:
            raise EngineLoadError("a fake engine needs at least one input and output")
        for kind, specs in (("input", options.inputs), ("output", options.outputs)):
            names = [spec.name for spec in specs]
            for name in names:
                if names.count(name) > 1:
                    raise EngineLoadError(f"two {kind}s are called {name!r}")
        for i, output in enumerate(options.outputs):
            source = options.inputs[min(i, len(options.inputs) - 1)]
            if output.dtype != source.dtype:
                raise EngineLoadError(
                    f"fake output {output.name!r} is {output.dtype}, but it echoes "
                    f"input {source.name!r}, which is {source.dtype}"
                )
        self.options = options
        self.warmed_cells_only = options.cold_ms > 0
        self.made: set[tuple[Shape, ...]] = set()  # what any context has warmed
        self.inputs = options.inputs
        self.outputs = options.outputs

    def run_time_s(self, rows: int) -> float:
        """Seconds that a run of `rows` rows takes."""
        return self.options.base_ms / 1e3 + rows * self.options.per_row_us / 1e6

    def create_context(self) -> FakeContext:
        return FakeContext(self)


class FakeContext(ExecutionContext):
    """One run at a time of a `FakeEngine`."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._warm: set[tuple[Shape, ...]] = set()

    def warm(self, shapes: Sequence[Shape]) -> None:
        key = tuple(map(tuple, shapes))
        if key not in self._engine.made:
            time.sleep(self._engine.options.cold_ms / 1e3)
            self._engine.made.add(key)
        self._warm.add(key)

    def execute(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        engine = self._engine
        options = engine.options
        shapes = tuple([array.shape for array in inputs])
        if engine.warmed_cells_only and shapes not in self._warm:
            raise EngineRunError(f"the shapes {list(shapes)} are not warm")
        if options.fail_value is not None and np.any(inputs[0] == options.fail_value):
            raise EngineRunError(f"the value {options.fail_value} cannot be run")
        if options.sleep:
            seconds = engine.run_time_s(len(inputs[0]))
            if seconds > 0:
                time.sleep(seconds)
        results = []
        for i, output in enumerate(outputs):
            source = inputs[min(i, len(inputs) - 1)]
            if output is None:
                output = np.empty(self._shape(i, source), source.dtype)
            if output.shape == source.shape:
                np.copyto(output, source)
            else:
                output[...] = _refit(source, output.shape)
            results.append(output)
        return results

    def _shape(self, index: int, source: Array) -> tuple[int, ...]:
        axes = self._engine.outputs[index].shape
        if len(axes) == source.ndim:
            return tuple(
                a if isinstance(a, int) else s
                for a, s in zip(axes, source.shape, strict=True)
            )
        return (len(source), *(a if isinstance(a, int) else 1 for a in axes[1:]))


def _refit(source: Array, shape: tuple[int, ...]) -> Array:
    """Every row of `source` repeated or cut to the size of a row of `shape`."""
    rows = [np.resize(row, shape[1:]) for row in source]
    return np.stack(rows) if rows else np.empty(shape, source.dtype)
