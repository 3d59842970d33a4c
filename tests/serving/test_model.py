"""A model's turns: from requests to answers, failures, limits and the end of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from batcher.errors import ModelNotReady, PayloadTooLarge, QueueFull, ShuttingDown
from batcher.serving.budget import Budget
from engines import (
    Engine,
    EngineDeadError,
    ExecutionContext,
    FakeEngine,
    FakeOptions,
    TensorSpec,
)

from .desk import Desk, X, Y, echo

INVALID, INTERNAL, UNAVAILABLE, DEADLINE = 3, 13, 14, 4

MakeDesk = Callable[..., Desk]


@pytest.fixture
def make() -> Iterator[MakeDesk]:
    """Makes desks, and closes them."""
    desks: list[Desk] = []

    def made(engine: Engine | None = None, **options: Any) -> Desk:
        desks.append(Desk(engine, **options))
        return desks[-1]

    yield made
    for desk in desks:
        desk.close()


def rows(*values: int) -> dict[str, Any]:
    """Inputs whose rows hold these numbers."""
    return {"x": np.repeat(np.array(values).reshape(-1, 1), 2, axis=1)}


def column(desk: Desk, call: str) -> list[int]:
    """What the rows of an answer hold."""
    found: list[int] = desk.answers[call]["y"][:, 0].tolist()
    return found


def runs(desk: Desk) -> dict[int, int]:
    """How many batches of how many rows have run."""
    return {n: size.runs for n, size in desk.model.statistics.batches.items()}


class Dying(Engine):
    """A back end whose device is lost with its first run."""

    backend = "dying"
    inputs = (X,)
    outputs = (Y,)

    def create_context(self) -> ExecutionContext:
        return DyingContext()


class DyingContext(ExecutionContext):
    """See `Dying`."""

    def execute(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        raise EngineDeadError("the device is lost")


class Meeting(Engine):
    """A back end whose runs wait for each other, two at a time."""

    backend = "meeting"
    inputs = (X,)
    outputs = (Y,)

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=30)

    def create_context(self) -> ExecutionContext:
        return MeetingContext(self.barrier)


class MeetingContext(ExecutionContext):
    """See `Meeting`."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def execute(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        self.barrier.wait()
        return [np.array(inputs[0])]


# -- answers --------------------------------------------------------------------------


def test_what_waits_runs_together(make: MakeDesk) -> None:
    """Requests that wait at one turn are one batch, padded to its rung."""
    desk = make()
    for call, value in (("a", 1), ("b", 2), ("c", 3)):
        desk.submit(call, rows(value))

    desk.settle()

    assert {call: column(desk, call) for call in desk.answers} == {
        "a": [1],
        "b": [2],
        "c": [3],
    }
    assert runs(desk) == {3: 1}
    assert desk.model.statistics.padding_rows == 1


def test_other_outputs_share_a_batch(make: MakeDesk) -> None:
    """Requests that ask for different outputs may run together."""
    desk = make()
    desk.submit("a", rows(1))
    desk.submit("b", rows(2), outputs=["y"])

    desk.settle()

    assert runs(desk) == {2: 1}


def test_other_shapes_do_not_share_a_batch(make: MakeDesk) -> None:
    """Rows of different length run in batches of their own, in order of arrival."""
    x, y = (TensorSpec(name, "INT64", ("N", "D")) for name in "xy")
    desk = make(FakeEngine(FakeOptions(inputs=(x,), outputs=(y,))))
    for call, width in (("a", 1), ("b", 2), ("c", 1)):
        desk.submit(call, {"x": np.zeros((1, width), np.int64)})

    desk.settle()

    assert runs(desk) == {2: 1, 1: 1}
    assert desk.order == ["a", "c", "b"]


def test_a_large_request_is_answered_once(make: MakeDesk) -> None:
    """A request of 20 rows is split into runs of 8, and answered as a whole."""
    desk = make()
    desk.submit("large", rows(*range(20)))
    desk.submit("small", rows(99))

    desk.settle()

    assert column(desk, "large") == list(range(20))
    assert column(desk, "small") == [99]
    assert sorted(desk.order) == ["large", "small"]
    assert desk.model.statistics.rows == 21


