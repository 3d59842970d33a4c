"""Log lines: one per record, whatever the record holds."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.serving import logs
from batcher.serving.logs import JsonFormatter, TextFormatter, escaped

FORGED = "x\n2026-01-01T00:00:00.000Z ERROR root: forged"

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) [\w.]+: .*"
)


def record(message: str, *args: object, error: BaseException | None = None) -> Any:
    """A log record at a known instant."""
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("batcher.x", logging.INFO, "f.py", 1, message, args, info)
    made.created, made.msecs = 1_780_000_000.25, 250.0
    return made


def raised(text: str) -> BaseException:
    """An exception with a traceback."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """The lines on stderr so far; the root logger is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield lambda: capsys.readouterr().err.splitlines()
    root.handlers[:] = handlers
    root.setLevel(level)


# -- text -----------------------------------------------------------------------------


def test_a_text_line_says_when_what_and_where() -> None:
    """Instant in UTC, level, logger and text, in this order."""
    line = TextFormatter().format(record("model %r has %d rows", "m", 8))

    assert line == "2026-05-28T20:26:40.250Z INFO batcher.x: model 'm' has 8 rows"


@given(st.text())
def test_any_text_is_one_line(text: str) -> None:
    """No text ends its line, by any character that ends one somewhere."""
    line = TextFormatter().format(record("%s", text))

    assert len(line.splitlines()) == 1
    assert LINE.fullmatch(line)


@given(st.text())
def test_escaping_touches_control_characters_only(text: str) -> None:
    """Printable text is shown as it is, in any script."""
    shown = escaped(text)

    assert re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", shown) is None
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb", r"a\nb"),
        ("a\r\nb", r"a\r\nb"),
        ("a\tb", r"a\tb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\x00b\x7fc\x85d", r"a\x00b\x7fc\x85d"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("modèle モデル", "modèle モデル"),
    ],
)
def test_control_characters_are_shown_escaped(text: str, expected: str) -> None:
    """Line ends, terminal commands and NUL are visible, and harmless."""
    assert escaped(text) == expected


def test_a_traceback_belongs_to_its_line() -> None:
    """Every further line is marked; the text of the exception cannot leave its mark."""
    lines = TextFormatter().format(record("failed", error=raised(FORGED))).splitlines()

    assert lines[0].endswith("INFO batcher.x: failed")
    assert lines[1] == "    | Traceback (most recent call last):"
    assert [line for line in lines[1:] if not line.startswith("    | ")] == []
    assert lines[-2:] == ["    | ValueError: x", "    | " + FORGED.split("\n")[1]]


# -- JSON -----------------------------------------------------------------------------


def test_a_json_line_has_the_same_fields() -> None:
    """Time, level, logger and message, and no traceback where there is none."""
    line = JsonFormatter().format(record("model %r", "m"))

    assert json.loads(line) == {
        "time": "2026-05-28T20:26:40.250Z",
        "level": "info",
        "logger": "batcher.x",
        "message": "model 'm'",
    }


@given(st.text())
def test_any_text_is_one_json_object(text: str) -> None:
    """Whatever a message holds comes back from one line of ASCII."""
    line = JsonFormatter().format(record("%s", text))

    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == text


def test_a_json_traceback_is_a_field() -> None:
    """A traceback is in its record's own object, lines and all."""
    line = JsonFormatter().format(record("failed", error=raised(FORGED)))

    fields = json.loads(line)
    assert fields["message"] == "failed"
    assert fields["traceback"].endswith(f"ValueError: {FORGED}")
    assert len(line.splitlines()) == 1


# -- set up ---------------------------------------------------------------------------


def test_what_is_below_the_level_is_not_logged(logged: Any) -> None:
    """Records at or above the level go to stderr, from every logger."""
    logs.setup("text", "warning")

    logging.getLogger("batcher.a").info("quiet")
    logging.getLogger("batcher.a").warning("loud")
    logging.getLogger("grpc").error("louder")

    texts = [line.split(": ", 1)[1] for line in logged()]
    assert texts == ["loud", "louder"]


def test_setting_up_twice_does_not_log_twice(logged: Any) -> None:
    """The last setting counts, alone."""
    logs.setup("text", "info")
    logs.setup("json", "info")

    logging.getLogger("batcher.a").info("once")

    (line,) = logged()
    assert json.loads(line)["message"] == "once"


def test_asyncios_own_chatter_is_left_out(logged: Any) -> None:
    """Debugging the daemon does not mean debugging the event loop."""
    logs.setup("text", "debug")

    logging.getLogger("asyncio").debug("Using selector")
    logging.getLogger("batcher.a").debug("seen")

    assert len(logged()) == 1
