"""Starts that work, starts that must not, and bad models beside good ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import models
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from batcher import __version__

from .client import Client, assert_refused, ones, trailing
from .daemon import Daemon, environment, eventually, free_port, run_batcher
from .repository import SEQ_AXES, window, write, write_fake

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


# -- bad models beside a good one (B021, B091, B092) --------------------------------

BAD: dict[str, tuple[str | None, str]] = {
    # name: (its model.toml, or None for a damaged file; what the log must say)
    "garbage": (None, "garbage"),
    "empty": (None, "empty"),
    "knob": ("max_bach = 4", "max_bach: no such knob"),
    "syntax": ("max_batch = = 4", "model.toml"),
    "kind": ('max_batch = "many"', "max_batch"),
    "policy": ('batching.policy = "nonsense"', "'nonsense' is none of eager, window"),
    "fixed": ("max_batch = 8", "fixed at 1"),
    "axis": ("[axes.T]\nbuckets = [8]", "no input has an axis of that name"),
    "padless": ("[axes.S]\nbuckets = [8]", "a value for input 'ids' is needed"),
    "input": (SEQ_AXES.replace("mask", "nope"), "no 'nope'"),
    "output": (SEQ_AXES + "outputs = { zz = { axis = 1 } }", "no 'zz'"),
    "rank": (SEQ_AXES + "outputs = { y = { axis = 2 } }", "axis = 2"),
    "zero": (SEQ_AXES.replace("[8, 16, 32]", "[0, 8]"), "[0, 8]"),
    "slots": ("slots.count = 10000", "at most 64, got 10000"),
    "engine": ('engine = "warp"', "warp"),
    "fake": ('engine = "fake"', "[fake]"),
    "narrow": ("max_batch = 64\nbatching.max_queue = 16", "max_queue = 16"),
    'a"b': ("", "cannot be a model's name"),
    "n" * 200: ("", "at most 128 characters"),
    "rungs": ("max_batch = 8\nbatching.rungs = [1, 4]", "rungs ends at 4"),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with one good model and many bad ones."""
    root = tmp_path_factory.mktemp("mixed")
    write(root, "good", models.probe())
    write(root, "a b", models.twin_a())
    for name, (toml, _) in BAD.items():
        if toml is None:
            folder = root / name / "1"
            folder.mkdir(parents=True)
            (folder / "model.onnx").write_bytes(
                b"" if name == "empty" else b"junk" * 99
            )
        else:
            build = models.seq() if "axes" in toml else models.probe()
            write(root, name, models.probe(1) if name == "fixed" else build, toml)
    with Daemon(root, cwd=root) as running:
        yield running


@pytest.mark.parametrize("name", BAD, ids=lambda name: name[:8])
def test_a_bad_model_is_named(mixed: Daemon, name: str) -> None:
    """Each bad model has a line that names it and what is wrong (B091)."""
    lines = [line for line in mixed.lines if f"model {name!r} cannot be served" in line]

    assert len(lines) == 1, mixed.stderr
    assert BAD[name][1] in lines[0]


def test_the_good_model_serves(mixed: Daemon) -> None:
    """One bad model does not keep the others from being served."""
    with Client(mixed.grpc) as client:
        stub = client.stub
        ready = [
            stub.ModelReady(pb.ModelReadyRequest(name=name)).ready
            for name in ("good", "a b", *BAD)
        ]
        error = assert_refused(
            lambda: client.infer("knob", x=ones()), UNAVAILABLE, "failed to load"
        )

        assert ready == [True, True] + [False] * len(BAD)
        assert "retry-after" not in trailing(error)  # trying again does not help
        assert client.infer("good", x=ones())["y"].tolist() == [[2, 2, 2, 2]]
        assert client.infer("a b", x=ones())["y"].tolist() == [[2, 2, 2, 2]]
        names = {
            s.name
            for s in stub.ModelStatistics(pb.ModelStatisticsRequest()).model_stats
        }
        assert names == {"good", "a b"}
    assert mixed.get("/readyz")[0] == 200
    assert 'model="a b"' in mixed.get("/metrics")[1]
    mixed.check_stderr()


# -- slow starts (B053) -----------------------------------------------------------


