"""What the machine gives, for knobs that are left open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from engines.cores import usable_cores


def default_io_threads() -> int:
    """By the cores: one thread moves 1.3 GB/s of large messages, or 50,000 small ones a
    second (measured on a machine of 16)."""
    return min(max(usable_cores() // 4, 1), 4)


def memory_bytes() -> int:
    """Memory of this machine, or of the control group that limits the process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
