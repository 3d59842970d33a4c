"""A TensorRT plan on a GPU, shared by the lanes that run it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from engines import cuda
from engines.base import Engine, ExecutionContext, Profile
from engines.errors import EngineLoadError, EngineRunError
from engines.tensorrt.allocator import output_allocator
from engines.tensorrt.buffers import SETS
from engines.tensorrt.lane import Lane
from engines.tensorrt.memory import MemoryNeed
from engines.tensorrt.messages import collected_errors, logger
from engines.tensorrt.module import FlavourChoice, find
from engines.tensorrt.plans import write_whole
from engines.tensorrt.remedies import with_remedy
from engines.tensors import Shape, TensorSpec, element_count

log = logging.getLogger(__name__)

_DTYPES: Final[dict[str, str]] = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "BOOL": "BOOL",
}
"""TensorRT's names of the types that can travel over the protocol."""

_GRAPH_SHARE: Final = 16
"""Graphs may take this part of the device's memory unless told otherwise."""


class TensorRTEngine(Engine):
    """See the module's text.

    Args:
        plan: the serialized engine.
        name: of the model, for messages.
        device: index of the GPU.
        flavour: which TensorRT runs it.
        specs: names of axes by tensor, from the ONNX (a plan has none).
        kernel_cache: file of TensorRT for RTX's specialised kernels; read when it is
            there, and written by `save_warm`.
        graphs: whether warmed runs become CUDA graphs, where that pays.
        graph_bytes: the most device memory that graphs may take; cells warmed later run
            without. None: a sixteenth of the device.

    Attributes:
        device: index of the GPU.
        activation_bytes: of one lane.
        input_bytes, output_bytes: per tensor, of the largest that a profile holds (0
            for an output whose shape the run decides).

    Raises:
        EngineLoadError: TensorRT or the GPU is missing, or the plan is not for them.
    """

    backend = "tensorrt"
    warmed_cells_only = True

    def __init__(
        self,
        plan: bytes,
        *,
        name: str = "plan",
        device: int = 0,
        flavour: FlavourChoice = "auto",
        specs: Sequence[TensorSpec] = (),
        kernel_cache: Path | None = None,
        graphs: bool = True,
        graph_bytes: int | None = None,
    ) -> None:
        found = find(flavour)
        try:
            cuda.use(device)
        except EngineRunError as error:
            raise EngineLoadError(f"{name}: no GPU {device}: {error}") from error
        self.trt = found.trt
        self.device = device
        self.graphs = graphs
        self.lanes = 0
        self._name = name
        self._plan_bytes = len(plan)
        self._kernel_cache = kernel_cache
        if kernel_cache is not None:
            gpu = _file_name(cuda.properties(device).name)
            self.costs_path = kernel_cache.with_suffix(f".{gpu}.costs.json")
        self._graph_bytes_left = graph_bytes
        self._graph_bytes = 0
        self._graph_lock = threading.Lock()
        self._making = threading.Lock()
        self._runtime = found.trt.Runtime(logger(found))
        with collected_errors() as said:
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise EngineLoadError(
                f"{name}: {found} cannot load the plan: {with_remedy(str(said))}"
            )
        try:
            self._look(specs)
        except EngineRunError as error:
            raise EngineLoadError(str(error)) from error

    def _look(self, specs: Sequence[TensorSpec]) -> None:
        """Reads what the plan takes and gives, and how much memory that is."""
        trt = self.trt
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        known = {spec.name: spec for spec in specs}
        inputs: list[TensorSpec] = []
        outputs: list[TensorSpec] = []
        for tensor in names:
            spec = self._spec(tensor, known.get(tensor))
            is_input = engine.get_tensor_mode(tensor) == trt.TensorIOMode.INPUT
            (inputs if is_input else outputs).append(spec)
        order = {spec.name: i for i, spec in enumerate(specs)}
        inputs.sort(key=lambda spec: order.get(spec.name, 0))
        outputs.sort(key=lambda spec: order.get(spec.name, 0))
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.profiles = tuple(
            self._profile(i) for i in range(engine.num_optimization_profiles)
        )
        self._kernels: Any = None
        self._spare: dict[int, Any] = {}
        self._runtime_config = self._configured()
        self.activation_bytes = max(
            engine.get_device_memory_size_for_profile_v2(i)
            for i in range(engine.num_optimization_profiles)
        )
        self.input_bytes = [
            max(element_count(p.max[spec.name]) for p in self.profiles) * spec.itemsize
            for spec in self.inputs
        ]
        self.output_bytes = self._largest_outputs()

    # -- Engine -----------------------------------------------------------------------

    def create_context(self) -> ExecutionContext:
        try:
            lane = Lane(self)
        except cuda.OutOfDeviceMemory as error:
            free, total = cuda.memory()
            need = self.memory_need(self.lanes + 1)
            text = need.refusal(self._name, self.device, free, total)
            raise EngineLoadError(f"{text} ({error})") from error
        self.lanes += 1
        return lane

    def host_buffer(self, size: int) -> memoryview:
        cuda.use(self.device)
        return cuda.pinned(size)

    def adopt_buffer(self, view: memoryview) -> None:
        cuda.use(self.device)
        cuda.lock_pages(view)

    def release_buffer(self, view: memoryview) -> None:
        cuda.use(self.device)
        cuda.unlock_pages(view)

    def save_warm(self) -> None:
        """Writes the specialised kernels beside the plan, where the flavour has any."""
        cache = self._kernels
        if cache is None or self._kernel_cache is None:
            return
        try:
            write_whole(self._kernel_cache, bytes(cache.serialize()))
        except OSError as error:
            log.warning("%s: kernels are not kept: %s", self._name, error)

    def close(self) -> None:
        self._spare.clear()
        self._runtime_config = self._kernels = None
        self._engine = None

    def memory_need(self, lanes: int) -> MemoryNeed:
        """What this engine needs with so many lanes."""
        return MemoryNeed(
            weights=self._plan_bytes,
            activation=self.activation_bytes,
            buffers=SETS * (sum(self.input_bytes) + sum(self.output_bytes)),
            graphs=self._graph_bytes,
            lanes=lanes,
        )

    # -- for lanes --------------------------------------------------------------------

    def new_context(self) -> Any:
        """An execution context whose activation memory is the caller's to give."""
        trt = self.trt
        # Contexts may run at the same time, but not be made at the same time.
        with self._making, collected_errors() as said:
            if self._runtime_config is not None:
                context = self._engine.create_execution_context(self._runtime_config)
            else:
                context = self._engine.create_execution_context(
                    trt.ExecutionContextAllocationStrategy.USER_MANAGED
                )
        if context is None:
            raise EngineRunError(f"{self._name}: no execution context: {said}")
        return context

    def spare_context(self, profile: int) -> Any:
        """A context with this profile that was made for its sizes, once; or None.

        To make one takes seconds where the kernels are not in the cache.
        """
        return self._spare.pop(profile, None)

    @contextmanager
    def graph_budget(self) -> Iterator[bool]:
        """Whether there is memory left for a graph; what is made inside is counted.

        One lane at a time: the device tells only how much is free of all.
        """
        with self._graph_lock:
            before, total = cuda.memory()
            if self._graph_bytes_left is None:
                self._graph_bytes_left = total // _GRAPH_SHARE
            yield self._graph_bytes_left > 0
            taken = max(before - cuda.memory()[0], 0)
            self._graph_bytes += taken
            if self._graph_bytes_left > 0 >= self._graph_bytes_left - taken:
                log.info(
                    "%s: the budget for graphs is used up (%d MiB); further shapes run "
                    "without",
                    self._name,
                    self._graph_bytes >> 20,
                )
            self._graph_bytes_left -= taken

    def new_allocator(self) -> Any:
        """Memory for an output whose shape the run decides."""
        return output_allocator(self.trt)

    def profile_for(self, shapes: Sequence[Shape]) -> int:
        """The profile that is tuned for the shape nearest to these.

        Raises:
            EngineRunError: none holds them.
        """
        best, best_distance = -1, float("inf")
        for index, profile in enumerate(self.profiles):
            if not self._inside(profile, shapes):
                continue
            wanted = sum(map(element_count, shapes))
            tuned = sum(element_count(profile.opt[spec.name]) for spec in self.inputs)
            ratio = max(wanted, 1) / max(tuned, 1)
            distance = max(ratio, 1 / ratio)
            if distance < best_distance:
                best, best_distance = index, distance
        if best < 0:
            raise EngineRunError(
                f"{self._name}: no profile holds the shapes {list(map(list, shapes))}"
            )
        return best

    @property
    def name(self) -> str:
        """Of the model, for messages."""
        return self._name

    # -- inside -----------------------------------------------------------------------

    def _spec(self, name: str, known: TensorSpec | None) -> TensorSpec:
        engine = self._engine
        kind = engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise EngineLoadError(
                f"{self._name}: tensor {name!r} has the type {kind}, which cannot "
                f"travel over the protocol (possible: {', '.join(_DTYPES)})"
            )
        shape = tuple(engine.get_tensor_shape(name))
        named = known.shape if known is not None else (None,) * len(shape)
        if len(named) != len(shape):
            named = (None,) * len(shape)
        # What the ONNX has dynamic stays so: a plan fixes axes that its first profile
        # has at one size.
        axes = tuple(
            size if size >= 0 and isinstance(label, int) else label
            for size, label in zip(shape, named, strict=True)
        )
        if known is None:
            axes = tuple(size if size >= 0 else None for size in shape)
        return TensorSpec(name, _DTYPES[kind], axes)

    def _profile(self, index: int) -> Profile:
        limits: list[dict[str, Shape]] = [{}, {}, {}]
        for spec in self.inputs:
            shapes = self._engine.get_tensor_profile_shape(spec.name, index)
            for limit, shape in zip(limits, shapes, strict=True):
                limit[spec.name] = tuple(shape)
        return Profile(*limits)

    def _inside(self, profile: Profile, shapes: Sequence[Shape]) -> bool:
        for spec, shape in zip(self.inputs, shapes, strict=True):
            low, high = profile.min[spec.name], profile.max[spec.name]
            if len(shape) != len(low):
                return False
            if any(not a <= s <= b for a, s, b in zip(low, shape, high, strict=True)):
                return False
        return True

    def _configured(self) -> Any:
        """How contexts of TensorRT for RTX specialise kernels; None elsewhere."""
        trt = self.trt
        if not hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
            return None
        config: Any = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        # At warm-up, and not beside the first callers.
        config.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        cache = config.create_runtime_cache()
        path = self._kernel_cache
        if (
            path is not None
            and path.exists()
            and not cache.deserialize(path.read_bytes())
        ):
            log.warning("%s: %s cannot be used, and is made anew", self._name, path)
        config.set_runtime_cache(cache)
        self._kernels = cache  # the configuration keeps only a pointer to it
        return config

    def _largest_outputs(self) -> list[int]:
        """Bytes of each output at the profiles' largest inputs (0 where unknown)."""
        largest = [0] * len(self.outputs)
        stream = cuda.Stream()
        for index, profile in enumerate(self.profiles):
            context = self._spare[index] = self.new_context()
            context.set_optimization_profile_async(index, stream.number)
            stream.synchronize()
            for spec in self.inputs:
                context.set_input_shape(spec.name, profile.max[spec.name])
            context.infer_shapes()
            for i, spec in enumerate(self.outputs):
                shape = tuple(context.get_tensor_shape(spec.name))
                if -1 not in shape:
                    size = element_count(shape) * spec.itemsize
                    largest[i] = max(largest[i], size)
        return largest


def _file_name(text: Any) -> str:
    """The letters and digits of a GPU's name."""
    name = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return "".join(c if c.isalnum() else "-" for c in name.strip("\0 "))
