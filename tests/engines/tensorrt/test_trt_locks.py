"""One maker at a time: threads, processes, dead holders, folders without flock."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.tensorrt.locks import Locking, WaitCancelled, exclusive, is_held

KINDS: list[Locking] = ["flock", "file"]

HOLDER = """
import sys, time
from pathlib import Path
from engines.tensorrt.locks import exclusive
with exclusive(Path(sys.argv[1]), locking=sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(path: Path, locking: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), locking],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("locking", KINDS)
def test_threads_take_turns(locking: Locking, tmp_path: Path) -> None:
    """Never two at once, and all get it in the end."""
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        with exclusive(tmp_path / "lock", locking=locking):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most == [1, 1, 1, 1]


@pytest.mark.parametrize("locking", KINDS)
def test_another_process_is_waited_for(locking: Locking, tmp_path: Path) -> None:
    """Whoever waits is told once, may give up, and gets it when the holder dies."""
    path = tmp_path / "lock"
    waits: list[int] = []
    with holder(path, locking) as process:
        assert is_held(path)
        with (
            pytest.raises(WaitCancelled),
            exclusive(
                path,
                locking=locking,
                on_wait=lambda: waits.append(1),
                cancelled=lambda: len(waits) > 0,
            ),
        ):
            pass

        threading.Timer(0.2, process.kill).start()
        with exclusive(path, locking=locking):
            code = process.wait()

    assert waits == [1]
    assert code == -9
    assert not is_held(path)


def test_a_lock_file_of_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    """On the same host its process id tells; nobody waits for a minute."""
    path = tmp_path / "lock"
    with holder(path, "file") as process:
        process.kill()
        process.wait()
        assert (tmp_path / "lockfile").exists()

    started = time.monotonic()
    with exclusive(path, locking="file"):
        owner = json.loads((tmp_path / "lockfile").read_bytes())
    took = time.monotonic() - started

    assert owner["pid"] == os.getpid()
    assert took < 5
    assert not (tmp_path / "lockfile").exists()


@pytest.mark.parametrize("content", [b"", b"\0\0", b"[]", b'{"pid": 1}'])
def test_a_lock_file_of_another_host_is_taken_over_when_stale(
    content: bytes, tmp_path: Path
) -> None:
    """Without signs of life for the set time, however its content looks."""
    path = tmp_path / "lockfile"
    path.write_bytes(content or json.dumps({"host": "elsewhere", "pid": 1}).encode())
    seen: list[float] = []

    with exclusive(
        tmp_path / "lock",
        locking="file",
        stale_s=0.5,
        on_wait=lambda: seen.append(time.monotonic()),
    ):
        waited = time.monotonic() - seen[0]

    assert 0.2 < waited < 5


def test_a_live_holder_is_not_taken_for_dead(tmp_path: Path) -> None:
    """A fresh lock file of this host's living process is respected."""
    owner = {"host": socket.gethostname(), "pid": os.getppid(), "token": "t"}
    (tmp_path / "lockfile").write_text(json.dumps(owner))
    turns: list[int] = []

    def cancelled() -> bool:
        turns.append(1)
        return len(turns) > 3

    with (
        pytest.raises(WaitCancelled),
        exclusive(tmp_path / "lock", locking="file", cancelled=cancelled),
    ):
        pass

    assert json.loads((tmp_path / "lockfile").read_bytes()) == owner


def test_a_lock_that_was_taken_over_is_left_to_its_new_holder(tmp_path: Path) -> None:
    """The old holder, back to life, does not remove what is another's now."""
    path = tmp_path / "lockfile"
    with exclusive(tmp_path / "lock", locking="file"):
        path.write_text('{"token": "of another"}')

    assert path.read_text() == '{"token": "of another"}'


def test_no_drafts_are_left(tmp_path: Path) -> None:
    """The folder holds nothing but what the kind of locking needs."""
    with exclusive(tmp_path / "lock", locking="file"):
        during = sorted(os.listdir(tmp_path))
    after = os.listdir(tmp_path)

    assert during == ["lockfile"]
    assert after == []
