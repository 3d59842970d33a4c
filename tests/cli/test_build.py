"""The command `batcher build`: what it takes, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from batcher.cli import app
from batcher.errors import ConfigError
from batcher.serving.buildtarget import build_target
from engines.errors import EngineLoadError
from engines.tensorrt.facts import gpu_fact
from engines.tensorrt.module import load
from engines.tensorrt.plans import read_sidecar, sha256, sidecar_path

NEEDS_GPU = pytest.mark.skipif(not gpu_fact().gpus, reason="needs a GPU")
COMMAND = [sys.executable, "-P", "-m", "batcher", "build"]


@pytest.fixture(scope="session", autouse=True)
def rtx() -> None:
    """TensorRT for RTX builds without a GPU; these tests are skipped where it is not
    installed, but never in CI."""
    try:
        load("tensorrt_rtx")
    except EngineLoadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def environment(folder: Path, *, gpu: bool = False) -> dict[str, str]:
    """Of the command: without GPUs unless told otherwise, with its own temporary
    folder."""
    (folder / "tmp").mkdir(exist_ok=True)
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **hidden, "TMPDIR": str(folder / "tmp")}


def build(
    folder: Path, *arguments: str | Path, gpu: bool = False
) -> subprocess.CompletedProcess[str]:
    """The installed command, run in a folder."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=environment(folder, gpu=gpu),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def refusal(*arguments: str | Path) -> str:
    """The one line with which it ends before anything is built."""
    result = CliRunner().invoke(app, ["build", *map(str, arguments)])

    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("batcher build: ")


def bounds(report: dict[str, Any], name: str) -> list[tuple[list[int], list[int]]]:
    """Per profile of a report the smallest and the largest shape of an input."""
    profiles = report["settings"]["profiles"]
    return [(profile["min"][name], profile["max"][name]) for profile in profiles]


def deep(layers: int = 300) -> onnx.ModelProto:
    """x FP32 [N, 8] -> y FP32 [N, 8]: enough layers that its build takes a while."""
    rng = np.random.default_rng(1)
    nodes, weights, value = [], [], "x"
    for i in range(layers):
        weight = rng.normal(0, 0.3, (8, 8)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Sin", [f"m{i}"], [f"s{i}"]))
        value = f"s{i}"
    return network(nodes, value, weights)


def overflowing() -> onnx.ModelProto:
    """x FP32 [N, 8] -> d = 9 x, by way of numbers that 16 bits do not hold."""
    large = numpy_helper.from_array(np.eye(8, dtype=np.float32) * 30000, "large")
    small = numpy_helper.from_array(np.eye(8, dtype=np.float32) / 10000, "small")
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["a"]),
        helper.make_node("MatMul", ["a", "large"], ["b"]),
        helper.make_node("MatMul", ["b", "small"], ["c"]),
        helper.make_node("MatMul", ["c", "small"], ["d"]),
    ]
    return network(nodes, "d", [large, small])


