"""What a caller must not be able to do; where nothing may listen."""

from __future__ import annotations

import os
import pickle
import re
import socket
from pathlib import Path

import grpc
import models
import pytest
from tritonclient.grpc import service_pb2 as pb

from .client import Client, Raw, assert_refused, ones, pack, request, unpack
from .daemon import Daemon
from .repository import write

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


def listening(pid: int) -> set[str]:
    """The addresses that a process listens on, as in /proc/net/tcp and tcp6."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if found := re.fullmatch(r"socket:\[(\d+)\]", target):
            inodes.add(found[1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1])
    return addresses


def test_defaults_bind_loopback_only(tmp_path: Path) -> None:
    """Started without addresses it listens on 127.0.0.1, and nowhere else (B100)."""
    for port in (8001, 8002):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"port {port} is taken by something else")
    model = write(tmp_path / "models", "probe", models.probe())
    with Daemon(model, cwd=tmp_path, defaults=True) as daemon:
        assert daemon.grpc == "127.0.0.1:8001"
        assert daemon.http == "127.0.0.1:8002"
        loopback = "0100007F"
        assert listening(daemon.pid) == {f"{loopback}:1F41", f"{loopback}:1F42"}


def test_settings_write_no_files(client: Client, tmp_path: Path) -> None:
    """Log and trace settings cannot name a file to write (B096)."""
    log, trace = pb.LogSettingsRequest(), pb.TraceSettingRequest()
    log.settings["log_file"].string_param = str(tmp_path / "x")
    trace.settings["trace_file"].value.append(str(tmp_path / "y"))
    assert_refused(lambda: client.stub.LogSettings(log), UNIMPLEMENTED)
    assert_refused(lambda: client.stub.TraceSetting(trace), UNIMPLEMENTED)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 1, 1_000_000])
def test_uploads_are_refused(client: Client, size: int) -> None:
    """A model cannot be uploaded, nor fetched from anywhere (B095, B099, B100)."""
    load = pb.RepositoryModelLoadRequest(model_name="new")
    load.parameters["file:1/model.onnx"].bytes_param = bytes(size)
    load.parameters["config"].string_param = '{"url": "http://127.0.0.1:9/x"}'

    assert_refused(lambda: client.stub.RepositoryModelLoad(load), UNIMPLEMENTED)


def test_pickles_stay_bytes(client: Client, tmp_path: Path) -> None:
    """Bytes that are a pickle come back as they are, and nothing is run (B101)."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    data = pickle.dumps(Evil(), protocol=0)
    message = request("id_string", x=Raw("BYTES", [1, 1], pack([data])))
    answer = client.stub.ModelInfer(message)

    assert unpack(answer.raw_output_contents[0]) == [data]
    assert list(tmp_path.iterdir()) == []


def test_half_sent_connections(daemon: Daemon, client: Client) -> None:
    """Connections that stop in the middle of a request leave others alone (B098)."""
    host, port = daemon.grpc.split(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\4\0\0\0\0\0"
    headers = b"\xff\xff\xff\1\4\0\0\0\1"  # a frame that says it is 16 MiB long
    silent = []
    for sent in (b"", preface[:10], preface, preface + settings + headers, b"GET / "):
        for _ in range(20):
            one = socket.create_connection((host, int(port)), 5)
            one.sendall(sent)
            silent.append(one)
    try:
        answers = [client.infer("probe", x=ones(1, i), timeout=2) for i in range(20)]
    finally:
        for one in silent:
            one.close()

    assert [a["y"][0, 0] for a in answers] == [2 * i for i in range(20)]


def test_large_metadata(client: Client) -> None:
    """Metadata far beyond what is sensible is refused, and the connection lives."""
    metadata = (("x-large", "v" * 100_000),)
    call = client.stub.ModelInfer.future(
        request("probe", x=ones()), metadata=metadata, timeout=5
    )

    assert call.code() != grpc.StatusCode.OK
    assert client.infer("probe", x=ones())["y"].tolist() == [[2, 2, 2, 2]]


def test_metadata_is_ignored(client: Client) -> None:
    """Metadata that other servers act on changes nothing here (B088)."""
    metadata = (
        ("triton-grpc-protocol-inference", "x"),
        ("priority", "1"),
        ("timeout", "1"),
        ("authorization", "Bearer nonsense"),
        ("binary-bin", b"\0\xff"),
    )
    message = request("probe", x=ones(), id="m")
    answer = client.stub.ModelInfer(message, metadata=metadata, timeout=5)

    assert answer.id == "m"
    assert dict(answer.parameters) == {}