def test_the_budget_is_given_back(make: MakeDesk) -> None:
    """Bytes are charged while a request is in the model, however it ends."""
    budget = Budget(10_000)
    desk = make(echo(fail_value=7.0), budget=budget)
    for call, values in (("a", [1]), ("poison", [7]), ("large", range(20))):
        desk.submit(call, rows(*values))
    left = desk.submit("left", rows(5))
    charged = budget.used

    desk.model.cancel(left)
    desk.settle()

    assert charged > 20 * 16
    assert budget.used == 0
    assert set(desk.answers) | set(desk.failures) == {"a", "poison", "large"}


# -- failures -------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 3, 6])
def test_only_the_guilty_request_fails(make: MakeDesk, place: int) -> None:
    """A batch that fails is split until the poison is alone; the rest is answered."""
    desk = make(echo(fail_value=7.0))
    calls = [f"r{i}" for i in range(7)]
    for i, call in enumerate(calls):
        desk.submit(call, rows(7 if i == place else 100 + i))

    desk.settle()

    code, text, _ = desk.failures[f"r{place}"]
    assert list(desk.failures) == [f"r{place}"]
    assert (code, text) == (INTERNAL, "model 'm' failed: the value 7.0 cannot be run")
    assert {call: column(desk, call) for call in desk.answers} == {
        f"r{i}": [100 + i] for i in range(7) if i != place
    }


def test_failures_are_counted_by_reason(make: MakeDesk) -> None:
    """What the engine refuses counts as BACKEND, not as a success (B104)."""
    desk = make(echo(fail_value=7.0))
    for i in range(8):
        desk.submit(f"r{i}", rows(7 if i == 3 else i + 10))

    desk.settle()

    statistics = desk.model.statistics
    assert statistics.requests == 7
    assert statistics.failures == {
        "REJECTED": 0,
        "CANCELED": 0,
        "BACKEND": 1,
        "OTHER": 0,
    }


def test_a_part_that_fails_fails_its_whole_request(make: MakeDesk) -> None:
    """A split request with a poisoned row has one answer, the failure."""
    desk = make(echo(fail_value=7.0))
    desk.submit("large", rows(*range(20)))

    desk.settle()

    assert desk.order == ["large"]
    assert desk.failures["large"][0] == INTERNAL
    assert desk.model.idle


def test_a_run_that_no_memory_holds_fails_alone(make: MakeDesk) -> None:
    """A request whose batch cannot be laid out is an error, and the model lives on."""
    x, y = TensorSpec("x", "INT8", ("N", "S")), TensorSpec("y", "INT8", ("N", *"SSS"))
    desk = make(FakeEngine(FakeOptions(inputs=(x,), outputs=(y,))))
    size = 1 << 17
    request = desk.submit("large", {"x": np.zeros((1, 1), np.int8)})
    request.plan.fit.group.out_tails = ((size, size, size),)
    desk.submit("small", {"x": np.zeros((1, 2), np.int8)})

    desk.settle()

    assert desk.failures["large"][0] == INTERNAL
    assert desk.answers["small"]["y"].shape == (1, 2, 2, 2)
    assert (desk.model.ready, desk.model.dead) == (True, None)


def test_a_dead_engine_fails_everything_at_once(make: MakeDesk) -> None:
    """After the engine's death all that waits is answered, and nothing new is taken."""
    desk = make(Dying())
    for i in range(20):
        desk.submit(f"r{i}", rows(i))

    desk.settle()

    assert {code for code, _, _ in desk.failures.values()} == {INTERNAL}
    assert len(desk.failures) == 20
    assert isinstance(desk.model.dead, EngineDeadError)
    assert desk.model.ready is False
    with pytest.raises(ModelNotReady, match="its engine is dead"):
        desk.submit("new", rows(1))


