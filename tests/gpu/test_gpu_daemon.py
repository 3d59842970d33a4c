"""The daemon on a GPU: from a bare ONNX file to right answers, twice."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

E2E = str(Path(__file__).parents[1])
sys.path.insert(0, E2E)

from e2e import repository  # noqa: E402
from e2e.client import Client, result  # noqa: E402
from e2e.daemon import Daemon, eventually, run_batcher  # noqa: E402
from e2e.test_isolation import engine_of  # noqa: E402

SEQ = """
engine = "tensorrt"
max_batch = 8
batch_axis = "first"
[axes.S]
buckets = [4, 16, 64]
pad = { ids = 0, mask = 0 }
"""


def mean(ids: np.ndarray) -> np.ndarray:
    """What `models.seq` gives with a full mask."""
    return models.seq_table()[ids].mean(axis=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one model."""
    root = tmp_path_factory.mktemp("repository")
    repository.write(root, "seq", models.seq(), SEQ)
    return root


def serve(folder: Path, plans: Path, *more: str, **options: Any) -> Daemon:
    """The daemon on that repository."""
    arguments = (folder, "--plan-cache", str(plans), *more)
    return Daemon(*arguments, cwd=folder.parent, ready=False, **options)


def test_mixed_lengths_are_answered_right(folder: Path, plans: Path) -> None:
    """Hundreds of requests of every length at once, padded to buckets and rungs; the
    second start finds everything built."""
    for start in range(2):
        with serve(folder, plans) as daemon:
            daemon.wait_ready(120)
            with Client(daemon.grpc) as client:
                rng = np.random.default_rng(start)
                ids = [
                    rng.integers(0, 100, (int(rng.integers(1, 4)), int(length)))
                    for length in rng.integers(1, 65, 400)
                ]
                calls = [client.start("seq", ids=i, mask=np.ones_like(i)) for i in ids]
                for given, call in zip(ids, calls, strict=True):
                    y = result(call)["y"]
                    np.testing.assert_allclose(y, mean(given), rtol=2e-2, atol=2e-3)
                eventually(lambda: "are warm after" in daemon.stderr, 60)
                again = [client.start("seq", ids=i, mask=np.ones_like(i)) for i in ids]
                for given, call in zip(ids, again, strict=True):
                    y = result(call)["y"]
                    np.testing.assert_allclose(y, mean(given), rtol=2e-2, atol=2e-3)
            log = daemon.stderr
            assert ("agrees with ONNX Runtime" in log) == (start == 0)
            assert ("built in" in log) == (start == 0)
            daemon.stop()


def test_a_bare_onnx_file_is_served_with_no_configuration(
    tmp_path: Path, plans: Path
) -> None:
    """`batcher serve model.onnx --engine tensorrt` does everything itself."""
    path = models.save(models.probe(), tmp_path / "probe.onnx")
    with serve(path, plans, "--engine", "tensorrt", "--batch-axis", "first") as daemon:
        daemon.wait_ready(120)
        with Client(daemon.grpc) as client:
            x = np.arange(12, dtype=np.float32).reshape(3, 4)
            answer = client.infer("probe", x=x)
            assert answer["y"].shape == (3, 4)
            config = client.statistics("probe")
            assert config.inference_count == 3
        daemon.stop()


def test_a_built_plan_is_served_as_it_is(tmp_path: Path, plans: Path) -> None:
    """`batcher build`, then `batcher serve` of the plan; axes keep their names."""
    folder = repository.write(tmp_path, "seq", models.seq(), SEQ)
    source = folder / "1" / "model.onnx"
    plan = folder / "1" / "model.plan"
    built = run_batcher("build", source, "-o", plan, cwd=tmp_path, timeout_s=200)
    assert built.returncode == 0, built.stderr
    source.unlink()
    with serve(tmp_path, plans) as daemon:
        daemon.wait_ready(60)
        with Client(daemon.grpc) as client:
            ids = np.arange(10).reshape(1, 10)
            answer = client.infer("seq", ids=ids, mask=np.ones_like(ids))
            np.testing.assert_allclose(answer["y"], mean(ids), rtol=2e-2, atol=2e-3)
        daemon.stop()


def test_a_killed_engine_comes_back_warm(folder: Path, plans: Path) -> None:
    """kill -9 of the engine's process: UNAVAILABLE, then right answers again, from the
    plan and the kernels that are there."""
    with serve(folder, plans, "--isolation", "process") as daemon:
        daemon.wait_ready(120)
        with Client(daemon.grpc) as client:
            ids = np.arange(12).reshape(1, 12)
            mask = np.ones_like(ids)
            client.infer("seq", ids=ids, mask=mask)
            seen = len(daemon.lines)
            os.kill(engine_of(daemon, "seq"), signal.SIGKILL)
            daemon.wait_line("model 'seq' is back after", 60)
            y = client.infer("seq", ids=ids, mask=mask)["y"]
            np.testing.assert_allclose(y, mean(ids), rtol=2e-2, atol=2e-3)
            assert not any("built in" in line for line in daemon.lines[seen:])
        daemon.stop()


def test_both_places_of_the_engine_give_the_same(folder: Path, plans: Path) -> None:
    """Answers do not depend on whether the engine is a thread or a process."""
    ids = np.random.default_rng(9).integers(0, 100, (8, 33))
    answers = []
    for place in ("thread", "process"):
        with serve(folder, plans, "--isolation", place) as daemon:
            daemon.wait_ready(120)
            with Client(daemon.grpc) as client:
                y = client.infer("seq", ids=ids, mask=np.ones_like(ids))["y"]
                answers.append(y.tobytes())
            daemon.stop()
    assert answers[0] == answers[1]
