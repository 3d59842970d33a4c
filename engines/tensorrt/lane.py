"""A lane: one compute stream of a GPU, and the contexts, buffers and graphs on it.

A run is three steps on the device: inputs to it, the network, outputs back. A lane has
several sets of device buffers, so that the inputs of the next run travel, and its
kernels are queued, while one is running; small copies are queued together with the
kernels, as one graph. All profiles share one block of activation memory,
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
from engines.tensorrt.buffers import (
    SETS,
    BufferSet,
    Course,
    Ended,
    LaneCell,
    Queued,
    Route,
    address_of,
)
from engines.tensorrt.messages import collected_errors
from engines.tensors import Shape, element_count

if TYPE_CHECKING:
    from engines.tensorrt.engine import TensorRTEngine

log = logging.getLogger(__name__)

_ALONG: Final = 1 << 18
"""Bytes up to which inputs and outputs are copied on the compute stream itself: a
second stream and its events cost more host time than such a copy takes."""

_WORTH_IT: Final = 1.02
"""A graph may take this much longer than a plain run (noise) and is kept."""

_MAX_HOMES: Final = 1024  # of arrays that come and go
_TRIALS: Final = 3  # runs that are timed to choose between them


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
        self._cells: dict[tuple[Shape, ...], LaneCell] = {}
        self._routes: dict[int, Route] = {}
        self._homes: dict[int, int] = {}  # address of an input to its buffer set
        self._course = Course()
        self._block = cuda.DeviceBuffer(engine.activation_bytes)
        self._sets = [
            BufferSet(engine.input_bytes, engine.output_bytes) for _ in range(SETS)
        ]
        self._allocators: dict[int, Any] = {}
        self._marks = cuda.Event(timed=True), cuda.Event(timed=True)

    def enter_thread(self) -> None:
        cuda.use(self._engine.device)
        cuda.stay_near(self._engine.device)
        cuda.sleep_exactly()

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        route = self._routes.get(id(inputs))
        if route is None or route.inputs is not inputs:
            cell = self._cell(tuple([array.shape for array in inputs]))
            if not cell.known:
                return self._run_now(cell, inputs, outputs)
            route = self._route(cell, inputs, outputs)
        return self._launch(route)

    def try_launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch | None:
        route = self._routes.get(id(inputs))
        if route is None or route.inputs is not inputs:
            return None
        if route.whole is None and route.cell.graphs[route.index] is None:
            return None  # a plain run takes the host as long as the device
        cuda.use(self._engine.device)
        return self._launch(route)

    def _launch(self, route: Route) -> Launch:
        buffers = self._sets[route.index]
        alone = self._course.begin()
        try:
            out = self._queue(route, buffers)
            if alone:
                buffers.spun.record(out)
            buffers.left.record(out)
        except BaseException:
            self._course.undo()
            raise
        return Queued(route, buffers, self._course, alone)

    def _queue(self, route: Route, buffers: BufferSet) -> cuda.Stream:
        """Queues copies and network; returns the stream on which the outputs leave."""
        cell, compute = route.cell, self._compute
        if buffers.apart:
            compute.wait_for(buffers.left)
            buffers.apart = False
        if route.whole is not None:
            buffers.began.record(compute)
            route.whole.launch(compute)
            buffers.ended.record(compute)
            return compute
        into = compute if cell.along else self._in
        out = compute if cell.along else self._out
        if into is not compute:
            into.wait_for(buffers.ended)
        route.copy_in(into)
        if into is not compute:
            buffers.arrived.record(into)
            compute.wait_for(buffers.arrived)
        buffers.began.record(compute)
        self._enqueue(cell, route.index)
        buffers.ended.record(compute)
        if out is not compute:
            out.wait_for(buffers.ended)
            buffers.apart = True
        route.copy_out(out)
        return out

    def expect(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> None:
        cell = self._cell(tuple([array.shape for array in inputs]))
        if not cell.known or any(given is None for given in outputs):
            return
        route = self._route(cell, inputs, outputs)
        self._routes[id(inputs)] = route
        if cell.along and cell.graphs[0] is not None:
            with self._engine.graph_budget() as granted:
                if granted:
                    self._capture_whole(route)

    def warm(self, shapes: Sequence[Shape]) -> None:
        """Prepares runs of these input shapes: kernels, then graphs where they pay.

        Inputs are whatever lies in the device's buffers.

        Raises:
            EngineRunError: no profile holds these shapes, or they cannot be run.
        """
        cell = self._cell(tuple(shapes))
        if cell.plain_ns or not cell.known:
            return
        self._settle()  # runs under way use the same buffers
        self._enqueue(cell, 0)  # specialises the kernels
        self._compute.synchronize()
        cell.plain_ns = cell.expected_ns = self._fastest_ns(cell)
        if self._engine.graphs and _capturable(cell.context, self._compute):
            with self._engine.graph_budget() as granted:
                if granted:
                    self._capture(cell)

    def output_shapes(self, shapes: Sequence[Shape]) -> list[Shape | None] | None:
        return list(self._cell(tuple(shapes)).outputs)

    @property
    def timings(self) -> dict[tuple[Shape, ...], tuple[int, int]]:
        """Per warmed cell, ns on the device of a plain run and of its graph (0: none
        could be made)."""
        cells = self._cells.items()
        return {shapes: (c.plain_ns, c.graph_ns) for shapes, c in cells}

    def close(self) -> None:
        if not self._sets:
            return
        self._settle()
        for route in self._routes.values():
            if route.whole is not None:
                route.whole.close()
        self._routes.clear()
        for cell in self._cells.values():
            cell.drop_graphs()
        self._cells.clear()
        self._contexts.clear()
        self._allocators.clear()
        self._engine.lanes -= 1
        for buffers in self._sets:
            buffers.close()
        self._sets.clear()
        self._block.close()

    # -- inside -----------------------------------------------------------------------

    def _settle(self) -> None:
        """Waits until nothing is under way."""
        for stream in (self._in, self._compute, self._out):
            stream.synchronize()

    def _capture(self, cell: LaneCell) -> None:
        """Makes the graphs of a cell, and keeps them unless plain runs are faster."""
        try:
            for index in range(1 if cell.along else SETS):
                with cuda.capture(self._compute) as captured:
                    self._enqueue_plain(cell, index)
                cell.graphs[index] = captured[0]
        except EngineRunError as error:
            log.warning("shapes %s run without a graph: %s", cell.shapes, error)
            cell.drop_graphs()
            return
        self._enqueue(cell, 0)
        cell.graph_ns = self._fastest_ns(cell)
        if cell.graph_ns > cell.plain_ns * _WORTH_IT:
            log.debug("shapes %s run faster without a graph", cell.shapes)
            cell.drop_graphs()

    def _capture_whole(self, route: Route) -> None:
        """Makes one graph of the copies and the network: one call instead of ten."""
        self._settle()
        try:
            # A change of shapes waits for the device, which cannot be captured.
            self._enqueue_plain(route.cell, route.index)
            self._compute.synchronize()
            with cuda.capture(self._compute) as captured:
                route.copy_in(self._compute)
                self._enqueue_plain(route.cell, route.index)
                route.copy_out(self._compute)
            route.whole = captured[0]
        except EngineRunError as error:
            log.warning("shapes %s are copied one by one: %s", route.cell.shapes, error)

    def _route(
        self, cell: LaneCell, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Route:
        """Which buffers a run of these arrays uses: always the same for the same."""
        first = address_of(inputs[0]) if inputs else 0
        index = self._homes.get(first)
        if index is None:
            if len(self._homes) >= _MAX_HOMES:
                self._homes.clear()
            index = self._homes[first] = len(self._homes) % SETS
        filled = [
            self._output_array(i, shape) if given is None else given
            for i, (given, shape) in enumerate(zip(outputs, cell.outputs, strict=True))
        ]
        return Route(cell, self._sets[index], index, inputs, filled)

    def _cell(self, shapes: tuple[Shape, ...]) -> LaneCell:
        cell = self._cells.get(shapes)
        if cell is None:
            cell = self._cells[shapes] = self._make_cell(shapes)
        return cell

    def _make_cell(self, shapes: tuple[Shape, ...]) -> LaneCell:
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
        return LaneCell(context, shapes, tuple(outputs), sum(sizes) <= _ALONG)

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

    def _enqueue(self, cell: LaneCell, index: int) -> None:
        graph = cell.graphs[index]
        if graph is not None:
            graph.launch(self._compute)
        else:
            self._enqueue_plain(cell, index)

    def _enqueue_plain(self, cell: LaneCell, index: int) -> None:
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

    def _fastest_ns(self, cell: LaneCell) -> int:
        """The device time of the fastest of some runs."""
        began, ended = self._marks
        best = 0
        for _ in range(_TRIALS):
            began.record(self._compute)
            self._enqueue(cell, 0)
            ended.record(self._compute)
            self._compute.synchronize()
            taken = ended.elapsed_ns(began)
            best = min(best or taken, taken)
        return best

    def _output_array(self, index: int, shape: Shape | None) -> Array:
        spec = self._engine.outputs[index]
        count = element_count(shape or ())
        view = cuda.pinned(count * spec.itemsize)
        return np.frombuffer(view, spec.numpy, count).reshape(shape or ())

    def _run_now(
        self, cell: LaneCell, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        """A run whose output shapes are known only when it has ended."""
        engine, compute = self._engine, self._compute
        buffers = self._sets[0]
        self._in.synchronize()
        self._out.synchronize()
        for array, buffer in zip(inputs, buffers.inputs, strict=True):
            if array.nbytes:
                cuda.copy_to_device(
                    buffer.pointer, address_of(array), array.nbytes, compute
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
                cuda.copy_to_host(address_of(array), source, array.nbytes, compute)
            filled.append(array)
        compute.synchronize()
        return Ended(filled, buffers.ended.elapsed_ns(buffers.began))


def _capturable(context: Any, stream: cuda.Stream) -> bool:
    """Whether runs can be captured; where TensorRT cannot be asked, trying shows."""
    asked = getattr(context, "is_stream_capturable", None)
    return asked is None or bool(asked(stream.number))
