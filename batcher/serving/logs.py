"""Logging to stderr: one line per record, as text or as JSON.

Nothing that a client sends can forge a line: control characters are escaped, and the
lines of a traceback are marked as belonging to the record above them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final, Literal

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


def setup(style: Literal["text", "json"], level: str) -> None:
    """Sends all records at or above `level` to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _instant(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
