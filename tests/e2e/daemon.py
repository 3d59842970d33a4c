"""The daemon as a subprocess: start, wait for a line, look inside, stop.

Runs `python -m batcher serve` from a folder outside the repository and with no
PYTHONPATH, so that the installed package is what is tested.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

READY = re.compile(r"batcher \S+ ready in \S+ s on (?P<where>.*?): ")
# What must never be on stderr, whatever clients do (B083, B109, B110).
UNHANDLED = re.compile(
    r"Traceback|Exception in callback|Exception ignored|BlockingIOError|"
    r"never retrieved|was never awaited|internal error|Segmentation fault|panicked"
)

Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]


def eventually(
    condition: Callable[[], Any], timeout_s: float = 5.0, what: str = ""
) -> Any:
    """Poll until `condition` is true; returns its value, or fails."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.005)
    return value


def run_batcher(
    *arguments: str | Path, cwd: Path, timeout_s: float = 20
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, for starts that must fail."""
    return subprocess.run(
        command(arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def command(arguments: Sequence[str | Path]) -> list[str]:
    """The command line of the installed package."""
    return [sys.executable, "-m", "batcher", *map(str, arguments)]


def environment() -> dict[str, str]:
    """This process's, without what would change the package or its knobs."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("BATCHER_", "PYTHON", "GRPC_"))
    }


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Daemon:
    """A running `batcher serve`.

    Args:
        arguments: of `serve`; addresses on free ports are added where none are given.
        cwd: a folder outside the repository.
        ready: whether to wait for the ready line.
        defaults: whether to leave the addresses to the daemon.
        variables: `BATCHER_…` variables.

    Attributes:
        grpc: the first gRPC address.
        addresses: all gRPC addresses.
        http: HOST:PORT of the HTTP port.
        lines: what it wrote to stderr so far.
    """

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path,
        ready: bool = True,
        defaults: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        given = [str(a) for a in arguments]
        self.http = ""
        if "--http-address" in given:
            self.http = given[given.index("--http-address") + 1]
        if "--grpc-address" not in given and not defaults:
            given += ["--grpc-address", "127.0.0.1:0"]
        if "--http-address" not in given and not defaults:
            given += ["--http-address", "127.0.0.1:0"]
        self.lines: list[str] = []
        self.addresses: list[str] = []
        self._more = threading.Condition()
        self._closed = False
        self.process = subprocess.Popen(
            command(["serve", *given]),
            cwd=cwd,
            env={**environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            if ready:
                self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self.process.poll() is None:
                self.stop()
        finally:
            self.kill()

    @property
    def grpc(self) -> str:
        return self.addresses[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        """All that it wrote to stderr so far."""
        with self._more:
            return "".join(self.lines)

    # -- life -------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float = 20) -> None:
        """Wait for the ready line, and take the addresses from it."""
        found = READY.search(self.wait_line(READY.pattern, timeout_s))
        assert found is not None
        for address in found["where"].split(", "):
            if address.startswith("http "):
                self.http = address.removeprefix("http ")
            else:
                self.addresses.append(address)

    def wait_line(self, pattern: str, timeout_s: float = 10) -> str:
        """The first line, past or future, that matches `pattern`."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._more:
            while True:
                for line in self.lines[seen:]:
                    if re.search(pattern, line):
                        return line
                seen = len(self.lines)
                left_s = deadline - time.monotonic()
                if self._closed or left_s <= 0:
                    text = "".join(self.lines)
                    raise AssertionError(f"no line like {pattern!r} in:\n{text}")
                self._more.wait(left_s)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = 15) -> int:
        """Wait for the end; returns the exit code (minus the signal's number)."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def stop(self, timeout_s: float = 15) -> None:
        """Stop by SIGTERM: it must exit with 0 and no sign of a bug on stderr."""
        self.signal()
        code = self.wait_exit(timeout_s)
        self.check_stderr()
        assert code == 0, self.stderr

    def kill(self) -> None:
        """End it at once, however it is."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def check_stderr(self) -> None:
        """No traceback, no complaint of asyncio, gRPC or the interpreter."""
        text = self.stderr
        found = UNHANDLED.search(text)
        assert found is None, text[max(0, found.start() - 500) : found.end() + 3000]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                self.lines.append(line)
                self._more.notify_all()
        with self._more:
            self._closed = True
            self._more.notify_all()

    # -- looking inside ---------------------------------------------------------------

    def reached(self) -> bool:
        """Whether its HTTP port answers."""
        try:
            return self.get("/livez")[0] == 200
        except OSError:
            return False

    def get(self, path: str, timeout_s: float = 5) -> tuple[int, str]:
        """Status and body of a GET at the HTTP port."""
        url = f"http://{self.http}{path}"
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self, holding: str = "") -> Metrics:
        """The samples of the metrics page whose lines hold a text; it must parse."""
        status, page = self.get("/metrics")
        assert status == 200
        if holding:  # parsing a page of fifty models takes long
            lines = [x for x in page.splitlines() if holding in x and x[0] != "#"]
            page = "\n".join(lines) + "\n"
        samples: Metrics = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in samples, f"{key} is there twice"
                samples[key] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = set(labels.items())
        samples = self.metrics(name).items()
        values = [v for (n, ls), v in samples if n == name if wanted <= ls]
        assert values, f"no {name} with {labels}"
        return sum(values)

    def waiting(self, model: str) -> int:
        """Requests in the queue of a model."""
        return int(self.metric("nv_inference_pending_request_count", model=model))

    def in_flight_bytes(self) -> int:
        """Bytes of requests that are charged to the budget."""
        return int(self.metric("batcher_in_flight_bytes"))

    def rss_kib(self, field: str = "VmRSS") -> int:
        """Resident memory, or its peak with `VmHWM`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None
        return int(found[1])

    def open_files(self) -> int:
        """How many file descriptors it holds."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self) -> int:
        """How many threads it has."""
        return len(os.listdir(f"/proc/{self.pid}/task"))
