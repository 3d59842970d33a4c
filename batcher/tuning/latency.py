"""Recording of durations: exact up to some millions, in fine buckets beyond.

Integer nanoseconds in; what is made of them is in `percentiles`. Recording is one call
into C per request, and a load process needs no numpy for it, which would take most of
its start.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

EXACT_LIMIT: Final = 4_000_000
"""Samples kept as they are by one process (8 bytes each); later ones are bucketed."""

_STEP_BITS: Final = 8

Recorded = tuple[bytes, dict[int, int]]
"""Exact samples (int64), and counts of the others by bucket."""


class LatencyRecorder:
    """Collects durations in nanoseconds."""

    def __init__(self, exact_limit: int = EXACT_LIMIT) -> None:
        self._limit = exact_limit
        self._exact: array[int] = array("q")
        self._recent = self._exact
        self._counts: Counter[int] = Counter()
        self.record: Callable[[int], None] = self._exact.append
        """Add one duration. Looked up anew after each `fold`."""

    def fold(self) -> None:
        """Bound the memory; to be called every so often."""
        if self._recent is self._exact:
            if len(self._exact) < self._limit:
                return
        else:
            self._counts.update(map(bucket_of, self._recent))
        self._recent = array("q")
        self.record = self._recent.append

    def take(self) -> Recorded:
        """What was recorded, for `percentiles.LatencySummary`."""
        if self._recent is not self._exact:
            self.fold()
        return self._exact.tobytes(), dict(self._counts)


def bucket_of(duration_ns: int) -> int:
    """The bucket of a duration: 256 between a power of two and the next."""
    shift = max(0, duration_ns.bit_length() - _STEP_BITS - 1)
    return (shift << _STEP_BITS) + (duration_ns >> shift)


def bucket_end_ns(bucket: int) -> int:
    """The longest duration of a bucket: at most 0.4 % more than the shortest."""
    shift = max(0, (bucket >> _STEP_BITS) - 1)
    return ((bucket - (shift << _STEP_BITS) + 1) << shift) - 1
