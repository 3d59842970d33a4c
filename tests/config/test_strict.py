"""Numbers and booleans are what they say: nothing is read into a string or a switch."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import Strict

from batcher.config import ModelConfig, ServerConfig, from_mapping, load_model_config
from batcher.config import schema as knobs
from batcher.errors import ConfigError

KINDS = {int: "integer", float: "number", bool: "boolean"}

FAKE = 'engine = "fake"\n[fake]\n'

WRONG: dict[str, str] = {
    # TOML: key, what was expected, and the value
    'max_batch = "8"': "max_batch: Input should be a valid integer (got '8')",
    "max_batch = true": "max_batch: Input should be a valid integer (got True)",
    "max_batch = 8.0": "max_batch: Input should be a valid integer (got 8.0)",
    "batching.timeout_ms = '5'": (
        "batching.timeout_ms: Input should be a valid number (got '5')"
    ),
    "batching.timeout_ms = true": (
        "batching.timeout_ms: Input should be a valid number (got True)"
    ),
    "batching.allow_timeout_override = 1": (
        "batching.allow_timeout_override: Input should be a valid boolean (got 1)"
    ),
    'batching.allow_timeout_override = "no"': (
        "batching.allow_timeout_override: Input should be a valid boolean (got 'no')"
    ),
    "batching.rungs = [true, 2]": (
        "batching.rungs.0: Input should be a valid integer (got True)"
    ),
    "slots.count = '2'": "slots.count: Input should be a valid integer (got '2')",
    "[axes.s]\nbuckets = ['8']": (
        "axes.s.buckets.0: Input should be a valid integer (got '8')"
    ),
    "[axes.s]\nbuckets = [8]\npad = { x = false }": (
        "axes.s.pad.x: Input should be a valid number (got False)"
    ),
    "[axes.s]\nbuckets = [8]\ninputs = { x = '1' }": (
        "axes.s.inputs.x: Input should be a valid integer (got '1')"
    ),
    "[axes.s]\nbuckets = [8]\noutputs = { y = { axis = true } }": (
        "axes.s.outputs.y.axis: Input should be a valid integer (got True)"
    ),
    FAKE + "base_ms = '1'": "fake.base_ms: Input should be a valid number (got '1')",
    FAKE + "fail_value = true": (
        "fake.fail_value: Input should be a valid number (got True)"
    ),
    FAKE + "inputs = [{ name = 'x', shape = ['4'] }]": (
        "fake.inputs.0.shape.0: Input should be a valid integer (got '4')"
    ),
}


def plain(kind: Any) -> set[type]:
    """The numbers and booleans of a type that are read leniently."""
    if typing.get_origin(kind) is typing.Annotated:
        base, *notes = typing.get_args(kind)
        return set() if any(isinstance(n, Strict) for n in notes) else plain(base)
    if kind in KINDS:
        return {kind}
    return {found for part in typing.get_args(kind) for found in plain(part)}


@pytest.mark.parametrize("toml", WRONG)
def test_nothing_is_made_a_number(tmp_path: Path, toml: str) -> None:
    """A value of another type is refused with its key, the type wanted and itself."""
    path = tmp_path / "model.toml"
    path.write_text(toml)

    with pytest.raises(ConfigError) as caught:
        load_model_config(path)

    assert str(caught.value) == f"{path}: {WRONG[toml]}"


def test_an_integer_may_stand_for_a_float() -> None:
    """Nobody has to write 5.0."""
    config = from_mapping(
        ModelConfig,
        {
            "batching": {"timeout_ms": 5},
            "axes": {"s": {"buckets": [8], "pad": {"x": 0}}},
        },
        "test",
    )

    assert repr(config.batching.timeout_ms) == "5.0"
    assert repr(config.axes["s"].pad) == "{'x': 0.0}"
    assert from_mapping(ServerConfig, {"drain_timeout_s": 3}, "").drain_timeout_s == 3


def test_every_number_of_the_schema_is_strict() -> None:
    """A knob that is added is strict as well."""
    lenient = [
        f"{kind.__name__}.{name}"
        for kind in vars(knobs).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        if plain(hint)
    ]

    assert lenient == []
