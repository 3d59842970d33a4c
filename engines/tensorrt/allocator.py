"""Memory for outputs whose shape is known only after the run."""

from __future__ import annotations

from typing import Any

from engines import cuda
from engines.errors import EngineRunError
from engines.tensors import Shape


def output_allocator(trt: Any) -> Any:
    """An `IOutputAllocator` that keeps one growing buffer (`pointer`, `shape`)."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.shape: Shape = ()
            self._buffer: cuda.DeviceBuffer | None = None

        @property
        def pointer(self) -> int:
            return self._buffer.pointer if self._buffer is not None else 0

        def reallocate_output_async(
            self, tensor: str, memory: int, size: int, alignment: int, stream: int
        ) -> int | None:
            if self._buffer is None or self._buffer.size < size:
                try:
                    self._buffer = cuda.DeviceBuffer(size)  # aligned to 256 bytes
                except EngineRunError:
                    return None  # TensorRT then refuses the run
            return self._buffer.pointer

        def notify_shape(self, tensor: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return OutputAllocator()
