"""Brings models back whose engine's process has ended.

A model comes back from its plan and its kernels, warm, and with its books. One that
ends again soon is started again after a longer and longer pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from batcher.errors import BatcherError
from batcher.serving.host import Host
from batcher.serving.loader import LoadedModel, load
from batcher.serving.model import Model
from batcher.serving.repository import ModelSource
from engines import EngineError

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 30.0
_CALM_S: Final = 60.0
"""A model that has lived for so long is started again after the first pause."""


class Revival:
    """Loads lost models again. For the event loop's thread.

    Args:
        host, overrides: as for `load`.
        revived: called with the model that was lost and what was loaded in its place.
    """

    def __init__(
        self,
        host: Host,
        overrides: Mapping[str, Any],
        revived: Callable[[Model, LoadedModel], None],
    ) -> None:
        self._host = host
        self._overrides = overrides
        self._revived = revived
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, tuple[float, float]] = {}  # name to (last loss, pause)
        self._loading = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="revival")

    def begin(self, model: Model, source: ModelSource, text: str) -> None:
        """Takes up a model that was lost; `text` says how."""
        name = source.name
        if name in self._tasks:
            return  # of several devices another was first
        now = time.monotonic()
        last, pause = self._pauses.get(name, (now, 0.0))
        pause = min(max(2 * pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        if now - last > _CALM_S:
            pause = _FIRST_PAUSE_S
        self._pauses[name] = (now, pause)
        log.error("model %r is lost (%s); next try in %.2f s", name, text, pause)
        revival = self._revive(model, source, pause)
        self._tasks[name] = asyncio.get_running_loop().create_task(revival)

    @property
    def loading(self) -> bool:
        """Whether a load is under way: it cannot be interrupted."""
        return self._loading

    async def stop(self) -> None:
        """Gives up what is not back yet; a load under way is left to itself."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False)

    async def _revive(self, model: Model, source: ModelSource, pause: float) -> None:
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        await loop.run_in_executor(self._thread, model.close)
        while True:
            await asyncio.sleep(pause)
            try:
                loaded = await loop.run_in_executor(self._thread, self._load, source)
            except Exception as error:
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                log.error(
                    "model %r cannot be started again, next try in %.1f s: %s",
                    source.name,
                    pause,
                    error,
                    exc_info=not isinstance(error, BatcherError | EngineError),
                )
            else:
                # First: it may be lost again already.
                del self._tasks[source.name]
                self._revived(model, loaded)
                seconds = time.monotonic() - began
                log.warning("model %r is back after %.1f s", source.name, seconds)
                return

    def _load(self, source: ModelSource) -> LoadedModel:
        self._loading = True
        try:
            return load(source, self._overrides, self._host)
        finally:
            self._loading = False
