"""Warms, while a model is served, the cells that it can do without at first."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from batcher.serving.loader import LoadedModel
from batcher.serving.readying import Tails, keep_costs
from engines import (
    Cell,
    EngineDeadError,
    EngineError,
    ExecutionContext,
)
from engines.costs import measure

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.002  # between looks whether the model is idle
_LOOK_LONG_S: Final = 0.2  # between looks whether to stop waiting for a slot
_STUCK_S: Final = 5.0
"""What takes longer than this to warm one cell is not waited for."""


class Warming:
    """A thread that warms one cell after the other, on every slot.

    The first run of a cell takes up to seconds, in which kernels are made for it. That
    happens on a context of its own, so that no slot is kept from its batches; what is
    left to do on a slot takes milliseconds, between two runs.

    Args:
        loaded: the model, with what is cold, the most useful first.
        on_warm: told of each cell that all slots can run, and of the time that a run
            takes (ns; 0 if it was not measured), on this thread.
        idle: whether nobody is waiting for the model; asked on this thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        on_warm: Callable[[Tails, int, int], None],
        idle: Callable[[], bool],
    ) -> None:
        self._name = name = loaded.signature.name
        self._engines = loaded.engines
        self._slots = loaded.slots
        self._shapes = loaded.shapes
        self._cold = loaded.cold
        self._on_warm = on_warm
        self._idle = idle
        self._costs = list(loaded.costs)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"warming {name}", daemon=True
        )

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it after the cell under way; must come before the slots are closed."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_STUCK_S)

    def _run(self) -> None:
        started = time.monotonic()
        scouts = self._scouts()
        warm = 0
        try:
            for tails, rung in self._cold:
                if self._stop.is_set():
                    return
                cell = self._shapes.group(tails).cell(rung)
                begun = time.monotonic()
                error = self._warmed(scouts, cell)
                self._give_way(time.monotonic() - begun)
                if isinstance(error, EngineDeadError):
                    return
                if error is None:
                    warm += 1
                    self._on_warm(tails, rung, self._measured(scouts, cell))
                else:
                    log.warning(
                        "model %r: batches of %d rows of %s are not used: %s",
                        self._name,
                        rung,
                        [list(tail) for tail in tails],
                        error,
                    )
            log.info(
                "model %r: all %d further batch sizes are warm after %.1f s",
                self._name,
                warm,
                time.monotonic() - started,
            )
        except Exception:  # a fault here must not go unseen, nor end the model
            log.exception("model %r: warming has ended early", self._name)
        finally:
            for scout in scouts:
                scout.close()
            with contextlib.suppress(EngineError):  # it has said so elsewhere
                for engine in self._engines:
                    engine.save_warm()
            keep_costs(self._engines[0], self._costs)

    def _measured(self, scouts: Sequence[ExecutionContext], cell: Cell) -> int:
        """How long a run takes, alone on the first device; 0 where nothing says so."""
        if len(scouts) < len(self._engines):
            return 0  # which device has one is not known
        costs = measure(self._engines[0], scouts[:1], [cell])
        self._costs += costs
        return costs[0].device_ns + costs[0].host_ns if costs else 0

    def _give_way(self, taken_s: float) -> None:
        """Waits for a gap, but not for ever: a fifth of the time is warming's."""
        until = time.monotonic() + 4 * taken_s
        while time.monotonic() < until and not self._idle():
            if self._stop.wait(_LOOK_S):
                return

    def _scouts(self) -> list[ExecutionContext]:
        """One context per engine; none where the memory is short."""
        scouts = []
        for engine in self._engines:
            try:
                scouts.append(engine.create_context())
            except (EngineError, MemoryError) as error:
                log.info("model %r: warming on the slots alone: %s", self._name, error)
        return scouts

    def _warmed(
        self, scouts: Sequence[ExecutionContext], cell: Cell
    ) -> EngineError | None:
        """Why a cell could not be warmed everywhere, or None."""
        try:
            for scout in scouts:
                scout.enter_thread()
                scout.warm(cell.inputs)
        except EngineError as error:
            return error
        errors: list[EngineError | None] = []
        done = threading.Semaphore(0)

        def then(error: EngineError | None) -> None:
            errors.append(error)
            done.release()

        for slot in self._slots:
            slot.warm(cell, then)
        for _ in self._slots:
            while not done.acquire(timeout=_LOOK_LONG_S):
                if self._stop.is_set():  # a slot that is closed tells nothing
                    return EngineDeadError("the slots are closed")
        return next((error for error in errors if error is not None), None)
