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

    __slots__ = ("_means", "_rungs")

    def __init__(self) -> None:
        self._rungs: list[int] = []  # ascending
        self._means: list[float] = []  # of the rung at the same place

    def record(self, rung: int, run_ns: int) -> None:
        """Takes in one run of `rung` rows that lasted `run_ns`."""
        rungs = self._rungs
        at = bisect_left(rungs, rung)
        if at == len(rungs) or rungs[at] != rung:
            rungs.insert(at, rung)
            # 0 would clamp all that follows.
            self._means.insert(at, max(float(run_ns), 1.0))
            return
        # An outlier (a page fault, a stolen core) moves the mean, but not by all of it.
        mean = self._means[at]
        self._means[at] = mean + (min(run_ns, mean * _CLAMP) - mean) * _WEIGHT

    def estimate_ns(self, rung: int) -> int | None:
        """Predicted run time of `rung` rows, or None when nothing was measured.

        Never below what a smaller measured rung takes (a larger batch is not faster).
        """
        rungs = self._rungs
        if not rungs:
            return None
        means = self._means
        at = bisect_left(rungs, rung)
        if at < len(rungs) and rungs[at] == rung:
            value = means[at]
        elif at == 0:
            value = means[0]  # nothing smaller: its cost is an upper bound
        elif at == len(rungs):
            value = means[-1] * rung / rungs[-1]
        else:
            low, high = rungs[at - 1], rungs[at]
            share = (rung - low) / (high - low)
            value = means[at - 1] + (means[at] - means[at - 1]) * share
        return int(max(value, max(means[:at], default=0.0)))
