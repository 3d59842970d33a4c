"""The exception classes of the daemon; codes of the wire never appear here.

Every class is one kind of answer a caller can get. The table from these classes to
gRPC codes is `batcher.rpc.status`, and nowhere else. The tree:

* BatcherError
    * ConfigError            start-up only: a knob is unknown, wrong or contradictory
    * InvalidRequest         the caller's request can never succeed as it is
        * PayloadTooLarge    larger than the message limit
    * ModelNotFound          no such model or version
    * ModelNotReady          loading, unloading or failed to load: try again later
    * QueueFull              the queue's or the daemon's bound is hit: try again later
    * QueueTimeout           waited longer than the queue policy or `timeout` allows
    * DeadlineExceeded       the client's deadline has passed before the run
    * RequestCancelled       the client went away
    * ShuttingDown           the daemon drains
    * Unsupported            not built, or switched off
    * EngineFailure          the engine failed on this request
"""

from __future__ import annotations


class BatcherError(Exception):
    """Base of all; `str(error)` is the text that the caller may read."""

    retry_after_ms: int | None = None
    """When set, how long a caller should wait before it tries again (milliseconds)."""


class ConfigError(BatcherError):
    """A configuration that cannot be used; ends the start with exit code 2."""


class InvalidRequest(BatcherError):
    """The request is malformed or does not fit the model."""


class PayloadTooLarge(InvalidRequest):
    """The message is larger than the limit (the text names both sizes)."""


class ModelNotFound(BatcherError):
    """The model or the version is not served here."""


class ModelNotReady(BatcherError):
    """The model exists but cannot take requests now."""

    retry_after_ms = 1000


class QueueFull(BatcherError):
    """A bound (queue length, bytes in flight) is hit."""

    retry_after_ms = 100


class QueueTimeout(BatcherError):
    """The request waited in the queue for longer than it may."""


class DeadlineExceeded(BatcherError):
    """The client's deadline passed before the request could run."""


class RequestCancelled(BatcherError):
    """The client cancelled or disconnected."""


class ShuttingDown(BatcherError):
    """The daemon drains: it answers what it accepted and takes nothing new."""

    retry_after_ms = 1000


class Unsupported(BatcherError):
    """The feature is not built or is switched off."""


class EngineFailure(BatcherError):
    """The engine could not run this request; neighbours are not affected."""