def network(
    nodes: Sequence[onnx.NodeProto], output: str, constants: list[TensorProto]
) -> onnx.ModelProto:
    """x FP32 [N, 8] -> `output` FP32 [N, 8]."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes),
        "network",
        [value("x", TensorProto.FLOAT, ["N", 8])],
        [value(output, TensorProto.FLOAT, ["N", 8])],
        constants,
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


# -- what is written ------------------------------------------------------------------


def test_a_plan_is_built_without_a_gpu_and_says_so(tmp_path: Path) -> None:
    """The plan lies beside the model with its sidecar; it was not compared."""
    models.save(models.probe(), tmp_path / "probe.onnx")

    result = build(tmp_path, "probe.onnx", "--max-batch", "4")

    assert (result.returncode, result.stderr) == (0, "")
    assert "batch sizes: 1,2,4" in result.stdout
    assert "NOT compared with the model: that takes a GPU" in result.stdout
    plan = tmp_path / "probe.plan"
    sidecar = read_sidecar(plan)
    assert sidecar is not None
    assert sidecar.plan_sha256 == sha256(plan.read_bytes())
    assert (sidecar.flavour, sidecar.key, sidecar.gpu) == ("tensorrt_rtx", "", "")
    assert sidecar.notes["rungs"] == [1, 2, 4]
    assert "check" not in sidecar.notes
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_models_file_is_found_and_flags_win(tmp_path: Path) -> None:
    """max_batch, axes and [tensorrt] come from model.toml, unless a flag says else."""
    model = models.save(models.seq(), tmp_path / "seq" / "3" / "model.onnx")
    (tmp_path / "seq" / "model.toml").write_text(
        "max_batch = 8\n"
        "[tensorrt]\nprecision = 'fp16'\ntf32 = false\n"
        "[axes.S]\nbuckets = [4, 16]\n"
    )

    result = build(tmp_path, model, "--axis", "S=4,8", "--precision", "keep", "--json")

    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert result.stderr == f"batcher build: configured by {report['config']}\n"
    assert report["plan"] == str(model.with_name("model.plan"))
    assert report["rungs"] == [1, 2, 4, 8]
    assert bounds(report, "ids") == [([1, 4], [8, 8])]
    assert (report["precision"], report["settings"]["tf32"]) == ("", False)
    assert report["comparison"] is None


def test_sizes_of_a_models_file_can_be_replaced(tmp_path: Path) -> None:
    """`--axis` stands for `sizes` where the file has those in place of buckets."""
    model = models.save(models.seq(), tmp_path / "seq.onnx")
    (tmp_path / "own.toml").write_text("max_batch = 2\n[axes.S]\nsizes = [4, 16]\n")

    flags = ("--config", "own.toml", "--axis", "S=6", "--json", "-o", "new/it.plan")
    result = build(tmp_path, model, *flags)

    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert bounds(report, "mask") == [([1, 6], [2, 6])]
    assert sidecar_path(tmp_path / "new" / "it.plan").is_file()


def test_progress_is_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stderr is no terminal, it says what is being done, and for how long."""
    monkeypatch.setattr("batcher.cli_build._EVERY_S", 0.01)
    model = models.save(deep(30), tmp_path / "deep.onnx")

    result = CliRunner().invoke(app, ["build", str(model), "--no-check", "--json"])

    assert result.exit_code == 0
    assert json.loads(result.stdout)["unchecked"] == "that is switched off"
    lines = result.stderr.splitlines()
    assert any("batcher build: building, step" in line for line in lines)


# -- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--max-batch 0", "--max-batch must be at least 1, got 0"),
        ("--workspace-mb 0", "--workspace-mb must be at least 1, got 0"),
        ("--rungs 1,x", "--rungs '1,x' must be numbers with commas between, as in"),
        ("--rungs 4,2", "--rungs: batching.rungs must be ascending"),
        ("--max-batch 4 --rungs 1,2", "--max-batch and --rungs: batching.rungs ends"),
        ("--axis 4,8", "--axis must be NAME=SIZES, as in sequence=16,32,64"),
        ("--axis a=4 --axis a=8", "--axis a is given twice"),
        ("--axis a=8,4", "--axis a: axes.a.buckets must be ascending"),
        ("--axis a=4,8", "no input has an axis named 'a'"),
        ("--precision int9", "--precision: tensorrt.precision: Input should be 'keep'"),
        ("--flavour trt", "--flavour: tensorrt.flavour: Input should be 'auto'"),
        ("--optimization-level 6", "--optimization-level: tensorrt.optimization_level"),
        ("--hardware-compatibility any", "--hardware-compatibility: tensorrt.hard"),
        ("--input-u8 1,2 --input-u8 3,4", "--input-u8 3,4 is given twice"),
        ("--input-u8 1", "input-u8 '1': must be SCALE,MEAN"),
        ("--samples not-there.npz", "not-there.npz: no such file"),
        ("--plugin not-there.so", "not-there.so: no such file"),
        ("--config not-there.toml", "not-there.toml: [Errno 2] No such file"),
        ("--device 99", "no GPU" if not gpu_fact().gpus else "there is no GPU 99"),
        ("--no-check --check --compute-capability 1.0", "--check is not possible: "),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, flags: str, text: str) -> None:
    """What is wrong is said before anything is built, by the name of its flag."""
    model = models.save(models.probe(), tmp_path / "probe.onnx")

    assert text in refusal(model, *flags.split())
    assert [path.name for path in tmp_path.iterdir()] == ["probe.onnx"]


def test_an_output_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    """A folder, the model itself, or a place below a file is no place for a plan."""
    model = models.save(models.probe(), tmp_path / "probe.onnx")

    assert refusal(model, "-o", tmp_path).endswith("is a folder; name a file in it")
    assert refusal(model, "-o", model).endswith("is the model itself")
    below = refusal(model, "-o", model / "a" / "b.plan")
    assert below.endswith(f"{model} cannot be written")


