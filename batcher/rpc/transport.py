"""The seam between the wire and the daemon.

A transport turns gRPC calls into `Handler.on_call` and answers them with `respond` or
`fail`. All of it happens on the event loop's thread. Two transports fill it:
`batcher.rpc.native` and `batcher.rpc.grpcio`; nothing above knows which.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from batcher.errors import ConfigError

Metadata = tuple[tuple[str, str | bytes], ...]
"""Metadata as gRPC gives it: bytes for keys ending in -bin."""

Trailing = tuple[tuple[str, str], ...]

Call = Hashable
"""A transport's handle of one call, opaque to everyone else."""


class Reply(Protocol):
    """Where the answer to a call goes: a transport, or a stream within one."""

    def respond(self, call: Any, payload: bytes, trailing: Trailing = ()) -> None:
        """Answers with a message. Without effect when the caller has gone."""
        ...

    def fail(self, call: Any, code: int, text: str, trailing: Trailing = ()) -> None:
        """Answers with a status. Without effect when the caller has gone."""
        ...


class Handler(Protocol):
    """What the daemon does with calls."""

    def on_call(
        self,
        reply: Reply,
        call: Any,
        method: str,
        payload: bytes,
        metadata: Metadata,
        deadline_ns: int | None,
        peer: str,
    ) -> object | None:
        """A call has arrived.

        Args:
            reply: answer there, now or later, exactly once.
            call: the handle to answer with.
            method: full name, "/inference.GRPCInferenceService/ModelInfer".
            payload: the serialized message.
            metadata: as sent.
            deadline_ns: on `time.monotonic_ns`, None when the caller set none.
            peer: who called, in gRPC's notation ("ipv4:127.0.0.1:4711").

        Returns:
            A token for `on_cancel` when the answer comes later, None when it was given.
        """
        ...

    def on_cancel(self, token: object) -> None:
        """The caller of a call that was not answered yet has gone."""
        ...


class Transport(Reply, Protocol):
    """A server for one or several addresses."""

    @property
    def in_flight(self) -> int:
        """Calls not answered yet."""
        ...

    @property
    def addresses(self) -> list[str]:
        """What it listens on, with the real port where 0 was asked for."""
        ...

    async def start(self) -> None:
        """Binds and begins to serve.

        Raises:
            ConfigError: an address cannot be bound.
        """
        ...

    def drain_inbox(self) -> None:
        """Hands over what has arrived since the last call (on the loop's thread)."""
        ...

    def end_streams(self) -> None:
        """Ends what may stay open for ever, with a reason. For a drained daemon."""
        ...

    async def stop(self) -> None:
        """Sends what was answered, then closes. Nothing is answered afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: TCP or a Unix socket.

    Attributes:
        host, port: of TCP; port 0 takes a free one.
        path: of a Unix socket, else None.
    """

    host: str = ""
    port: int = 0
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`.

        Raises:
            ConfigError: it is none of them.
        """
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if path.startswith("//"):
                path = path[2:]
            if not path:
                raise ConfigError(f"address {text!r}: the path is missing")
            if len(path.encode()) > 107:  # sockaddr_un holds 108 with its NUL
                raise ConfigError(f"address {text!r}: the path has over 107 bytes")
            return cls(path=path)
        host, _, port = text.rpartition(":")
        number = int(port) if re.fullmatch("[0-9]{1,5}", port) else -1
        if not host or not 0 <= number <= 65535:
            raise ConfigError(
                f"address {text!r} is neither HOST:PORT (0 to 65535) nor unix:PATH"
            )
        return cls(host=host.strip("[]"), port=number)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, wherever it leads
            return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
