"""What a lane keeps: device buffers, kinds of runs, and runs that are under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from engines import cuda
from engines.base import Array, Launch
from engines.tensors import Shape

SETS: Final = 3
"""Sets of device buffers in a lane, one for each staging of a slot: while one is run,
the next is filled and the last one read."""

_EARLY_NS: Final = 80_000
"""A thread that waits for a run wakes so much before its expected end, and spins."""
_LONG_NS: Final = 100_000
"""What is sooner over is not slept for: that alone takes as long."""
_WEIGHT: Final = 8  # a run moves the expectation by one part of this


class BufferSet:
    """Device buffers of one run, and the marks that say when they are free.

    Attributes:
        inputs, outputs: one buffer per tensor.
        arrived: the inputs are there.
        began, ended: of the run; after `ended` the inputs may be overwritten.
        left: the outputs may be overwritten.
        spun: as `left`, for a thread that spins.
        apart: whether the outputs leave on another stream, and `left` must be waited
            for.
    """

    __slots__ = (
        "apart",
        "arrived",
        "began",
        "ended",
        "inputs",
        "left",
        "outputs",
        "spun",
    )

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.inputs = [cuda.DeviceBuffer(size) for size in inputs]
        self.outputs = [cuda.DeviceBuffer(size) for size in outputs]
        self.arrived = cuda.Event()
        self.began = cuda.Event(timed=True)
        self.ended = cuda.Event(timed=True)
        self.left = cuda.Event()
        self.spun = cuda.Event(spins=True)
        self.apart = False

    def close(self) -> None:
        for buffer in (*self.inputs, *self.outputs):
            buffer.close()


class LaneCell:
    """Runs of one set of input shapes.

    Attributes:
        context: with the profile that holds them.
        shapes: of the inputs.
        outputs: of the outputs; None where the values decide.
        along: whether copies go along on the compute stream.
        graphs: the network alone, per buffer set; None where runs are plain.
        plain_ns, graph_ns: a run on the device when it was warmed; 0 before.
        expected_ns: how long a run takes lately, on the device.
    """

    __slots__ = (
        "along",
        "context",
        "expected_ns",
        "graph_ns",
        "graphs",
        "outputs",
        "plain_ns",
        "shapes",
    )

    def __init__(
        self,
        context: Any,
        shapes: tuple[Shape, ...],
        outputs: tuple[Shape | None, ...],
        along: bool,
    ) -> None:
        self.context = context
        self.shapes = shapes
        self.outputs = outputs
        self.along = along
        self.graphs: list[cuda.Graph | None] = [None] * SETS
        self.plain_ns = 0
        self.graph_ns = 0
        self.expected_ns = 0

    @property
    def known(self) -> bool:
        """Whether the shapes of all outputs are known before a run."""
        return None not in self.outputs

    def drop_graphs(self) -> None:
        """Runs plainly from now on."""
        for graph in self.graphs:
            if graph is not None:
                graph.close()
        self.graphs = [None] * SETS


class Route:
    """A run of certain arrays, worked out once.

    Attributes:
        cell: what is run.
        inputs: the very list of arrays.
        outputs: where the outputs go.
        index: of the buffer set.
        into, back: copies to the device and from it: (target, source, bytes).
        whole: copies and network as one graph, or None.
    """

    __slots__ = ("back", "cell", "index", "inputs", "into", "outputs", "whole")

    def __init__(
        self,
        cell: LaneCell,
        buffers: BufferSet,
        index: int,
        inputs: Sequence[Array],
        outputs: list[Array],
    ) -> None:
        self.cell = cell
        self.index = index
        self.inputs = inputs
        self.outputs = outputs
        self.into = [
            (buffer.pointer, address_of(array), array.nbytes)
            for array, buffer in zip(inputs, buffers.inputs, strict=True)
            if array.nbytes
        ]
        self.back = [
            (address_of(array), buffer.pointer, array.nbytes)
            for array, buffer in zip(outputs, buffers.outputs, strict=True)
            if array.nbytes
        ]
        self.whole: cuda.Graph | None = None

    def copy_in(self, stream: cuda.Stream) -> None:
        """Queues the copies of the inputs to the device."""
        for target, source, size in self.into:
            cuda.copy_to_device(target, source, size, stream)

    def copy_out(self, stream: cuda.Stream) -> None:
        """Queues the copies of the outputs from the device."""
        for target, source, size in self.back:
            cuda.copy_to_host(target, source, size, stream)


class Course:
    """The runs under way on a lane, counted by the thread that launches them and by
    the one that waits."""

    __slots__ = ("_begun", "_ended")

    def __init__(self) -> None:
        self._begun = 0  # each is written by one thread only
        self._ended = 0

    def begin(self) -> bool:
        """Counts a run; returns whether nothing else is under way."""
        alone = self._begun == self._ended
        self._begun += 1
        return alone

    def undo(self) -> None:
        """Counts out a run that could not be launched."""
        self._begun -= 1

    def end(self) -> None:
        """Counts the end of a run."""
        self._ended += 1


class Queued(Launch):
    """A run on the device."""

    __slots__ = ("_alone", "_begun_ns", "_course", "_route", "_set")

    def __init__(
        self, route: Route, buffers: BufferSet, course: Course, alone: bool
    ) -> None:
        self._route = route
        self._set = buffers
        self._course = course
        self._alone = alone
        self._begun_ns = time.monotonic_ns()

    def wait(self) -> tuple[list[Array], int]:
        cell, buffers, course = self._route.cell, self._set, self._course
        try:
            if self._alone and cell.expected_ns:
                # Somebody waits for this very run: be there when it ends. Asleep for
                # most of the time, as others may need the core.
                due_ns = self._begun_ns + cell.expected_ns - _EARLY_NS
                remaining_ns = due_ns - time.monotonic_ns()
                if remaining_ns > _LONG_NS:
                    time.sleep(remaining_ns / 1e9)
                buffers.spun.synchronize()
            else:
                buffers.left.synchronize()
        finally:
            course.end()
        # By the device's clock: what the host sees includes how long it has slept.
        run_ns = buffers.ended.elapsed_ns(buffers.began)
        expected_ns = cell.expected_ns or run_ns
        cell.expected_ns = expected_ns + (run_ns - expected_ns) // _WEIGHT
        return self._route.outputs, run_ns


class Ended(Launch):
    """A run that had to be waited for at once."""

    __slots__ = ("_result",)

    def __init__(self, outputs: list[Array], run_ns: int) -> None:
        self._result = outputs, run_ns

    def wait(self) -> tuple[list[Array], int]:
        return self._result


def address_of(array: Array) -> int:
    """Where the values of an array begin."""
    address: int = array.__array_interface__["data"][0]
    return address
