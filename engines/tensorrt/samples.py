"""Inputs to compare a plan on: random ones that suit the model, or given ones.

Random integers are the danger: an id outside its table reads outside of it, or fails
the run. So ids stay within the smallest table that the graph looks them up in, and
integers that are looked up nowhere are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from engines.base import Array
from engines.errors import EngineLoadError
from engines.tensors import Shape, TensorSpec

# Operators that change an id's shape or type, and not its value.
_CARRIERS: Final = {
    "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose",
    "Expand", "Slice", "Concat",
}  # fmt: skip
_UNKNOWN: Final = 2  # ids below this are taken as safe anywhere


def random_samples(
    inputs: Sequence[TensorSpec],
    shapes: Sequence[Mapping[str, Shape]],
    *,
    vocabularies: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Iterator[dict[str, Array]]:
    """One sample for each of the shapes; the same for the same seed.

    Floats are normal with variance 1; UINT8 and INT8 without a vocabulary spread over
    all their values, as images do; an input with "mask" in its name is 1 from the left
    and 0 on a tail that differs by row, as tokenizers make it (never all 0).

    Args:
        inputs: of the engine.
        shapes: see `Grid.corners`.
        vocabularies: per input of integers, how many ids there are: see
            `vocabulary_sizes`.
        seed: of the generator.

    Raises:
        EngineLoadError: an input has a type that cannot be made up.
    """
    sizes = vocabularies or {}
    for number, each in enumerate(shapes):
        rng = np.random.default_rng([seed, number])
        yield {
            spec.name: _random(spec, each[spec.name], sizes.get(spec.name), rng)
            for spec in inputs
        }


def vocabulary_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Per input that is looked up in a table, the rows of the smallest such table.

    Follows each input through operators that keep values, to Gather nodes over a
    constant; external weights need not be loaded.
    """
    graph = model.graph
    rows = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                rows[node.output[0]] = tuple(attribute.t.dims)
        elif node.op_type in ("Identity", "Cast", "DequantizeLinear") and (
            node.input[0] in rows
        ):
            rows[node.output[0]] = rows[node.input[0]]
    sources = {
        value.name: {value.name} for value in graph.input if value.name not in rows
    }
    sizes: dict[str, int] = {}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] in rows:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            size = rows[node.input[0]][axis]
            for name in sources.get(node.input[1], ()):
                sizes[name] = min(size, sizes.get(name, size))
        elif node.op_type in _CARRIERS:
            carried = set().union(*(sources.get(name, set()) for name in node.input))
            for name in node.output:
                sources[name] = carried
    return {name: size for name, size in sizes.items() if size > 0}


def load_samples(path: Path, inputs: Sequence[TensorSpec]) -> list[dict[str, Array]]:
    """Samples from an `.npz` file: one array per input, or `input.0`, `input.1`, …

    Args:
        path: the file; arrays of Python objects in it are refused, never unpickled.
        inputs: what it must hold, in these dtypes and with these shapes.

    Raises:
        EngineLoadError: it cannot be read, or does not fit; names the array.
    """
    names = {spec.name for spec in inputs}
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # zipfile's, numpy's and the system's
        raise EngineLoadError(f"{path}: no .npz file of arrays: {error}") from error
    groups: dict[int, dict[str, Array]] = {}
    for key, array in arrays.items():
        name, number = key, 0
        head, _, tail = key.rpartition(".")
        if key not in names and head in names and tail.isdigit():
            name, number = head, int(tail)
        if name not in names:
            raise EngineLoadError(
                f"{path}: the model has no input {name!r} (it has "
                f"{', '.join(sorted(names))})"
            )
        groups.setdefault(number, {})[name] = array
    for number, sample in groups.items():
        for spec in inputs:
            if spec.name not in sample:
                raise EngineLoadError(
                    f"{path}: sample {number} has no array for input {spec.name!r}"
                )
            _check_sample(path, spec, sample[spec.name])
    if not groups:
        raise EngineLoadError(f"{path}: it holds no arrays")
    return [groups[number] for number in sorted(groups)]


def _check_sample(path: Path, spec: TensorSpec, array: Array) -> None:
    wanted = spec.wire_shape
    fits = len(wanted) == array.ndim and all(
        fixed in (-1, size) for fixed, size in zip(wanted, array.shape, strict=True)
    )
    if array.dtype != spec.numpy or not fits:
        raise EngineLoadError(
            f"{path}: input {spec.name!r} must be {spec.numpy} {list(wanted)}; the "
            f"array is {array.dtype} {list(array.shape)}"
        )


def _random(
    spec: TensorSpec, shape: Shape, vocabulary: int | None, rng: np.random.Generator
) -> Array:
    kind = spec.numpy
    if spec.dtype == "BYTES":
        raise EngineLoadError(
            f"input {spec.name!r} holds strings, which cannot be made up: give samples"
        )
    if spec.dtype == "BOOL" or "mask" in spec.name.lower():
        return _mask(shape, rng).astype(kind)
    if spec.dtype in ("UINT8", "INT8") and vocabulary is None:
        limits = np.iinfo(kind)
        return rng.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)
    if spec.dtype.startswith(("INT", "UINT")):
        return rng.integers(0, vocabulary or _UNKNOWN, shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def _mask(shape: Shape, rng: np.random.Generator) -> Array:
    mask = np.ones(shape, np.int64)
    if len(shape) >= 2 and shape[-1] > 1:
        length = shape[-1]
        rows = mask.reshape(-1, length)
        kept = rng.integers(1, length, len(rows), endpoint=True)
        kept[0] = length
        rows[:] = np.arange(length) < kept[:, None]
    return mask
