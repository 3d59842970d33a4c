"""What is said outside the log's records: the format is the one asked for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from batcher.serving import logs

UNCAUGHT = """
import sys, threading, warnings
from batcher.serving import logs
logs.setup("json", "info")
logs.catch_uncaught()
class Finalizer:
    def __del__(self):
        raise ValueError("finalizer")
def fail():
    raise ValueError("thread")
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
Finalizer()
warnings.warn("careful")
logs.tell("from a handler")
"""

BUG = """
import sys
sys.argv = ["batcher", "serve", "models", "--log-format", "json"]
from batcher import cli
from batcher.serving import server
def serve(*arguments):
    raise ZeroDivisionError("a bug")
server.serve = serve
cli.main()
"""


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """The root logger is put back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def ended(code: str) -> subprocess.CompletedProcess[str]:
    """A process that has run `code`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "variable", "style"),
    [
        ("", "", "text"),
        ("serve m", "", "text"),
        ("serve m --log-format json", "", "json"),
        ("serve --log-format=json m", "", "json"),
        ("serve m", "json", "json"),
        ("serve m --log-format text", "json", "text"),
        ("serve m --log-format json --log-format text", "", "text"),
        ("serve m --log-format xml", "", "text"),
        ("serve m --log-format", "json", "text"),
        ("serve -- --log-format json", "", "text"),
    ],
)
def test_the_format_is_known_before_the_line_is_parsed(
    arguments: str, variable: str, style: str
) -> None:
    """As Typer would read it: the last flag wins, and flags win over the variable."""
    asked = logs.asked_for(arguments.split(), {"BATCHER_LOG_FORMAT": variable})

    assert asked == style


def test_lines_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is shown as it is, an error with the program's name, at every level."""
    logs.setup("text", "error")

    logs.announce("ready\x1b[2K")
    logs.announce("broken", logging.ERROR)

    assert capsys.readouterr().err == "ready\\x1b[2K\nbatcher: broken\n"


def test_lines_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Where records are JSON, these lines are as well."""
    logs.setup("json", "error")

    logs.announce("ready", name="batcher.x")
    logs.announce("broken", logging.ERROR)

    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(r["level"], r["logger"], r["message"]) for r in records] == [
        ("info", "batcher.x", "ready"),
        ("error", "batcher", "broken"),
    ]


def test_what_nobody_catches_is_a_record() -> None:
    """Exceptions of threads and finalizers, and warnings, are JSON like all else."""
    done = ended(UNCAUGHT)
    lines = done.stderr.splitlines()
    records = [json.loads(line) for line in lines[:-1]]

    assert done.returncode == 0
    assert [r["message"].split(":")[0] for r in records[:2]] == [
        "thread 'worker' failed",
        "exception ignored in",
    ]
    assert "ValueError: thread" in records[0]["traceback"]
    assert "ValueError: finalizer" in records[1]["traceback"]
    assert "careful" in records[2]["message"]
    assert lines[-1].endswith("Z INFO batcher: from a handler")  # no flag asks for JSON


def test_a_bug_at_the_start_is_a_record() -> None:
    """An exception that nobody expects is one line with its traceback, and code 1."""
    done = ended(BUG)
    (line,) = done.stderr.splitlines()

    assert done.returncode == 1
    assert json.loads(line)["level"] == "error"
    assert json.loads(line)["traceback"].endswith("ZeroDivisionError: a bug")
