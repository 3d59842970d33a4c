"""The HTTP port: health and metrics, at any time and under load."""

from __future__ import annotations

import http.client
import socket
import threading
from itertools import pairwise

from .client import Client, ones
from .daemon import Daemon, Metrics, eventually

COUNTERS = (
    "nv_inference_count",
    "nv_inference_exec_count",
    "_total",
    "_bucket",
    "_sum",
)


def test_health(daemon: Daemon) -> None:
    """/livez and /readyz say ok."""
    assert daemon.get("/livez") == (200, "ok\n")
    assert daemon.get("/readyz") == (200, "ok\n")


def test_what_is_not_there(daemon: Daemon) -> None:
    """Other paths are 404, and the answer says what there is."""
    for path in ("/", "/metrics/", "/livez/x", "/../etc/passwd", "/%2e%2e", "/x?y=z"):
        assert daemon.get(path) == (404, "/metrics, /livez, /readyz\n")


def test_methods(daemon: Daemon) -> None:
    """Only GET and HEAD are answered."""
    connection = http.client.HTTPConnection(daemon.http, timeout=5)
    found = {}
    for method in ("HEAD", "POST", "PUT", "DELETE"):
        connection.request(method, "/livez")
        with connection.getresponse() as answer:
            found[method] = (answer.status, answer.read())
        connection.close()

    assert found["HEAD"] == (200, b"")
    assert [found[m][0] for m in ("POST", "PUT", "DELETE")] == [405] * 3


def test_silent_callers(daemon: Daemon) -> None:
    """Connections that say nothing do not keep others from being answered (B098)."""
    host, port = daemon.http.split(":")
    silent = [socket.create_connection((host, int(port)), 5) for _ in range(30)]
    try:
        assert daemon.get("/livez", timeout_s=2) == (200, "ok\n")
    finally:
        for one in silent:
            one.close()


def test_metrics_under_load(daemon: Daemon, client: Client) -> None:
    """Every scrape parses, and no counter goes down, while requests come in (B106)."""
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            for call in [client.start("probe", x=ones()) for _ in range(20)]:
                call.result()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        pages: list[Metrics] = [daemon.metrics() for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    counted = "nv_inference_request_success"
    label = frozenset({("model", "probe"), ("version", "1")})

    assert pages[0][counted, label] < pages[-1][counted, label]
    for earlier, later in pairwise(pages):
        assert earlier.keys() == later.keys()
        shrunk = [k for k in later if k[0].endswith(COUNTERS) and later[k] < earlier[k]]
        assert shrunk == []


def test_histograms_add_up(daemon: Daemon, client: Client) -> None:
    """The last bucket of a histogram is its count, and buckets do not shrink."""
    client.infer("twin_b", x=ones(3))
    samples = daemon.metrics('model="twin_b"')
    for name in ("batcher_batch_rows", "batcher_request_duration_seconds"):
        buckets = {
            dict(labels)["le"]: value
            for (n, labels), value in samples.items()
            if n == f"{name}_bucket"
        }
        sizes = [buckets[le] for le in sorted(buckets, key=float)]
        (count,) = (v for (n, _), v in samples.items() if n == f"{name}_count")

        assert sizes == sorted(sizes)
        assert sizes[-1] == buckets["+Inf"] == count >= 1


def test_unknown_models_make_no_series(daemon: Daemon, client: Client) -> None:
    """What callers invent does not become a label (B106)."""
    before = len(daemon.metrics())
    calls = [client.start(f"unknown{i}", x=ones()) for i in range(300)]
    assert all(call.code() is not None for call in calls)

    assert eventually(lambda: len(daemon.metrics())) == before
