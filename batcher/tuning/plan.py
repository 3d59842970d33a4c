"""What the processes of a run tell each other: a worker's plan, counts and result.

`Body`, what a request carries, is a part of the plan.

Plain picklable values; who sends what when is in `bench` and `worker`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batcher.errors import ConfigError

if TYPE_CHECKING:
    from batcher.tuning.arrivals import Arrivals
    from batcher.tuning.headers import Metadata
    from batcher.tuning.latency import Recorded

OVERFLOW: Final = "OVERFLOW"
"""In the place of a gRPC code: not sent, since too many were in flight."""

UNANSWERED: Final = "UNANSWERED"
"""In the place of a gRPC code: no answer came until the run was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One kind of request of the load."""

    message: bytes
    """The serialised ModelInferRequest."""

    label: str = ""
    """What the report calls it; empty for its position in the list."""

    weight: float = 1.0
    """How often it is sent, relative to the other bodies' weights."""

    deadline_us: int | None = None
    """Microseconds after which the call is given up (`grpc-timeout`), or None."""

    metadata: Metadata = ()
    """Metadata sent with each call; the value of a `-bin` key is bytes."""

    guessed: tuple[str, ...] = ()
    """Inputs with axes of any size, for which nobody has given one."""

    expected_raw: tuple[bytes, ...] | None = None
    """The answer's `raw_output_contents`, for verification; None takes the answer
    to the request that is sent before the run as the right one."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigError(
                f"body {self.label!r}: weight is {self.weight}; it must be above 0"
            )
        if self.deadline_us is not None and self.deadline_us <= 0:
            raise ConfigError(
                f"body {self.label!r}: deadline_us is {self.deadline_us}; it must be "
                "above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One process' share of a run."""

    index: int
    """Position among the processes, from 0."""

    processes: int
    """How many processes there are."""

    target: str
    """Address of the server."""

    bodies: tuple[Body, ...]
    """All bodies of the run."""

    connections: int
    """Connections of this process."""

    callers: int
    """Closed-loop callers of this process; 0 in open loop."""

    arrivals: Arrivals | None
    """The whole run's arrivals, of which this process sends its share."""

    max_in_flight: int
    """Open loop: the most requests of this process without an answer."""

    warmup_ns: int
    """Nanoseconds of load before the measured window."""

    measure_ns: int
    """Length of the measured window in nanoseconds."""

    drain_ns: int
    """The longest wait, after the window, for answers to its requests."""

    requests: int | None
    """Number of requests to measure, or None for as many as the window takes."""

    verify_fraction: float
    """Fraction of the answers (0 to 1) that is compared with what is expected."""

    seed: int
    """Seed of everything random."""


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """How far a worker is; all counts since its start, warm-up included."""

    answered: int
    """Answers with status OK."""

    errors: int
    """Requests that ended otherwise."""

    in_flight: int
    """Requests without an answer."""


@dataclass(slots=True)
class ErrorCount:
    """Requests that ended with one code."""

    count: int
    """How many."""

    sample: str
    """The first one's text."""


@dataclass(slots=True, kw_only=True)
class WorkerResult:
    """What one process measured."""

    sent: int = 0
    """Measured requests: due in the window, whether or not they left."""

    succeeded: int = 0
    """Measured requests answered OK."""

    errors: dict[str, ErrorCount] = field(default_factory=dict)
    """Measured requests that failed, by name of the code."""

    latency: Recorded = (b"", {})
    """`LatencyRecorder.take` of the measured OK answers."""

    send_lag: Recorded = (b"", {})
    """The same of how late requests left (open loop)."""

    verified: int = 0
    """Answers compared."""

    mismatches: int = 0
    """Answers that were not as expected."""

    mismatch_sample: str = ""
    """What was wrong with the first of those."""

    retries: int = 0
    """Requests sent again because the server had not looked at them."""

    connections_lost: int = 0
    """Connections that ended, or could not be made again, during the run."""

    window_ns: int = 0
    """Length of the window that was measured in nanoseconds."""

    wall_ns: int = 0
    """Nanoseconds between two readings of the following, at the window's ends."""

    cpu_ns: int = 0
    """CPU time of the process between them, in nanoseconds."""

    runqueue_ns: int = 0
    """Nanoseconds between them that it was ready to run but had no core."""

    handled: int = 0
    """Requests that ended between them."""

    answered: int = 0
    """Those of them that were answered OK, whenever they were due."""
