"""The HTTP port: /metrics, /livez, /readyz. Small, on threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST

from batcher.errors import ConfigError
from batcher.rpc.transport import Address


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64  # 5 by default: a few probes at once wait a second


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds a silent caller may hold its thread

    def log_message(self, format: str, *args: Any) -> None:
        """Probes and scrapes are not logged."""


class HttpServer:
    """Serves health and metrics.

    Args:
        address: HOST:PORT.
        ready: whether requests are taken.
        metrics: makes the page that Prometheus reads.

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
            self._server = make_server(
                address.host, address.port, self._serve, _Server, _Handler
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on http {address}: {error}") from error
        self.address = f"{address.host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},  # seconds that `close` may take
            name="http",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        status, kind, body = HTTPStatus.OK, "text/plain; charset=utf-8", b"ok\n"
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            status, body = HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n"
        elif path == "/metrics":
            kind, body = CONTENT_TYPE_LATEST, self._metrics()
        elif path == "/readyz":
            if not self._ready():
                status, body = HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n"
        elif path != "/livez":
            status, body = HTTPStatus.NOT_FOUND, b"/metrics, /livez, /readyz\n"
        headers = [("Content-Type", kind), ("Content-Length", str(len(body)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [b"" if environ.get("REQUEST_METHOD") == "HEAD" else body]
