"""What of CUDA and of the machine's cores can be seen without a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from engines import EngineDeadError, EngineRunError, cuda
from engines.cores import usable_cores

_PR_GET_TIMERSLACK = 30
_Result = TypeVar("_Result")

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def in_a_thread(act: Callable[[], _Result]) -> _Result:
    """What `act` gives on a new thread."""
    given: list[_Result] = []
    thread = threading.Thread(target=lambda: given.append(act()))
    thread.start()
    thread.join(30)
    return given[0]


# -- cores ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0", {0}),
        ("0-3\n", {0, 1, 2, 3}),
        ("0-1,8,10-11\n", {0, 1, 8, 10, 11}),
        ("5-5", {5}),
        ("", set()),
        ("\n", set()),
    ],
)
def test_linux_lists_of_cores_are_read(text: str, cores: set[int]) -> None:
    """Numbers and ranges with both ends, as the kernel writes them."""
    assert cuda.cpu_list(text) == cores


@pytest.mark.parametrize("text", ["a", "0-b", "-3", "0x1", "1.5", "0 1"])
def test_other_texts_are_no_lists_of_cores(text: str) -> None:
    """They are refused, not read as something else."""
    with pytest.raises(ValueError, match="invalid literal"):
        cuda.cpu_list(text)


@linux
def test_usable_cores_are_those_of_the_thread() -> None:
    """A thread that is kept on one core has one."""

    def counted() -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return usable_cores()

    assert in_a_thread(counted) == 1
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_cores_are_counted_where_they_cannot_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On macOS there are as many as the machine has."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)

    assert usable_cores() == os.cpu_count()


# -- threads --------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("cores", [1, 1024])
@pytest.mark.parametrize("device", [0, 99])
def test_a_thread_never_gets_more_cores(device: int, cores: int) -> None:
    """Near a device it keeps some of its own; where there is none it keeps them all."""

    def places() -> tuple[set[int], set[int]]:
        before = set(sorted(os.sched_getaffinity(0))[:cores])
        os.sched_setaffinity(0, before)
        cuda.stay_near(device)
        return before, os.sched_getaffinity(0)

    before, after = in_a_thread(places)

    assert after
    assert after <= before
    if device == 99:
        assert after == before


@linux
def test_short_sleeps_of_a_thread_end_on_time() -> None:
    """Its timers have no slack any more; those of others keep theirs."""
    libc = ctypes.CDLL(None)

    def slack_ns() -> int:
        return int(libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0))

    def exact() -> int:
        cuda.sleep_exactly()
        return slack_ns()

    before = slack_ns()

    assert in_a_thread(exact) == 1
    assert slack_ns() == before


# -- errors ---------------------------------------------------------------------------


@pytest.fixture
def errors() -> Any:
    """The codes of CUDA's runtime."""
    pytest.importorskip("cuda.bindings.runtime")
    return cuda.runtime().cudaError_t


def test_results_come_without_their_status(errors: Any) -> None:
    """One value bare, several as a tuple."""
    good = errors.cudaSuccess

    assert cuda.check((good, 5)) == 5
    assert cuda.check((good, 5, 6)) == (5, 6)
    assert cuda.check((good,)) == ()


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("cudaErrorMemoryAllocation", cuda.OutOfDeviceMemory, "out of memory"),
        ("cudaErrorIllegalAddress", EngineDeadError, "an illegal memory access"),
        ("cudaErrorInvalidValue", EngineRunError, "invalid argument"),
    ],
)
def test_a_status_becomes_an_error(
    errors: Any, name: str, kind: type[Exception], text: str
) -> None:
    """With CUDA's name and text; the class says whether the process can go on."""
    with pytest.raises(kind, match=f"^{name}: {text}") as raised:
        cuda.check((getattr(errors, name), 0))

    assert type(raised.value) is kind


def test_the_errors_that_end_everything_are_cudas(errors: Any) -> None:
    """None of the names is misspelt."""
    assert {name for name in cuda._STICKY if not hasattr(errors, name)} == set()
