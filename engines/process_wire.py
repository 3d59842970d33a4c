"""Messages between a process and the engine process that it has started.

A message is a fixed head in one packet of a Unix socket. What a run of known arrays
needs fits into the head; anything else is pickled behind it, with the bytes of arrays
apart, and lies in memory of its own (passed by descriptor) where it is large. Both ends
are the same version of this code, and nobody else can reach the socket.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import weakref
from typing import Any, Final

from engines.errors import (
    EngineDeadError,
    EngineError,
    EngineLoadError,
    EngineRunError,
)
from engines.process_memory import Mapping, new_memory

HEAD: Final = struct.Struct("<QQBB")
"""Two numbers that depend on the kind, the kind, and what else there is."""

Head = tuple[int, int, int, int]

NOTHING, INLINE, APART, DESCRIPTOR = range(4)

# To the worker, on the control socket.
OPEN, CONTEXT, SAVE, CLOSE = range(4)
# From the worker, on the control socket.
ANSWER, FAILURE, LOG = range(10, 13)
# To the worker, on the memory socket.
BUFFER, FREED, FORGET = range(20, 23)
# To the worker, on a context's socket.
DEFINE, RUN, RUN_ONCE, CALL = range(30, 34)
EXPECT: Final = "expect"
"""A call that names a known set of arrays, and not a method's arguments."""
# From the worker, on a context's socket.
DONE, FAILED = range(40, 42)

_INLINE_BYTES: Final = 32 << 10
_ALIGNED: Final = 64  # arrays of a message begin at multiples of this
_LENGTH: Final = struct.Struct("<Q")
_DESCRIPTOR: Final = struct.Struct("i")  # as the kernel has it
_ROOM: Final = socket.CMSG_SPACE(_DESCRIPTOR.size)
_CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Messages:
    """One end of a connection. One thread at a time may read.

    Any number may write, wherever they are, since a message is one packet; but one at a
    time where `quick`.

    Args:
        end: a connected socket of type SOCK_SEQPACKET, which this object then owns.
        quick: whether the descriptor of a message comes in a packet of its own, as it
            does at the other end: to look for one in every packet takes µs.

    Attributes:
        socket: the same, for what is sent without anything behind the head.
    """

    def __init__(self, end: socket.socket, *, quick: bool = False) -> None:
        self.socket = end
        self._quick = quick
        self._end = weakref.finalize(self, end.close)
        self._end.atexit = False
        self._packet = bytearray(HEAD.size + _INLINE_BYTES)
        self._size = 0
        self._descriptor: int | None = None

    def send(
        self,
        kind: int,
        number: int = 0,
        value: int = 0,
        content: object = None,
        *,
        descriptor: int | None = None,
    ) -> None:
        """Sends one message, with `content` or a descriptor where there is one.

        Raises:
            ConnectionError: the other end is gone.
            OSError: the system refuses to send anything.
            MemoryError: there is not the memory for `content`.
            pickle.PicklingError, TypeError, AttributeError: `content` cannot be sent.
        """
        if descriptor is not None:
            self._send_descriptor(
                HEAD.pack(number, value, kind, DESCRIPTOR), descriptor
            )
        elif content is None:
            self.socket.send(HEAD.pack(number, value, kind, NOTHING))
        else:
            parts, size = _dumped(content)
            if size <= _INLINE_BYTES:
                # Joined, since one call takes 1,024 parts at most.
                head = HEAD.pack(number, value, kind, INLINE)
                self.socket.send(b"".join([head, *parts]))
                return
            memory = new_memory(size)
            try:
                _fill(memory, size, parts)
                self._send_descriptor(HEAD.pack(number, value, kind, APART), memory)
            finally:
                os.close(memory)

    def receive(self) -> Head | None:
        """The next message's head, or None if the other end is gone."""
        try:
            if self._quick:
                self._size = self.socket.recv_into(self._packet)
            else:
                self._size, self._descriptor = self._receive_both(self._packet)
        except OSError:
            return None
        if not self._size:
            return None
        return HEAD.unpack_from(self._packet)

    def content(self, extra: int) -> Any:
        """What came with the message that was just received.

        Args:
            extra: of its head.

        Raises:
            OSError: the other end was gone before all of it had come.
            Exception: what loading it raises.
        """
        if extra == NOTHING:
            return None
        if extra == INLINE:
            # Its own memory: arrays of it are kept while the next message comes.
            return _loaded(memoryview(self._packet[HEAD.size : self._size]))
        memory = self.descriptor()
        try:
            mapping = Mapping(memory, os.fstat(memory).st_size)
        finally:
            os.close(memory)
        return _loaded(mapping.view())

    def descriptor(self) -> int:
        """The file descriptor that came with the message, for the caller to close.

        Raises:
            OSError: the other end was gone before it had come, or this process has as
                many as it may have.
        """
        if self._quick:
            _, self._descriptor = self._receive_both(bytearray(1))
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            raise ConnectionResetError("no descriptor has come with a message")
        return descriptor

    def shut(self) -> None:
        """Ends the connection for whoever reads or writes on it, at either end."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended, or is closed
            pass

    def close(self) -> None:
        """Gives the socket back, as does the end of this object."""
        self._end()

    def _send_descriptor(self, head: bytes, descriptor: int) -> None:
        if not self._quick:
            socket.send_fds(self.socket, [head], [descriptor])
            return
        self.socket.send(head)
        try:
            socket.send_fds(self.socket, [b"\0"], [descriptor])
        except OSError as error:
            self.shut()  # the other end could not make sense of what follows
            raise ConnectionResetError(str(error)) from error

    def _receive_both(self, packet: bytearray) -> tuple[int, int | None]:
        """Bytes written into `packet`, and a descriptor if one came along."""
        size, ancillary, _, _ = self.socket.recvmsg_into(
            [packet], _ROOM, _CLOSE_ON_EXEC
        )
        for _, _, data in ancillary:
            return size, _DESCRIPTOR.unpack_from(data)[0]
        return size, None


def connection(*, quick: bool = False) -> tuple[Messages, socket.socket]:
    """Both ends of a new connection: one to use, one to hand over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Messages(ours, quick=quick), theirs


