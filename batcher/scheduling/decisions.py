"""What the scheduler tells its driver to do: values, never calls."""

from __future__ import annotations

from dataclasses import dataclass

from batcher.errors import BatcherError
from batcher.scheduling.request import Batch, Request


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run `batch` on `slot` (an index), behind what that slot runs already."""

    slot: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer `request` with `error`; it never runs (or runs no more)."""

    request: Request
    error: BatcherError


Decision = Dispatch | Reject
