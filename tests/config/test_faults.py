"""Wrong configurations: one line per fault, which names file, key and way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batcher.config import ModelConfig, ServerConfig, from_mapping, load_model_config
from batcher.errors import ConfigError

INTEGER = "Input should be a valid integer"

MODEL_FAULTS: dict[str, list[str]] = {
    "max_bach = 8": ["max_bach: no such knob"],
    "[batching]\nmax_dely_us = 8": ["batching.max_dely_us: no such knob"],
    "[axes.s]\nbuckets = [4]\npading = 1": ["axes.s.pading: no such knob"],
    "[slots]\ndevice = 7": ["slots.device: no such knob"],
    'engine = "onx"': [
        "engine: Input should be 'auto', 'onnxruntime', 'tensorrt' or 'fake' (got "
        "'onx')"
    ],
    'batch_axis = "1"': [
        "batch_axis: Input should be 'auto', 'first' or 'none' (got '1')"
    ],
    "max_batch = 8.5": [f"max_batch: {INTEGER} (got 8.5)"],
    "max_batch = -1": ["max_batch must be at least 0, got -1"],
    "max_batch = 65537": ["max_batch must be at most 65536, got 65537"],
    "batching = 3": [
        "batching: Input should be a dictionary or an instance of BatchingConfig "
        "(got 3)"
    ],
    "[slots]\ncount = -1": ["slots.count must be at least 0, got -1"],
    "[slots]\ndevices = [0, 0]": ["slots.devices must be different GPUs, got [0, 0]"],
    "[tensorrt]\noptimization_level = 6": [
        "tensorrt.optimization_level must be at most 5, got 6"
    ],
    "[tensorrt]\nprecision = 'int4'": [
        "tensorrt.precision: Input should be 'keep', 'fp32', 'fp16' or 'bf16' (got "
        "'int4')"
    ],
    "[slots]\ncount = 10000": ["slots.count must be at most 64, got 10000"],
    "[batching]\nmax_delay_us = -1": [
        "batching.max_delay_us must be at least 0, got -1"
    ],
    f"[batching]\nmax_delay_us = {10**30}": [
        f"batching.max_delay_us must be at most 3600000000, got {10**30}"
    ],
    "[batching]\nmax_queue = 0": ["batching.max_queue must be at least 1, got 0"],
    f"[batching]\nmax_queue = {2**31}": [
        f"batching.max_queue must be at most {2**31 - 1}, got {2**31}"
    ],
    "[batching]\nmax_request_rows = -1": [
        "batching.max_request_rows must be at least 0, got -1"
    ],
    "[batching]\ntimeout_ms = -0.5": [
        "batching.timeout_ms must be at least 0, got -0.5"
    ],
    "[batching]\ntimeout_ms = nan": ["batching.timeout_ms must be at least 0, got nan"],
    "[batching]\ntimeout_ms = inf": [
        "batching.timeout_ms must be at most 86400000, got inf"
    ],
    "[batching]\nrungs = [1, 2, 2]": [
        "batching.rungs must be ascending and positive, got [1, 2, 2]"
    ],
    "[batching]\nrungs = [0, 2]": [
        "batching.rungs must be ascending and positive, got [0, 2]"
    ],
    "[batching]\nrungs = [1, 100000]": [
        "batching.rungs must be at most 65536, got 100000"
    ],
    '[batching]\nrungs = [1, "x"]': [f"batching.rungs.1: {INTEGER} (got 'x')"],
    "[axes.s]\nbuckets = [8, 4]": [
        "axes.s.buckets must be ascending and positive, got [8, 4]"
    ],
    "[axes.s]\nsizes = [0]": ["axes.s.sizes must be ascending and positive, got [0]"],
    "[axes.s]": ["axes.s needs either buckets or sizes"],
    "[axes.a]\nbuckets = [4]\n[axes.b]\nbuckets = [4]\nsizes = [4]": [
        "axes.b needs either buckets or sizes"
    ],
    '[axes.s]\nbuckets = [4]\ntoo_long = "cut"': [
        "axes.s.too_long: Input should be 'reject' or 'truncate' (got 'cut')"
    ],
    '[axes.s]\nbuckets = [4]\npad = { x = "a" }': [
        "axes.s.pad.x: Input should be a valid number (got 'a')"
    ],
    "[axes.s]\nbuckets = [4]\noutputs = { y = {} }": [
        "axes.s.outputs.y.axis: is needed"
    ],
    "[axes.s]\nbuckets = [4]\noutputs = { y = { axis = 0 } }": [
        "axes.s.outputs.y.axis must be at least 1, got 0"
    ],
    "[axes.s]\nbuckets = [4]\noutputs = { y = { axis = 1, ratio = 0 } }": [
        "axes.s.outputs.y.ratio must be > 0, got 0.0"
    ],
    "[axes.s]\nbuckets = [4]\noutputs = { y = { axis = 1, ratio = nan } }": [
        "axes.s.outputs.y.ratio must be > 0, got nan"
    ],
    'engine = "fake"\n[fake]\nbase_ms = -1': [
        "fake.base_ms must be at least 0, got -1.0"
    ],
    'engine = "fake"\n[fake]\nper_row_us = inf': [
        "fake.per_row_us must be at most 3600000000, got inf"
    ],
    'engine = "fake"\n[fake]\ninputs = [{ dtype = "FP32" }]': [
        "fake.inputs.0.name: is needed"
    ],
    'max_batch = "many"\n[slots]\ncount = "two"\nnone = 1': [
        f"max_batch: {INTEGER} (got 'many')",
        f"slots.count: {INTEGER} (got 'two')",
        "slots.none: no such knob",
    ],
}
"""TOML to the lines of its refusal, without the file's name."""

