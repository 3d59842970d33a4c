"""How many processor cores there are to use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The processor cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
