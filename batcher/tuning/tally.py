"""Counting of one process: which requests are measured, and what became of them.

A request is measured when the instant it was due lies in the window; an answer counts
towards the rate when it arrives between two readings, at the window's ends. The loop
that sends is `worker`; no sockets here, and instants are passed in.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from batcher.tuning.headers import OK, code_name
from batcher.tuning.latency import LatencyRecorder
from batcher.tuning.plan import (
    OVERFLOW,
    UNANSWERED,
    ErrorCount,
    WorkerCounts,
    WorkerResult,
)
from batcher.tuning.verify import difference

if TYPE_CHECKING:
    from batcher.tuning.calls import Call
    from batcher.tuning.plan import WorkerPlan

_REPORT_NS: Final = 200_000_000
_SAMPLE_LENGTH: Final = 1000


class _Reading(NamedTuple):
    """Figures of the process at one instant: two of them bound the window."""

    at_ns: int
    cpu_ns: int
    runqueue_ns: int
    ended: int
    answered: int


class Tally:
    """The counts of one process."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.result = WorkerResult()
        self.give_up_at_ns = 0
        """When answers are no longer waited for."""
        self._plan = plan
        self._from_ns = 0
        self._until_ns = 0
        self._latency = LatencyRecorder()
        self._lag = LatencyRecorder()
        self._left = plan.requests
        self._sent = 0
        self._ended = 0
        self._errors = 0
        self._verify_due = 0.0
        self._report_at_ns = 0
        self._last_answer_ns = 0
        self._readings: list[_Reading] = []

    def begin(self, start_at_ns: int) -> None:
        """The load begins at this instant, the window after the warm-up."""
        self._from_ns = start_at_ns + self._plan.warmup_ns
        self._until_ns = self._from_ns + self._plan.measure_ns
        self.give_up_at_ns = self._until_ns + self._plan.drain_ns

    def admit(self, due_ns: int, calls: int) -> tuple[int, bool]:
        """How many of `calls`, due now or at `due_ns`, may be sent; whether measured.

        Those that may are counted as sent.
        """
        measured = self._from_ns <= due_ns < self._until_ns
        if self._left is not None and due_ns >= self._from_ns:
            calls = min(calls, self._left) if measured else 0
            self._left -= calls
        self._sent += calls
        if measured:
            self.result.sent += calls
        return calls, measured

    def samples(self) -> bool:
        """Whether the answer to a measured call, sent now, is to be compared."""
        self._verify_due += self._plan.verify_fraction
        if self._verify_due < 1:
            return False
        self._verify_due -= 1
        return True

    def note_lag(self, due_ns: int, now_ns: int) -> None:
        """A measured request due at `due_ns` leaves now."""
        self._lag.record(now_ns - due_ns)

    def finish(self, calls: list[Call], now_ns: int) -> None:
        """Count calls that ended."""
        # Runs for every call: what can be counted for all at once, or derived, is.
        record = self._latency.record
        succeeded = 0
        for call in calls:
            if call.code != OK:
                self._fail(call, code_name(call.code), call.text)
            elif call.measured:
                succeeded += 1
                record(now_ns - call.due_ns)
                if call.payload is not None:
                    self._verify(call, call.payload)
        self._ended += len(calls)
        if succeeded:
            self.result.succeeded += succeeded
            self._last_answer_ns = now_ns

    def is_full(self) -> bool:
        """Open loop: whether more requests are admitted than may be in flight."""
        return self._sent - self._ended > self._plan.max_in_flight

    def overflow(self, call: Call) -> None:
        """A call was admitted, but cannot be sent: too many are in flight."""
        limit = self._plan.max_in_flight * self._plan.processes
        self._ended += 1
        self._fail(call, OVERFLOW, f"not sent: {limit} are in flight")

    def is_complete(self, now_ns: int) -> bool:
        """Whether nothing measured will be sent any more."""
        return now_ns >= self._until_ns or self._left == 0

    @property
    def outstanding(self) -> int:
        """Measured requests without an answer."""
        result = self.result
        failed = sum(error.count for error in result.errors.values())
        return result.sent - result.succeeded - failed

    def next_boundary_ns(self, now_ns: int, at_most_ns: int) -> int:
        """The next instant that must not be slept through."""
        for boundary in (self._from_ns, self._until_ns, self.give_up_at_ns):
            if now_ns < boundary < at_most_ns:
                return boundary
        return at_most_ns

    def tick(self, now_ns: int) -> WorkerCounts | None:
        """Bound the memory, take the readings; the counts, every so often."""
        self._latency.fold()
        self._lag.fold()
        if len(self._readings) == 0 and now_ns >= self._from_ns:
            self._read(now_ns)
        if len(self._readings) == 1 and now_ns >= self._until_ns:
            self._read(now_ns)
        if now_ns < self._report_at_ns:
            return None
        self._report_at_ns = now_ns + _REPORT_NS
        return WorkerCounts(
            answered=self._ended - self._errors,
            errors=self._errors,
            in_flight=self._sent - self._ended,
        )

    def end(self, now_ns: int, *, interrupted: bool) -> None:
        """The run is over: complete `result`."""
        result = self.result
        if len(self._readings) == 1:
            self._read(now_ns)
        if len(self._readings) == 2:
            first, last = self._readings
            result.wall_ns = last.at_ns - first.at_ns
            result.cpu_ns = last.cpu_ns - first.cpu_ns
            result.runqueue_ns = last.runqueue_ns - first.runqueue_ns
            result.handled = last.ended - first.ended
            result.answered = last.answered - first.answered
        outstanding = self.outstanding
        if interrupted:
            result.sent -= outstanding
        elif outstanding:
            waited_s = (now_ns - self._until_ns) / 1e9
            result.errors[UNANSWERED] = ErrorCount(
                outstanding,
                f"no answer {waited_s:.1f} s after the end of the window",
            )
        until_ns = min(now_ns, self._until_ns)
        if self._plan.requests is not None:
            # A number of requests takes until the last of them has its answer.
            until_ns = self._last_answer_ns or until_ns
        result.window_ns = max(0, until_ns - self._from_ns)
        result.latency = self._latency.take()
        result.send_lag = self._lag.take()

    def _verify(self, call: Call, payload: bytearray) -> None:
        body = self._plan.bodies[call.request.index]
        if body.expected_raw is None:
            return
        self.result.verified += 1
        fault = difference(payload, body.expected_raw)
        if fault:
            self.result.mismatches += 1
            if not self.result.mismatch_sample:
                self.result.mismatch_sample = f"{self._label(call)}: {fault}"

    def _fail(self, call: Call, code: str, text: str) -> None:
        self._errors += 1
        if not call.measured:
            return
        known = self.result.errors.get(code)
        if known is not None:
            known.count += 1
        else:
            sample = f"{self._label(call)}: {text}"[:_SAMPLE_LENGTH]
            self.result.errors[code] = ErrorCount(1, sample)

    def _label(self, call: Call) -> str:
        index = call.request.index
        return f"body {index} {self._plan.bodies[index].label}".rstrip()

    def _read(self, now_ns: int) -> None:
        self._readings.append(
            _Reading(
                at_ns=now_ns,
                cpu_ns=time.process_time_ns(),
                runqueue_ns=runqueue_ns(),
                ended=self._ended,
                answered=self._ended - self._errors,
            )
        )


def runqueue_ns() -> int:
    """Nanoseconds that this process has waited for a core; 0 if Linux does not say."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
