"""The daemon: bind, load, serve, drain. The whole life of a process, top to bottom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client import Metric

from batcher import __version__
from batcher.config import ServerConfig
from batcher.errors import BatcherError, ConfigError
from batcher.rpc.grpcio import GrpcioTransport
from batcher.rpc.native import NativeTransport
from batcher.rpc.service import Service
from batcher.rpc.sockets import PrivateFolder, close_all
from batcher.rpc.status import StatusTable
from batcher.rpc.streams import HealthWatchers, make_streams
from batcher.rpc.transport import Address, Transport
from batcher.serving import logs, signals
from batcher.serving.budget import Budget
from batcher.serving.describe import ladder
from batcher.serving.directory import ModelDirectory
from batcher.serving.driver import Driver
from batcher.serving.host import Host
from batcher.serving.http import HttpServer
from batcher.serving.loader import LoadedModel, load, seed_costs
from batcher.serving.machine import default_io_threads, memory_bytes
from batcher.serving.metrics import collect, exposition
from batcher.serving.model import Model
from batcher.serving.readying import Tails
from batcher.serving.repository import ModelSource, find_models
from batcher.serving.revival import Revival
from batcher.serving.statistics import ModelStatistics
from batcher.serving.warming import Warming
from engines import EngineError

log = logging.getLogger(__name__)

_FAREWELL_S = 0.02
"""How long the last word on streams has to travel through a front (seconds)."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that wants the interpreter lock waits before it asks for it. The
default, 5 ms, is longer than a batch: a slot would idle while the loop is busy."""


class Server:
    """One daemon.

    Args:
        config: its knobs.
        paths: models and repositories.
        overrides: values that win over every model's file.
    """

    def __init__(
        self,
        config: ServerConfig,
        paths: Sequence[Path],
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        try:
            self._sources = find_models(paths)
        except (OSError, RuntimeError) as error:  # no access; no such user's home
            where = ", ".join(map(str, paths))
            raise ConfigError(f"models at {where}: {error}") from error
        self._overrides = overrides or {}
        self._addresses = [Address.parse(text) for text in config.grpc_address]
        self._http_address = (
            None
            if config.http_address == "none"
            else Address.parse(config.http_address)
        )
        self._status = StatusTable(strict_triton=config.strict_triton_codes)
        self._directory = ModelDirectory()
        self._service = Service(self._directory, self._status, __version__)
        self._watchers = HealthWatchers()
        limit = config.max_in_flight_mb << 20 or memory_bytes() // 4
        self._budget = Budget(limit)
        if limit < config.max_message_mb << 20:
            log.warning(
                "requests above %d MiB are refused though --max-message-mb is %d: all "
                "that are in flight may have no more together (--max-in-flight-mb)",
                limit >> 20,
                config.max_message_mb,
            )
        self._transports: list[Transport] = []
        self._folder: PrivateFolder | None = None  # of the fallback's socket
        self._http: HttpServer | None = None
        self._stop = asyncio.Event()
        self._signal = ""
        self._loads: Future[LoadedModel] | None = None
        self._host = Host.of(config, self._on_lost)
        self._revival = Revival(self._host, self._overrides, self._revived)

    async def run(self) -> int:
        """Serves until a signal; returns the exit code.

        Raises:
            ConfigError: an address cannot be bound, or no model can be loaded.
        """
        started = time.monotonic()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = asyncio.get_running_loop()
        signals.on_signal(self._on_signal, close_all)
        self._driver = Driver(self._loop)
        try:
            await self._bind()
            await self._load_until_stopped()
            if not self._stop.is_set():
                seconds = time.monotonic() - started
                logs.announce(self._ready_line(seconds), name=log.name)
            gc.collect()
            gc.freeze()  # what lives as long as the daemon need not be looked at again
            await self._stop.wait()
            code = await self._drain()
        finally:
            await self._close()
        if self._revival.loading or not (self._loads is None or self._loads.done()):
            # It cannot be interrupted, and the interpreter would wait for its thread.
            signals.leave(code)
        return code

    # -- start ------------------------------------------------------------------------

    async def _bind(self) -> None:
        """Listens everywhere, before models are loaded: a taken port fails at once."""
        config = self._config
        limit = config.max_message_mb << 20
        native: list[Address] = []
        others: list[Address] = []
        for address in self._addresses:
            (native if self._is_native(address) else others).append(address)
        fallback: str | None = None
        if native:
            self._folder = PrivateFolder()
            fallback = self._folder.socket
            others.append(Address(path=fallback))
        if others:
            await self._start(
                GrpcioTransport(
                    others,
                    self._service,
                    self._service.methods,
                    make_streams(self._service, self._watchers),
                    self._driver.wake,
                    max_message_bytes=limit,
                    socket_mode=config.socket_mode,
                )
            )
        for address in native:
            await self._start(
                NativeTransport(
                    address,
                    self._service,
                    self._service.methods,
                    self._driver.wake,
                    self._status,
                    max_message_bytes=limit,
                    socket_mode=config.socket_mode,
                    fallback=fallback,
                    io_threads=config.io_threads or default_io_threads(),
                )
            )
        self._driver.serve(self._transports)
        if self._http_address is not None:
            self._http = HttpServer(
                self._http_address, lambda: self._directory.ready, self._metrics
            )

    def _metrics(self) -> bytes:
        """The metrics page; called on a thread of the HTTP server."""

        async def read() -> list[Metric]:
            return collect(self._directory.all(), self._budget)

        books = asyncio.run_coroutine_threadsafe(read(), self._loop)
        return exposition(books.result(timeout=10))

    def _is_native(self, address: Address) -> bool:
        choice = self._config.transport
        if choice == "auto":
            return address.local
        if choice == "native" and not address.local:
            log.warning(
                "%s: the native transport has no TLS and no hard limit on what "
                "compressed messages unfold to; use it on trusted networks only",
                address,
            )
        return choice == "native"

    async def _start(self, transport: Transport) -> None:
        await transport.start()
        self._transports.append(transport)

    async def _load_until_stopped(self) -> None:
        """Loads the models; a signal ends the wait, though not a load under way."""
        self._directory.expect(self._sources)
        if self._stop.is_set():
            return
        loading = self._loop.create_task(self._load())
        stopped = self._loop.create_task(self._stop.wait())
        try:
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading
        finally:
            loading.cancel()
            stopped.cancel()

    async def _load(self) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        for source in self._sources:
            try:
                self._loads = thread.submit(load, source, self._overrides, self._host)
                loaded = await asyncio.wrap_future(self._loads)
            except (BatcherError, EngineError) as error:
                for line in str(error).splitlines():
                    log.error("model %r cannot be served: %s", source.name, line)
                self._directory.failed(source.name, str(error))
            except Exception as bug:
                log.exception("model %r cannot be served", source.name)
                self._directory.failed(source.name, str(bug))
            else:
                self._serve_model(loaded)
        thread.shutdown(wait=False)
        self._loads = None
        if not self._directory.all():
            raise ConfigError("none of the models can be served (see above)")
        self._directory.loading = False
        self._watchers.set_ready(self._directory.ready)

    def _serve_model(
        self, loaded: LoadedModel, books: ModelStatistics | None = None
    ) -> None:
        model = Model(
            loaded,
            self._budget,
            self._status,
            self._config.max_message_mb << 20,
            self._driver.touch,
            self._driver.touch_here,
        )
        if books is not None:
            model.statistics = books
        model.warm_groups = seed_costs(
            loaded,
            lambda tails: model.scheduler.group(tails, model.rungs_of(tails)),
        )
        if loaded.cold:
            self._warm_further(loaded, model)
        self._directory.add(model)
        self._service.models_changed()
        lost = next((e.lost for e in loaded.engines if e.lost is not None), None)
        if lost is not None:  # since it was loaded, and before it could be found
            self._on_lost(loaded.signature.name, lost)

    def _on_lost(self, name: str, text: str) -> None:
        """An engine's process has ended; on any thread."""

        def lost() -> None:
            for model in self._directory.all():
                if model.signature.name == name and not self._directory.draining:
                    if all(engine.lost is None for engine in model.engines):
                        continue  # it is back already
                    model.lose()
                    self._watchers.set_ready(self._directory.ready)
                    self._revival.begin(model, self._directory.source(name), text)

        with contextlib.suppress(RuntimeError):  # the loop is closed: it is the end
            self._loop.call_soon_threadsafe(lost)

    def _revived(self, old: Model, loaded: LoadedModel) -> None:
        """A model is back, in the place of what it was and with its books."""
        self._driver.forget(old)
        self._serve_model(loaded, old.statistics)
        self._watchers.set_ready(self._directory.ready)

    def _warm_further(self, loaded: LoadedModel, model: Model) -> None:
        def use(tails: Tails, rung: int, run_ns: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it is the end
                self._loop.call_soon_threadsafe(model.use_rung, tails, rung, run_ns)

        model.warming = Warming(loaded, use, lambda: model.idle)
        model.warming.start()

    def _ready_line(self, seconds: float) -> str:
        addresses = [a for t in self._transports for a in t.addresses]
        private = self._folder.path if self._folder is not None else "\0"
        shown = [a for a in addresses if private not in a]
        models = [_described(model) for model in self._directory.all()]
        if self._http is not None:
            shown.append(f"http {self._http.address}")
        return (
            f"batcher {__version__} ready in {seconds:.2f} s on {', '.join(shown)}: "
            + "; ".join(models)
        )

    # -- end --------------------------------------------------------------------------

    def _on_signal(self, name: str) -> None:
        self._signal = name
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is the end
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _drain(self) -> int:
        """Answers what was accepted, then returns the exit code."""
        self._directory.drain()
        self._watchers.set_ready(False)
        if self._directory.loading and not self._busy():
            log.info("%s while models load: nothing to drain", self._signal)
            return 0
        log.info("draining: %d requests in flight", self._in_flight())
        deadline = time.monotonic() + self._config.drain_timeout_s
        while self._busy():
            if time.monotonic() > deadline:
                log.error("drain timed out: %d requests lost", self._in_flight())
                # A run under way cannot be ended, and would outlive the interpreter.
                signals.leave(1)
            await asyncio.sleep(0.005)
        log.info("drained")
        return 0

    def _busy(self) -> bool:
        return bool(self._in_flight() or not all(m.idle for m in self._directory.all()))

    def _in_flight(self) -> int:
        return sum(transport.in_flight for transport in self._transports)

    async def _close(self) -> None:
        try:
            if self._http is not None:
                self._http.close()
            for transport in self._transports:
                transport.end_streams()
            if self._transports:
                await asyncio.sleep(_FAREWELL_S)
            # The fronts first: they may still hand streams over to the fallback.
            for transport in reversed(self._transports):
                await transport.stop()
            await self._revival.stop()
            for model in self._directory.all():
                self._driver.forget(model)
                if model.idle:
                    model.close()
            self._driver.close()
        finally:
            close_all()


def serve(
    config: ServerConfig,
    paths: Sequence[Path],
    overrides: Mapping[str, Any] | None = None,
) -> int:
    """Runs a daemon in this process until a signal; returns the exit code.

    Raises:
        ConfigError: see `Server`.
    """

    async def main() -> int:
        return await Server(config, paths, overrides).run()

    try:
        import uvloop
    except ImportError:  # not on this system
        return asyncio.run(main())
    return uvloop.run(main())


def _described(model: Model) -> str:
    parts = [f"rungs {ladder(model.rungs)}"]
    if not model.signature.batched:
        parts = ["not batched"]
    for rule in model.shapes.rules:
        kind = "buckets" if rule.padded else "sizes"
        parts.append(f"{rule.name} {kind} {','.join(map(str, rule.buckets))}")
    signature = model.signature
    return f"{signature.name}/{signature.version} ({', '.join(parts)})"


__all__ = ["ModelSource", "Server", "serve"]
