"""The part of CUDA that engines on a GPU use, over cuda-python, with errors raised.

Thin on purpose: handles that free themselves, and one place that knows which errors
leave the device unusable for the process.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from engines.errors import EngineDeadError, EngineLoadError, EngineRunError

_PR_SET_TIMERSLACK: Final = 29

# After these every further call of the process fails too (CUDA's "sticky" errors).
_STICKY: Final = frozenset(
    {
        "cudaErrorIllegalAddress",
        "cudaErrorLaunchTimeout",
        "cudaErrorHardwareStackError",
        "cudaErrorIllegalInstruction",
        "cudaErrorMisalignedAddress",
        "cudaErrorInvalidAddressSpace",
        "cudaErrorInvalidPc",
        "cudaErrorLaunchFailure",
        "cudaErrorAssert",
        "cudaErrorECCUncorrectable",
        "cudaErrorNvlinkUncorrectable",
        "cudaErrorContained",
        "cudaErrorUnknown",
    }
)


class OutOfDeviceMemory(EngineRunError):
    """The device has not as much free memory as was asked for."""


@cache
def runtime() -> Any:
    """CUDA's runtime interface (`cuda.bindings.runtime`), loaded once.

    Raises:
        EngineLoadError: cuda-python is not installed, or finds no CUDA runtime.
    """
    try:
        from cuda.bindings import runtime as bindings
    except ImportError as error:
        raise EngineLoadError(
            f"cuda-python cannot be loaded ({error}): pip install cuda-python"
        ) from error
    return bindings


def check(result: tuple[Any, ...]) -> Any:
    """The values of a runtime call without its status; one value comes bare.

    Raises:
        OutOfDeviceMemory: an allocation failed; everything else goes on.
        EngineDeadError: no further call of this process will succeed.
        EngineRunError: any other failure.
    """
    if result[0]:
        raise _error(result[0])
    return result[1] if len(result) == 2 else result[1:]


def _error(status: Any) -> EngineRunError | EngineDeadError:
    name = getattr(status, "name", str(status))
    text = name
    _, said = runtime().cudaGetErrorString(status)
    if said:
        text = f"{name}: {said.decode() if isinstance(said, bytes) else said}"
    if name == "cudaErrorMemoryAllocation":
        return OutOfDeviceMemory(text)
    if name in _STICKY:
        return EngineDeadError(text)
    return EngineRunError(text)


# -- devices --------------------------------------------------------------------------


def use(device: int) -> None:
    """Makes `device` the one that this thread's calls mean."""
    check(runtime().cudaSetDevice(device))


def properties(device: int) -> Any:
    """CUDA's description of a device (`name`, `major`, `minor`, …)."""
    return check(runtime().cudaGetDeviceProperties(device))


def memory() -> tuple[int, int]:
    """Free and total bytes of this thread's device."""
    free, total = check(runtime().cudaMemGetInfo())
    return int(free), int(total)


def stay_near(device: int) -> None:
    """Keeps this thread on the cores that are nearest to a device, where that is known.

    What the process may use is never widened.
    """
    try:
        place = check(runtime().cudaDeviceGetPCIBusId(16, device))
        text = place.decode() if isinstance(place, bytes) else str(place)
        folder = Path("/sys/bus/pci/devices") / text.strip("\0").lower()
        near = cpu_list((folder / "local_cpulist").read_text())
        mine = os.sched_getaffinity(0)
        if near & mine and not mine <= near:
            os.sched_setaffinity(0, near & mine)
    except (OSError, ValueError, AttributeError, EngineRunError):
        return  # no such folder in this container, or no such call on this system


def sleep_exactly() -> None:
    """Lets this thread's short sleeps end on time, and not up to 50 µs later."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux


def cpu_list(text: str) -> set[int]:
    """The numbers of Linux's "0-3,8".

    Raises:
        ValueError: it is not of that form.
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


# -- memory ---------------------------------------------------------------------------


