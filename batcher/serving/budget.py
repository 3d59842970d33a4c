"""How many bytes of requests the daemon holds at a time."""

from __future__ import annotations

from batcher.errors import BatcherError, PayloadTooLarge, QueueFull


class Budget:
    """Bytes of requests in the daemon, and their limit."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def refusal(self, size: int) -> BatcherError:
        """Why a request of `size` bytes does not fit: for now, or ever."""
        if size > self.limit:
            return PayloadTooLarge(
                f"the request has {size} bytes; all that are in flight may have "
                f"{self.limit} together"
            )
        return QueueFull(
            f"{self.used} bytes of requests are in flight and the limit is "
            f"{self.limit}; try again later"
        )
