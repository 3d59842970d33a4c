"""Slots of contexts that take the next run while one is under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from engines import (
    Cell,
    Completion,
    Engine,
    EngineDeadError,
    EngineRunError,
    ExecutionContext,
    Slot,
    TensorSpec,
)
from engines.base import Array, Launch, PipelinedContext

X = TensorSpec("x", "INT64", ("N",))
RUN_NS = 5_000_000


class Device(Engine):
    """Echoes; a run ends when `finish` lets it, and fails where `faults` says so."""

    backend = "device"
    inputs = outputs = (X,)

    def __init__(self, **faults: Exception) -> None:
        self.faults = faults  # "launch7": when the run that holds 7 is launched
        self.launched: list[int] = []
        self.two_queued = threading.Event()
        self.finish = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.closed = False

    def create_context(self) -> ExecutionContext:
        return DeviceContext(self)


class DeviceContext(PipelinedContext):
    """See `Device`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        self._device.threads.add(f"{threading.get_ident()}")

    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        device, value = self._device, int(inputs[0][0])
        device.launched.append(value)
        if len(device.launched) == 2:
            device.two_queued.set()
        if f"launch{value}" in device.faults:
            raise device.faults[f"launch{value}"]
        return DeviceLaunch(device, value, outputs)

    def close(self) -> None:
        self._device.closed = True


class DeviceLaunch(Launch):
    """A run of `Device`."""

    def __init__(self, device: Device, value: int, outputs: Sequence[Any]) -> None:
        self._device, self._value, self._outputs = device, value, outputs

    def wait(self) -> tuple[list[Array], int]:
        assert self._device.finish.acquire(timeout=30)
        if f"wait{self._value}" in self._device.faults:
            raise self._device.faults[f"wait{self._value}"]
        self._outputs[0][:] = self._value
        return [*self._outputs], RUN_NS


def slot_of(device: Device) -> tuple[Slot, threading.Semaphore]:
    """A slot and its doorbell."""
    rung = threading.Semaphore(0)
    return Slot(device, "lane", rung.release), rung


def start(slot: Slot, value: int) -> None:
    """Starts a run that holds a number."""
    staging = slot.acquire()
    staging.reserve_input(0, 8)[:8] = np.int64(value).tobytes()
    slot.start(staging, Cell([(1,)], [(1,)]))


def completions(slot: Slot, rung: threading.Semaphore, count: int) -> list[Completion]:
    """What has ended, once this many have."""
    for _ in range(count):
        assert rung.acquire(timeout=30)
    return list(slot.completions())


def test_a_run_is_launched_behind_the_one_under_way() -> None:
    """The second run is on the device before the first has ended; both come back."""
    device = Device()
    slot, rung = slot_of(device)
    start(slot, 1)
    start(slot, 2)
    queued = device.two_queued.wait(30)
    device.finish.release(2)
    first, second = completions(slot, rung, 2)
    slot.close()

    assert queued
    assert [c.outputs[0].tolist() for c in (first, second)] == [[1], [2]]
    assert first.ended_ns - first.started_ns == RUN_NS  # the device's own time
    assert first.arrays is not None
    assert len(device.threads) == 2
    assert device.closed


def test_failures_stay_with_their_run() -> None:
    """A run that cannot be launched, or that ends badly, leaves the others alone."""
    device = Device(launch2=EngineRunError("no"), wait3=ValueError("oops"))
    slot, rung = slot_of(device)
    device.finish.release(9)
    done = []
    for value in (1, 2, 3, 4):
        start(slot, value)
        (one,) = completions(slot, rung, 1)
        slot.release(one.staging)
        done.append(one)
    slot.close()

    assert [str(c.error) for c in done] == ["None", "no", "ValueError: oops", "None"]
    assert done[3].error is None


def test_nothing_runs_on_a_dead_device() -> None:
    """After a run that has killed the device every run fails, launched or not."""
    death = EngineDeadError("gone")
    device = Device(wait1=death)
    slot, rung = slot_of(device)
    start(slot, 1)
    start(slot, 2)
    assert device.two_queued.wait(30)
    device.finish.release(9)
    done = completions(slot, rung, 2)
    start(slot, 3)
    done += completions(slot, rung, 1)
    slot.close()

    assert [c.error for c in done] == [death] * 3
    assert device.launched == [1, 2]
    assert slot.dead is death
