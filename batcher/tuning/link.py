"""The sockets under the HTTP/2 connections: addresses, channels and reconnecting links.

A channel is one socket with its connection and dies with it; a link is a place in the
set of connections that always has, or is getting, a channel. Both are told the time
and driven by the worker's loop; neither waits.
"""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING, Final

from batcher.errors import ConfigError
from batcher.tuning.headers import PENDING, UNAVAILABLE
from batcher.tuning.http2 import Connection

if TYPE_CHECKING:
    from batcher.tuning.calls import Call

_RECEIVE_BYTES: Final = 65_536
_FIRST_BACKOFF_NS: Final = 10_000_000
_LAST_BACKOFF_NS: Final = 1_000_000_000
_CONNECT_TIMEOUT_NS: Final = 5_000_000_000

_HOST_PORT = re.compile(r"(?:\[([^]]+)\]|([^:\[\]]+)):(\d+)")


class Address:
    """Where a server listens: `host:port`, `[ipv6]:port` or `unix:PATH`.

    Raises:
        ConfigError: `target` is none of these, or its host cannot be resolved.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        if target.startswith("unix:"):
            path = target.removeprefix("unix:")
            self._path = path[2:] if path.startswith("//") else path
            if not self._path:
                raise ConfigError(f"target {target!r}: the path is missing")
            self.authority = "localhost"
            self._resolved: list[tuple[int, tuple[object, ...]]] = []
            return
        match = _HOST_PORT.fullmatch(target)
        if match is None:
            raise ConfigError(
                f"target {target!r}: give host:port, [ipv6]:port or unix:PATH"
            )
        self._path = ""
        self.authority = target
        if not 0 < int(match[3]) < 2**16:  # the resolver takes it modulo 65536
            raise ConfigError(f"target {target!r}: a port is from 1 to 65535")
        host = match[1] or match[2]
        try:
            found = socket.getaddrinfo(host, int(match[3]), type=socket.SOCK_STREAM)
        except (OSError, OverflowError) as fault:
            raise ConfigError(f"target {target!r}: {fault}") from fault
        self._resolved = [(family, address) for family, *_, address in found]

    def start(self, attempt: int) -> tuple[socket.socket, str]:
        """Begin to connect; return the socket and, if it failed at once, why.

        A name may have several addresses, and `localhost` be ::1 first while the
        server listens on 127.0.0.1 only: each attempt takes the next.
        """
        if self._path:
            made = socket.socket(socket.AF_UNIX)
            address: object = self._path
        else:
            family, address = self._resolved[attempt % len(self._resolved)]
            made = socket.socket(family, socket.SOCK_STREAM)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setblocking(False)
        try:
            made.connect(address)  # type: ignore[arg-type]
        except BlockingIOError as fault:
            # A Unix socket says EAGAIN when the listener's backlog is full, and is
            # not connecting then.
            return made, os.strerror(fault.errno or 0) if self._path else ""
        except OSError as fault:
            return made, fault.strerror or str(fault)
        return made, ""

    @property
    def attempts(self) -> int:
        """How many addresses there are to try."""
        return max(1, len(self._resolved))


class Channel:
    """One socket and the HTTP/2 connection on it."""

    __slots__ = (
        "_unsent",
        "blocked",
        "closed",
        "http",
        "link",
        "opened_at_ns",
        "socket",
    )

    def __init__(self, made: socket.socket, link: Link, now_ns: int) -> None:
        self.socket = made
        self.link = link
        self.http = Connection()
        self.opened_at_ns = now_ns
        self.closed = ""
        """Why the channel is of no more use; empty while it is."""
        self.blocked = False
        """Whether bytes wait for the socket to take them."""
        self._unsent = b""

    def receive(self) -> bytes:
        """Bytes that have arrived; sets `closed` when the peer has gone."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return b""
        except OSError as fault:
            self._close(fault.strerror or str(fault))
            return b""
        if not data:
            self._close("closed by the server")
        return data

    def flush(self) -> bool:
        """Send what waits; return whether some of it must wait for the socket."""
        output = self.http.output
        if not output:
            if not self._unsent:
                return False
            data = self._unsent
        elif len(output) == 1 and not self._unsent:
            data = output[0]
        else:
            data = self._unsent + b"".join(output)
        output.clear()
        sent = 0
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            pass
        except OSError as fault:
            # The reading side will say so too; what has come is read before.
            self._close(fault.strerror or str(fault))
            sent = len(data)
        self.blocked = sent < len(data)
        self._unsent = data[sent:] if self.blocked else b""
        return self.blocked

    def _close(self, fault: str) -> None:
        if not self.closed:
            what = "lost" if self.http.ready else "failed"
            self.closed = f"connection {what}: {fault}"
        self.http.news = True


class Link:
    """A place among the connections, with a channel when there is one.

    Calls given to a link without a usable channel wait for the attempt to connect
    that is running or due next, and end as UNAVAILABLE if that fails, as those of a
    gRPC client library do.
    """

    def __init__(self, index: int, address: Address) -> None:
        self.index = index
        self.channel: Channel | None = None
        self.up = False
        """Whether calls can be sent at once."""
        self.retry_at_ns = 0
        """When the next attempt is due, if there is no channel."""
        self.last_fault = ""
        """Why the last attempt failed or the last channel ended."""
        self._address = address
        self._queue: list[Call] = []
        self._backoff_ns = _FIRST_BACKOFF_NS
        self._attempt = 0

    def connect(self, now_ns: int) -> Channel | None:
        """Begin an attempt; None if it failed at once (see `failed`)."""
        made, fault = self._address.start(self._attempt)
        if fault:
            made.close()
            self.last_fault = fault
            return None
        self.channel = Channel(made, self, now_ns)
        return self.channel

    def opened(self) -> None:
        """The channel's peer has shown that it speaks HTTP/2: send what waits."""
        self.up = True
        self._backoff_ns = _FIRST_BACKOFF_NS
        waiting, self._queue = self._queue, []
        self.submit([call for call in waiting if call.code == PENDING])

    def submit(self, calls: list[Call]) -> None:
        """Send calls, or keep them for the next channel."""
        if self.up and self.channel is not None:
            self.channel.http.submit(calls)
        else:
            self._queue += calls

    def replaced(self, now_ns: int) -> None:
        """The channel takes no new calls (GOAWAY): get another one now."""
        opened_at_ns = self.channel.opened_at_ns if self.channel is not None else 0
        self.channel = None
        self.up = False
        # Not faster than this, or a peer that sends every channel away is stormed.
        self.retry_at_ns = max(now_ns, opened_at_ns + _FIRST_BACKOFF_NS)

    def failed(self, fault: str, now_ns: int) -> list[Call]:
        """An attempt or a channel ended: try again later; return the calls lost."""
        if not self.up:
            self._attempt += 1
        self.channel = None
        self.up = False
        self.last_fault = fault
        self.retry_at_ns = now_ns + self._backoff_ns
        self._backoff_ns = min(2 * self._backoff_ns, _LAST_BACKOFF_NS)
        waiting, self._queue = self._queue, []
        lost = [call for call in waiting if call.code == PENDING]
        for call in lost:
            call.fail(UNAVAILABLE, fault)
        return lost

    def overdue(self, now_ns: int) -> bool:
        """Whether the attempt that is running has taken too long."""
        channel = self.channel
        return (
            channel is not None
            and not self.up
            and now_ns - channel.opened_at_ns > _CONNECT_TIMEOUT_NS
        )
