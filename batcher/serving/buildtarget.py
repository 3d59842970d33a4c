"""Where a built plan may go: never in the place of something else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from batcher.errors import ConfigError


def build_target(model: Path, output: Path | None) -> Path:
    """Where the plan goes.

    Args:
        model: the ONNX file.
        output: as it was given; None for the model's name with `.plan`.

    Raises:
        ConfigError: it cannot be written there, or something is there that is no plan;
            said now, and not after the build.
    """
    target = model.with_suffix(".plan") if output is None else output
    if target.is_dir():
        raise ConfigError(f"--output {target} is a folder; name a file in it")
    if target.resolve() == model.resolve():
        raise ConfigError(f"--output {target} is the model itself")
    if target.suffix == ".onnx":
        raise ConfigError(
            f"--output {target} would be taken for a model; name it .plan"
        )
    if os.path.lexists(target):
        # Plans are renamed into place, which would replace a device, pipe or link.
        if not stat.S_ISREG(target.lstat().st_mode):
            raise ConfigError(f"--output {target} is no regular file; name another")
        with target.open("rb") as file:
            begins = file.read(4)
        if begins and begins[1:] != b"trt":
            raise ConfigError(
                f"--output {target} is there already, and is no plan; remove it, or "
                "name another file"
            )
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {target}: {folder} cannot be written")
    return target
