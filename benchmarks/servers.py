"""The servers that the benchmarks drive: ours and its peers, as command lines.

Each serves the model `fake` (FP32[16], batches of at most 32, one instance) on a port
of 127.0.0.1, with the time of a batch given as `Work`. To add a peer, add an entry to
`peers`. Nothing is started here; `running.py` does that.
"""

from __future__ import annotations

import os
import string
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from benchmarks import wire

REPOSITORY_DIR: Final = Path(__file__).resolve().parent.parent
_PEERS_DIR: Final = REPOSITORY_DIR / "benchmarks/peers"

_OUR_MODEL: Final = string.Template("""\
engine = "fake"
max_batch = 32
[batching]
policy = "eager"
[slots]
count = 1
[fake]
base_ms = $base_ms
per_row_us = $per_row_us
inputs = [ { name = "INPUT0", dtype = "FP32", shape = [16] } ]
outputs = [ { name = "OUTPUT0", dtype = "FP32", shape = [16] } ]
""")


@dataclass(frozen=True, slots=True)
class Work:
    """How long the model takes for a batch."""

    base_ms: float
    per_row_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command line and what its environment has besides ours."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


Launcher = Callable[[Work, int, Path], Launch]
"""From the model's time, the port, and a folder that is removed afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One row of the tables."""

    name: str
    launch: Launcher
    answers: Literal["grpc", "echo", "http"] = "grpc"
    """gRPC v2; gRPC, but the reply is the request; or raw bytes over HTTP/1.1."""

    counts: Literal["file", "statistics", "none"] = "file"
    """Who tells rows and batches run: `fake_model.py`, `ModelStatistics`, or nobody."""

    needs: tuple[Path, ...] = ()
    """What `peers/setup.sh` must have made."""

    def missing(self) -> str | None:
        """Why it cannot be run here, or None."""
        for path in self.needs:
            if not path.exists():
                return f"not set up: no {path} (run benchmarks/peers/setup.sh)"
        return None


def ours(transport: str, python: str = sys.executable) -> Server:
    """Our daemon on one of its transports, run by `python`."""

    def launch(work: Work, port: int, folder: Path) -> Launch:
        model = folder / "repository" / wire.MODEL / "model.toml"
        model.parent.mkdir(parents=True)
        model.write_text(
            _OUR_MODEL.substitute(base_ms=work.base_ms, per_row_us=work.per_row_us)
        )
        command = [python, "-m", "batcher", "serve", str(model.parent.parent)]
        command += ["--grpc-address", f"127.0.0.1:{port}", "--http-address", "none"]
        return Launch(command=[*command, "--transport", transport])

    return Server(name=f"ours-{transport}", launch=launch, counts="statistics")


def peers() -> dict[str, Server]:
    """All the others by name, whether they are set up or not."""
    root = Path(
        os.environ.get("PEERS_ROOT") or Path(tempfile.gettempdir(), "batcher-peers")
    )
    python = root / "grpc/bin/python"
    stubs = root / "stubs"
    python_needs = (python, stubs / "inference/grpc_service_pb2.py")
    mosec_python = root / "mosec/bin/python"
    backend = root / "backends/sleep/libtriton_sleep.so"
    found = root.glob("triton/lib/python3*/site-packages/pytriton/tritonserver/bin/*")
    triton = next(
        (f for f in found if f.name == "tritonserver"), root / "triton/tritonserver"
    )
    servers = [
        Server(
            name=name,
            launch=_triton(triton, backend, delay_us),
            counts="statistics",
            needs=(triton, backend),
        )
        for name, delay_us in (("triton", 0), ("triton-2ms", 2000))
    ]
    servers += [
        Server(
            name="mosec",
            launch=_mosec(mosec_python),
            answers="http",
            needs=(mosec_python,),
        ),
        Server(
            name="grpcio",
            launch=_python(python, stubs, "grpcio_server.py"),
            needs=python_needs,
        ),
        Server(
            name="grpcio-tuned",
            launch=_python(
                python,
                stubs,
                "grpcio_server.py",
                arguments=("0.5",),
                prefix=("chrt", "-b", "0"),
                environment={"GRPC_EXPERIMENTS": "-event_engine_listener"},
            ),
            needs=python_needs,
        ),
        Server(
            name="sketch",
            launch=_python(python, stubs, "sketch_server.py"),
            needs=python_needs,
        ),
        Server(
            name="echo",
            launch=_python(python, stubs, "echo_server.py"),
            answers="echo",
            counts="none",
            needs=python_needs,
        ),
    ]
    return {server.name: server for server in servers}


def _python(
    python: Path,
    stubs: Path,
    file: str,
    *,
    arguments: Sequence[str] = (),
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Launcher:
    def launch(work: Work, port: int, folder: Path) -> Launch:
        command = [*prefix, str(python), str(_PEERS_DIR / file), f"127.0.0.1:{port}"]
        return Launch(
            command=[*command, *arguments],
            environment={"PYTHONPATH": str(stubs), **(environment or {})},
        )

    return launch


def _mosec(python: Path) -> Launcher:
    def launch(work: Work, port: int, folder: Path) -> Launch:
        command = [str(python), str(_PEERS_DIR / "mosec_server.py")]
        command += ["--address", "127.0.0.1", "--port", str(port)]
        return Launch(command=[*command, "--timeout", "30000", "--capacity", "2048"])

    return launch


def _triton(binary: Path, backend: Path, delay_us: int) -> Launcher:
    def launch(work: Work, port: int, folder: Path) -> Launch:
        model = folder / "repository" / wire.MODEL
        (model / "1").mkdir(parents=True)
        config = string.Template((_PEERS_DIR / "triton/config.pbtxt").read_text())
        text = config.substitute(delay_us=delay_us)
        (model / "config.pbtxt").write_text(text)
        flags = [
            f"--model-repository={model.parent}",
            f"--backend-directory={backend.parent.parent}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={port}",
            "--allow-http=false",
            "--allow-metrics=false",
        ]
        return Launch(command=[str(binary), *flags])

    return launch
