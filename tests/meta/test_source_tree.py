"""Rules of the source tree that no linter knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import batcher
import engines

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

SOURCES = sorted(
    path
    for package in ("batcher", "engines")
    for path in (ROOT / package).rglob("*.py")
)

MAX_LINES = 400
MAX_TEST_LINES = 600

LONG_FILES = {
    "batcher/rpc/grpcio.py": "one use of gRPC's core: server, unary calls, streams",
    "batcher/rpc/request.py": "one request's checks, in their order, with their texts",
}
"""Files with more lines than the limit, and why they are not two."""

MAY_PRINT = {
    "batcher/cli.py": "a command's output",
    "batcher/cli_bench.py": "a command's output",
}
"""Files that print, and what."""

ENGINES = [
    "DTYPES",
    "Arrays",
    "Cell",
    "Completion",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EngineLoadError",
    "EngineLostError",
    "EngineRunError",
    "ExecutionContext",
    "FakeEngine",
    "FakeOptions",
    "Profile",
    "Slot",
    "Staging",
    "TensorSpec",
    "open",
]


def name(path: Path) -> str:
    """A file as it is called in the lists above."""
    return path.relative_to(ROOT).as_posix()


def lines(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text(encoding="utf-8").splitlines())


def cases() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every test function of the suite, with where it is."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and node.name.startswith("test_"):
                yield f"{name(path)}::{node.name}", node


def imported(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running `code`."""
    script = f"import sys\n{code}\nprint(*{{m.split('.')[0] for m in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return set(result.stdout.split())


def test_files_are_short() -> None:
    """A source file has at most 400 lines, or stands in the list with its reason."""
    long = {name(path) for path in SOURCES if lines(path) > MAX_LINES}

    assert long - set(LONG_FILES) == set()
    assert set(LONG_FILES) - {name(path) for path in SOURCES} == set()


def test_test_files_are_short() -> None:
    """A file of tests has at most 600 lines."""
    long = [name(p) for p in TESTS.rglob("*.py") if lines(p) > MAX_TEST_LINES]

    assert long == []


def test_only_commands_print() -> None:
    """What the daemon has to say goes through its log, or to a file that is listed."""
    printing = {
        name(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    }

    assert printing - set(MAY_PRINT) == set()


def test_every_file_says_what_lives_there() -> None:
    """Every module begins with a docstring whose first line is a sentence."""
    silent = []
    for path in SOURCES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if not text.split("\n\n")[0].rstrip().endswith((".", ":")):
            silent.append(name(path))

    assert silent == []


def test_every_test_says_what_it_shows() -> None:
    """Every test function has a docstring, which is a sentence."""
    silent = [
        where
        for where, node in cases()
        if not (ast.get_docstring(node) or "").split("\n\n")[0].endswith(".")
    ]

    assert silent == []


def test_no_test_sleeps() -> None:
    """Tests wait for what they wait for, never for time to pass."""
    sleeping = sorted(
        {
            where
            for where, node in cases()
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and ast.unparse(call.func) in ("time.sleep", "asyncio.sleep")
        }
    )

    processes = ("tests/e2e/", "tests/engines/tensorrt/")  # they watch real ones
    assert [w for w in sleeping if not w.startswith(processes)] == []


@pytest.mark.parametrize("package", ["engines", "batcher"])
def test_packages_import_without_a_back_end(package: str) -> None:
    """Neither package needs ONNX Runtime (or TensorRT) to be imported."""
    loaded = imported(f"import {package}")

    assert loaded & {"onnxruntime", "onnx", "tensorrt", "cuda"} == set()


def test_no_module_loads_a_back_end_by_itself() -> None:
    """Back ends are imported by the engine that needs them, when it is opened."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if path.name != "__main__.py" and path != ROOT / "engines" / "onnxruntime.py"
    ]
    builders = [m for m in modules if m.startswith("engines.tensorrt")]
    others = sorted({*modules} - {*builders})

    loaded = imported("\n".join(f"import {module}" for module in others))
    built = imported("\n".join(f"import {module}" for module in builders))

    back_ends = {"onnxruntime", "onnx", "tensorrt", "tensorrt_rtx", "cuda"}
    assert loaded & back_ends == set()
    # These read models; what runs them is loaded when it is found.
    assert built & back_ends <= {"onnx"}


def test_the_command_imports_no_more_than_it_must() -> None:
    """`batcher --help` answers before gRPC, numpy or a back end would be loaded."""
    loaded = imported("import batcher.cli")

    assert loaded & {"grpc", "numpy", "onnxruntime", "pydantic", "uvloop"} == set()


def test_the_public_names_are_these() -> None:
    """What is public is listed; a change of it is a change of this test."""
    assert engines.__all__ == ENGINES
    assert batcher.__all__ == ["__version__"]
    assert [n for n in ENGINES if not hasattr(engines, n)] == []
