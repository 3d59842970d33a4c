"""The command `batcher doctor`: what it finds, what is a problem, how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from batcher.cli import app
from batcher.cli_doctor import Diagnosis, diagnose
from batcher.errors import ConfigError
from batcher.serving.plancache import default_plan_cache

FLAVOURS = ("tensorrt", "tensorrt_rtx")


def doctor(
    *flags: str, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The installed command, on a machine whose GPUs are hidden.

    Args:
        flags: of the command.
        path: a folder whose modules go before those that are installed.
        variables: more of the environment.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-P", "-m", "batcher", "doctor", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def shadow(folder: Path, module: str, line: str = "") -> Path:
    """A folder with a module of this name that does not load."""
    line = line or "raise ImportError('libwrong.so.1: cannot open [shared] object')"
    (folder / f"{module}.py").write_text(line + "\n")
    return folder


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets both flavours of TensorRT count as not installed."""
    for flavour in FLAVOURS:
        monkeypatch.setitem(sys.modules, flavour, None)


def blocked(found: dict[str, Any]) -> dict[str, str]:
    """What the problems of a report in JSON make impossible, with their text."""
    return {problem["blocks"]: problem["what"] for problem in found["problems"]}


def texts(found: Diagnosis) -> list[str]:
    """The problems in words."""
    return [problem.what for problem in found.problems]


# -- the command ----------------------------------------------------------------------


def test_it_prints_what_there_is_one_fact_a_line() -> None:
    """Without a terminal, lines are whole, and no ornament is among them."""
    result = doctor(BATCHER_PLAN_CACHE="/plans")
    lines = result.stdout.splitlines()

    assert (result.returncode, result.stderr) == (0, "")
    assert lines[0].endswith(": can serve models")
    names = [line.split("  ")[0] for line in lines]
    for name in ("Python", "GPU", "NVIDIA driver", "TensorRT for RTX", "ONNX Runtime"):
        assert names.count(name) == 1
    assert [line for line in lines if line != line.rstrip() or "\x1b" in line] == []
    assert result.stdout.isascii()


def test_the_json_has_all_of_it() -> None:
    """Machines get every fact, choice and problem under a stable key."""
    result = doctor("--json")
    found = json.loads(result.stdout)

    assert result.returncode == 0
    assert found["can_serve"] is True
    assert found["host"]["cores"] >= 1
    assert found["host"]["memory_bytes"] > 1 << 20
    packages = {package["name"]: package["state"] for package in found["packages"]}
    assert packages["grpcio"] == packages["pygrpc-native"] == "found"
    assert packages["ONNX Runtime"] == packages["the daemon"] == "found"
    assert [fact["flavour"] for fact in found["tensorrt"]] == list(FLAVOURS)
    uses = {choice["what"]: choice["uses"] for choice in found["choices"]}
    assert uses["model.onnx"] == "onnxruntime (CPU)"
    assert uses["gRPC on loopback, Unix sockets"] == "native"
    assert uses["gRPC on other addresses"] == "grpcio"


def test_asked_for_tensorrt_it_says_why_not() -> None:
    """Without a GPU, `--engine tensorrt` is exit 1, with a reason and a remedy."""
    result = doctor("--engine", "tensorrt", "--json")
    found = json.loads(result.stdout)

    assert result.returncode == 1
    assert found["can_serve"] is False
    reasons = [p for p in found["problems"] if p["blocks"] == "tensorrt"]
    assert reasons
    assert all(problem["remedy"] for problem in reasons)
    chosen = next(c for c in found["choices"] if "model.plan" in c["what"])
    assert chosen["uses"] == "none"
    assert chosen["why"] == "; ".join(problem["what"] for problem in reasons)


def test_an_engine_that_is_none_is_wrong_usage() -> None:
    """Exit 2, and one line that names what there is."""
    result = doctor("--engine", "tensorflow")

    assert result.returncode == 2
    assert result.stderr == (
        "batcher doctor: --engine 'tensorflow' is none of auto, onnxruntime, tensorrt\n"
    )