class DeviceBuffer:
    """Bytes on the device, freed with the object.

    Raises:
        OutOfDeviceMemory: there are not as many.
    """

    __slots__ = ("__weakref__", "_free", "pointer", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.pointer = int(check(runtime().cudaMalloc(max(size, 1))))
        self._free = weakref.finalize(self, _quietly, runtime().cudaFree, self.pointer)

    def close(self) -> None:
        """Gives the memory back now."""
        self._free()


def pinned(size: int) -> memoryview:
    """`size` bytes of page-locked host memory, freed when nothing refers to them.

    Copies between it and the device need no staging by the driver: 55 GB/s against
    8 GB/s from pageable memory (measured on an H200).

    Raises:
        OutOfDeviceMemory: the host has not as many to lock.
    """
    pointer = int(check(runtime().cudaHostAlloc(max(size, 1), 0)))
    array = (ctypes.c_ubyte * size).from_address(pointer)
    weakref.finalize(array, _quietly, runtime().cudaFreeHost, pointer)
    return memoryview(array).cast("B")


def lock_pages(view: memoryview) -> None:
    """Makes memory that exists as good for copies as `pinned`; of another process too.

    Raises:
        EngineRunError: the host does not lock it.
    """
    check(runtime().cudaHostRegister(_address(view), view.nbytes, 0))


def unlock_pages(view: memoryview) -> None:
    """Gives back what `lock_pages` has locked.

    Raises:
        EngineRunError: it was not locked.
    """
    check(runtime().cudaHostUnregister(_address(view)))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _quietly(release: Callable[[int], Any], handle: Any) -> None:
    """Gives something back; at the end of the process, or of a dead device, in vain."""
    release(handle)


# -- order ----------------------------------------------------------------------------


class Stream:
    """A queue of work on the device; never the default stream, which waits for all."""

    __slots__ = ("__weakref__", "_free", "handle", "number")

    def __init__(self) -> None:
        cudart = runtime()
        self.handle = check(
            cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)
        )
        self.number = int(self.handle)  # as TensorRT takes it
        self._free = weakref.finalize(
            self, _quietly, cudart.cudaStreamDestroy, self.handle
        )

    def wait_for(self, event: Event) -> None:
        """What is queued from now on waits for `event`; the host does not."""
        check(runtime().cudaStreamWaitEvent(self.handle, event.handle, 0))

    def synchronize(self) -> None:
        """Waits until everything queued has ended; without the interpreter lock."""
        check(runtime().cudaStreamSynchronize(self.handle))


class Event:
    """A mark in a stream that can be waited for.

    Args:
        timed: whether it notes the time (`elapsed_ns`).
        spins: whether waiting for it takes a core (some µs quicker) or sleeps.
    """

    __slots__ = ("__weakref__", "_free", "handle")

    def __init__(self, *, timed: bool = False, spins: bool = False) -> None:
        cudart = runtime()
        flags = 0 if spins else cudart.cudaEventBlockingSync
        if not timed:
            flags |= cudart.cudaEventDisableTiming
        self.handle = check(cudart.cudaEventCreateWithFlags(flags))
        self._free = weakref.finalize(
            self, _quietly, cudart.cudaEventDestroy, self.handle
        )

    def record(self, stream: Stream) -> None:
        """Marks what has been queued on `stream` so far."""
        check(runtime().cudaEventRecord(self.handle, stream.handle))

    def synchronize(self) -> None:
        """Waits until the device has come to the mark."""
        check(runtime().cudaEventSynchronize(self.handle))

    def elapsed_ns(self, since: Event) -> int:
        """Time on the device between two timed marks that were both reached."""
        return int(
            check(runtime().cudaEventElapsedTime(since.handle, self.handle)) * 1e6
        )


class Graph:
    """Work captured once, launched many times with one call."""

    __slots__ = ("__weakref__", "_free", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._free = weakref.finalize(
            self, _quietly, runtime().cudaGraphExecDestroy, handle
        )

    def launch(self, stream: Stream) -> None:
        """Queues all of it on `stream`."""
        check(runtime().cudaGraphLaunch(self.handle, stream.handle))

    def close(self) -> None:
        """Gives its memory back now."""
        self._free()


@contextmanager
def capture(stream: Stream) -> Iterator[list[Graph]]:
    """Captures what is queued on `stream` inside; the list then holds the graph.

    Only this thread's calls are captured, and other threads' are not disturbed.

    Raises:
        EngineRunError: something inside cannot be captured (the list stays empty).
    """
    cudart = runtime()
    mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    check(cudart.cudaStreamBeginCapture(stream.handle, mode))
    made: list[Graph] = []
    try:
        yield made
    except BaseException:
        _, graph = cudart.cudaStreamEndCapture(stream.handle)
        if graph is not None:
            cudart.cudaGraphDestroy(graph)
        raise
    graph = check(cudart.cudaStreamEndCapture(stream.handle))
    try:
        made.append(Graph(check(cudart.cudaGraphInstantiate(graph, 0))))
    finally:
        cudart.cudaGraphDestroy(graph)


def copy_to_device(target: int, source: int, size: int, stream: Stream) -> None:
    """Queues a copy of `size` bytes from page-locked host memory to the device."""
    kind = runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
    check(runtime().cudaMemcpyAsync(target, source, size, kind, stream.handle))


def copy_to_host(target: int, source: int, size: int, stream: Stream) -> None:
    """Queues a copy of `size` bytes from the device to page-locked host memory."""
    kind = runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost
    check(runtime().cudaMemcpyAsync(target, source, size, kind, stream.handle))
