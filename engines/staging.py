"""Where the inputs and outputs of a run lie: flat buffers, and arrays over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from engines.base import Array
from engines.tensors import Shape, TensorSpec, element_count

_MAX_KNOWN: Final = 512  # cells whose arrays a staging keeps


class Cell:
    """The shapes of one kind of batch.

    Compared by identity: keep one for each kind, since stagings keep what they make for
    it.

    Args:
        inputs: per input, the shape of the whole batch.
        outputs: per output, the same; None where it is not known beforehand.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(
        self, inputs: Sequence[Shape], outputs: Sequence[Shape | None]
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs


class Arrays:
    """The buffers of a staging, seen in the shapes of one cell.

    Attributes:
        inputs, outputs: what a context executes.
        derived: for the owner of the slot, to keep what it has made of `outputs`.
    """

    __slots__ = ("derived", "inputs", "outputs")

    def __init__(self, inputs: list[Array], outputs: list[Array | None]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.derived: Any = None


class Staging:
    """One set of input and output buffers, flat, growing to the largest batch seen.

    Args:
        index: its number within the slot.
        inputs, outputs: the engine's.
        allocate: makes a buffer of so many bytes.

    Attributes:
        index: its number within the slot.
        inputs: per input a byte view to write rows into (BYTES: unused).
        objects: per BYTES input the array of Python bytes to run, else None.
    """

    __slots__ = (
        "_allocate",
        "_known",
        "_specs_in",
        "_specs_out",
        "index",
        "inputs",
        "objects",
        "outputs",
    )

    def __init__(
        self,
        index: int,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        allocate: Callable[[int], memoryview],
    ) -> None:
        self.index = index
        self._allocate = allocate
        self._specs_in = inputs
        self._specs_out = outputs
        self.inputs = [memoryview(bytearray()) for _ in inputs]
        self.outputs = [memoryview(bytearray()) for _ in outputs]
        self.objects: list[Array | None] = [None] * len(inputs)
        self._known: dict[Cell, Arrays] = {}

    def arrays(self, cell: Cell) -> Arrays:
        """The buffers in the shapes of `cell`, made larger where they must be.

        Raises:
            MemoryError, ValueError: a shape that no memory holds.
        """
        known = self._known.get(cell)
        if known is not None:
            return known
        made = Arrays(
            [self.input_array(i, shape) for i, shape in enumerate(cell.inputs)],
            [self.output_array(i, shape) for i, shape in enumerate(cell.outputs)],
        )
        if all(spec.dtype != "BYTES" for spec in self._specs_in):
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[cell] = made
        return made

    def reserve_input(self, position: int, size: int) -> memoryview:
        """The byte view of input `position`, at least `size` bytes long."""
        if len(self.inputs[position]) < size:
            self._known.clear()
            self.inputs[position] = self._allocate(size)
        return self.inputs[position]

    def input_array(self, position: int, shape: Shape) -> Array:
        """Input `position` as an array of `shape` over the same bytes."""
        objects = self.objects[position]
        if objects is not None:
            return objects
        spec = self._specs_in[position]
        count = element_count(shape)
        view = self.reserve_input(position, count * spec.itemsize)
        return np.frombuffer(view, spec.numpy, count).reshape(shape)

    def output_array(self, position: int, shape: Shape | None) -> Array | None:
        """Where output `position` goes, or None where its shape is not known."""
        spec = self._specs_out[position]
        if shape is None or spec.dtype == "BYTES":
            return None
        count = element_count(shape)
        if len(self.outputs[position]) < count * spec.itemsize:
            self._known.clear()
            self.outputs[position] = self._allocate(count * spec.itemsize)
        array = np.frombuffer(self.outputs[position], spec.numpy, count)
        return array.reshape(shape)
