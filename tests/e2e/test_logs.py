"""The log: one record a line, whatever clients send; JSON where JSON is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import grpc
import models
import numpy as np
import pytest

from .client import Client, Raw, ones, request, set_parameter
from .conftest import Start
from .daemon import Daemon
from .repository import write

RECORD = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) [\w.]+: "
)
FORGED = "2026-01-01T00:00:00.000Z ERROR forged: line"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good models and one that cannot be loaded."""
    root = tmp_path_factory.mktemp("logs")
    write(root, "probe", models.probe())
    write(root, "emb", models.emb())
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"\n" + FORGED.encode() + b"\n")
    return root


def provoke(client: Client) -> None:
    """Sends lines in every field that a client can fill."""
    line = f"x\n{FORGED}\r\n\x85\u2028{FORGED}\x1b[2K\n"
    messages = [
        request(line, x=ones()),
        request("probe", x=ones(), version=line),
        request("probe", x=ones(), outputs=[line]),
        request("probe", x=Raw(line, [1, 4], bytes(16))),
        request("probe", x=ones(), id=line),
        request("probe", **{line: ones()}),
        request("emb", ids=np.array([[99]]), id=line),
        request("probe", x=ones(), parameters={line: line, "timeout": line}),
        request("broken", x=ones()),
    ]
    wrong = request("probe", x=ones())
    set_parameter(wrong.inputs[0].parameters[line], line)
    for message in [*messages, wrong]:
        call = client.send(message, timeout=5)
        assert call.code() != grpc.StatusCode.UNKNOWN
    path = f"/inference.GRPCInferenceService/{FORGED.replace(' ', '_')}"
    client.channel.unary_unary(path).future(b"", metadata=(("m", "v\t"),)).code()
    client.raw.future(b"\xff\n" + FORGED.encode()).code()


def test_clients_cannot_forge_lines(start: Start, repository: Path) -> None:
    """Nothing that a client or a file sends begins a line of the log."""
    daemon = start(repository, "--log-level", "debug")
    with Client(daemon.grpc) as client:
        provoke(client)
    daemon.stop()
    lines = daemon.stderr.splitlines()
    odd = [x for x in lines if not RECORD.match(x) and not x.startswith("    | ")]

    assert any("'broken' cannot be served" in x for x in lines)
    assert [x[:8] for x in odd] == ["batcher "]  # the ready line
    assert [x for x in lines if x.startswith(FORGED[:30])] == []
    assert "\x1b" not in daemon.stderr


def test_json(repository: Path, tmp_path: Path) -> None:
    """In JSON mode every line is an object with time, level, logger and message."""
    flags = ("--log-format", "json", "--log-level", "debug")
    with Daemon(repository, *flags, cwd=tmp_path) as daemon:
        with Client(daemon.grpc) as client:
            provoke(client)
        daemon.stop()
    records = [json.loads(line) for line in daemon.stderr.splitlines()]
    messages = [record["message"] for record in records]

    assert all({"time", "level", "logger", "message"} <= r.keys() for r in records)
    assert any("'broken' cannot be served" in m for m in messages)
    assert any(m.startswith("batcher ") and " ready in " in m for m in messages)
    assert messages[-1] == "drained"


def test_log_level(repository: Path, tmp_path: Path) -> None:
    """At level error only errors are logged, and the ready line stays."""
    with Daemon(repository, "--log-level", "error", cwd=tmp_path) as daemon:
        pass
    lines = daemon.stderr.splitlines()

    assert all(" ERROR " in line or " ready in " in line for line in lines)
    assert sum(" ready in " in line for line in lines) == 1
