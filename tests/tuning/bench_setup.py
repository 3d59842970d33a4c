"""What the tests of `batcher bench` share: servers, bodies and a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from batcher.rpc.messages import ModelInferRequest
from batcher.tuning.bench import BenchConfig
from batcher.tuning.bodies import Body

SERVER = Path(__file__).with_name("bench_server.py")


class Server:
    """A running server process."""

    def __init__(self, kind: str, address: str, options: dict[str, int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), kind, address, json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        self.target = address
        if not address.startswith("unix:"):
            self.target = address.removesuffix("0") + port

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class StartServer(Protocol):
    """Starts a server (see `bench_server.py`), which ends with the test."""

    def __call__(
        self,
        kind: str = ...,
        address: str = ...,
        options: dict[str, int] | None = ...,
    ) -> Server: ...


def make_body(
    size_bytes: int = 64,
    *,
    model: str = "echo",
    weight: float = 1.0,
    deadline_us: int | None = None,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
    **parameters: int,
) -> Body:
    """A body of one input of `size_bytes`; `parameters` steer the server."""
    request = ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="raw", datatype="UINT8")
    tensor.shape.extend([1, size_bytes])
    request.raw_input_contents.append(bytes(i % 251 for i in range(size_bytes)))
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return Body(
        message=request.SerializeToString(),
        weight=weight,
        deadline_us=deadline_us,
        metadata=metadata,
    )


def closed(target: str, **changes: object) -> BenchConfig:
    """A short closed-loop run: 100 requests by 4 callers."""
    config = BenchConfig(
        target=target,
        bodies=(make_body(),),
        callers=4,
        connections=2,
        processes=1,
        requests=100,
        warmup_s=0.0,
        measure_s=10.0,
        server_statistics=False,
    )
    return replace(config, **changes)  # type: ignore[arg-type]
