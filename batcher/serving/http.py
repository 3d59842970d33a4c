"""The HTTP port: /metrics, /livez, /readyz. Small, on threads of its own.

What clients do is never worth more than a debug record: probes connect and say
nothing, and go away in the middle. How many connections there are, and how long each
lasts, is bounded here.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, cast
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST

from batcher.errors import ConfigError
from batcher.rpc.transport import Address

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 128
"""Connections at the same time; one more ends the oldest, which is a silent one."""

_SILENT_S: Final = 10
"""How long a caller may send or take nothing (seconds)."""

_LIFE_S: Final = 30
"""How long a connection may last at all (seconds): some send a byte now and then."""

_PAUSE_S: Final = 0.1
"""The wait after a connection that could not be accepted (seconds): it stays in the
queue, and the socket readable, so that without a wait the thread would spin."""

_QUIET_S: Final = 60
"""The time between two warnings of one kind (seconds)."""

_PLAIN: Final = "text/plain; charset=utf-8"

Page = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""


class _Server(ThreadingMixIn, TCPServer):
    """A thread per connection, up to a limit."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64  # 5 by default: a few probes at once wait a second

    def __init__(self, address: Address, page: Callable[[str], Page]) -> None:
        self.page = page
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # sockets and when they came, oldest first
        self._warned_at: dict[str, float] = {}
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        super().__init__((address.host, address.port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except ConnectionError as error:  # it has gone before its turn came
            log.debug("http: a client has gone: %s", error)
            raise
        except OSError as error:
            self._warn(
                "accept",
                f"no connection can be accepted ({error}); {_way_out(error)}",
            )
            self.closing.wait(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                text = f"{MAX_CONNECTIONS} connections at once: each new one ends"
                self._warn("full", f"{text} the oldest; find out who leaves them open")
                _end(next(iter(self._open)))
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except (RuntimeError, MemoryError) as error:
            # The system has no thread for it.
            self._warn(
                "thread",
                f"a connection was closed without an answer ({error}); raise the "
                "limit of processes and threads, or the memory",
            )
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # so that nobody ends a socket of another connection
            self._open.pop(request, None)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        old = time.monotonic() - _LIFE_S
        with self._lock:
            for request, came_at in self._open.items():
                if came_at > old:
                    break
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # What goes wrong in making a page is caught in `HttpServer`: what the system
        # says about a socket is the client's doing.
        error = sys.exception()
        if isinstance(error, OSError):
            log.debug("http: %s has gone: %s", client_address, error)
        else:
            log.error("http: %s got no answer", client_address, exc_info=error)

    def _warn(self, kind: str, text: str) -> None:
        """Warns now and then: what causes it may last, and come with every client."""
        now = time.monotonic()
        last = self._warned_at.get(kind)
        if last is None or now - last >= _QUIET_S:
            self._warned_at[kind] = now
            log.warning("http port %s: %s", self.server_address[1], text)


def _end(connection: socket.socket) -> None:
    """Wakes the thread of a connection, which closes it."""
    with suppress(OSError):  # the client has ended it before
        connection.shutdown(socket.SHUT_RDWR)


def _way_out(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"raise the limit of open files (ulimit -n), now {limit}"
    if error.errno == errno.ENFILE:
        return "raise the system's limit of open files (sysctl fs.file-max)"
    return "it is tried again"


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENT_S
    server_version = "batcher"
    sys_version = ""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command in ("GET", "HEAD"):
            return True
        self._answer((HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN, b"GET only\n"))
        return False

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self._answer(cast(_Server, self.server).page(path))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, page: Page) -> None:
        status, kind, body = page
        self.send_response(status)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes and scrapes are not logged, nor clients that make no sense."""
        log.debug("http: %s: %s", self.client_address, format % args)


class HttpServer:
    """Serves health and metrics.

    Args:
        address: HOST:PORT.
        ready: whether requests are taken.
        metrics: makes the page that Prometheus reads; TimeoutError when it cannot now.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self, address: Address, ready: Callable[[], bool], metrics: Callable[[], bytes]
    ) -> None:
        if address.path is not None:
            raise ConfigError("the HTTP address must be HOST:PORT")
        self._ready = ready
        self._metrics = metrics
        try:
            self._server = _Server(address, self._page)
        except OSError as error:
            raise ConfigError(f"cannot listen on http {address}: {error}") from error
        port = self._server.server_address[1]
        self.address = str(Address(address.host, int(port)))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},  # seconds that `close` may take
            name="http",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _page(self, path: str) -> Page:
        """The answer to a GET, whatever happens in making it."""
        try:
            return self._made(path)
        except TimeoutError:
            log.warning("http: %s was not made in time: the daemon is too busy", path)
            return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, b"too busy\n"
        except Exception:
            if self._server.closing.is_set():  # what it asks may be gone by now
                log.debug("http: %s came too late", path, exc_info=True)
                return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, b"shutting down\n"
            log.exception("http: %s failed", path)
            return HTTPStatus.INTERNAL_SERVER_ERROR, _PLAIN, b"internal error\n"

    def _made(self, path: str) -> Page:
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, self._metrics()
        if path == "/readyz":
            if not self._ready():
                return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, b"not ready\n"
        elif path != "/livez":
            return HTTPStatus.NOT_FOUND, _PLAIN, b"/metrics, /livez, /readyz\n"
        return HTTPStatus.OK, _PLAIN, b"ok\n"
