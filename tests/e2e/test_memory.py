"""What a long life must not cost: memory over many requests of many shapes."""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from pathlib import Path
from typing import Any

import grpc
import models
import numpy as np
import pytest

from .client import Client, ones, request
from .conftest import Start
from .daemon import Daemon, eventually
from .repository import window, write

log = logging.getLogger(__name__)

SHAPES = 2000
LONG = bool(os.environ.get("BATCHER_TEST_LONG"))
WARM, TOTAL = (20_000, 100_000) if LONG else (4_000, 7_000)
IN_FLIGHT = 200


class Flood:
    """Serialized requests as fast as one thread sends them, so many in flight."""

    def __init__(self, client: Client) -> None:
        self._raw = client.raw
        self._calls: deque[Any] = deque()
        self.codes: dict[grpc.StatusCode, int] = {}

    def send(self, payload: bytes) -> None:
        """Sends one, after the oldest has ended when there are too many."""
        if len(self._calls) >= IN_FLIGHT:
            self._end(self._calls.popleft())
        self._calls.append(self._raw.future(payload, timeout=30))

    def finish(self) -> None:
        """Waits for all."""
        while self._calls:
            self._end(self._calls.popleft())

    def _end(self, call: Any) -> None:
        code = call.code()
        self.codes[code] = self.codes.get(code, 0) + 1


@pytest.mark.slow
def test_many_shapes(start: Start, tmp_path: Path) -> None:
    """Requests of 2,000 shapes: resident memory is flat once most were seen twice.

    Few of these requests share a run, so a second sees some 1,000: 100,000 of them on
    both transports would double the suite (BATCHER_TEST_LONG=1 sends them), and a leak
    of 2 kB shows with 3,000.
    """
    model = write(tmp_path / "models", "id_fp32", models.identity("fp32"))
    chance = random.Random(3)
    payloads = [
        request("id_fp32", x=np.zeros((1 + i % 5, 1 + i // 5), np.float32), id=str(i))
        for i in range(SHAPES)
    ]
    bodies = [payload.SerializeToString() for payload in payloads]
    daemon = start(model)
    with Client(daemon.grpc) as client:
        flood = Flood(client)
        for _ in range(WARM):
            flood.send(chance.choice(bodies))
        flood.finish()
        before = daemon.rss_kib()
        for _ in range(TOTAL - WARM):
            flood.send(chance.choice(bodies))
        flood.finish()
        after = daemon.rss_kib()

    log.info("%d KiB after %d requests, %d after %d", before, WARM, after, TOTAL)
    assert flood.codes == {grpc.StatusCode.OK: TOTAL}
    assert after < before * 1.05
    daemon.stop()


@pytest.mark.slow
def test_requests_that_end_badly(tmp_path: Path) -> None:
    """Failed, refused and timed-out requests leave no memory behind (B073, B075)."""
    write(tmp_path / "models", "emb", models.emb())
    small = window(2, 1000, "max_queue = 2\ntimeout_ms = 5")
    write(tmp_path / "models", "small", models.probe(), small)
    poison = request("emb", ids=np.array([[99]])).SerializeToString()
    wrong = request("emb", ids=np.zeros((1, 100_000), np.int64)).SerializeToString()
    waits = [
        request("small", x=ones(), id="i" * (i % 500)).SerializeToString()
        for i in range(500)
    ]
    unknown = [
        request(f"nope{i}", x=ones(), version="1").SerializeToString()
        for i in range(500)
    ]

    def rounds(count: int) -> None:
        for i in range(count):
            flood.send(poison)
            flood.send(waits[i % 500])
            flood.send(unknown[i % 500])
            if i % 10 == 0:
                flood.send(wrong)
        flood.finish()

    with Daemon(tmp_path / "models", cwd=tmp_path) as daemon:
        with Client(daemon.grpc) as client:
            flood = Flood(client)
            rounds(150)
            before = daemon.rss_kib()
            rounds(450)
            after = daemon.rss_kib()

        assert grpc.StatusCode.OK in flood.codes  # pairs of `small` that were in time
        assert flood.codes[grpc.StatusCode.INTERNAL] == 600
        assert flood.codes[grpc.StatusCode.NOT_FOUND] == 600
        assert flood.codes[grpc.StatusCode.INVALID_ARGUMENT] == 60
        assert after < before * 1.05 + 2000
        eventually(lambda: daemon.in_flight_bytes() == 0)
        assert daemon.waiting("small") == daemon.waiting("emb") == 0
