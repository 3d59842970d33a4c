"""The model that the Python peers run: sleeps for a batch's time, counts, echoes.

A batch of n rows takes BENCH_BASE_MS + n * BENCH_PER_ROW_US of sleep and no CPU.
Rows and batches are counted in the 16-byte file BENCH_COUNTS; the benchmark reads it.
"""

from __future__ import annotations

import mmap
import os
import struct
import time


class FakeModel:
    """One instance; not thread-safe."""

    def __init__(self) -> None:
        self._base_s = float(os.environ.get("BENCH_BASE_MS", "2")) / 1e3
        self._per_row_s = float(os.environ.get("BENCH_PER_ROW_US", "20")) / 1e6
        self._batches = self._rows = 0
        self._counts: mmap.mmap | None = None
        if path := os.environ.get("BENCH_COUNTS"):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(file, 16)
            self._counts = mmap.mmap(file, 16)
            os.close(file)

    def run(self, rows: int) -> None:
        """One batch."""
        self._batches += 1
        self._rows += rows
        if self._counts is not None:
            struct.pack_into("<QQ", self._counts, 0, self._rows, self._batches)
        seconds = self._base_s + self._per_row_s * rows
        if seconds > 0:
            time.sleep(seconds)
