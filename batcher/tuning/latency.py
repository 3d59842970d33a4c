"""Recording of latencies: exact up to some millions, in fine buckets beyond.

Nanoseconds in, percentiles out. Recording is one call into C per request; everything
slower happens in `fold` and at the end of a run.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

EXACT_LIMIT: Final = 4_000_000
"""Samples kept as they are by one process (8 bytes each); later ones are bucketed."""

_STEPS: Final = 256
"""Buckets between a power of two and the next: at most 0.2 % off."""


class LatencyRecorder:
    """Collects durations in nanoseconds."""

    def __init__(self, exact_limit: int = EXACT_LIMIT) -> None:
        self._limit = exact_limit
        self._exact: array[int] = array("q")
        self._recent = self._exact
        self._counts = np.zeros(64 * _STEPS, dtype=np.int64)
        self.record: Callable[[int], None] = self._exact.append
        """Add one duration. Looked up anew after each `fold`."""

    def fold(self) -> None:
        """Bound the memory; to be called every so often."""
        if self._recent is self._exact:
            if len(self._exact) < self._limit:
                return
        else:
            _count(np.frombuffer(self._recent, dtype=np.int64), self._counts)
        self._recent = array("q")
        self.record = self._recent.append

    def take(self) -> tuple[bytes, bytes]:
        """What was recorded, for `LatencySummary`: exact samples and bucket counts."""
        if self._recent is self._exact:
            return self._exact.tobytes(), b""
        self.fold()
        return self._exact.tobytes(), self._counts.tobytes()


class LatencySummary:
    """Percentiles over what one or more recorders took.

    Exact (nearest rank) as long as no recorder passed its limit; within 0.2 % beyond.
    """

    def __init__(self, taken: Iterable[tuple[bytes, bytes]] = ()) -> None:
        parts = list(taken)
        samples = [np.frombuffer(exact, dtype=np.int64) for exact, _ in parts]
        self._values = np.sort(np.concatenate(samples)) if samples else np.empty(0)
        self.exact = not any(counts for _, counts in parts)
        """Whether percentiles are exact."""
        self._cumulative = np.empty(0, dtype=np.int64)
        self.max_ns = int(self._values[-1]) if self._values.size else 0
        """Longest duration; of bucketed samples its bucket's upper end."""
        self.count = int(self._values.size)
        """How many durations there are."""
        self.mean_ns = float(self._values.mean()) if self.count else 0.0
        """Mean of all durations."""
        if not self.exact:
            self._use_buckets([counts for _, counts in parts if counts])

    def _use_buckets(self, parts: list[bytes]) -> None:
        counts = np.zeros(64 * _STEPS, dtype=np.int64)
        _count(self._values.astype(np.int64), counts)
        for part in parts:
            counts += np.frombuffer(part, dtype=np.int64)
        used = np.flatnonzero(counts)
        self._values = _bucket_ends(used)
        self._cumulative = np.cumsum(counts[used])
        self.count = int(self._cumulative[-1])
        self.max_ns = max(self.max_ns, int(self._values[-1]))
        self.mean_ns = float((self._values * counts[used]).sum() / self.count)

    def percentile_ns(self, percent: float) -> int:
        """The duration that `percent` of all do not exceed; 0 when there are none."""
        if not self.count:
            return 0
        rank = max(1, int(np.ceil(self.count * percent / 100 - 1e-9)))
        if self.exact:
            return int(self._values[rank - 1])
        return int(self._values[np.searchsorted(self._cumulative, rank)])

    def share_within(self, limit_ns: int) -> float:
        """The fraction (0 to 1) of durations of at most `limit_ns`."""
        if not self.count:
            return 0.0
        place = int(np.searchsorted(self._values, limit_ns, side="right"))
        if self.exact:
            return place / self.count
        return int(self._cumulative[place - 1]) / self.count if place else 0.0


def _count(values: np.ndarray, counts: np.ndarray) -> None:
    """Add durations to bucket counts."""
    if values.size:
        fraction, exponent = np.frexp(np.maximum(values, 1).astype(np.float64))
        index = exponent * _STEPS + ((fraction - 0.5) * 2 * _STEPS).astype(np.int64)
        counts += np.bincount(index, minlength=counts.size)


def _bucket_ends(index: np.ndarray) -> np.ndarray:
    """The upper ends of buckets, in nanoseconds."""
    fraction = (index % _STEPS + 1) / (2 * _STEPS) + 0.5
    ends: np.ndarray = np.ldexp(fraction, index // _STEPS).astype(np.int64)
    return ends
