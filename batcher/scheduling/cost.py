"""Measured run times of batches, and what they predict.

One `CostRow` per group: rung to run time in nanoseconds. Filled by warm-up, then by
every run. Holds numbers only; knows nothing of requests.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

_WEIGHT: Final = 1 / 16  # of the newest run (scheduling literature: EWMA 1/16)
_CLAMP: Final = 5.0  # a run this many times slower than the mean is an outlier


class CostRow:
    """Run time by rung, with interpolation between the rungs that were measured."""

    __slots__ = ("_mean", "_rungs")

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._rungs: list[int] = []

    def record(self, rung: int, run_ns: int) -> None:
        """Takes in one run of `rung` rows that lasted `run_ns`."""
        mean = self._mean.get(rung)
        if mean is None:
            self._mean[rung] = max(float(run_ns), 1.0)  # 0 would clamp all that follows
            self._rungs.insert(bisect_left(self._rungs, rung), rung)
            return
        # An outlier (a page fault, a stolen core) moves the mean, but not by all of it.
        sample = min(float(run_ns), mean * _CLAMP)
        self._mean[rung] = mean + (sample - mean) * _WEIGHT

    def estimate_ns(self, rung: int) -> int | None:
        """Predicted run time of `rung` rows, or None when nothing was measured.

        Never below what a smaller measured rung takes (a larger batch is not faster).
        """
        rungs = self._rungs
        if not rungs:
            return None
        mean = self._mean
        at = bisect_left(rungs, rung)
        if at < len(rungs) and rungs[at] == rung:
            value = mean[rung]
        elif at == 0:
            value = mean[rungs[0]]  # nothing smaller: its cost is an upper bound
        elif at == len(rungs):
            value = mean[rungs[-1]] * rung / rungs[-1]
        else:
            low, high = rungs[at - 1], rungs[at]
            share = (rung - low) / (high - low)
            value = mean[low] + (mean[high] - mean[low]) * share
        return int(max([value, *(mean[smaller] for smaller in rungs[:at])]))
