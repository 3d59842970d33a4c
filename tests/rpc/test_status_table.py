"""The one table from errors to gRPC codes, and the texts that go with them."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from batcher import errors
from batcher.rpc import status
from batcher.rpc.status import MAX_TEXT_BYTES, StatusTable, clipped

CODES = {
    "BatcherError": "INTERNAL",
    "ConfigError": "INTERNAL",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "EngineFailure": "INTERNAL",
    "InvalidRequest": "INVALID_ARGUMENT",
    "ModelNotFound": "NOT_FOUND",
    "ModelNotReady": "UNAVAILABLE",
    "PayloadTooLarge": "RESOURCE_EXHAUSTED",
    "QueueFull": "UNAVAILABLE",
    "QueueTimeout": "UNAVAILABLE",
    "RequestCancelled": "CANCELLED",
    "ShuttingDown": "UNAVAILABLE",
    "Unsupported": "UNIMPLEMENTED",
}

TRITON = {
    **CODES,
    "DeadlineExceeded": "UNAVAILABLE",
    "PayloadTooLarge": "INVALID_ARGUMENT",
}


def classes(root: type[errors.BatcherError]) -> Iterator[type[errors.BatcherError]]:
    """A class of ours and all below it."""
    if root.__module__ == errors.__name__:
        yield root
        for child in root.__subclasses__():
            yield from classes(child)


def codes(table: StatusTable) -> dict[str, str]:
    """The name of the code of every error."""
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    return {
        kind.__name__: names[table.code(kind("text"))]
        for kind in classes(errors.BatcherError)
    }


def test_every_error_has_a_code_of_its_own_row() -> None:
    """Each exception class stands in the table itself, not by way of its parent."""
    assert set(status._CODES) == set(classes(errors.BatcherError))


def test_codes_are_the_documented_ones() -> None:
    """Every error answers with the code that the design gives it."""
    assert codes(StatusTable()) == CODES


def test_strict_codes_are_tritons() -> None:
    """The strict table has no code that Triton never sends, and differs in two only."""
    strict = codes(StatusTable(strict_triton=True))

    assert strict == TRITON
    assert not set(strict.values()) & {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}


def test_a_subclass_has_its_parents_code() -> None:
    """An error class that the table does not know answers as its nearest parent."""

    class Nested(errors.PayloadTooLarge):
        pass

    assert StatusTable().code(Nested("")) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


@pytest.mark.parametrize("bug", [ValueError("secret"), KeyError("secret"), OSError()])
def test_the_text_of_a_bug_stays_here(bug: Exception) -> None:
    """What is not our error is INTERNAL, and its text is for the log only."""
    code, text, trailing = StatusTable().status(bug)

    assert code == grpc.StatusCode.INTERNAL.value[0]
    assert text == "internal error (see the server's log)"
    assert trailing == ()


def test_retry_hints_are_on_what_is_worth_retrying() -> None:
    """Full queue, model not ready and shutdown say when to try again; others do not."""
    table = StatusTable()

    hints = {
        k.__name__: table.status(k("text"))[2] for k in classes(errors.BatcherError)
    }

    assert {name: dict(hint) for name, hint in hints.items() if hint} == {
        "QueueFull": {"retry-after": "1", "grpc-retry-pushback-ms": "100"},
        "ModelNotReady": {"retry-after": "1", "grpc-retry-pushback-ms": "1000"},
        "ShuttingDown": {"retry-after": "1", "grpc-retry-pushback-ms": "1000"},
    }


@pytest.mark.parametrize(
    ("retry_ms", "seconds"), [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (2500, "3")]
)
def test_seconds_of_a_retry_hint_are_rounded_up(retry_ms: int, seconds: str) -> None:
    """Whole seconds, never 0, and never earlier than the exact hint."""
    error = errors.QueueFull("text")
    error.retry_after_ms = retry_ms

    trailing = dict(StatusTable().status(error)[2])

    assert trailing == {"retry-after": seconds, "grpc-retry-pushback-ms": str(retry_ms)}


def test_a_withdrawn_hint_is_not_sent() -> None:
    """An error whose hint was taken away (a model that failed for good) has none."""
    error: errors.BatcherError = errors.ModelNotReady("text")
    error.retry_after_ms = None

    assert StatusTable().status(error) == (14, "text", ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a" * MAX_TEXT_BYTES, "a" * MAX_TEXT_BYTES),
        ("a" * (MAX_TEXT_BYTES + 1), "a" * (MAX_TEXT_BYTES - 3) + "…"),
        ("é" * MAX_TEXT_BYTES, "é" * ((MAX_TEXT_BYTES - 3) // 2) + "…"),
        ("lone \ud800", "lone ?"),
    ],
    ids=["empty", "exact", "one over", "two bytes each", "surrogate"],
)
def test_texts_are_cut_to_4_kb_of_utf8(text: str, expected: str) -> None:
    """A text is whole up to the limit, and cut between characters beyond it."""
    assert clipped(text) == expected
    assert len(clipped(text).encode()) <= MAX_TEXT_BYTES


def test_the_status_of_an_error_has_its_cut_text() -> None:
    """A long text goes out cut, with the code of its class."""
    code, text, _ = StatusTable().status(errors.InvalidRequest("x" * 100_000))

    assert (code, len(text.encode())) == (3, MAX_TEXT_BYTES)
