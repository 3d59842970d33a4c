"""Flags that win over every model's file: wrong ones are told once, by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from batcher.cli import app
from batcher.config import check_overrides
from batcher.errors import ConfigError

FLAGS = {
    "--engine": "engine",
    "--max-batch": "max_batch",
    "--policy": "batching.policy",
    "--max-queue": "batching.max_queue",
    "--slots": "slots.count",
}

WRONG: dict[str, list[str]] = {
    # the command line: the lines on stderr, all of them
    "--max-batch 0": ["--max-batch must be at least 1, got 0"],
    "--max-batch -1": ["--max-batch: max_batch must be at least 0, got -1"],
    "--max-batch 70000": ["--max-batch: max_batch must be at most 65536, got 70000"],
    "--policy windw": [
        "--policy: batching.policy 'windw' is none of eager, window",
    ],
    "--max-delay-us -1": [
        "--max-delay-us: batching.max_delay_us must be at least 0, got -1"
    ],
    "--max-queue 0": ["--max-queue: batching.max_queue must be at least 1, got 0"],
    "--timeout-ms nan": [
        "--timeout-ms: batching.timeout_ms must be at least 0, got nan"
    ],
    "--slots 65": ["--slots: slots.count must be at most 64, got 65"],
    "--engine warp": [
        "--engine: engine: Input should be 'auto', 'onnxruntime', 'tensorrt' or 'fake' "
        "(got 'warp')"
    ],
    "--slots 65 --max-queue 0": [
        "--max-queue: batching.max_queue must be at least 1, got 0",
        "--slots: slots.count must be at most 64, got 65",
    ],
    "--max-batch 64 --max-queue 16 --slots 2": [
        "--max-batch and --max-queue: batching.max_queue = 16 keeps batches of "
        "max_batch = 64 rows from filling; raise the one or lower the other"
    ],
}


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the command sets for gRPC, and its logging, do not outlive the test."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three models that could be served."""
    for name in "abc":
        folder = tmp_path / name
        folder.mkdir()
        tensor = '[{ name = "x", shape = [4] }]'
        (folder / "model.toml").write_text(
            f'engine = "fake"\n[fake]\ninputs = {tensor}\noutputs = {tensor}\n'
        )
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_flag_is_told_once(repository: Path, line: str) -> None:
    """One line names the flag, however many models there are; none is loaded."""
    result = CliRunner().invoke(app, ["serve", str(repository), *line.split()])

    assert result.exit_code == 2
    assert result.stderr.splitlines() == [f"batcher: {text}" for text in WRONG[line]]


def test_a_variable_is_checked_like_a_flag(repository: Path) -> None:
    """The text names the flag that the variable stands for."""
    result = CliRunner().invoke(
        app, ["serve", str(repository)], env={"BATCHER_SLOTS": "0"}
    )

    assert result.exit_code == 2
    assert result.stderr == "batcher: --slots must be at least 1, got 0\n"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"engine": "fake"},
        {"engine": "fake", "max_batch": 8},
        {"max_batch": 8, "slots": {"count": 2}},
        {"batching": {"max_queue": 1}},
    ],
    ids=str,
)
def test_what_some_model_could_do_with_is_let_through(overrides: Any) -> None:
    """What only a model's own file can contradict is for that model to say."""
    check_overrides(overrides, FLAGS)


def test_a_value_without_a_flag_is_checked_too() -> None:
    """A value of no flag of its own is checked with all others."""
    with pytest.raises(ConfigError, match=r"batching\.rungs must be ascending"):
        check_overrides({"batching": {"rungs": [2, 1], "max_queue": 5}}, FLAGS)
