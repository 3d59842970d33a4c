"""The one table from our errors to gRPC status codes.

A test walks the exception classes and fails when one is missing here.
"""

from __future__ import annotations

from typing import Final

import grpc

from batcher import errors

Trailing = tuple[tuple[str, str], ...]
"""Trailing metadata: lower-case names and ASCII values."""

MAX_TEXT_BYTES: Final = 4096
"""Longest error text that is sent; past 16 kB gRPC makes RESOURCE_EXHAUSTED of it."""

_CODES: Final[dict[type[errors.BatcherError], grpc.StatusCode]] = {
    errors.BatcherError: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PayloadTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    errors.QueueFull: grpc.StatusCode.UNAVAILABLE,
    errors.QueueTimeout: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.EngineFailure: grpc.StatusCode.INTERNAL,
}

# What Triton answers where it differs (it produces no DEADLINE_EXCEEDED and no
# RESOURCE_EXHAUSTED; protocol notes §1.5): `--strict-triton-codes`.
_TRITON_CODES: Final[dict[type[errors.BatcherError], grpc.StatusCode]] = {
    errors.PayloadTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DeadlineExceeded: grpc.StatusCode.UNAVAILABLE,
}


class StatusTable:
    """Turns an exception into what goes on the wire.

    Args:
        strict_triton: answer Triton's code where it differs from ours.
    """

    def __init__(self, *, strict_triton: bool = False) -> None:
        codes = {**_CODES, **(_TRITON_CODES if strict_triton else {})}
        self._codes = {kind: int(code.value[0]) for kind, code in codes.items()}

    def code(self, error: BaseException) -> int:
        """The gRPC status code of an error; anything not ours is INTERNAL."""
        for kind in type(error).__mro__:
            code = self._codes.get(kind)
            if code is not None:
                return code
        return int(grpc.StatusCode.INTERNAL.value[0])

    def status(self, error: BaseException) -> tuple[int, str, Trailing]:
        """Code, text and trailing metadata (a retry hint where trying again helps).

        The text of an error that is not ours stays here: it is a bug, goes to the log,
        and may hold what a caller must not see.
        """
        if not isinstance(error, errors.BatcherError):
            return self.code(error), "internal error (see the server's log)", ()
        return self.code(error), clipped(str(error)), _retry_hint(error)


def clipped(text: str) -> str:
    """The text, cut to `MAX_TEXT_BYTES` of UTF-8."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= MAX_TEXT_BYTES:
        return raw.decode("utf-8")
    return raw[: MAX_TEXT_BYTES - 3].decode("utf-8", "ignore") + "…"


def _retry_hint(error: errors.BatcherError) -> Trailing:
    retry_ms = error.retry_after_ms
    if retry_ms is None:
        return ()
    # The first is for people and proxies (seconds, as in HTTP), the second is what
    # gRPC clients with a retry policy obey (gRFC A6, server pushback).
    seconds = str(max(1, -(-retry_ms // 1000)))
    return (("retry-after", seconds), ("grpc-retry-pushback-ms", str(retry_ms)))
