"""Percentiles, mean and shares over the durations that load processes recorded."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from batcher.tuning.latency import bucket_end_ns, bucket_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batcher.tuning.latency import Recorded


class LatencySummary:
    """Percentiles over what one or more recorders took.

    Exact (nearest rank) as long as no recorder passed its limit; within 0.4 % beyond.
    """

    def __init__(self, taken: Iterable[Recorded] = ()) -> None:
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

    def _use_buckets(self, parts: list[dict[int, int]]) -> None:
        counts = Counter(map(bucket_of, self._values.tolist()))
        for part in parts:
            counts.update(part)
        used = sorted(counts)
        in_each = np.array([counts[bucket] for bucket in used])
        self._values = np.array([bucket_end_ns(bucket) for bucket in used])
        self._cumulative = np.cumsum(in_each)
        self.count = int(self._cumulative[-1])
        self.max_ns = max(self.max_ns, int(self._values[-1]))
        self.mean_ns = float((self._values * in_each).sum() / self.count)

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
