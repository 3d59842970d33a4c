"""Run a model before it is served: warm its cells, learn costs, and look for surprises.

Runs on a thread of its own with an execution context of its own. Where the batch axis
is a guess from the model's file, these runs say whether it holds; where rows of a batch
turn out to depend on each other, or on their padding, a warning says so.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from batcher.errors import InvalidRequest
from batcher.rpc.request import Shape
from batcher.serving.shapes import ModelShapes, cut_size
from engines import Engine, EngineError, ExecutionContext

log = logging.getLogger(__name__)

# Sizes tried for a dynamic axis that nothing is known of, until the model runs.
_GUESSES: Final = (16, 1, 32, 64, 224)
_MAX_CELLS: Final = 64
_LARGE_RUN_NS: Final = 200_000_000
"""The largest batch is warmed only when it should take less than this, where any
shape may run anyway."""
_TOLERANCE: Final = 0.02


@dataclass
class WarmUp:
    """What the runs have shown.

    Attributes:
        costs: (row shapes of the group, rung, run time in ns).
        batches: False when an output does not have the batch's rows.
        predicted: whether output shapes followed from the axis names.
        warnings: what a user should know.
    """

    costs: list[tuple[tuple[Shape, ...], int, int]] = field(default_factory=list)
    batches: bool = True
    predicted: bool = True
    warnings: list[str] = field(default_factory=list)


def warm_up(engine: Engine, shapes: ModelShapes, rungs: Sequence[int]) -> WarmUp:
    """Runs every bucket with its smallest and largest rung, and compares.

    A model that cannot be run on made-up input is served all the same: the result is
    then empty, and the log says so.
    """
    result = WarmUp()
    context = engine.create_context()
    try:
        cells = list(itertools.islice(_cells(shapes), _MAX_CELLS))
        for sizes in cells:
            _warm_cell(context, engine, shapes, sizes, rungs, result)
        if result.costs and shapes.batched and result.batches and rungs[-1] > 1:
            _compare_rows(context, shapes, cells[0], result)
            _compare_padding(context, shapes, result)
    finally:
        context.close()
    return result


def _cells(shapes: ModelShapes) -> Any:
    """Every combination of buckets, as axis rule name to size."""
    choices = [[(rule.name, b) for b in rule.buckets] for rule in shapes.rules]
    for combination in itertools.product(*choices):
        yield dict(combination)


def _warm_cell(
    context: ExecutionContext,
    engine: Engine,
    shapes: ModelShapes,
    sizes: dict[str, int],
    rungs: Sequence[int],
    result: WarmUp,
) -> None:
    first_ns = 0
    for rung in dict.fromkeys((rungs[0], rungs[-1])):
        expected_ns = first_ns * rung // rungs[0]
        any_shape = not engine.warmed_cells_only
        if rung != rungs[0] and any_shape and expected_ns > _LARGE_RUN_NS:
            continue  # its first caller will not notice one cold run
        run = _first_run(context, shapes, sizes, rung)
        if run is None:
            return
        inputs, outputs, first_ns = run
        tails = tuple(a.shape[1:] if shapes.batched else a.shape for a in inputs)
        result.costs.append((tails, rung, first_ns))
        _check_outputs(shapes, inputs, outputs, rung, result)


def _first_run(
    context: ExecutionContext, shapes: ModelShapes, sizes: dict[str, int], rows: int
) -> tuple[list[Any], list[Any], int] | None:
    """Inputs, outputs and time of a run that works, whatever its free axes are."""
    error: EngineError | None = None
    free = any(
        not isinstance(axis, int) for spec in shapes.inputs for axis in spec.shape[1:]
    )
    for guess in _GUESSES if free else _GUESSES[:1]:
        inputs = make_inputs(shapes, sizes, rows, guess)
        try:
            context.execute(inputs, [None] * len(shapes.outputs))  # cold
            started_ns = time.monotonic_ns()
            outputs = context.execute(inputs, [None] * len(shapes.outputs))
            return inputs, outputs, time.monotonic_ns() - started_ns
        except EngineError as failed:
            error = failed
    log.info("warm-up with made-up input failed, and is left out: %s", error)
    return None


def make_inputs(
    shapes: ModelShapes, sizes: dict[str, int], rows: int, guess: int
) -> list[Any]:
    """Random inputs: small floats, integers 0 and 1, empty strings."""
    rng = np.random.default_rng(rows)
    governed = {
        place: sizes[rule.name] for rule in shapes.rules for place in rule.places
    }
    arrays = []
    for index, spec in enumerate(shapes.inputs):
        shape = [
            axis if isinstance(axis, int) else governed.get((index, i), guess)
            for i, axis in enumerate(spec.shape)
        ]
        if shapes.batched:
            shape[0] = rows
        if spec.dtype == "BYTES":
            array = np.full(shape, b"", dtype=object)
        elif spec.dtype.startswith(("FP", "BF")):
            array = rng.normal(0, 1, shape).astype(spec.numpy)
        else:
            array = rng.integers(0, 2, shape).astype(spec.numpy)
        arrays.append(array)
    return arrays


def _check_outputs(
    shapes: ModelShapes,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    rung: int,
    result: WarmUp,
) -> None:
    if shapes.batched and any(not o.ndim or len(o) != rung for o in outputs):
        result.batches = False
        return
    try:
        fit = shapes.fit(tuple(tuple(a.shape) for a in inputs))
    except InvalidRequest:  # not reached: the inputs are made to fit
        return
    for expected, output in zip(fit.group.cell(rung).outputs, outputs, strict=True):
        if expected is not None and expected != tuple(output.shape):
            result.predicted = False


def _compare_rows(
    context: ExecutionContext,
    shapes: ModelShapes,
    sizes: dict[str, int],
    result: WarmUp,
) -> None:
    """Whether two rows together give what each gives alone."""
    run = _first_run(context, shapes, sizes, 2)
    if run is None:
        return
    inputs, together, _ = run
    if any(not o.ndim or len(o) != 2 for o in together):
        result.batches = False
        return
    none = [None] * len(shapes.outputs)
    for row in (0, 1):
        alone_in = [np.ascontiguousarray(a[row : row + 1]) for a in inputs]
        kept = [np.array(o[row : row + 1]) for o in together]
        try:
            alone = context.execute(alone_in, none)
        except EngineError:
            return
        for spec, a, b in zip(shapes.outputs, alone, kept, strict=True):
            if a.shape != b.shape or not _close(a, b):
                result.warnings.append(
                    f"output {spec.name!r} of a row differs when it runs in a batch: "
                    'rows depend on each other; batch_axis = "none" keeps them apart'
                )
                return


def _compare_padding(
    context: ExecutionContext, shapes: ModelShapes, result: WarmUp
) -> None:
    """Whether a padded row gives what it gives unpadded."""
    for rule in shapes.rules:
        if not rule.padded or len(rule.buckets) < 2:
            continue
        small = {r.name: r.buckets[0] for r in shapes.rules}
        run = _first_run(context, shapes, small, 1)
        if run is None:
            return
        inputs, outputs, _ = run
        plain = [np.array(o) for o in outputs]
        bucket = rule.buckets[1]
        padded = []
        for index, array in enumerate(inputs):
            widths = [(0, 0)] * array.ndim
            for place, axis in rule.places:
                if place == index:
                    widths[axis] = (0, bucket - rule.buckets[0])
            value = rule.pad.get(index, 0)
            padded.append(np.pad(array, widths, constant_values=value))
        try:
            filled = context.execute(padded, [None] * len(shapes.outputs))
        except EngineError:
            return
        for index, spec in enumerate(shapes.outputs):
            cut = filled[index]
            if index in rule.outputs:
                axis, ratio = rule.outputs[index]
                size = cut_size(rule.buckets[0], ratio)
                cut = cut[(slice(None),) * axis + (slice(size),)]
            if cut.shape != plain[index].shape or not _close(cut, plain[index]):
                result.warnings.append(
                    f"output {spec.name!r} changes when axis {rule.name!r} is padded "
                    f"from {rule.buckets[0]} to {bucket} (made-up input, so a mask of "
                    "ones and zeros may explain it); check axes."
                    f"{rule.name}.pad and .outputs"
                )


def _close(a: Any, b: Any) -> bool:
    """Whether two outputs agree but for rounding.

    Generous, since made-up input can be badly conditioned (differences of 0.2 % of the
    range were seen on a model that is exact on real input), while rows that depend on
    each other differ by as much as they hold.
    """
    if a.dtype == object or a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.abs(x[np.isfinite(x)])
    tolerance = _TOLERANCE * (finite.max() if finite.size else 1.0)
    return bool(np.allclose(x, y, rtol=_TOLERANCE, atol=tolerance, equal_nan=True))