def test_plugins_outside_of_the_allowed_folders_are_not_loaded(tmp_path: Path) -> None:
    """A library is code, so the folder that it lies in must be given too."""
    model = models.save(models.probe(), tmp_path / "probe.onnx")
    library = tmp_path / "plugin.so"
    library.touch()
    other = tmp_path / "other"
    other.mkdir()

    text = refusal(model, "--plugin", library, "--plugin-folder", other)

    assert "is not in an allowed folder" in text
    assert not model.with_suffix(".plan").exists()


def test_a_model_that_cannot_batch_is_not_built_for_batches(tmp_path: Path) -> None:
    """The rule is the daemon's: a fixed first axis is no batch."""
    model = models.save(models.probe(batch=1), tmp_path / "probe.onnx")

    text = refusal(model, "--max-batch", "8")

    assert "the model cannot batch: the first axis of input 'x' is fixed at 1" in text


def test_what_no_network_is_leaves_the_old_plan(tmp_path: Path) -> None:
    """A build that fails touches nothing that is there."""
    (tmp_path / "bad.onnx").write_bytes(b"no network")
    (tmp_path / "bad.plan").write_bytes(b"an old plan")

    refusal(tmp_path / "bad.onnx")

    assert (tmp_path / "bad.plan").read_bytes() == b"an old plan"
    assert not (tmp_path / "bad.plan.json").exists()


# -- how it ends ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_build_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """In the middle of a build it is exit 130 with one line, and no file anywhere."""
    models.save(deep(), tmp_path / "deep.onnx")
    running = subprocess.Popen(
        [*COMMAND, "deep.onnx"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pause = threading.Event()
    deadline = time.monotonic() + 60
    while not list((tmp_path / "tmp").glob("batcher-plan-*/*.lock")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        pause.wait(0.005)
    running.send_signal(number)
    stdout, stderr = running.communicate(timeout=60)

    assert running.returncode == 130
    assert (stdout, stderr) == ("", "batcher build: stopped, and nothing was written\n")
    assert not (tmp_path / "deep.plan").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.gpu
@NEEDS_GPU
def test_on_a_gpu_the_plan_is_compared(tmp_path: Path) -> None:
    """The numbers of the comparison are in the report and in the sidecar."""
    models.save(models.seq(), tmp_path / "seq.onnx")

    flags = ("--max-batch", "4", "--axis", "S=4,8", "--json")
    result = build(tmp_path, "seq.onnx", *flags, gpu=True)

    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert (report["unchecked"], report["comparison"]["passed"]) == ("", True)
    sidecar = read_sidecar(tmp_path / "seq.plan")
    assert sidecar is not None
    assert sidecar.notes["check"] == report["comparison"]
    assert sidecar.gpu == report["gpu"] != ""


@pytest.mark.gpu
@NEEDS_GPU
def test_a_plan_that_computes_something_else_is_not_written(tmp_path: Path) -> None:
    """Numbers that FP16 does not hold are found: exit 1, the table, and no file."""
    models.save(overflowing(), tmp_path / "high.onnx")

    flags = ("--max-batch", "2", "--precision", "fp16")
    result = build(tmp_path, "high.onnx", *flags, gpu=True)

    assert result.returncode == 1
    assert "FAILED: output 'd'" in result.stdout
    assert "refused, and not written" in result.stdout
    assert [p.name for p in tmp_path.iterdir() if "plan" in p.name] == []


@pytest.mark.parametrize("what", ["pipe", "link", "text", "onnx"])
def test_nothing_but_a_plan_is_replaced(tmp_path: Path, what: str) -> None:
    """Devices, pipes, links and files of other kinds stay what they are."""
    model = tmp_path / "m.onnx"
    model.write_bytes(b"")
    target = tmp_path / ("other.onnx" if what == "onnx" else "target")
    if what == "pipe":
        os.mkfifo(target)
    elif what == "link":
        target.symlink_to(tmp_path / "elsewhere.plan")
    elif what == "text":
        target.write_text("precious")

    with pytest.raises(ConfigError, match=f"--output {target} "):
        build_target(model, target)


def test_an_earlier_plan_is_replaced(tmp_path: Path) -> None:
    """What begins like a plan, or is empty, may be written over."""
    for content in (b"vtrt and more", b""):
        target = tmp_path / "m.plan"
        target.write_bytes(content)
        assert build_target(tmp_path / "m.onnx", target) == target