def test_not_ready_before_all_is_loaded(transport: str, tmp_path: Path) -> None:
    """Live from the first moment, ready only with all models; then both (B053)."""
    root = tmp_path / "models"
    write(root, "a_quick", models.probe())
    for name in ("b_slow", "c_slow"):
        write_fake(root, name, 250, max_batch=1)
    port = free_port()
    addresses = ("--grpc-address", f"127.0.0.1:{port}")
    addresses += ("--http-address", f"127.0.0.1:{free_port()}")
    daemon = Daemon(
        root, *addresses, "--transport", transport, cwd=tmp_path, ready=False
    )
    with daemon, Client(f"127.0.0.1:{port}") as client:
        stub = client.stub
        kind = health_pb2.HealthCheckResponse
        health = health_pb2_grpc.HealthStub(client.channel)
        eventually(daemon.reached, 20)
        watch = health.Watch(
            health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True
        )
        statuses = [next(watch).status]
        live = stub.ServerLive(pb.ServerLiveRequest(), wait_for_ready=True, timeout=5)
        ready = stub.ServerReady(pb.ServerReadyRequest())
        model_ready = stub.ModelReady(pb.ModelReadyRequest(name="c_slow"))
        error = assert_refused(
            lambda: client.infer("c_slow", x=ones()), UNAVAILABLE, "loading"
        )
        assert daemon.get("/readyz")[0] == 503

        assert (live.live, ready.ready, model_ready.ready) == (True, False, False)
        assert trailing(error)["retry-after"] == "1"
        statuses.append(next(watch).status)
        assert statuses == [kind.NOT_SERVING, kind.SERVING]
        assert stub.ServerReady(pb.ServerReadyRequest()).ready
        assert client.infer("c_slow", x=ones())["y"].tolist() == ones().tolist()
        daemon.wait_ready()


# -- what must not start ----------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model."""
    return write(tmp_path_factory.mktemp("startup"), "probe", models.probe())


FLAGS: dict[str, tuple[str, ...]] = {
    # flags: what one line must say
    "--policy nonsense": ("nonsense", "eager, window"),
    "--transport pigeon": ("transport", "pigeon"),
    "--max-batch 64 --max-queue 16": ("max_queue = 16", "max_batch = 64"),  # (B010)
    "--slots 65": ("slots.count", "65"),
    "--socket-mode 9z": ("9z", "octal"),
    "--max-message-mb 4096": ("max_message_mb", "2047"),
    "--max-batch many": ("--max-batch", "valid integer"),
    "--nonsense": ("--nonsense",),
}


@pytest.fixture(scope="module")
def started(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[subprocess.CompletedProcess[str], list[Path]]]:
    """A start with each of `FLAGS`: how it ended, and what it left behind."""

    def start(flags: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
        cwd = tmp_path_factory.mktemp("flags")
        none = ("--http-address", "none", "--grpc-address", "unix:a.sock")
        done = run_batcher("serve", model, *none, *flags.split(), cwd=cwd)
        return done, list(cwd.iterdir())

    with ThreadPoolExecutor(2) as pool:  # most of a start is spent in imports
        return dict(zip(FLAGS, pool.map(start, FLAGS), strict=True))


@pytest.mark.parametrize("flags", FLAGS)
def test_wrong_flags(
    started: dict[str, tuple[subprocess.CompletedProcess[str], list[Path]]], flags: str
) -> None:
    """A wrong or contradictory flag ends the start with 2 and names what is wrong."""
    done, left = started[flags]

    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert any(all(text in line for text in FLAGS[flags]) for line in lines)
    assert len(lines) <= 8  # typer's usage takes the most
    assert left == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("nothing", "no such file or folder"),
        ("twice", "two models are called 'probe'"),
    ],
)
def test_wrong_paths(tmp_path: Path, make: str, text: str) -> None:
    """A path with no model, or two of one name, is one line and exit code 2."""
    paths = [tmp_path / "models"]
    if make == "twice":
        paths = [write(tmp_path / n, "probe", models.probe()) for n in ("a", "b")]
    done = run_batcher("serve", *paths, cwd=tmp_path)

    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_only_bad_models(tmp_path: Path) -> None:
    """Without a single good model there is no daemon."""
    (tmp_path / "bad.onnx").write_bytes(b"junk")
    none = ("--http-address", "none", "--grpc-address", "unix:a.sock")
    done = run_batcher("serve", "bad.onnx", *none, cwd=tmp_path)

    assert done.returncode == 2
    assert "model 'bad' cannot be served" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("batcher: none of the models")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.onnx"]