# -- limits ---------------------------------------------------------------------------


def test_a_full_queue_refuses(make: MakeDesk) -> None:
    """One request more than `max_queue` is refused, and takes no bytes."""
    budget = Budget(1 << 20)
    desk = make(policy="window", max_delay_us=300_000, max_queue=2, budget=budget)
    for call in ("a", "b"):
        desk.submit(call, rows(1))
    charged = budget.used

    with pytest.raises(QueueFull, match=r"queue is full \(2 requests wait\)"):
        desk.submit("c", rows(1))

    assert budget.used == charged
    desk.model.scheduler.drain()  # the window need not be waited out
    desk.settle()
    assert set(desk.answers) == {"a", "b"}


def test_a_burst_is_not_counted_against_the_queue_before_it_is_run(
    make: MakeDesk,
) -> None:
    """What a free slot can take at once does not fill the queue."""
    desk = make(max_queue=2)

    for call in ("a", "b", "c"):
        desk.submit(call, rows(1))

    desk.settle()
    assert set(desk.answers) == {"a", "b", "c"}


def test_the_byte_budget_refuses(make: MakeDesk) -> None:
    """A request that does not fit the bytes in flight is refused, with both numbers."""
    budget = Budget(160)
    desk = make(budget=budget)
    desk.submit("a", rows(1))

    with pytest.raises(QueueFull) as caught:
        desk.submit("b", rows(*range(8)))

    assert f"{budget.used} bytes of requests are in flight" in str(caught.value)
    assert "the limit is 160" in str(caught.value)
    desk.settle()


def test_what_the_byte_budget_never_holds(make: MakeDesk) -> None:
    """A request larger than the whole budget is told that waiting does not help."""
    desk = make(budget=Budget(100))

    with pytest.raises(PayloadTooLarge, match="100 together"):
        desk.submit("b", rows(*range(8)))
    desk.settle()


def test_refusals_are_counted(make: MakeDesk) -> None:
    """A request that finds the queue full is a failure for the books (B104)."""
    desk = make(policy="window", max_delay_us=300_000, max_queue=1)
    desk.submit("a", rows(1))
    with pytest.raises(QueueFull):
        desk.submit("b", rows(1))

    desk.model.scheduler.drain()  # the window need not be waited out
    desk.settle()

    assert desk.model.statistics.failures["REJECTED"] == 1


def test_a_passed_deadline_is_told(make: MakeDesk) -> None:
    """A request whose deadline passes in the queue is told so, and not run."""
    desk = make(policy="window", max_delay_us=10_000_000)
    now_ns = time.monotonic_ns()
    desk.submit("late", rows(1), deadline_ns=now_ns)
    desk.submit("early", rows(2))

    desk.turn()

    assert desk.failures["late"][0] == DEADLINE
    assert "deadline" in desk.failures["late"][1]
    assert desk.answers == {}


def test_the_next_wakeup_is_the_end_of_the_delay(make: MakeDesk) -> None:
    """A turn says when it wants the next one: when the oldest request is due."""
    desk = make(policy="window", max_delay_us=60_000_000)
    before_ns = time.monotonic_ns()
    desk.submit("a", rows(1))
    after_ns = time.monotonic_ns()

    desk.turn()

    assert before_ns <= desk.model.wakeup_ns - 60_000_000_000 <= after_ns
    assert desk.model.idle is False


@pytest.mark.parametrize(
    ("configured_ms", "override", "asked_us", "expected_ns"),
    [
        (0, True, 0, 0),
        (700, True, 0, 700_000_000),
        (700, True, 300_000, 300_000_000),
        (700, True, 900_000, 700_000_000),
        (700, False, 300_000, 700_000_000),
        (0, True, 300_000, 300_000_000),
        (0, False, 300_000, 0),
    ],
)
def test_a_requests_timeout_may_only_shorten(
    make: MakeDesk, configured_ms: int, override: bool, asked_us: int, expected_ns: int
) -> None:
    """The parameter sets a limit where there is none, and shortens one there is."""
    desk = make(timeout_ms=configured_ms, allow_timeout_override=override)

    request = desk.submit("a", rows(1), timeout_us=asked_us)
    desk.settle()

    assert request.plan.timeout_ns == expected_ns
    limit_ns = request.expires_ns - request.arrival_ns
    assert (limit_ns == expected_ns) is (expected_ns > 0)


