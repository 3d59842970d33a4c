"""Memory that two processes share: anonymous files, passed by descriptor.

No name in a file system stands for it, so nothing is left behind however a process
ends, and the size of /dev/shm is no limit. A mapping needs no descriptor once it is
made, and is undone when nothing refers to its bytes.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_log = logging.getLogger(__name__)
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@cache
def _libc() -> Any:
    # Python's own mmap keeps a descriptor for as long as it is mapped.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


@cache
def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def new_memory(size: int) -> int:
    """A descriptor of `size` bytes (whole pages) of zeros, for the caller to close.

    Raises:
        MemoryError: the machine has not as many.
    """
    # The kernel would give them, and end whoever writes to them.
    if size > _physical_bytes():
        raise MemoryError(f"{size} bytes are more than this machine has")
    descriptor = -1
    try:
        descriptor = os.memfd_create("engine-buffer", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise MemoryError(f"{size} bytes of shared memory: {error}") from error
    return descriptor


class Mapping:
    """`size` bytes of shared memory as this process sees them.

    They stay mapped until neither this object nor any view of them is left.

    Args:
        descriptor: of the memory; not needed afterwards.
        size: at least a byte of it is mapped.
        before_unmap: called at the end, on any thread, while the bytes are there.

    Attributes:
        address: of the first byte, at the start of a page.

    Raises:
        MemoryError: there is no room for it in the address space.
    """

    __slots__ = ("_bytes", "address", "size")

    def __init__(
        self,
        descriptor: int,
        size: int,
        before_unmap: Callable[[], None] | None = None,
    ) -> None:
        libc, length = _libc(), max(size, 1)
        address = libc.mmap(
            None,
            length,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED,
            descriptor,
            0,
        )
        if address == _MAP_FAILED:
            text = os.strerror(ctypes.get_errno() or errno.ENOMEM)
            raise MemoryError(f"{size} bytes of shared memory: {text}")
        self.address: int = address
        self.size = size
        self._bytes: Any = (ctypes.c_ubyte * size).from_address(address)
        finalizer = weakref.finalize(self._bytes, _unmap, address, length, before_unmap)
        finalizer.atexit = False  # the arrays of a thread that still runs lie in it

    def view(self) -> memoryview:
        """All of its bytes."""
        return memoryview(self._bytes).cast("B")


def _unmap(address: int, length: int, before_unmap: Callable[[], None] | None) -> None:
    try:
        if before_unmap is not None:
            before_unmap()
    except Exception:
        _log.exception("shared memory is given back all the same")
    _libc().munmap(address, length)


def bytes_at(address: int, size: int) -> memoryview:
    """A view of bytes that somebody else keeps."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


class LentMemory:
    """The buffers that this process has made and another one shares.

    Args:
        lend: told the number, the size and the descriptor of each new one.
        freed: told its number when nothing here refers to it any more; called on any
            thread, wherever that thread is, so it must neither wait nor lock.
    """

    def __init__(
        self,
        lend: Callable[[int, int, int], None],
        freed: Callable[[int], None],
    ) -> None:
        self._lend = lend
        self._freed = freed
        self._made = 0
        self._in_order = threading.Lock()
        self._known: dict[int, tuple[int, int]] = {}  # address to (size, number)

    def allocate(self, size: int) -> memoryview:
        """`size` new bytes, zeroed, at the start of a page.

        Raises:
            MemoryError: there are not as many.
        """
        if not size:
            return memoryview(bytearray())
        descriptor = new_memory(size)
        try:
            mapping = Mapping(descriptor, size, lambda: self._forget(address))
            address = mapping.address
            with self._in_order:  # the other process relies on it
                number = self._made
                self._made = number + 1
                self._known[address] = size, number
                self._lend(number, size, descriptor)
        finally:
            os.close(descriptor)
        return mapping.view()

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """Which buffer these bytes lie in, and where in it; None: in none."""
        for start, (length, number) in list(self._known.items()):
            if start <= address and address + size <= start + length:
                return number, address - start
        return None

    def _forget(self, address: int) -> None:
        # Before the address can be given out again.
        _, number = self._known.pop(address)
        self._freed(number)


class BorrowedMemory:
    """The buffers that another process has lent to this one.

    Args:
        adopt: see `Engine.adopt_buffer`.
        release: see `Engine.release_buffer`.
    """

    def __init__(
        self,
        adopt: Callable[[memoryview], None],
        release: Callable[[memoryview], None],
    ) -> None:
        self._adopt = adopt
        self._release = release
        self._views: dict[int, memoryview] = {}
        self._newest = -1
        self._changed = threading.Condition()

    def add(self, number: int, size: int, descriptor: int) -> None:
        """Maps a buffer, and closes its descriptor. Numbers rise."""
        view: memoryview | None = None
        try:
            view = self._map(size, descriptor)
        except Exception:  # a run that needs it says so
            _log.exception("a buffer of %d bytes cannot be shared", size)
        finally:
            os.close(descriptor)
        with self._changed:
            if view is not None:
                self._views[number] = view
            self._newest = number
            self._changed.notify_all()

    def remove(self, number: int) -> None:
        """The owner needs it no more; it stays mapped while something here does."""
        with self._changed:
            view = self._views.pop(number, None)
        del view  # unmaps it, mostly; not under the lock

    def clear(self) -> None:
        """Removes all."""
        for number in list(self._views):
            self.remove(number)

    def view(self, number: int) -> memoryview:
        """The bytes of a buffer, once it has come.

        Raises:
            MemoryError: it could not be mapped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= number)
            view = self._views.get(number)
        if view is None:
            raise MemoryError("a buffer could not be shared (see the log)")
        return view

    def _map(self, size: int, descriptor: int) -> memoryview:
        adopted = False

        def before_unmap() -> None:
            if adopted:
                self._release(bytes_at(mapping_address, size))

        mapping = Mapping(descriptor, size, before_unmap)
        mapping_address = mapping.address
        view = mapping.view()
        try:
            self._adopt(view)
            adopted = True
        except Exception as error:  # slower, and right all the same
            _log.warning("a buffer of %d bytes is used as it is: %s", size, error)
        return view
