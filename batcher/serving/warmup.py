"""Run a model before it is served: warm its cells, learn costs, and look for surprises.

Runs on a thread of its own with an execution context of its own. Where the batch axis
is a guess from the model's file, these runs say whether it holds; where rows of a batch
turn out to depend on each other, or on their padding, a warning says so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from batcher.errors import InvalidRequest
from batcher.rpc.request import Shape
from batcher.serving.shapes import ModelShapes, cut_size
from engines import Engine, EngineError, ExecutionContext
from engines.report import Report, unheard

_NO_ROWS: Final = "its outputs do not have the batch's rows"

# Sizes tried for a dynamic axis that nothing is known of, until the model runs.
_GUESSES: Final = (16, 1, 32, 64, 224)
_MAX_CELLS: Final = 64
_LARGE_RUN_NS: Final = 200_000_000
"""The largest batch is warmed only when it should take less than this, where any
shape may run anyway."""
_TOLERANCE: Final = 0.02
_MIXED: Final = 0.2
"""Relative difference of a row alone and in a batch from which on it is no rounding:
the row holds something of its neighbours. (Dynamically quantized models, whose scale
is that of the whole batch, stay well below.)"""
_COMPARED_ROWS: Final = 5
"""Rows that are run alone and together. A model that puts rows into an order shows it
on made-up ones that lie in another, and these run in both directions."""


@dataclass
class WarmUp:
    """What the runs have shown.

    Attributes:
        costs: (row shapes of the group, rung, run time in ns).
        obstacle: why rows cannot share a batch, as the runs have shown; None if they
            can, as far as is known.
        failure: why no made-up input can be run, None if one could.
        predicted: whether output shapes followed from the axis names.
        warnings: what a user should know.
    """

    costs: list[tuple[tuple[Shape, ...], int, int]] = field(default_factory=list)
    obstacle: str | None = None
    failure: str | None = None
    predicted: bool = True
    warnings: list[str] = field(default_factory=list)


def warm_up(
    engine: Engine,
    context: ExecutionContext,
    shapes: ModelShapes,
    rungs: Sequence[int],
    report: Report = unheard,
) -> WarmUp:
    """Runs every bucket with its smallest and largest rung, and compares.

    A model that cannot be run on made-up input is served all the same: the result then
    has nothing but the reason.

    Args:
        engine: the network.
        context: where it is run.
        shapes: the shape rules; they learn the shapes of outputs that the engine knows.
        rungs: batch sizes worth running.
        report: told how far it is ("first runs").
    """
    result = WarmUp()
    cells = list(_cells(shapes))
    if not engine.warmed_cells_only:
        cells = cells[:_MAX_CELLS]
    for done, sizes in enumerate(cells):
        report("first runs", done, len(cells))
        _warm_cell(context, engine, shapes, sizes, rungs, result)
    if result.costs and result.obstacle is None:
        if shapes.batched and rungs[-1] > 1:
            rows = _compared_rows(engine, rungs)
            if engine.warmed_cells_only:
                for warm in (1, rows):  # a plan's profiles may not hold one row alone
                    _warm(context, shapes, cells[0], warm)
            _compare_rows(context, shapes, cells[0], rows, result)
        _compare_padding(context, engine, shapes, rungs[0], result)
    return result


def _compared_rows(engine: Engine, rungs: Sequence[int]) -> int:
    """How many rows are run together; where each size is warmed, one that is anyway."""
    if engine.warmed_cells_only:
        return next(rung for rung in rungs if rung > 1)
    return min(_COMPARED_ROWS, rungs[-1])


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
        if not any_shape:
            error = _warm(context, shapes, sizes, rung)
            if error is not None:
                result.failure = result.failure or error
                return
        run = _first_run(context, shapes, sizes, rung)
        if isinstance(run, str):
            result.failure = result.failure or run
            return
        inputs, outputs, first_ns = run
        tails = tuple(a.shape[1:] if shapes.batched else a.shape for a in inputs)
        result.costs.append((tails, rung, first_ns))
        _check_outputs(shapes, inputs, outputs, rung, result)


def _warm(
    context: ExecutionContext, shapes: ModelShapes, sizes: dict[str, int], rows: int
) -> str | None:
    """Prepares a cell, and learns the shapes of its outputs; why not, if it fails."""
    tensors = make_inputs(shapes, sizes, rows, _GUESSES[0])
    given = [tuple(array.shape) for array in tensors]
    try:
        context.warm(given)
        known = context.output_shapes(given)
    except EngineError as error:
        return str(error)
    if known is not None:
        first = 1 if shapes.batched else 0
        shapes.learn(
            tuple(shape[first:] for shape in given),
            tuple(None if shape is None else shape[first:] for shape in known),
        )
    return None


def _first_run(
    context: ExecutionContext,
    shapes: ModelShapes,
    sizes: dict[str, int],
    rows: int,
) -> tuple[list[Any], list[Any], int] | str:
    """Inputs, outputs and time of a run that works, whatever its free axes are; or why
    none does."""
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
    return str(error)


def make_inputs(
    shapes: ModelShapes, sizes: dict[str, int], rows: int, guess: int
) -> list[Any]:
    """Random inputs: small floats, integers 0 and 1, strings of digits."""
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
            array = np.empty(shape, dtype=object)
            flat = rng.integers(0, 100, array.size)
            array.reshape(-1)[:] = [b"%d" % number for number in flat]
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
        result.obstacle = _NO_ROWS
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
    rows: int,
    result: WarmUp,
) -> None:
    """Whether rows together give what each gives alone, whatever their order."""
    run = _first_run(context, shapes, sizes, rows)
    if isinstance(run, str):
        return
    inputs, outputs, _ = run
    none = [None] * len(shapes.outputs)
    together = [np.array(o) for o in outputs]  # theirs may be used again
    turned_in = [np.ascontiguousarray(a[::-1]) for a in inputs]
    try:
        turned = [np.array(o) for o in context.execute(turned_in, none)]
        alone = []
        for row in range(rows):
            one = [np.ascontiguousarray(a[row : row + 1]) for a in inputs]
            alone.append([np.array(o) for o in context.execute(one, none)])
    except EngineError as error:
        result.warnings.append(
            "made-up rows that run in a batch do not run alone: whether rows depend on "
            f"each other could not be checked ({error})"
        )
        return
    for i, spec in enumerate(shapes.outputs):
        single = [outputs[i] for outputs in alone]
        for batch in (together[i], turned[i]):
            if (
                not batch.ndim
                or len(batch) != rows
                or any(o.shape != batch[:1].shape for o in single)
            ):
                result.obstacle = _NO_ROWS
                return
        apart = np.concatenate(single)
        _judge(spec.name, apart, together[i], result)
        _judge(spec.name, apart, turned[i][::-1], result)


def _judge(name: str, apart: Any, together: Any, result: WarmUp) -> None:
    """Notes what it means that rows give `apart` alone and `together` in a batch."""
    differs = f"output {name!r} of a row differs when it runs in a batch"
    if _distance(apart, together) > _MIXED:
        result.obstacle = f"{differs}: rows depend on each other"
    elif not result.warnings and not _close(apart, together):
        result.warnings.append(
            f"{differs}, though not by much: rows may depend on each other; "
            'batch_axis = "none" keeps them apart'
        )


def _compare_padding(
    context: ExecutionContext,
    engine: Engine,
    shapes: ModelShapes,
    rows: int,
    result: WarmUp,
) -> None:
    """Whether padded rows give what they give unpadded."""
    for rule in shapes.rules:
        size, bucket = _padded_size(rule.buckets) if rule.padded else (0, 0)
        if not size or (engine.warmed_cells_only and size not in rule.buckets):
            continue
        small = {r.name: r.buckets[0] for r in shapes.rules} | {rule.name: size}
        run = _first_run(context, shapes, small, rows)
        if isinstance(run, str):
            return
        inputs, outputs, _ = run
        plain = [np.array(o) for o in outputs]
        padded = []
        for index, array in enumerate(inputs):
            widths = [(0, 0)] * array.ndim
            for place, axis in rule.places:
                if place == index:
                    widths[axis] = (0, bucket - size)
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
                cut = cut[(slice(None),) * axis + (slice(cut_size(size, ratio)),)]
            changes = (
                f"output {spec.name!r} changes when axis {rule.name!r} is padded from "
                f"{size} to {bucket}"
            )
            if cut.shape != plain[index].shape:
                result.warnings.append(
                    f"{changes}: it has the shape {list(cut.shape)} and not "
                    f"{list(plain[index].shape)}; axes.{rule.name}.outputs says how it "
                    "follows the axis"
                )
            elif not _close(cut, plain[index]):
                result.warnings.append(
                    f"{changes} (made-up input, so a mask of ones and zeros may "
                    f"explain it); check axes.{rule.name}.pad and .outputs"
                )


def _padded_size(buckets: Sequence[int]) -> tuple[int, int]:
    """A size and the bucket it is padded to, to compare; zeros where there is none."""
    if len(buckets) > 1:
        return buckets[0], buckets[1]  # both are shapes that are run anyway
    return buckets[0] // 2, buckets[0]


def _distance(a: Any, b: Any) -> float:
    """How far two outputs lie apart: of numbers relative to their size, of all else
    the share of elements that differ."""
    if a.dtype == object or a.dtype.kind in "biu":
        return float(np.mean(a != b)) if a.size else 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.all(same | finite):
        return float("inf")
    norm = float(np.linalg.norm(x[finite]))
    apart = float(np.linalg.norm((x - y)[finite]))
    return apart / norm if norm else float(apart > 0)


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
