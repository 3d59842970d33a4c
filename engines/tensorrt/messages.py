"""TensorRT's messages, handed to Python's logging and to whoever made the failed call.

TensorRT reports by logger what Python reports by exception: a call returns None, and
the reason went by. TensorRT keeps the first logger it is given for the whole process,
so there is one per flavour here, and calls collect what was said during them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from engines.tensorrt.module import TensorRT

_log = logging.getLogger("engines.tensorrt")
_lock = threading.Lock()
_loggers: Final[dict[str, Any]] = {}
_collectors: Final[list[Said]] = []

_LEVELS: Final = (
    logging.ERROR,  # INTERNAL_ERROR
    logging.ERROR,
    logging.WARNING,
    logging.DEBUG,  # INFO is about TensorRT's inside
    logging.DEBUG,
)
# True of every model that has such a tensor, and no reason to worry.
_HARMLESS: Final = ("Int64 binding", "unsupported in TensorRT-RTX", "Thread context")
_MAX_KEPT: Final = 20


class Said:
    """The errors TensorRT has reported while a call was being made.

    Attributes:
        errors: in order, without repetitions.
        thread: that made the call.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.thread = threading.get_ident()

    def add(self, text: str) -> None:
        """Keeps a message, unless it was given before or there are too many."""
        if text not in self.errors and len(self.errors) < _MAX_KEPT:
            self.errors.append(text)

    def __str__(self) -> str:
        return "; ".join(self.errors) or "TensorRT gives no reason"


def logger(tensorrt: TensorRT) -> Any:
    """The process's `ILogger` for a flavour; always the same object."""
    with _lock:
        if tensorrt.flavour not in _loggers:
            _loggers[tensorrt.flavour] = _make(tensorrt.trt)
        return _loggers[tensorrt.flavour]


@contextmanager
def collected_errors() -> Iterator[Said]:
    """Collects the errors of the calls within; they are not logged as errors then.

    A message from one of TensorRT's own threads goes to all who collect.
    """
    said = Said()
    with _lock:
        _collectors.append(said)
    try:
        yield said
    finally:
        with _lock:
            _collectors.remove(said)


def write(severity: int, text: str) -> None:
    """Takes one message; `severity` is the value of `ILogger.Severity` (0 is worst)."""
    text = " ".join(text.split())
    level = _LEVELS[min(max(severity, 0), len(_LEVELS) - 1)]
    if level > logging.DEBUG and any(part in text for part in _HARMLESS):
        level = logging.DEBUG
    if level == logging.ERROR and _collect(text):
        level = logging.DEBUG  # the exception will say it
    _log.log(level, "%s", text)


def _collect(text: str) -> bool:
    here = threading.get_ident()
    with _lock:
        own = [said for said in _collectors if said.thread == here]
        for said in own or _collectors:
            said.add(text)
        return bool(_collectors)


def _make(trt: Any) -> Any:
    class Bridge(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            try:
                write(int(severity), text)
            except Exception:  # an exception here would end the process
                _log.exception("a message of TensorRT could not be written")

    return Bridge()
