"""The driver: what makes the event loop call the models, as seldom as possible.

One wake-up handles every call that has arrived and every batch that has finished.
Threads ring `wake` (a flag, and at most one entry in the loop's queue); models that
have something to do are `touch`ed; one exact timer serves the earliest wake-up that any
scheduler asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from batcher.rpc.transport import Transport
from batcher.scheduling import NEVER
from batcher.serving.model import Model
from batcher.serving.timer import make_timer

log = logging.getLogger(__name__)


class Driver:
    """Runs transports and models on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transports: Sequence[Transport] = ()
        self._touched: deque[Model] = deque()
        self._woken = False
        self._sleepers: dict[Model, int] = {}  # wake-up instants asked for
        self._timer = make_timer(loop, self._tick)

    def serve(self, transports: Sequence[Transport]) -> None:
        """The transports whose inboxes are emptied at every wake-up."""
        self._transports = transports

    def wake(self) -> None:
        """Makes the loop look around soon; from any thread."""
        # A race on the flag costs one wake-up too many, never one too few: it is
        # cleared before anything is looked at.
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._tick)

    def touch(self, model: Model) -> None:
        """Asks for a turn of `model`; from any thread."""
        model.touched = True
        self._touched.append(model)
        if not self._woken:
            self.wake()

    def touch_here(self, model: Model) -> None:
        """Notes that `model` has something to do at the next look around.

        For the loop's own thread while calls are handed over (`drain_inbox`).
        """
        if not model.touched:
            model.touched = True
            self._touched.append(model)

    def forget(self, model: Model) -> None:
        """No more turns for a model that is closed."""
        self._sleepers.pop(model, None)

    def close(self) -> None:
        """Ends the timer."""
        self._timer.close()

    def _tick(self) -> None:
        self._woken = False  # first: what comes from now on rings again
        for transport in self._transports:
            try:
                transport.drain_inbox()
            except Exception:
                log.exception("a transport failed on what has arrived")
                self.wake()  # for what is left in its inbox
        now_ns = time.monotonic_ns()
        if self._sleepers:
            for model, at_ns in list(self._sleepers.items()):
                if at_ns <= now_ns and not model.touched:
                    self._touched.append(model)
        touched = self._touched
        while touched:
            model = touched.popleft()
            model.touched = False
            try:
                model.turn(now_ns)
            except Exception as bug:
                # A bug in one model's turn must not stop the others, nor be silent.
                log.exception("a turn of model %r failed", model.signature.name)
                model.abandon(bug)
            if model.wakeup_ns < NEVER:
                self._sleepers[model] = model.wakeup_ns
            else:
                self._sleepers.pop(model, None)
        sleepers = self._sleepers
        self._timer.set(min(sleepers.values()) if sleepers else NEVER)
