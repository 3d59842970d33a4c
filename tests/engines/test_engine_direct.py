"""Slots whose runs are launched by the caller of `start` where that takes one call."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from engines import (
    Cell,
    Completion,
    Engine,
    EngineDeadError,
    EngineError,
    EngineLoadError,
    EngineRunError,
    ExecutionContext,
    Slot,
    TensorSpec,
)
from engines.base import Array, Launch, PipelinedContext
from engines.tensors import Shape

X = TensorSpec("x", "INT64", ("N",))
ONE = Cell([(1,)], [(1,)])
WAIT_S = 30


class Device(Engine):
    """Echoes; what is `slow` cannot be launched with one call.

    Attributes:
        faults: of the run that holds 7: "run7"; and of "warm" and "expect".
        launched: per run: its value, the thread that has launched it, its inputs.
        tried: values that `try_launch` was asked for.
        expected: the lists of inputs and of outputs that were.
        inside, release: rung when a slow run or a warm-up has begun that is `held`;
            and what lets it go on.
        crowded: whether two threads were ever in the context at the same time.
    """

    backend = "device"
    inputs = outputs = (X,)

    def __init__(
        self,
        *,
        slow: Sequence[int] = (),
        held: bool = False,
        pause_s: float = 0.0,
        **faults: Exception,
    ) -> None:
        self.slow = set(slow)
        self.held = held
        self.pause_s = pause_s
        self.faults = faults
        self.launched: list[tuple[int, int, Sequence[Array]]] = []
        self.tried: list[int] = []
        self.expected: list[tuple[Sequence[Array], Sequence[Array | None]]] = []
        self.warmed: list[list[Shape]] = []
        self.inside = threading.Semaphore(0)
        self.release = threading.Semaphore(0)
        self.crowded = False
        self.contexts = 0
        self.closed = 0

    def create_context(self) -> ExecutionContext:
        self.contexts += 1
        return DeviceContext(self)


class DeviceContext(PipelinedContext):
    """See `Device`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._alone = threading.Lock()

    def try_launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch | None:
        device, value = self.device, int(inputs[0][0])
        device.tried.append(value)
        if value in device.slow:
            return None
        return self._launch(False, inputs, outputs)

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        return self._launch(True, inputs, outputs)

    def _launch(
        self, slow: bool, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        device, value = self.device, int(inputs[0][0])
        self._enter(slow)
        device.launched.append((value, threading.get_ident(), inputs))
        self._alone.release()
        if f"run{value}" in device.faults:
            raise device.faults[f"run{value}"]
        return Echo(value, outputs)

    def warm(self, shapes: Sequence[Shape]) -> None:
        device = self.device
        self._enter(True)
        device.warmed.append(list(shapes))
        self._alone.release()
        if "warm" in device.faults:
            raise device.faults["warm"]

    def expect(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> None:
        device = self.device
        device.expected.append((inputs, outputs))
        if "expect" in device.faults:
            raise device.faults["expect"]

    def close(self) -> None:
        self.device.closed += 1

    def _enter(self, slow: bool) -> None:
        device = self.device
        if not self._alone.acquire(blocking=False):
            device.crowded = True
            raise RuntimeError("another thread is in the context")
        if slow:
            time.sleep(device.pause_s)
            if device.held:
                device.inside.release()
                assert device.release.acquire(timeout=WAIT_S)


class Echo(Launch):
    """A run of `Device`."""

    def __init__(self, value: int, outputs: Sequence[Any]) -> None:
        self._value, self._outputs = value, outputs

    def wait(self) -> tuple[list[Array], int]:
        self._outputs[0][:] = self._value
        return [*self._outputs], 1


class Bench:
    """A slot of a device, used by one thread."""

    def __init__(self, device: Device, context: ExecutionContext | None = None) -> None:
        self.device = device
        self._rung = threading.Semaphore(0)
        self.slot = Slot(device, "lane", self._rung.release, context)

    def start(self, value: int, cell: Cell = ONE) -> None:
        """Starts a run that holds a number."""
        staging = self.slot.acquire()
        staging.reserve_input(0, 8)[:8] = np.int64(value).tobytes()
        self.slot.start(staging, cell)

    def ended(self, count: int) -> list[Completion]:
        """The next completions, their stagings released."""
        for _ in range(count):
            assert self._rung.acquire(timeout=WAIT_S)
        done = list(self.slot.completions())
        for completion in done:
            self.slot.release(completion.staging)
        return done

    def run(self, value: int) -> Completion:
        """One run from start to end."""
        self.start(value)
        (completion,) = self.ended(1)
        return completion

    def warm(self, cell: Cell = ONE) -> EngineError | None:
        """Warms a cell, and says why it could not."""
        told: SimpleQueue[EngineError | None] = SimpleQueue()
        self.slot.warm(cell, told.put)
        return told.get(timeout=WAIT_S)


def values(done: Sequence[Completion]) -> list[int]:
    """What the runs have given."""
    return [c.outputs[0].item() for c in done]


# -- who launches ---------------------------------------------------------------------


def test_a_run_of_one_call_is_launched_by_the_caller() -> None:
    """It is on the device when `start` returns, and ends like any other."""
    bench = Bench(Device())
    bench.start(7)
    launched = [(v, thread) for v, thread, _ in bench.device.launched]
    (done,) = bench.ended(1)
    bench.slot.close()

    assert launched == [(7, threading.get_ident())]
    assert values([done]) == [7]
    assert done.arrays is not None
    assert done.ended_ns - done.started_ns == 1


def test_other_runs_go_through_the_launching_thread() -> None:
    """Each is tried once, and launched by a thread of the slot."""
    bench = Bench(Device(slow=[7]))
    done = bench.run(7)
    bench.slot.close()

    (launched,) = bench.device.launched
    assert launched[1] != threading.get_ident()
    assert bench.device.tried == [7]
    assert values([done]) == [7]


def test_no_run_overtakes_one_that_takes_longer_to_launch() -> None:
    """Behind it even a run of one call goes through the thread, and is not tried."""
    bench = Bench(Device(slow=[1], held=True))
    bench.start(1)
    assert bench.device.inside.acquire(timeout=WAIT_S)
    bench.start(2)
    launched_meanwhile = len(bench.device.launched)
    bench.device.release.release(2)
    done = bench.ended(2)
    bench.slot.close()

    assert launched_meanwhile == 0
    assert bench.device.tried == [1]
    assert values(done) == [1, 2]


def test_the_caller_launches_again_when_the_thread_has_nothing_left() -> None:
    """One slow run does not make all that follow slow."""
    bench = Bench(Device(slow=[1]))
    bench.run(1)
    deadline = time.monotonic() + WAIT_S
    while threading.get_ident() not in {t for _, t, _ in bench.device.launched}:
        assert time.monotonic() < deadline
        bench.run(2)
    bench.slot.close()


def test_no_run_is_launched_while_a_cell_is_warmed() -> None:
    """It waits behind the warm-up, which uses the same context."""
    bench = Bench(Device(held=True))
    done = threading.Event()
    bench.slot.warm(ONE, lambda error: done.set())
    assert bench.device.inside.acquire(timeout=WAIT_S)
    bench.start(1)
    tried_meanwhile = list(bench.device.tried)
    bench.device.release.release(2)
    assert done.wait(WAIT_S)
    ended = bench.ended(1)
    bench.slot.close()

    assert tried_meanwhile == []
    assert values(ended) == [1]
    assert not bench.device.crowded


def test_whatever_is_mixed_the_order_is_kept() -> None:
    """Runs of both kinds and warm-ups: one at a time in the context, all in turn."""
    choose = random.Random(7)
    slow = [value for value in range(400) if choose.random() < 0.3]
    bench = Bench(Device(slow=slow, pause_s=0.0005))
    warmed: list[EngineError | None] = []
    orders = 0
    ended: list[int] = []
    for value in range(400):
        if choose.random() < 0.1:
            bench.slot.warm(ONE, warmed.append)
            orders += 1
        bench.start(value)
        if value % 2:  # two are under way
            ended += values(bench.ended(2))
    bench.slot.close()

    assert ended == list(range(400))
    assert [value for value, _, _ in bench.device.launched] == ended
    assert {t == threading.get_ident() for _, t, _ in bench.device.launched} == {
        True,
        False,
    }
    assert warmed == [None] * orders
    assert not bench.device.crowded


# -- what goes wrong ------------------------------------------------------------------


@pytest.mark.parametrize("slow", [[], [1, 3], [1, 2]])
def test_failures_of_launches_arrive_in_order(slow: list[int]) -> None:
    """As completions like others, whoever has launched; `start` does not raise."""
    faults: dict[str, Any] = {"run2": EngineRunError("no"), "run3": ValueError("oops")}
    bench = Bench(Device(slow=slow, **faults))
    outcomes: list[str | int] = []
    for value in (1, 3, 5):
        bench.start(value)
        bench.start(value + 1)
        outcomes += [
            c.outputs[0].item() if c.error is None else str(c.error)
            for c in bench.ended(2)
        ]
    bench.slot.close()

    assert outcomes == [1, "no", "ValueError: oops", 4, 5, 6]
    assert [value for value, _, _ in bench.device.launched] == [1, 2, 3, 4, 5, 6]


def test_a_direct_launch_may_find_the_device_dead() -> None:
    """The run fails with it, and so do all that follow, which are not tried."""
    death = EngineDeadError("gone")
    bench = Bench(Device(run1=death))
    done = [bench.run(value) for value in (1, 2)]
    bench.slot.close()

    assert [c.error for c in done] == [death, death]
    assert bench.slot.dead is death
    assert bench.device.tried == [1]


def test_a_dead_device_may_be_found_while_a_cell_is_warmed() -> None:
    """Who has asked is told, and nothing is run any more."""
    death = EngineDeadError("gone")
    bench = Bench(Device(warm=death))
    told = bench.warm()
    done = bench.run(1)
    bench.slot.close()

    assert told is death
    assert bench.slot.dead is death
    assert done.error is death
    assert bench.device.tried == []
    assert bench.device.launched == []


@pytest.mark.parametrize("step", ["warm", "expect"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (EngineRunError("no profile"), "no profile"),
        (EngineLoadError("no memory"), "no memory"),
        (ValueError("oops"), "ValueError: oops"),
    ],
)
def test_a_cell_that_cannot_be_warmed_hurts_nobody(
    step: str, fault: Exception, text: str
) -> None:
    """The error is told, and runs go on."""
    faults: dict[str, Any] = {step: fault}
    bench = Bench(Device(**faults))
    told = bench.warm()
    done = bench.run(1)
    bench.slot.close()

    assert isinstance(told, EngineError)
    assert str(told) == text
    assert values([done]) == [1]
    assert bench.slot.dead is None


# -- what is prepared -----------------------------------------------------------------


def launched_lists(bench: Bench, cell: Cell) -> list[Sequence[Array]]:
    """The lists that runs of a cell are launched with, one for each staging."""
    before = len(bench.device.launched)
    for value in (1, 2, 3):
        bench.start(value, cell)
    bench.ended(3)
    return [inputs for _, _, inputs in bench.device.launched[before:]]


def are(lists: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the very same lists, in whatever order."""
    return sorted(map(id, lists)) == sorted(map(id, others))


def test_reserved_runs_are_launched_with_the_lists_that_were_expected() -> None:
    """For each of the three stagings, inputs and outputs."""
    bench = Bench(Device())
    bench.slot.reserve(ONE)
    launched = launched_lists(bench, ONE)
    bench.slot.close()

    assert len({id(inputs) for inputs in launched}) == 3
    assert are(launched, [inputs for inputs, _ in bench.device.expected])
    assert len({id(outputs) for _, outputs in bench.device.expected}) == 3


def test_all_cells_that_are_reserved_together_stay_expected() -> None:
    """Though the buffers grow for the larger ones: that comes first."""
    cells = [Cell([(rows,)], [(rows,)]) for rows in (1, 64, 8)]
    bench = Bench(Device())
    bench.slot.reserve(*cells)
    launched = [each for cell in cells for each in launched_lists(bench, cell)]
    bench.slot.close()

    assert are(launched, [inputs for inputs, _ in bench.device.expected])
    assert len(launched) == 9


def test_what_was_warmed_is_reserved_too() -> None:
    """Its runs are as quick as those of cells that were ready at first."""
    cell = Cell([(4,)], [(4,)])
    bench = Bench(Device())
    told = bench.warm(cell)
    launched = launched_lists(bench, cell)
    bench.slot.close()

    assert told is None
    assert bench.device.warmed == [[(4,)]]
    assert are(launched, [inputs for inputs, _ in bench.device.expected])


def test_a_reserve_that_fails_says_so() -> None:
    """Before there are runs; by the thread that has asked."""
    bench = Bench(Device(expect=EngineRunError("no memory for a graph")))
    with pytest.raises(EngineRunError, match="no memory for a graph"):
        bench.slot.reserve(ONE)
    done = bench.run(1)
    bench.slot.close()

    assert values([done]) == [1]


def test_a_context_that_is_given_is_taken_over() -> None:
    """Runs happen in it, no other is made, and the slot closes it."""
    device = Device()
    bench = Bench(device, context=DeviceContext(device))
    done = bench.run(7)
    open_before = device.closed == 0
    bench.slot.close()

    assert device.contexts == 0
    assert values([done]) == [7]
    assert open_before
    assert device.closed == 1
