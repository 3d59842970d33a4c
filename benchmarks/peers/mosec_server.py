"""Peer: mosec (Rust front end, one worker process), raw bytes over HTTP/1.1.

Started by `benchmarks/servers.py` with mosec's own `--address` and `--port`. It waits
up to 2 ms for a fuller batch.
"""

from __future__ import annotations

import numpy as np
from fake_model import FakeModel
from mosec import Server, Worker


class Echo(Worker):
    """FP32[16] in and out, batches of at most 32."""

    def __init__(self) -> None:
        self._model = FakeModel()

    def deserialize(self, data: bytes) -> np.ndarray:
        """Bytes to a row."""
        return np.frombuffer(data, np.float32)

    def serialize(self, data: np.ndarray) -> bytes:
        """A row to bytes."""
        return data.tobytes()

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        """One batch: rows are joined and split, as any real model's must be."""
        self._model.run(len(data))
        return list(np.stack(data))


if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, num=1, max_batch_size=32, max_wait_time=2)
    server.run()