@pytest.mark.parametrize("command", ["doctor", "build"])
def test_every_flag_is_in_the_documents(command: str) -> None:
    """docs/operations.md names the flags of the command, below its own heading."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    section = text.split(f"`batcher {command}`\n", 1)[1].split("\n## ")[0]
    group: Any = typer.main.get_command(app)
    options = group.commands[command].params
    flags = {f for o in options for f in (*o.opts, *o.secondary_opts) if f[:2] == "--"}

    assert {flag for flag in flags if f"`{flag}`" not in section} <= {"--help"}


# -- what is broken -------------------------------------------------------------------


def test_nothing_can_be_served_without_any_engine(tmp_path: Path) -> None:
    """ONNX Runtime that does not load is exit 1, where TensorRT cannot run either."""
    result = doctor("--json", path=shadow(tmp_path, "onnxruntime"))
    found = json.loads(result.stdout)

    assert result.returncode == 1
    assert blocked(found)["onnxruntime"] == (
        "ONNX Runtime does not load: ImportError: libwrong.so.1: cannot open [shared] "
        "object"
    )


@pytest.mark.parametrize("module", ["pygrpc_native", "grpc"])
def test_a_daemon_that_does_not_load_cannot_serve(tmp_path: Path, module: str) -> None:
    """A broken package that the daemon needs stops everything, and is named."""
    result = doctor("--json", path=shadow(tmp_path, module))
    found = json.loads(result.stdout)

    assert result.returncode == 1
    assert "libwrong.so.1" in blocked(found)["serving"]
    assert {c["uses"] for c in found["choices"] if "gRPC" in c["what"]} == {"none"}


def test_a_broken_tensorrt_is_a_problem_with_a_remedy(tmp_path: Path) -> None:
    """A flavour that is installed and does not load is reported in its own words."""
    result = doctor(path=shadow(tmp_path, "tensorrt"))
    problem = next(
        line for line in result.stdout.splitlines() if line.startswith("1. ")
    )

    assert result.returncode == 0
    assert "TensorRT is installed but does not load: ImportError: libwrong" in problem
    assert "cannot open [shared] object" in problem
    assert "pip install --force-reinstall 'trt-batcher[tensorrt]'" in result.stdout


def test_without_numpy_it_says_so(tmp_path: Path) -> None:
    """What everything needs is one line on stderr and exit 1, not a traceback."""
    result = doctor(path=shadow(tmp_path, "numpy"))

    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("batcher doctor: ImportError: ")
    assert line.endswith("; pip install --force-reinstall trt-batcher")


def test_a_package_that_raises_anything_is_a_fact(tmp_path: Path) -> None:
    """A library that fails in a way of its own ends nothing."""
    result = doctor(
        "--json", path=shadow(tmp_path, "uvloop", "raise KeyError('x\\ny')")
    )
    found = json.loads(result.stdout)
    uvloop = next(p for p in found["packages"] if p["name"] == "uvloop")

    assert uvloop["state"] == "broken"
    assert uvloop["detail"] == "KeyError: 'x\\ny'"


def test_a_base_installation_without_gpu_has_no_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorRT is missed only where there is a GPU, or where it is asked for."""
    hide(monkeypatch)

    found = diagnose()
    asked = diagnose("tensorrt")

    assert found.can_serve
    assert ("no TensorRT is installed" in texts(found)) == bool(found.gpu.gpus)
    assert "no TensorRT is installed" in texts(asked)
    assert not asked.can_serve
    assert {fact.state for fact in found.tensorrt} == {"missing"}


# -- the plan cache -------------------------------------------------------------------


def test_the_plan_cache_is_measured_and_not_made(tmp_path: Path) -> None:
    """Plans are counted, and a folder that is not there stays so."""
    (tmp_path / "a.plan").write_bytes(b"12345")
    (tmp_path / "a.plan.json").write_bytes(b"123")
    absent = tmp_path / "not" / "there"

    full = json.loads(doctor("--json", BATCHER_PLAN_CACHE=str(tmp_path)).stdout)
    empty = json.loads(doctor("--json", BATCHER_PLAN_CACHE=str(absent)).stdout)

    assert full["plan_cache"]["path"] == str(tmp_path)
    assert (full["plan_cache"]["plans"], full["plan_cache"]["size_bytes"]) == (1, 8)
    assert (empty["plan_cache"]["plans"], empty["plan_cache"]["writable"]) == (0, True)
    assert not absent.parent.exists()


def test_a_plan_cache_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops nothing, and its remedy names the variable."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("BATCHER_PLAN_CACHE", str(file / "plans"))

    found = diagnose("tensorrt")

    (problem,) = [p for p in found.problems if "plans are built anew" in p.what]
    assert f"{file} is no folder" in problem.what
    assert "BATCHER_PLAN_CACHE" in problem.remedy
    assert problem.blocks == ""
    assert not found.plan_cache.writable


def test_a_path_that_the_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    """Letters outside of the terminal's encoding are escaped."""
    folder = str(tmp_path / "pl\u00e4ne")
    result = doctor(BATCHER_PLAN_CACHE=folder, PYTHONIOENCODING="ascii", PYTHONUTF8="1")

    assert result.returncode == 0
    assert "pl\\xe4ne" in result.stdout


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"BATCHER_PLAN_CACHE": "/plans", "XDG_CACHE_HOME": "/cache"}, "/plans"),
        ({"BATCHER_PLAN_CACHE": "~/plans"}, "/home/me/plans"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/batcher/plans"),
        ({"XDG_CACHE_HOME": "cache"}, "/home/me/.cache/batcher/plans"),
        ({"BATCHER_PLAN_CACHE": ""}, "/home/me/.cache/batcher/plans"),
    ],
)
def test_the_default_plan_cache_follows_the_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    """Ours goes first, then the cache folder of the desktop's rules, then ~/.cache."""
    for name in ("BATCHER_PLAN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)

    assert default_plan_cache() == Path(folder)


def test_without_a_home_the_plan_cache_must_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans are code, so no folder that others can write is taken in its place."""
    monkeypatch.setenv("BATCHER_PLAN_CACHE", "~nobody-of-this-name/plans")

    with pytest.raises(ConfigError, match=r"no folder for .*; set BATCHER_PLAN_CACHE"):
        default_plan_cache()
    assert "no folder for TensorRT plans" in diagnose().plan_cache.detail
