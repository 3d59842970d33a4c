"""The one timer: never early, set anew at will, and gone when closed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from batcher.scheduling import NEVER
from batcher.serving.timer import LoopTimer, Timer, TimerFd, make_timer

MS = 1_000_000

Main = Callable[["Bell"], Coroutine[Any, Any, None]]

LINUX = sys.platform.startswith("linux")


class Bell:
    """A timer that notes when it fired."""

    def __init__(self, kind: Callable[..., Timer]) -> None:
        self.fired_ns: list[int] = []
        self.loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] = self.loop.create_future()
        self.timer = kind(self.loop, self._ring)

    def _ring(self) -> None:
        self.fired_ns.append(time.monotonic_ns())
        if not self._next.done():
            self._next.set_result(None)

    async def wait(self) -> int:
        """Waits until it fires (or has fired since the last wait); says when it did."""
        await asyncio.wait_for(self._next, 30)
        self._next = self.loop.create_future()
        return self.fired_ns[-1]


async def fires_later(kind: Callable[..., Timer], delay_ns: int) -> None:
    """Waits until another timer of the loop has fired."""
    other = Bell(kind)
    other.timer.set(time.monotonic_ns() + delay_ns)
    await other.wait()
    other.timer.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[..., Timer], Main], None]:
    """Runs a test's coroutine with a bell, on each event loop in turn."""
    runner = asyncio.run if request.param == "asyncio" else uvloop.run

    def run_it(kind: Callable[..., Timer], main: Main) -> None:
        async def with_bell() -> None:
            bell = Bell(kind)
            try:
                await main(bell)
            finally:
                bell.timer.close()

        runner(with_bell())

    return run_it


KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            TimerFd, marks=pytest.mark.skipif(not LINUX, reason="Linux has timerfd")
        ),
        LoopTimer,
    ],
)


@pytest.mark.skipif(not LINUX, reason="Linux has timerfd")
def test_the_exact_timer_is_never_early(run: Any) -> None:
    """It fires at or after the instant it was set to, for every delay."""

    async def main(bell: Bell) -> None:
        for delay_ns in (0, 1, 50_000, 300_000, 1_700_000, 3 * MS):
            at_ns = time.monotonic_ns() + delay_ns
            bell.timer.set(at_ns)

            assert await bell.wait() >= at_ns

    run(TimerFd, main)


def test_the_loops_timer_is_a_hint(run: Any) -> None:
    """The fallback may round by a millisecond; whoever set it looks at the clock."""

    async def main(bell: Bell) -> None:
        for delay_ns in (0, 300_000, 3 * MS):
            at_ns = time.monotonic_ns() + delay_ns
            bell.timer.set(at_ns)

            assert await bell.wait() >= at_ns - 2 * MS

    run(LoopTimer, main)


@KINDS
def test_an_instant_in_the_past_fires_at_once(kind: Any, run: Any) -> None:
    """A wake-up that is late already is not lost, whatever its number."""

    async def main(bell: Bell) -> None:
        for at_ns in (time.monotonic_ns() - MS, 1, 0, -5):
            bell.timer.set(at_ns)
            await bell.wait()

        assert len(bell.fired_ns) == 4

    run(kind, main)


@KINDS
def test_it_fires_once(kind: Any, run: Any) -> None:
    """After it fired it stays silent until it is set again, to the same instant too."""

    async def main(bell: Bell) -> None:
        at_ns = time.monotonic_ns() + MS
        bell.timer.set(at_ns)
        await bell.wait()
        await fires_later(kind, 5 * MS)
        once = len(bell.fired_ns)
        bell.timer.set(at_ns)
        await bell.wait()

        assert (once, len(bell.fired_ns)) == (1, 2)

    run(kind, main)


@KINDS
def test_setting_it_anew_forgets_the_old_instant(kind: Any, run: Any) -> None:
    """Only the last instant counts, be it earlier or later than the one before."""

    async def main(bell: Bell) -> None:
        bell.timer.set(time.monotonic_ns() + 3_600_000 * MS)
        bell.timer.set(time.monotonic_ns() + MS)
        first_ns = await bell.wait()
        later_ns = time.monotonic_ns() + 4 * MS
        bell.timer.set(time.monotonic_ns() + MS)
        bell.timer.set(later_ns)
        second_ns = await bell.wait()

        assert len(bell.fired_ns) == 2
        assert second_ns > first_ns
        assert second_ns >= later_ns - 2 * MS

    run(kind, main)


@KINDS
@pytest.mark.parametrize("at_ns", [NEVER, NEVER + 1, 1 << 70])
def test_never_disarms_it(kind: Any, run: Any, at_ns: int) -> None:
    """An instant that never comes takes the old one back."""

    async def main(bell: Bell) -> None:
        bell.timer.set(time.monotonic_ns() + 2 * MS)
        bell.timer.set(at_ns)
        await fires_later(kind, 8 * MS)

        assert bell.fired_ns == []

    run(kind, main)


@KINDS
def test_it_may_be_set_from_its_own_call(kind: Any, run: Any) -> None:
    """The callback that plans the next wake-up gets it."""

    async def main(bell: Bell) -> None:
        again: list[int] = []
        done = bell.loop.create_future()

        def ring() -> None:
            again.append(time.monotonic_ns())
            if len(again) < 3:
                timer.set(time.monotonic_ns() + MS)
            else:
                done.set_result(None)

        timer = kind(bell.loop, ring)
        timer.set(time.monotonic_ns() + MS)
        await asyncio.wait_for(done, 30)
        timer.close()

        assert len(again) == 3

    run(kind, main)


@KINDS
def test_closing_it_disarms_it(kind: Any, run: Any) -> None:
    """A closed timer does not fire any more."""

    async def main(bell: Bell) -> None:
        other = Bell(kind)
        other.timer.set(time.monotonic_ns() + 2 * MS)
        other.timer.close()
        await fires_later(kind, 6 * MS)

        assert other.fired_ns == []

    run(kind, main)


def test_the_best_timer_of_the_system_is_taken(run: Any) -> None:
    """On Linux it is the exact one."""

    async def main(bell: Bell) -> None:
        assert type(bell.timer) is (TimerFd if LINUX else LoopTimer)

    run(make_timer, main)
