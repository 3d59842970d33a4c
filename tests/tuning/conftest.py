"""Servers to bench."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .bench_setup import Server, StartServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers of one's own."""
    servers: list[Server] = []

    def start(
        kind: str = "front",
        address: str = "127.0.0.1:0",
        options: dict[str, int] | None = None,
    ) -> Server:
        servers.append(Server(kind, address, options or {}))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def front() -> Iterator[str]:
    """The target of a front server that many tests use."""
    server = Server("front", "127.0.0.1:0", {})
    yield server.target
    server.kill()
