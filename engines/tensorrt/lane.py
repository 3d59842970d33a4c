"""A lane: one compute stream of a GPU, and the contexts, buffers and graphs on it.

A run is three steps on the device: inputs to it, the network, outputs back. A lane has
two sets of device buffers, so that the inputs of the next run travel, and its kernels
are queued, while one is running. All profiles share one block of activation memory,
since runs of a lane follow each other; each has a context of its own, because changing
the profile of a context costs 6 ms (measured).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines import cuda
from engines.base import Array, Launch, PipelinedContext
from engines.errors import EngineRunError
from engines.tensorrt.messages import collected_errors
from engines.tensors import Shape, element_count

if TYPE_CHECKING:
    from engines.tensorrt.engine import TensorRTEngine

log = logging.getLogger(__name__)

SETS: Final = 2
"""Runs that can be under way on a lane: one that runs, and one that is queued."""

_ALONG: Final = 1 << 18
"""Bytes up to which inputs and outputs are copied on the compute stream itself: a
second stream and its events cost more host time than such a copy takes."""

_WORTH_IT: Final = 1.02
"""A graph may take this much longer than a plain run (noise) and is kept."""


class _BufferSet:
    """Device buffers of one run, and the marks that say when they are free."""

    __slots__ = ("arrived", "began", "ended", "inputs", "left", "outputs")

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.inputs = [cuda.DeviceBuffer(size) for size in inputs]
        self.outputs = [cuda.DeviceBuffer(size) for size in outputs]
        self.arrived = cuda.Event()  # the inputs are there
        self.began = cuda.Event(timed=True)
        self.ended = cuda.Event(timed=True)  # the inputs may be overwritten
        self.left = cuda.Event()  # the outputs may be overwritten

    def close(self) -> None:
        for buffer in (*self.inputs, *self.outputs):
            buffer.close()


class _Cell:
    """Runs of one set of input shapes: their context, output shapes and graphs."""

    __slots__ = ("along", "context", "graphs", "outputs", "shapes")

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
        self.along = along  # copies go along on the compute stream
        self.graphs: list[cuda.Graph | None] = [None] * SETS


class _Queued(Launch):
    """A run on the device."""

    __slots__ = ("_outputs", "_set")

    def __init__(self, buffers: _BufferSet, outputs: list[Array]) -> None:
        self._set = buffers
        self._outputs = outputs

    def wait(self) -> tuple[list[Array], int]:
        self._set.left.synchronize()
        return self._outputs, self._set.ended.elapsed_ns(self._set.began)


class _Done(Launch):
    """A run that had to be waited for at once."""

    __slots__ = ("_result",)

    def __init__(self, outputs: list[Array], run_ns: int) -> None:
        self._result = outputs, run_ns

    def wait(self) -> tuple[list[Array], int]:
        return self._result


class Lane(PipelinedContext):
    """See the module's text. Launch at most two runs before waiting for the first.

    Args:
        engine: the network on its device.

    Raises:
        EngineLoadError: the device has not the memory (the text has the arithmetic).
    """

    def __init__(self, engine: TensorRTEngine) -> None:
        cuda.use(engine.device)
        self._engine = engine
        self._compute = cuda.Stream()
        self._in = cuda.Stream()
        self._out = cuda.Stream()
        self._contexts: dict[int, Any] = {}
        self._cells: dict[tuple[Shape, ...], _Cell] = {}
        self._turn = 0
        self._block = cuda.DeviceBuffer(engine.activation_bytes)
        self._sets = [
            _BufferSet(engine.input_bytes, engine.output_bytes) for _ in range(SETS)
        ]
        self._allocators: dict[int, Any] = {}

    def enter_thread(self) -> None:
        cuda.use(self._engine.device)

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        shapes = tuple([array.shape for array in inputs])
        cell = self._cells.get(shapes)
        if cell is None:
            cell = self._cells[shapes] = self._make_cell(shapes)
        if any(shape is None for shape in cell.outputs):
            return self._run_now(cell, inputs, outputs)
        index = self._turn
        self._turn = (index + 1) % SETS
        buffers = self._sets[index]
        compute = self._compute
        into = compute if cell.along else self._in
        out = compute if cell.along else self._out
        if into is not compute:
            into.wait_for(buffers.ended)
        for array, buffer in zip(inputs, buffers.inputs, strict=True):
            if array.nbytes:
                cuda.copy_to_device(buffer.pointer, _address(array), array.nbytes, into)
        if into is not compute:
            buffers.arrived.record(into)
            compute.wait_for(buffers.arrived)
        compute.wait_for(buffers.left)
        buffers.began.record(compute)
        self._enqueue(cell, index)
        buffers.ended.record(compute)
        if out is not compute:
            out.wait_for(buffers.ended)
        filled = []
        for i, (given, buffer) in enumerate(zip(outputs, buffers.outputs, strict=True)):
            array = self._output_array(i, cell.outputs[i]) if given is None else given
            if array.nbytes:
                cuda.copy_to_host(_address(array), buffer.pointer, array.nbytes, out)
            filled.append(array)
        buffers.left.record(out)
        return _Queued(buffers, filled)

    def warm(self, shapes: tuple[Shape, ...], *, graphs: bool) -> tuple[int, int]:
        """Prepares runs of these input shapes: kernels, then graphs where they pay.

        Inputs are whatever lies in the device's buffers.

        Returns:
            Time on the device of a plain run and of a graph's, in ns (0: no graph).

        Raises:
            EngineRunError: no profile holds these shapes, or they cannot be run.
        """
        cell = self._cells.get(shapes)
        if cell is None:
            cell = self._cells[shapes] = self._make_cell(shapes)
        if any(shape is None for shape in cell.outputs):
            return 0, 0
        self._enqueue(cell, 0)  # specialises the kernels
        self._compute.synchronize()
        plain_ns = min(self._timed(cell, 0) for _ in range(3))
        if not graphs or not cell.context.is_stream_capturable(self._compute.number):
            return plain_ns, 0
        try:
            for index in range(SETS):
                with cuda.capture(self._compute) as captured:
                    self._enqueue_plain(cell, index)
                cell.graphs[index] = captured[0]
        except EngineRunError as error:
            log.warning("shapes %s run without a graph: %s", shapes, error)
            cell.graphs = [None] * SETS
            return plain_ns, 0
        self._timed(cell, 0)
        graph_ns = min(self._timed(cell, 0) for _ in range(3))
        if graph_ns > plain_ns * _WORTH_IT:
            cell.graphs = [None] * SETS
        return plain_ns, graph_ns

    def close(self) -> None:
        self._compute.synchronize()
        self._out.synchronize()
        self._cells.clear()
        self._contexts.clear()
        for buffers in self._sets:
            buffers.close()
        self._sets.clear()
        self._block.close()

    # -- inside -----------------------------------------------------------------------

    def _make_cell(self, shapes: tuple[Shape, ...]) -> _Cell:
        engine = self._engine
        profile = engine.profile_for(shapes)
        context = self._contexts.get(profile)
        if context is None:
            context = self._contexts[profile] = self._make_context(profile)
        with collected_errors() as said:
            self._set_shapes(context, shapes)
            missing = context.infer_shapes()
        if missing:
            raise EngineRunError(
                f"{engine.name}: the shapes of {', '.join(missing)} cannot be told: "
                f"{said}"
            )
        outputs: list[Shape | None] = []
        for spec in engine.outputs:
            shape = tuple(context.get_tensor_shape(spec.name))
            outputs.append(None if -1 in shape else shape)
        sizes = [
            element_count(shape) * spec.itemsize
            for spec, shape in zip(
                (*engine.inputs, *engine.outputs), (*shapes, *outputs), strict=True
            )
            if shape is not None
        ]
        return _Cell(context, shapes, tuple(outputs), sum(sizes) <= _ALONG)

    def _make_context(self, profile: int) -> Any:
        context = self._engine.spare_context(profile)
        if context is not None:
            context.set_device_memory(self._block.pointer, self._block.size)
            return context
        context = self._engine.new_context()
        context.set_device_memory(self._block.pointer, self._block.size)
        if not context.set_optimization_profile_async(profile, self._compute.number):
            name = self._engine.name
            raise EngineRunError(
                f"{name}: profile {profile} cannot be set (see the log)"
            )
        self._compute.synchronize()
        return context

    def _set_shapes(self, context: Any, shapes: tuple[Shape, ...]) -> None:
        name = self._engine.name
        for spec, shape in zip(self._engine.inputs, shapes, strict=True):
            if not context.set_input_shape(spec.name, shape):
                raise EngineRunError(
                    f"{name}: input {spec.name!r} cannot have shape {list(shape)}"
                )

    def _enqueue(self, cell: _Cell, index: int) -> None:
        graph = cell.graphs[index]
        if graph is not None:
            graph.launch(self._compute)
        else:
            self._enqueue_plain(cell, index)

    def _enqueue_plain(self, cell: _Cell, index: int) -> None:
        engine = self._engine
        context = cell.context
        self._set_shapes(context, cell.shapes)
        buffers = self._sets[index]
        for spec, buffer in zip(engine.inputs, buffers.inputs, strict=True):
            context.set_tensor_address(spec.name, buffer.pointer)
        for spec, buffer in zip(engine.outputs, buffers.outputs, strict=True):
            context.set_tensor_address(spec.name, buffer.pointer)
        if not context.execute_async_v3(self._compute.number):
            raise EngineRunError(f"{engine.name}: the run was refused (see the log)")

    def _timed(self, cell: _Cell, index: int) -> int:
        buffers = self._sets[index]
        buffers.began.record(self._compute)
        self._enqueue(cell, index)
        buffers.ended.record(self._compute)
        self._compute.synchronize()
        return buffers.ended.elapsed_ns(buffers.began)

    def _output_array(self, index: int, shape: Shape | None) -> Array:
        spec = self._engine.outputs[index]
        count = element_count(shape or ())
        view = cuda.pinned(count * spec.itemsize)
        return np.frombuffer(view, spec.numpy, count).reshape(shape or ())

    def _run_now(
        self, cell: _Cell, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        """A run whose output shapes are known only when it has ended."""
        engine, compute = self._engine, self._compute
        buffers = self._sets[0]
        self._in.synchronize()
        self._out.synchronize()
        for array, buffer in zip(inputs, buffers.inputs, strict=True):
            if array.nbytes:
                cuda.copy_to_device(
                    buffer.pointer, _address(array), array.nbytes, compute
                )
        unknown = [i for i, shape in enumerate(cell.outputs) if shape is None]
        for i in unknown:
            if i not in self._allocators:
                self._allocators[i] = engine.new_allocator()
            cell.context.set_output_allocator(
                engine.outputs[i].name, self._allocators[i]
            )
        buffers.began.record(compute)
        self._enqueue_plain(cell, 0)
        buffers.ended.record(compute)
        compute.synchronize()
        filled = []
        for i, (given, buffer) in enumerate(zip(outputs, buffers.outputs, strict=True)):
            source, shape = buffer.pointer, cell.outputs[i]
            if i in unknown:
                source, shape = self._allocators[i].pointer, self._allocators[i].shape
            if given is None or i in unknown:
                array = self._output_array(i, shape)
            else:
                array = given
            if array.nbytes:
                cuda.copy_to_host(_address(array), source, array.nbytes, compute)
            filled.append(array)
        compute.synchronize()
        return _Done(filled, buffers.ended.elapsed_ns(buffers.began))


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
