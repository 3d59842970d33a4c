"""The queue's bounds: how long a request may wait, and how many may."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from .client import Call, Client, assert_refused, ones, request, trailing
from .daemon import Daemon, eventually
from .repository import BUSY_S

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
OK = grpc.StatusCode.OK

SLACK_S = 0.19  # of a test machine that does other things


def busy(caller: Client, *models: str) -> list[Call]:
    """Makes models busy: one runs, one lies ready behind it, the next must wait.

    (Where the second one could expire before the first has run, it waits too.)
    """
    calls = [caller.start(model, x=ones()) for model in models for _ in range(2)]
    caller.stub.ServerLive(pb.ServerLiveRequest())  # they have arrived
    return calls


# -- how long (B026) --------------------------------------------------------------

WAITS = (
    # model, parameters, deadline; the code, after how long, and a text
    ("limited", {}, None, UNAVAILABLE, 0.3, "timeout expired"),
    ("limited", {"timeout": 0}, None, UNAVAILABLE, 0.3, "timeout expired"),
    ("limited", {"timeout": 100_000}, None, UNAVAILABLE, 0.1, "timeout expired"),
    ("limited", {"timeout": 2**63 - 1}, None, UNAVAILABLE, 0.3, "timeout expired"),
    ("limited", {}, 0.1, DEADLINE, 0.1, ""),
    ("fixed", {"timeout": 100_000}, None, UNAVAILABLE, 0.3, "timeout expired"),
    ("unlimited", {"timeout": 100_000}, None, UNAVAILABLE, 0.1, "timeout expired"),
    ("unlimited", {"timeout": 900_000}, 0.1, DEADLINE, 0.1, ""),
    ("unlimited", {"timeout": 1000}, None, UNAVAILABLE, 0.001, "ms in the queue"),
    ("unlimited", {}, None, OK, 2 * BUSY_S, ""),
)


class Waited:
    """A call that waits behind a busy model, and when it ended."""

    def __init__(self, caller: Client, case: tuple[Any, ...]) -> None:
        model, parameters, limit_s, *_ = case
        self._started = time.monotonic()
        self.took_s = 0.0
        message = request(model, x=ones(), parameters=parameters)
        self.call = caller.send(message, limit_s)
        self.call.add_done_callback(self._ended)

    def _ended(self, call: Call) -> None:
        self.took_s = time.monotonic() - self._started

    def in_time(self, case: tuple[Any, ...]) -> bool:
        """Whether it ended when it should have."""
        *_, code, wait_s, _ = case
        slack_s = SLACK_S + (BUSY_S if code == OK else 0)
        return wait_s - 0.01 <= self.took_s < wait_s + slack_s


@pytest.fixture(scope="module")
def waited(timed: Daemon) -> dict[int, Waited]:
    """All cases of `WAITS`; once more where the machine stood still."""
    for trial in range(3):
        try:
            waiting = wait_behind_others(timed)
        except AssertionError:  # the first requests were late themselves
            if trial == 2:
                raise
            continue
        if all(one.in_time(WAITS[i]) for i, one in waiting.items()):
            break
    return waiting


def wait_behind_others(timed: Daemon) -> dict[int, Waited]:
    """Sends all cases at one time, each behind two requests of its model."""
    with Client(timed.grpc) as caller:
        models = ("limited", "fixed", "unlimited")
        before = {model: caller.books(model) for model in models}
        running = busy(caller, *models)
        waiting = {i: Waited(caller, case) for i, case in enumerate(WAITS)}
        codes = [call.code() for call in running]
        # The second one of a model with a time-out shorter than a run expires.
        assert codes == [OK, UNAVAILABLE, OK, UNAVAILABLE, OK, OK]
        for one in waiting.values():
            one.call.code()
        for i, model in enumerate(models):
            books = caller.books(model) - before[model]
            ended = [case[3] for case in WAITS if case[0] == model]
            ended += codes[2 * i : 2 * i + 2]
            assert books.requests == books.runs == ended.count(OK)
            assert books.failures == len(ended) - ended.count(OK)
        return waiting


@pytest.mark.parametrize("case", range(len(WAITS)), ids=lambda i: f"{WAITS[i][:3]}")
def test_how_long_a_request_waits(waited: dict[int, Waited], case: int) -> None:
    """The three clocks: the model's timeout, the request's, the caller's deadline."""
    *_, code, wait_s, text = WAITS[case]
    call = waited[case].call

    assert call.code() == code
    assert text in call.details()
    assert waited[case].in_time(WAITS[case]), (waited[case].took_s, wait_s)
    assert "retry-after" not in trailing(call)  # told from a full queue


