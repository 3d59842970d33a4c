"""Where the daemon keeps TensorRT plans unless it is told otherwise, and what is there.

What a plan is and how it gets there is in `engines.tensorrt.cache`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batcher.errors import ConfigError

VARIABLE: Final = "BATCHER_PLAN_CACHE"


def default_plan_cache() -> Path:
    """The folder of plans: `$BATCHER_PLAN_CACHE`, or one in the user's cache folder.

    That is `$XDG_CACHE_HOME/batcher/plans`, or else `~/.cache/batcher/plans`. The
    folder may not exist yet.

    Raises:
        ConfigError: it is in a home folder, and the user has none. (No shared folder
            takes its place: a plan is code.)
    """
    try:
        if given := os.environ.get(VARIABLE):
            return Path(given).expanduser()
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():  # its specification says to pass over such
            cache = Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError(
            f"no folder for TensorRT plans: {str(error).rstrip('.')}; set {VARIABLE} "
            "to one that only this user can write"
        ) from None
    return cache / "batcher" / "plans"


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """The state of a plan cache.

    Attributes:
        path: where it is, or will be; "" where that cannot be told.
        plans: how many it holds.
        size_bytes: of all files in it.
        free_bytes: on its disk.
        writable: whether plans can be kept there.
        detail: what is wrong; "" if nothing is.
    """

    path: str
    plans: int
    size_bytes: int
    free_bytes: int
    writable: bool
    detail: str


def plan_folder() -> PlanFolder:
    """The state of the default plan cache; writes nothing, and raises nothing."""
    try:
        folder = default_plan_cache().absolute()
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        sizes = [(f.name, f.stat().st_size) for f in folder.glob("*") if f.is_file()]
        free_bytes = shutil.disk_usage(existing).free
    except (ConfigError, OSError) as error:
        return PlanFolder("", 0, 0, 0, False, str(error))
    detail = ""
    if not existing.is_dir():
        detail = f"{existing} is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        detail = f"{existing} cannot be written by this user"
    return PlanFolder(
        path=str(folder),
        plans=sum(name.endswith(".plan") for name, _ in sizes),
        size_bytes=sum(size for _, size in sizes),
        free_bytes=free_bytes,
        writable=not detail,
        detail=detail,
    )
