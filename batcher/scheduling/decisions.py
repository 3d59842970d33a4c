"""What the scheduler tells its driver to do: values, never calls."""

from __future__ import annotations

from typing import NamedTuple

from batcher.errors import BatcherError
from batcher.scheduling.request import Batch, Request


class Dispatch(NamedTuple):
    """Run `batch` on `slot` (an index), behind what that slot runs already."""

    slot: int
    batch: Batch


class Reject(NamedTuple):
    """Answer `request` with `error`; it never runs (or runs no more)."""

    request: Request
    error: BatcherError


Decision = Dispatch | Reject
