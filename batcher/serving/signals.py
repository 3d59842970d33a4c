"""SIGTERM, SIGINT and SIGHUP: what they do, from the first import to the last line.

The handlers are Python's own, not the event loop's: they must be there before there is
a loop, and a second signal must end a process whose loop is stuck. What a drain is
stands in `batcher.serving.server`. Imported first of all: it imports little itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final, NoReturn

from batcher.serving import logs

SECOND_SIGNAL: Final = 130
"""The exit code when a second signal came."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_received = 0
_begin_drain: Callable[[str], None] | None = None
_clean_up: Callable[[], None] | None = None


def watch() -> None:
    """Takes the signals over. Until `on_signal` there is nothing to drain: the first
    one ends the process with 0."""
    for number in _SIGNALS:
        ignored = signal.getsignal(number) == signal.SIG_IGN
        if not (ignored and number == signal.SIGHUP):  # nohup means what it says
            signal.signal(number, _handle)


def on_signal(begin_drain: Callable[[str], None], clean_up: Callable[[], None]) -> None:
    """From now on the first signal begins a drain.

    Args:
        begin_drain: called with the signal's name, between two instructions of the main
            thread, whatever that was doing.
        clean_up: removes what must not be left behind, at once; see `leave`.
    """
    global _begin_drain, _clean_up
    _begin_drain, _clean_up = begin_drain, clean_up
    watch()


def leave(code: int) -> NoReturn:
    """Ends the process without waiting for anything, threads in native code included.

    Nothing of it lies around afterwards.
    """
    try:
        if _clean_up is not None:
            _clean_up()
    finally:
        os._exit(code)


def _handle(number: int, frame: FrameType | None) -> None:
    global _received
    _received += 1
    name = signal.Signals(number).name
    if _received > 1:
        try:
            logs.tell(f"{name} once more: what is in flight is lost")
        finally:
            leave(SECOND_SIGNAL)
    if _begin_drain is not None:
        _begin_drain(name)
        return
    logs.tell(f"{name} during the start: nothing to drain")
    leave(0)
