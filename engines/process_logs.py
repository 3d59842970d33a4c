"""What is logged in an engine's process is logged by the process that started it.

Under the same names and at the same levels, so that there is one log in one form.
"""

from __future__ import annotations

import logging
import pickle
import threading
from typing import Any

from engines.process_wire import LOG, Messages

_log = logging.getLogger(__name__)


class RemoteTraceback(Exception):
    """The traceback of an error in the engine's process, as text."""


def levels() -> dict[str, int]:
    """The levels that are set here, by logger ("": the root)."""
    named = {
        name: logger.level
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return named | {"": logging.root.level}


def forward(control: Messages, levels: dict[str, int]) -> None:
    """Sends what is logged here to the other process, at its levels."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.root.handlers[:] = [_Forward(control)]
    logging.captureWarnings(True)
    threading.excepthook = _log_end


def log_here(fields: dict[str, Any]) -> None:
    """Logs a record of the other process as one of this."""
    record = logging.makeLogRecord(fields)
    text = fields.get("exc_text")
    if text:  # for formatters that look at the error itself
        record.exc_info = (RemoteTraceback, RemoteTraceback(f"\n{text}"), None)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _log_end(end: threading.ExceptHookArgs) -> None:
    name = end.thread.name if end.thread is not None else "unknown"
    error = end.exc_value or end.exc_type()
    _log.critical("the thread %r of an engine has ended", name, exc_info=error)


class _Forward(logging.Handler):
    """Sends records, with their arguments and errors made text."""

    def __init__(self, control: Messages) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields = dict(vars(record), msg=record.getMessage(), args=None)
            if record.exc_info:
                fields["exc_text"] = logging.Formatter().formatException(
                    record.exc_info
                )
            fields["exc_info"] = None
            try:
                self._control.send(LOG, 0, 0, fields)
            except (pickle.PicklingError, TypeError, AttributeError):
                known = vars(logging.makeLogRecord({}))
                kept = {name: fields[name] for name in known if name in fields}
                self._control.send(LOG, 0, 0, kept)
        except OSError:  # the parent is gone, and this process with it
            pass
        except Exception:
            self.handleError(record)
