"""How many bytes of requests the daemon holds at a time."""

from __future__ import annotations


class Budget:
    """Bytes of requests in the daemon, and their limit."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
