"""How far something long is: what is told, and the log for those who watch no bar."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

_QUIET_NS: Final = 2_000_000_000
_EVERY_NS: Final = 5_000_000_000

Report = Callable[[str, int, int], object]
"""Told how far things are: ("building", steps done, steps in all); must be quick."""


def unheard(phase: str, done: int, total: int) -> None:
    """The report that nobody wants."""


class Logged:
    """Logs how far a build is, every few seconds.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._phase = ""
        self._due_ns = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now_ns = time.monotonic_ns()
        if phase != self._phase:
            self._phase = phase
            self._due_ns = now_ns + _QUIET_NS
            if phase == "waiting":
                log.info("model %r: another process builds its plan", self._name)
        elif now_ns >= self._due_ns:
            self._due_ns = now_ns + _EVERY_NS
            log.info("model %r: %s, %d of %d", self._name, phase, done, total)
