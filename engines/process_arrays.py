"""The arrays of a run, as one process tells another of them.

What lies in shared memory is told by its place, once for a set of arrays that is run
again and again. The values of other inputs go along with every run, and those of other
outputs come back.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Final, NamedTuple

import numpy as np

from engines.base import Array
from engines.process_memory import BorrowedMemory, LentMemory
from engines.tensors import Shape, element_count


class Shared(NamedTuple):
    """An array in shared memory."""

    buffer: int
    offset: int
    shape: Shape
    dtype: np.dtype


class Own(NamedTuple):
    """An array that the worker makes: without elements, or an output to send back."""

    shape: Shape
    dtype: np.dtype


Place = Shared | Own | Array | None
"""How an array is told: an array stands for its values, None for an output to make."""

Sent = tuple[int, Array, bool]
"""An output that is sent back: its position, its values, and whether they belong into
the array that was given for it (else they are the output)."""


# -- where the run is asked for -------------------------------------------------------


class KnownSets:
    """Numbers of the sets of arrays that the worker has been told of.

    A set is known by the identity of its arrays, for as long as all of them live; they
    must not be given another shape or dtype in place.

    Args:
        forget: told the number of a set that is no more; called on any thread, wherever
            that thread is, so it must neither wait nor lock.
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._forget = forget
        self._numbers = itertools.count()
        self._known: dict[tuple[int, ...], tuple[int, list[Any]]] = {}

    def get(self, key: tuple[int, ...]) -> int | None:
        """The number of a known set; `key` has the `id` of every array."""
        known = self._known.get(key)
        return None if known is None else known[0]

    def new_number(self) -> int:
        """A number for a new set."""
        return next(self._numbers)

    def add(
        self, key: tuple[int, ...], number: int, arrays: Sequence[Array | None]
    ) -> None:
        """The worker has been told of a set."""
        known = self._known  # not self, which the callbacks would keep alive

        def gone(_: object) -> None:
            # At the death of its first array, before its `id` can be another's.
            if known.pop(key, None) is not None:
                forget(number)

        forget = self._forget
        references = [weakref.ref(a, gone) for a in arrays if a is not None]
        known[key] = number, references

    def clear(self) -> None:
        """Forgets all, and tells nobody."""
        self._known.clear()


def input_place(array: Array, memory: LentMemory) -> Place:
    """How an input is told."""
    if array.dtype == object:
        return array
    return _place(array, memory) or array


def output_place(array: Array | None, memory: LentMemory) -> Place:
    """How an output is told."""
    if array is None:
        return None
    return _place(array, memory) or Own(array.shape, array.dtype)


def _place(array: Array, memory: LentMemory) -> Shared | Own | None:
    if not array.nbytes:
        return Own(array.shape, array.dtype)
    if not array.flags.c_contiguous:
        return None
    address: int = array.__array_interface__["data"][0]
    found = memory.find(address, array.nbytes)
    return None if found is None else Shared(*found, array.shape, array.dtype)


def received(outputs: Sequence[Array | None], sent: Sequence[Sent]) -> list[Array]:
    """The outputs of a run: those that were given, and what was sent back."""
    results: list[Any] = [*outputs]
    for position, values, fills in sent:
        if fills:
            np.copyto(results[position], values)
        else:
            results[position] = values
    return results


# -- where it is run ------------------------------------------------------------------


class RunArrays:
    """What a context executes.

    Args:
        inputs, outputs: how they were told.
        memory: where shared ones lie.

    Raises:
        MemoryError: one of them cannot be had here.
    """

    __slots__ = ("_returned", "inputs", "outputs")

    def __init__(
        self,
        inputs: Sequence[Place],
        outputs: Sequence[Place],
        memory: BorrowedMemory,
    ) -> None:
        self.inputs: list[Any] = [_array(place, memory) for place in inputs]
        self.outputs = [_array(place, memory) for place in outputs]
        self._returned: Final = frozenset(
            i
            for i, (place, array) in enumerate(zip(outputs, self.outputs, strict=True))
            if isinstance(place, Own) and array is not None and array.nbytes
        )

    def to_send(self, results: Sequence[Array]) -> list[Sent] | None:
        """The outputs that the other process cannot see; None if it sees all."""
        given = self.outputs
        if not self._returned and all(map(is_, results, given)):
            return None
        return [
            (i, result, result is given[i])
            for i, result in enumerate(results)
            if result is not given[i] or i in self._returned
        ]


def _array(place: Place, memory: BorrowedMemory) -> Array | None:
    if isinstance(place, Shared):
        count = element_count(place.shape)
        view = memory.view(place.buffer)
        array = np.frombuffer(view, place.dtype, count, place.offset)
        return array.reshape(place.shape)
    if isinstance(place, Own):
        return np.empty(place.shape, place.dtype)
    return place