def test_a_deadline_that_is_over_at_arrival(caller: Client) -> None:
    """A call with next to no time left ends by its deadline, and hurts nobody."""
    calls = [caller.start("unlimited", x=ones(), timeout=1e-4) for _ in range(20)]

    assert {c.code() for c in calls} == {DEADLINE}
    assert caller.infer("unlimited", x=ones())["y"].tolist() == ones().tolist()


def test_a_missed_deadline_is_no_cancelled_call(caller: Client, timed: Daemon) -> None:
    """A call whose deadline passes counts as refused, whoever notices it first."""
    failures = "nv_inference_request_failure"
    before = timed.metrics(failures)
    running = busy(caller, "unlimited")
    late = [caller.start("unlimited", x=ones(), timeout=0.1) for _ in range(10)]
    assert {c.code() for c in late} == {DEADLINE}
    assert [c.code() for c in running] == [OK, OK]

    def counted() -> dict[str, float]:
        new = timed.metrics(failures)
        return {
            dict(labels)["reason"]: count - before.get((name, labels), 0)
            for (name, labels), count in new.items()
            if dict(labels)["model"] == "unlimited"
        }

    eventually(lambda: counted()["REJECTED"] == 10, what="ten refused requests")
    assert counted()["CANCELED"] == 0


def test_many_timed_out_requests_leave_nothing(caller: Client, timed: Daemon) -> None:
    """Hundreds of timed-out requests leave nothing behind (B075)."""
    before = caller.books("unlimited")
    running = busy(caller, "unlimited")
    message = request("unlimited", x=ones(), parameters={"timeout": 1000})
    payload = message.SerializeToString()
    calls = [caller.raw.future(payload, timeout=10) for _ in range(500)]
    codes = Counter(c.code() for c in calls)
    books = caller.books("unlimited") - before

    assert codes[UNAVAILABLE] + codes[OK] == 500
    assert codes[UNAVAILABLE] > 400  # the last ones may find the slot free
    assert books.failures == codes[UNAVAILABLE]
    assert timed.waiting("unlimited") == 0
    assert [c.code() for c in running] == [OK, OK]


# -- how many ---------------------------------------------------------------------


def test_queue_full(caller: Client, timed: Daemon) -> None:
    """One more than may wait is refused at once, with when to try again."""
    running = busy(caller, "small")
    waiting = [caller.start("small", x=ones(1, i)) for i in range(2)]
    eventually(lambda: timed.waiting("small") == 2)
    for _ in range(5):
        error = assert_refused(
            lambda: caller.infer("small", x=ones()),
            UNAVAILABLE,
            "queue is full",
            "2 requests",
        )
        assert trailing(error)["retry-after"] == "1"
    still_running = not running[1].done()

    assert still_running  # nobody waited for the slot to be refused
    assert [c.code() for c in running + waiting] == [OK] * 4


def test_every_wave_has_the_same_limit(caller: Client, timed: Daemon) -> None:
    """Of every wave as many are served, and all refusals are counted (B029)."""
    failures = "nv_inference_request_failure"
    for _ in range(3):
        before = caller.books("small")
        rejected = timed.metric(failures, model="small", reason="REJECTED")
        calls = [caller.start("small", x=ones(1, i)) for i in range(16)]
        codes = Counter(c.code() for c in calls)
        books = caller.books("small") - before
        counted = timed.metric(failures, model="small", reason="REJECTED") - rejected

        # One runs, one lies ready behind it, two wait; and who comes late finds room.
        assert codes[OK] + codes[UNAVAILABLE] == 16
        assert 4 <= codes[OK] <= 6
        assert (books.requests, books.runs) == (codes[OK], codes[OK])
        assert counted == books.failures == codes[UNAVAILABLE]
