"""What the scheduler knows of a slot: what it runs, and when it will be free.

Predictions only; nothing of streams or staging, which are the engine's.
"""

from __future__ import annotations

from typing import Final

from batcher.scheduling.request import NEVER, Batch

COMMIT_LEAD_NS: Final = 300_000
"""How long before a slot is free its next batch closes, so that its inputs lie ready.

Host work between two batches is a bubble: 0.3 ms per batch costs 8 % of goodput on one
engine (scheduling notes, "commit-ahead").
"""


class Slot:
    """What the scheduler knows of one slot: the batch it runs and the one behind it."""

    __slots__ = ("ahead", "commit_at_ns", "free_at_ns", "index", "running")

    def __init__(self, index: int) -> None:
        self.index = index
        self.running: Batch | None = None
        self.ahead: Batch | None = None
        self.free_at_ns = NEVER  # predicted; NEVER when nothing is known
        self.commit_at_ns = NEVER  # from when on it takes a batch that is not full

    def start(self, batch: Batch, now_ns: int) -> None:
        self.running = batch
        self.free_at_ns = self.commit_at_ns = NEVER
        cost_ns = batch.group.cost.estimate_ns(batch.rung)
        if cost_ns is not None:
            self.free_at_ns = now_ns + cost_ns
            # A shorter run is not worth closing a batch ahead for.
            if cost_ns >= 2 * COMMIT_LEAD_NS:
                self.commit_at_ns = self.free_at_ns - COMMIT_LEAD_NS
