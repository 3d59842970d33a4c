"""Logging to stderr: one line per record, as text or as JSON.

Nothing that a client sends can forge a line: control characters are escaped, and the
lines of a traceback are marked as belonging to the record above them. Where JSON is
asked for, every line is JSON, from the first one on; only what native code prints by
itself (a crash of the interpreter, a panic) cannot be.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from types import TracebackType

Style = Literal["text", "json"]

log = logging.getLogger(__name__)

# C0 and C1 controls and the Unicode line separators, all of which end a line somewhere.
_CONTROLS: Final = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))
} | {0x2028: "\\u2028", 0x2029: "\\u2029", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}


def escaped(text: str) -> str:
    """The text on one line, whatever it holds."""
    return text.translate(_CONTROLS)


class TextFormatter(logging.Formatter):
    """`2026-11-30T12:00:00.123Z INFO batcher.serving.server: text`."""

    def format(self, record: logging.LogRecord) -> str:
        text = escaped(record.getMessage())
        line = f"{_instant(record)} {record.levelname} {record.name}: {text}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n    | {escaped(part)}" for part in trace.split("\n"))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)  # ASCII, so that nothing in it ends the line


def setup(style: Style, level: str) -> None:
    """Sends all records at or above `level` to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def asked_for(arguments: Sequence[str], variables: Mapping[str, str]) -> Style:
    """The format that the command line asks for, before it is parsed.

    For what is said until then: wrong usage, and a signal during the imports.
    """
    style = variables.get("BATCHER_LOG_FORMAT", "")
    flag = "--log-format"
    for argument, value in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument == "--":
            break
        if argument == flag:
            style = value
        elif argument.startswith(f"{flag}="):
            style = argument.removeprefix(f"{flag}=")
    return "json" if style == "json" else "text"


def announce(text: str, level: int = logging.INFO, name: str = "batcher") -> None:
    """Shows a line at every log level: as it is, or as a record where all are JSON."""
    handlers = logging.getLogger().handlers
    as_json = any(isinstance(h.formatter, JsonFormatter) for h in handlers)
    line = _line(text, level, name) if as_json else escaped(text)
    if level > logging.INFO and not as_json:
        line = f"{name}: {line}"
    with suppress(OSError):  # nobody reads: that is no reason to end
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def tell(text: str) -> None:
    """Shows a line from within a signal handler, where no lock and no buffer is safe to
    use, and in the format asked for, whether the log is set up or not."""
    style = asked_for(sys.argv[1:], os.environ)
    line = _line(text, logging.INFO, "batcher", style)
    with suppress(OSError):
        os.write(2, line.encode() + b"\n")


def catch_uncaught() -> None:
    """Logs what would end up on stderr by itself, in a format of its own: exceptions
    of threads and of finalizers, and warnings."""

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            info = _info(args.exc_value, args.exc_traceback)
            name = args.thread.name if args.thread is not None else "?"
            log.error("thread %r failed", name, exc_info=info)

    def of_finalizer(args: sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None:
            info = _info(args.exc_value, args.exc_traceback)
            what = args.err_msg or "exception ignored in"
            log.error("%s: %r", what, args.object, exc_info=info)

    threading.excepthook = of_thread
    sys.unraisablehook = of_finalizer
    logging.captureWarnings(True)


def _info(
    error: BaseException, trace: TracebackType | None
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    return type(error), error, trace


def _line(text: str, level: int, name: str, style: Style = "json") -> str:
    record = logging.LogRecord(name, level, "", 0, text, None, None)
    return (JsonFormatter() if style == "json" else TextFormatter()).format(record)


def _instant(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
