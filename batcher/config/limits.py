"""Checks that many knobs share, and the limits of their values."""

from __future__ import annotations

from typing import Final

from batcher.errors import ConfigError

FORBID = {"extra": "forbid"}

MAX_BATCH: Final = 65_536
MAX_INT32: Final = 2**31 - 1
HOUR_US: Final = 3_600_000_000
DAY_MS: Final = 86_400_000


def between(name: str, value: float, least: float, most: float) -> None:
    """Sees to it that a value lies between two others.

    Raises:
        ConfigError: names the knob and the limit.
    """
    if value > most:
        raise ConfigError(f"{name} must be at most {most}, got {value}")
    if not value >= least:  # what is no number is not
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def ascending(name: str, values: tuple[int, ...]) -> None:
    """Sees to it that values are positive and each is larger than the last.

    Raises:
        ConfigError: names the knob.
    """
    if any(v < 1 for v in values) or list(values) != sorted(set(values)):
        raise ConfigError(f"{name} must be ascending and positive, got {list(values)}")