CONTRADICTIONS: dict[str, tuple[str, ...]] = {
    "max_batch = 64\n[batching]\nmax_queue = 16": (
        "batching.max_queue = 16",
        "max_batch = 64",
    ),
    "[batching]\nrungs = [1, 64]\nmax_queue = 16": (
        "batching.max_queue = 16",
        "batching.rungs up to 64",
    ),
    "max_batch = 8\n[batching]\nrungs = [1, 4]": (
        "batching.rungs ends at 4",
        "max_batch is 8",
    ),
    'max_batch = 8\n[batching]\npolicy = "window"\npreferred = [4, 16]': (
        "batching.preferred has 16",
        "max_batch is 8",
    ),
    "[batching]\npreferred = [4]": (
        "batching.preferred",
        "batching.policy = 'eager'",
        "'window'",
    ),
    'batch_axis = "none"\nmax_batch = 8': ('batch_axis = "none"', "max_batch = 8"),
    'engine = "fake"': ('engine = "fake"', "[fake]"),
    "[fake]\nbase_ms = 1": ('engine = "fake"', "[fake]"),
    "[axes.s]\nbuckets = [4]\nsizes = [4]": ("axes.s", "buckets", "sizes"),
    "[axes.s]\nsizes = [4]\npad = { x = 0 }": ("axes.s.sizes", "axes.s.pad"),
    '[axes.s]\nsizes = [4]\ntoo_long = "truncate"': (
        "axes.s.sizes",
        'axes.s.too_long = "truncate"',
    ),
}
"""TOML to the two sides that its refusal names."""

SERVER_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"port": 1}, "port: no such knob"),
    ({"grpc_address": ()}, "at least one gRPC address is needed"),
    ({"grpc_address": ("a:1", "b:1", "a:1")}, "grpc_address 'a:1' is given twice"),
    (
        {"transport": "http"},
        "transport: Input should be 'auto', 'native' or 'grpcio' (got 'http')",
    ),
    ({"socket_mode": 0o1777}, "socket_mode must be between 0 and 0777 (octal)"),
    ({"socket_mode": -1}, "socket_mode must be between 0 and 0777 (octal)"),
    ({"max_message_mb": 0}, "max_message_mb must be at least 1, got 0"),
    ({"max_message_mb": 2048}, "max_message_mb must be at most 2047, got 2048"),
    ({"max_in_flight_mb": -1}, "max_in_flight_mb must be at least 0, got -1"),
    ({"drain_timeout_s": -1}, "drain_timeout_s must be at least 0, got -1.0"),
    (
        {"drain_timeout_s": float("nan")},
        "drain_timeout_s must be at least 0, got nan",
    ),
    ({"log_format": "xml"}, "log_format: Input should be 'text' or 'json' (got 'xml')"),
    (
        {"log_level": "trace"},
        "log_level: Input should be 'debug', 'info', 'warning' or 'error' (got "
        "'trace')",
    ),
]


def refusal(tmp_path: Path, toml: str) -> list[str]:
    """The lines with which a model's file is refused, without its name."""
    path = tmp_path / "model.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_model_config(path)
    lines = str(caught.value).splitlines()
    assert [line for line in lines if not line.startswith(f"{path}: ")] == []
    return [line.removeprefix(f"{path}: ") for line in lines]


@pytest.mark.parametrize("toml", MODEL_FAULTS)
def test_every_fault_is_one_line_with_its_key(tmp_path: Path, toml: str) -> None:
    """A wrong key or value is named with its path, what is allowed, and what it was."""
    assert sorted(refusal(tmp_path, toml)) == sorted(MODEL_FAULTS[toml])


@pytest.mark.parametrize("toml", CONTRADICTIONS)
def test_contradictions_name_both_sides(tmp_path: Path, toml: str) -> None:
    """Two knobs that cannot both hold are refused in a line that names the two."""
    (line,) = refusal(tmp_path, toml)

    assert [side for side in CONTRADICTIONS[toml] if side not in line] == []


@pytest.mark.parametrize(("values", "line"), SERVER_FAULTS, ids=str)
def test_every_server_fault_is_one_line(values: dict[str, Any], line: str) -> None:
    """A wrong option of the daemon is one line with its name and the value."""
    with pytest.raises(ConfigError) as caught:
        from_mapping(ServerConfig, values, "options")

    assert str(caught.value) == f"options: {line}"


@pytest.mark.parametrize(
    "content",
    [b"max_batch = ", b"\xff\xfe", b"a = 1\na = 2"],
    ids=["cut", "bytes", "twice"],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    """What cannot be read as TOML is refused with the file's name."""
    path = tmp_path / "model.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        load_model_config(path)

    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A file that cannot be opened is refused with its name."""
    path = tmp_path / "none.toml"

    with pytest.raises(ConfigError, match=f"{path}: .*No such file"):
        load_model_config(path)


def test_limits_are_inclusive() -> None:
    """The largest and smallest allowed values are accepted."""
    largest = {
        "max_batch": 65536,
        "batching": {
            "max_delay_us": 3_600_000_000,
            "max_queue": 2**31 - 1,
            "timeout_ms": 86_400_000,
            "rungs": [1, 65536],
        },
        "slots": {"count": 64},
    }

    config = from_mapping(ModelConfig, largest, "test")

    assert (config.max_batch, config.batching.rungs) == (65536, (1, 65536))
    assert from_mapping(ModelConfig, {"max_batch": 0}, "test") == ModelConfig()