# -- errors ---------------------------------------------------------------------------

_CLASSES: Final[dict[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
        EngineLoadError,
        EngineRunError,
        EngineDeadError,
        EngineError,
        MemoryError,
    )
}


def described(error: BaseException, otherwise: type[EngineError]) -> tuple[str, str]:
    """An error as (name of a class that both ends know, text).

    Args:
        error: what was raised.
        otherwise: the class of anything that is no engine's error.
    """
    for kind in type(error).__mro__:
        if kind.__name__ in _CLASSES:
            return kind.__name__, str(error)
    return otherwise.__name__, f"{type(error).__name__}: {error}"


def error_of(name: str, text: str) -> Exception:
    """The error that `described` was told of."""
    return _CLASSES[name](text)


# -- content --------------------------------------------------------------------------


def _dumped(content: object) -> tuple[list[bytes | memoryview], int]:
    """`content` in parts that begin aligned when they follow each other; their size."""
    apart: list[pickle.PickleBuffer] = []
    body = pickle.dumps(content, 5, buffer_callback=apart.append)
    raws: list[bytes | memoryview] = [body, *(buffer.raw() for buffer in apart)]
    lengths = b"".join(_LENGTH.pack(len(raw)) for raw in raws)
    parts: list[bytes | memoryview] = []
    size = 0
    for raw in (_LENGTH.pack(len(raws)) + lengths, *raws):
        parts += [raw, bytes(-len(raw) % _ALIGNED)]
        size += len(raw) + len(parts[-1])
    return parts, size


def _fill(memory: int, size: int, parts: list[bytes | memoryview]) -> None:
    view = Mapping(memory, size).view()
    at = 0
    for part in parts:
        view[at : at + len(part)] = part
        at += len(part)


def _loaded(data: memoryview) -> Any:
    """What was dumped; arrays lie in `data`."""
    (count,) = _LENGTH.unpack_from(data)
    index = struct.Struct(f"<{count}Q")
    lengths = index.unpack_from(data, _LENGTH.size)
    at = _aligned(_LENGTH.size + index.size)
    raws = []
    for length in lengths:
        raws.append(data[at : at + length])
        at += _aligned(length)
    return pickle.loads(raws[0], buffers=raws[1:])


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED
