"""Starts that fail with --log-format json: every line on stderr is a JSON object."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import models
import pytest

from .daemon import command, environment
from .repository import write, write_fake

JSON = "--log-format json"

STARTS: dict[str, str] = {
    # the command line: what its last line says
    "good --grpc-address 127.0.0.1:{port}": "cannot listen on 127.0.0.1:{port}",
    "good --transport grpcio --grpc-address 127.0.0.1:{port}": (
        "cannot listen on 127.0.0.1:{port}"
    ),
    "good --http-address 127.0.0.1:{port}": "cannot listen on http 127.0.0.1:{port}",
    "good --grpc-address unix:/none/a.sock": "cannot listen on unix:/none/a.sock",
    "good --grpc-address nonsense": "neither HOST:PORT",
    "none.onnx": "none.onnx: no such file or folder",
    "good twice/good": "two models are called 'good'",
    "~nobody-of-that-name/models": "Could not determine home directory",
    "bad": "none of the models can be served",
    "good bad --max-queue 0": "--max-queue: batching.max_queue must be at least 1",
    "good --max-message-mb 0": "max_message_mb must be at least 1",
    "good --socket-mode 9": "'9' is not octal",
    "good --max-batch many": "'--max-batch'",
    "good --nonsense": "No such option: --nonsense",
    "": "Missing argument 'PATH...'",
}


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[subprocess.CompletedProcess[str], str]]]:
    """Each of `STARTS`: how it ended, and what its last line has to say."""
    root = tmp_path_factory.mktemp("json")
    write_fake(root, "good", 0)
    write_fake(root / "twice", "good", 0)
    write(root / "bad", "knob", models.probe(), "max_bach = 4\nmax_batch = '8'")
    write(root / "bad", "fixed", models.probe(1), "max_batch = 8")
    (root / "bad" / "broken" / "1").mkdir(parents=True)
    (root / "bad" / "broken" / "1" / "model.onnx").write_bytes(b"junk\n" * 9)

    def start(line: str) -> tuple[subprocess.CompletedProcess[str], str]:
        text = line.format(port=port)
        given = ["serve", *text.split(), *JSON.split()]
        for flag in ("--grpc-address", "--http-address"):
            given += [] if flag in given else [flag, "127.0.0.1:0"]
        ended = subprocess.run(
            command(given),
            cwd=root,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ended, STARTS[line].format(port=port)

    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        yield dict(zip(STARTS, pool.map(start, STARTS), strict=True))


@pytest.mark.parametrize("line", STARTS)
def test_a_start_that_fails(
    done: dict[str, tuple[subprocess.CompletedProcess[str], str]], line: str
) -> None:
    """Whatever it is that fails, each line is a record, and the last says why."""
    ended, text = done[line]
    records = [json.loads(row) for row in ended.stderr.splitlines()]

    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert records[-1]["level"] == "error"
    assert text in records[-1]["message"]
    assert all({"time", "level", "logger", "message"} == r.keys() for r in records)
