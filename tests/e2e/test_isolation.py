"""An engine in a process of its own: killed, it takes nobody along, and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import models
import numpy as np
import pytest

from . import repository
from .client import Client, ending, ones, result, trailing
from .daemon import Daemon, eventually

PROCESS = '[slots]\nisolation = "process"\n'


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    """A slow fake model and a real one, each in a process of its own."""
    repository.write_fake(tmp_path, "slow", 300, toml=PROCESS)
    repository.write(tmp_path, "twin", models.twin_a(), PROCESS)
    with Daemon(tmp_path, cwd=tmp_path) as daemon:
        yield daemon


def engine_of(daemon: Daemon, model: str) -> int:
    """The process in which a model's engine lives."""
    for pid in children(daemon.pid):
        with contextlib.suppress(OSError):  # one that has just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if model.encode() in words:
                return pid
    raise LookupError(model)


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def test_a_killed_engine_answers_unavailable_and_comes_back(served: Daemon) -> None:
    """What runs and what waits is UNAVAILABLE at once with a hint when to try again,
    readiness goes and returns, the other model does not notice, the books go on."""
    with Client(served.grpc) as client:
        client.infer("slow", x=ones())
        calls = [client.start("slow", x=ones(1, i)) for i in range(20)]
        eventually(lambda: served.waiting("slow") > 2)  # of 20: 8 run, 8 lie ready
        killed = time.monotonic()
        os.kill(engine_of(served, "slow"), signal.SIGKILL)

        codes = {ending(call) for call in calls}
        assert codes == {grpc.StatusCode.UNAVAILABLE}
        assert time.monotonic() - killed < 0.25
        assert "retry-after" in trailing(calls[0])
        assert "its engine has ended, and is started again" in calls[-1].details()
        assert served.get("/readyz")[0] == 503
        y = client.infer("twin", x=np.zeros((1, 4), np.float32))["y"]
        assert y.shape == (1, 4)

        served.wait_line("model 'slow' is back after", 30)
        assert served.get("/readyz")[0] == 200
        answer = client.infer("slow", x=ones(2, 7.0))["y"]
        np.testing.assert_array_equal(answer, ones(2, 7.0))
        books = client.statistics("slow")
        assert books.inference_stats.success.count == 2
        assert books.inference_stats.fail.count == 20
    assert "was killed by SIGKILL" in served.stderr or "SIGKILL" in served.stderr


def test_an_idle_engine_that_is_killed_is_noticed(served: Daemon) -> None:
    """No request is needed to find out; again and again it comes back, after a longer
    pause each time."""
    for pause in ("0.25", "0.50"):
        before = len(served.lines)
        os.kill(engine_of(served, "slow"), signal.SIGKILL)
        served.wait_line(f"model 'slow' is lost .*next try in {pause} s")
        eventually(
            lambda n=before: "model 'slow' is back" in "\n".join(served.lines[n:]), 40
        )
    with Client(served.grpc) as client:
        client.infer("slow", x=ones())


def test_an_engine_may_be_killed_while_sizes_are_warmed(tmp_path: Path) -> None:
    """It comes back and is warmed again, and a drain ends the daemon as ever."""
    fake = "cold_ms = 100\n" + PROCESS
    repository.write_fake(tmp_path, "cold", 0, max_batch=64, toml=fake)
    with Daemon(tmp_path, cwd=tmp_path) as daemon:
        for _ in range(2):
            before = len(daemon.lines)
            os.kill(engine_of(daemon, "cold"), signal.SIGKILL)
            eventually(
                lambda n=before: "is back after" in "\n".join(daemon.lines[n:]), 40
            )
        with Client(daemon.grpc) as client:
            client.infer("cold", x=ones())
        daemon.stop()


def test_no_process_outlives_the_daemon(tmp_path: Path) -> None:
    """Neither a drain nor kill -9 of the daemon leaves an engine behind."""
    repository.write_fake(tmp_path, "quick", 0, toml=PROCESS)
    for end in (signal.SIGTERM, signal.SIGKILL):
        with Daemon(tmp_path, cwd=tmp_path) as daemon:
            engine = engine_of(daemon, "quick")
            with Client(daemon.grpc) as client:
                client.infer("quick", x=ones())
            if end == signal.SIGTERM:
                daemon.stop()
            else:
                daemon.kill()
        eventually(lambda pid=engine: not alive(pid), 5)


def alive(pid: int) -> bool:
    """Whether a process runs (and is no zombie)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_wave_of_requests_through_a_process(served: Daemon) -> None:
    """Hundreds of requests at once come back each with its own rows."""
    with Client(served.grpc) as client:
        rng = np.random.default_rng(0)
        rows = [
            rng.normal(size=(int(rng.integers(1, 5)), 4)).astype(np.float32)
            for _ in range(300)
        ]
        calls = [client.start("twin", x=x) for x in rows]
        for x, call in zip(rows, calls, strict=True):
            alone = client.infer("twin", x=x)["y"]
            np.testing.assert_array_equal(result(call)["y"], alone)
