"""Where values come from, and which of them wins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from batcher.cli import app
from batcher.config import (
    AxisConfig,
    BatchingConfig,
    ModelConfig,
    ServerConfig,
    load_model_config,
)
from batcher.config.load import merged
from batcher.config.schema import OutputAxisConfig
from batcher.errors import ConfigError

TOML = """
max_batch = 16
[batching]
policy = "window"
max_delay_us = 500
preferred = [8]
[axes.sequence]
buckets = [32, 64]
pad = { ids = 0, mask = 0.5 }
outputs = { y = { axis = 1, follows = "sequence", ratio = 0.125 } }
too_long = "truncate"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model's file."""
    file = tmp_path / "model.toml"
    file.write_text(TOML)
    return file


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the command sets for gRPC, and its logging, do not outlive the test."""
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_without_a_file_all_is_default() -> None:
    """No file and no overrides give the dataclasses' own values."""
    assert load_model_config(None) == ModelConfig()
    assert ModelConfig().max_batch == 0


def test_an_empty_file_is_allowed(path: Path) -> None:
    """All of a model's file is optional."""
    path.write_text("")

    assert load_model_config(path) == ModelConfig()


def test_a_file_is_read_into_the_dataclasses(path: Path) -> None:
    """Tables and lists become what the schema says, and the rest stays default."""
    assert load_model_config(path) == ModelConfig(
        max_batch=16,
        batching=BatchingConfig(policy="window", max_delay_us=500, preferred=(8,)),
        axes={
            "sequence": AxisConfig(
                buckets=(32, 64),
                pad={"ids": 0.0, "mask": 0.5},
                outputs={
                    "y": OutputAxisConfig(axis=1, ratio=0.125, follows="sequence")
                },
                too_long="truncate",
            )
        },
    )


def test_overrides_win_over_the_file_key_by_key(path: Path) -> None:
    """A value given at start replaces the file's, and its neighbours stay."""
    config = load_model_config(path, {"max_batch": 32, "batching": {"max_delay_us": 9}})

    assert config.max_batch == 32
    assert config.batching == BatchingConfig(
        policy="window", max_delay_us=9, preferred=(8,)
    )


def test_an_override_that_contradicts_the_file_is_refused(path: Path) -> None:
    """What is checked is the result: the file alone would have been fine."""
    with pytest.raises(ConfigError, match="preferred has 8, but max_batch is 4"):
        load_model_config(path, {"max_batch": 4})


def test_faults_of_overrides_without_a_file_are_of_the_options() -> None:
    """Where there is no file, a wrong value is said to come from the options."""
    with pytest.raises(ConfigError, match=r"^options: max_batch must be at least 0"):
        load_model_config(None, {"max_batch": -1})


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"a": 2}, {"a": 2}),
        ({"t": {"a": 1, "b": 2}}, {"t": {"b": 3}}, {"t": {"a": 1, "b": 3}}),
        ({"t": {"a": 1}}, {"t": 5}, {"t": 5}),
        ({"t": 5}, {"t": {"a": 1}}, {"t": {"a": 1}}),
        ({"l": [1, 2]}, {"l": [3]}, {"l": [3]}),
    ],
)
def test_tables_are_merged_and_values_replaced(
    base: dict[str, Any], over: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Only tables are merged; numbers and lists are replaced as a whole."""
    before = repr((base, over))

    assert merged(base, over) == expected
    assert repr((base, over)) == before


def test_the_daemons_defaults_are_closed() -> None:
    """Without options the daemon listens on loopback, with Triton's ports."""
    config = ServerConfig()

    assert config.grpc_address == ("127.0.0.1:8001",)
    assert config.http_address == "127.0.0.1:8002"
    assert config.socket_mode == 0o660


# -- the command ----------------------------------------------------------------------


def serve(*options: str, **variables: str) -> tuple[int, list[str]]:
    """Exit code and error lines of `batcher serve` with options it refuses."""
    result = CliRunner().invoke(
        app,
        ["serve", "none.onnx", *options],
        env={f"BATCHER_{name}": value for name, value in variables.items()},
    )
    return result.exit_code, result.stderr.splitlines()


def test_a_wrong_flag_ends_the_start_with_2() -> None:
    """The fault is one line on stderr that names the daemon; nothing is loaded."""
    assert serve("--max-message-mb", "0") == (
        2,
        ["batcher: options: max_message_mb must be at least 1, got 0"],
    )


def test_every_wrong_flag_has_its_line() -> None:
    """Several faults are told at once."""
    code, lines = serve("--transport", "x", "--log-level", "y")

    assert code == 2
    assert [line.split(":")[2].strip() for line in lines] == ["transport", "log_level"]


def test_a_variable_is_as_good_as_a_flag() -> None:
    """A BATCHER_… variable is read like the flag."""
    assert serve(MAX_MESSAGE_MB="0") == serve("--max-message-mb", "0")


def test_a_flag_wins_over_a_variable() -> None:
    """Of both, the flag's value is taken."""
    code, lines = serve("--max-message-mb", "0", MAX_MESSAGE_MB="4000")

    assert (code, lines) == serve("--max-message-mb", "0")


def test_several_addresses_come_from_one_variable() -> None:
    """Addresses in a variable are parted by spaces."""
    code, lines = serve(GRPC_ADDRESS="unix:a.sock 127.0.0.1:1 unix:a.sock")

    assert code == 2
    assert lines == ["batcher: options: grpc_address 'unix:a.sock' is given twice"]


def test_the_socket_mode_is_octal() -> None:
    """A mode that is not octal is refused, and one that is too large as well."""
    assert serve("--socket-mode", "8") == (
        2,
        ["batcher: --socket-mode '8' is not octal"],
    )
    assert serve("--socket-mode", "1777")[1] == [
        "batcher: options: socket_mode must be between 0 and 0777 (octal)"
    ]


def test_a_path_that_is_not_there_is_named() -> None:
    """The file to serve is looked for before anything is started."""
    code, lines = serve()

    assert code == 2
    assert lines[-1] == "batcher: none.onnx: no such file or folder"