# -- leaving --------------------------------------------------------------------------


def test_a_cancelled_request_is_not_run(make: MakeDesk) -> None:
    """What waits and is cancelled leaves the queue; its neighbours are answered."""
    desk = make()
    desk.submit("a", rows(1))
    gone = desk.submit("gone", rows(2))
    desk.submit("c", rows(3))

    desk.model.cancel(gone)
    desk.settle()

    assert sorted(desk.order) == ["a", "c"]
    assert runs(desk) == {2: 1}
    assert desk.model.statistics.failures["CANCELED"] == 1


def test_a_request_cancelled_while_it_runs_is_dropped(make: MakeDesk) -> None:
    """Its rows run to the end, and its neighbours get theirs."""
    desk = make()
    desk.submit("a", rows(1))
    gone = desk.submit("gone", rows(2))
    desk.turn()

    desk.model.cancel(gone)
    desk.model.cancel(gone)
    desk.settle()

    assert desk.order == ["a"]
    assert column(desk, "a") == [1]
    assert desk.model.statistics.failures["CANCELED"] == 1


def test_cancelling_what_was_answered_changes_nothing(make: MakeDesk) -> None:
    """A cancellation that comes too late is no failure, and frees nothing twice."""
    budget = Budget(10_000)
    desk = make(budget=budget)
    request = desk.submit("a", rows(1))
    desk.settle()

    desk.model.cancel(request)

    assert desk.model.statistics.failures["CANCELED"] == 0
    assert budget.used == 0


def test_a_drain_answers_what_was_accepted(make: MakeDesk) -> None:
    """A drained model takes nothing new, and runs what waits without waiting on."""
    desk = make(policy="window", max_delay_us=60_000_000)
    desk.submit("a", rows(1))

    desk.model.drain(ShuttingDown("bye"))
    with pytest.raises(ShuttingDown, match="bye"):
        desk.submit("b", rows(2))
    desk.settle()

    assert desk.order == ["a"]
    assert column(desk, "a") == [1]


def test_refusals_of_a_drain_are_objects_of_their_own(make: MakeDesk) -> None:
    """Each caller gets its own exception: tracebacks do not grow."""
    desk = make()
    desk.model.drain(ShuttingDown("bye"))
    caught = []
    for call in ("a", "b"):
        with pytest.raises(ShuttingDown) as refusal:
            desk.submit(call, rows(1))
        caught.append(refusal.value)

    assert caught[0] is not caught[1]


def test_an_abandoned_model_leaves_nobody_waiting(make: MakeDesk) -> None:
    """After a bug of ours everything is answered, what waits and what runs."""
    budget = Budget(1 << 20)
    desk = make(budget=budget)
    desk.submit("runs", rows(1))
    desk.turn()
    desk.submit("waits", rows(2))
    desk.submit("large", rows(*range(20)))

    desk.model.abandon(RuntimeError("a bug"))

    assert {call: code for call, (code, _, _) in desk.failures.items()} == {
        "runs": INTERNAL,
        "waits": INTERNAL,
        "large": INTERNAL,
    }
    assert "a bug" not in str(desk.failures)
    assert budget.used == 0
    with pytest.raises(ModelNotReady, match="has failed"):
        desk.submit("new", rows(1))


def test_several_slots_run_at_the_same_time(make: MakeDesk) -> None:
    """With two slots two batches are under way after one turn."""
    engine = Meeting()
    desk = make(engine, slots=2, rungs=(1,))
    for call in ("a", "b"):
        desk.submit(call, rows(1))

    desk.settle()

    assert sorted(desk.answers) == ["a", "b"]