# -- ways to say it ---------------------------------------------------------------


def test_the_installed_script(tmp_path: Path) -> None:
    """`batcher` is on the path of the environment, and is this version."""
    script = Path(sys.executable).with_name("batcher")
    if not script.exists():
        pytest.skip("this environment has no scripts")
    done = subprocess.run(
        [script, "--version"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"batcher {__version__}\n"
    assert done.stderr == ""


def test_flags_files_and_variables(tmp_path: Path) -> None:
    """Flags win over variables, both over models' files; the rest is left alone."""
    models.save(models.probe(), tmp_path / "my_model.onnx")
    folder = write(tmp_path, "probe", models.probe(), window(4, 3000, "max_queue = 77"))
    variables = {"BATCHER_MAX_BATCH": "4", "BATCHER_MAX_DELAY_US": "123"}
    paths = ("my_model.onnx", folder, "--max-batch", "8", "--slots", "2")
    paths += ("--batch-axis", "first")
    with (
        Daemon(*paths, cwd=tmp_path, variables=variables) as daemon,
        Client(daemon.grpc) as client,
    ):
        answers = [client.infer(m, x=ones(8))["n"][0, 0] for m in ("my_model", "probe")]
        bare, file = (
            client.stub.ModelConfig(pb.ModelConfigRequest(name=name)).config
            for name in ("my_model", "probe")
        )

    assert answers == [8, 8]
    for config in (bare, file):
        assert config.max_batch_size == 8
        assert config.instance_group[0].count == 2
        assert config.dynamic_batching.max_queue_delay_microseconds == 123
    assert bare.parameters["policy"].string_value == "eager"
    assert file.parameters["policy"].string_value == "window"
    assert file.dynamic_batching.default_queue_policy.max_queue_size == 77


def test_the_highest_version(tmp_path: Path) -> None:
    """Of several versions the highest is served; others are NOT_FOUND."""
    for version, model in (("1", models.twin_a()), ("10", models.twin_b())):
        models.save(model, tmp_path / "twin" / version / "model.onnx")
    models.save(models.twin_a(), tmp_path / "twin" / "new" / "model.onnx")
    with (
        Daemon(tmp_path / "twin", cwd=tmp_path) as daemon,
        Client(daemon.grpc) as client,
    ):
        assert client.infer("twin", x=ones())["y"].tolist() == [[3, 3, 3, 3]]
        assert client.infer("twin", x=ones(), version="10")["y"][0, 0] == 3
        assert_refused(
            lambda: client.infer("twin", x=ones(), version="1"),
            grpc.StatusCode.NOT_FOUND,
            "version 1",
        )
        # The loaded copy does not depend on its file (B055).
        file = tmp_path / "twin" / "10" / "model.onnx"
        file.write_bytes(models.twin_a().SerializeToString())
        assert client.infer("twin", x=ones())["y"][0, 0] == 3
        os.truncate(file, 0)
        assert client.infer("twin", x=ones(64))["y"][63, 0] == 3


def test_other_addresses_are_warned_of(model: Path, tmp_path: Path) -> None:
    """native on an address that others can reach warns; auto takes grpcio there."""
    everywhere = ("--grpc-address", "0.0.0.0:0", "--log-level", "warning")
    with (
        Daemon(
            model, *everywhere, "--transport", "native", cwd=tmp_path, ready=False
        ) as native,
        Daemon(model, *everywhere, cwd=tmp_path) as auto,
    ):
        native.wait_ready()
        port = auto.grpc.rpartition(":")[2]
        with Client(f"127.0.0.1:{port}") as client:
            assert client.infer("probe", x=ones())["y"][0, 0] == 2

    assert native.stderr.count("use it on trusted networks only") == 1
    assert "trusted networks" not in auto.stderr
