"""A TensorRT plan on a GPU, shared by the lanes that run it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engines import cuda
from engines.base import Engine, ExecutionContext, Profile
from engines.errors import EngineLoadError, EngineRunError
from engines.tensorrt.allocator import output_allocator
from engines.tensorrt.lane import SETS, Lane
from engines.tensorrt.messages import collected_errors, logger
from engines.tensorrt.module import FlavourChoice, find
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


class TensorRTEngine(Engine):
    """See the module's text.

    Args:
        plan: the serialized engine.
        name: of the model, for messages.
        device: index of the GPU.
        flavour: which TensorRT runs it.
        specs: names of axes by tensor, from the ONNX (a plan has none).
        kernel_cache: file of TensorRT for RTX's specialised kernels; read when it is
            there, and written by `save_kernels`.

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
    ) -> None:
        found = find(flavour)
        trt = found.trt
        try:
            cuda.use(device)
        except EngineRunError as error:
            raise EngineLoadError(f"{name}: no GPU {device}: {error}") from error
        self.trt = trt
        self.device = device
        self._name = name
        self._kernel_cache = kernel_cache
        self._runtime = trt.Runtime(logger(found))
        with collected_errors() as said:
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise EngineLoadError(f"{name}: {found} cannot load the plan: {said}")
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
            return Lane(self)
        except cuda.OutOfDeviceMemory as error:
            raise EngineLoadError(self._arithmetic(error)) from error

    def host_buffer(self, size: int) -> memoryview:
        cuda.use(self.device)
        return cuda.pinned(size)

    def save_kernels(self) -> None:
        """Writes the specialised kernels beside the plan, where the flavour has any."""
        cache = getattr(self._runtime_config, "get_runtime_cache", lambda: None)()
        if cache is not None and self._kernel_cache is not None:
            data = bytes(cache.serialize())
            partial = self._kernel_cache.with_suffix(".partial")
            partial.write_bytes(data)
            partial.replace(self._kernel_cache)

    # -- for lanes --------------------------------------------------------------------

    def new_context(self) -> Any:
        """An execution context whose activation memory is the caller's to give."""
        trt = self.trt
        with collected_errors() as said:
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
        config = self._engine.create_runtime_config()
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

    def _arithmetic(self, error: BaseException) -> str:
        free, total = cuda.memory()
        mib = 1 << 20
        buffers = SETS * (sum(self.input_bytes) + sum(self.output_bytes))
        return (
            f"{self._name}: GPU {self.device} has not the memory for one more lane: "
            f"{self.activation_bytes / mib:.0f} MiB of activations + "
            f"{buffers / mib:.0f} MiB of buffers are needed, {free / mib:.0f} of "
            f"{total / mib:.0f} MiB are free; use fewer slots, a smaller max_batch or "
            f"shorter buckets ({error})"
        )
