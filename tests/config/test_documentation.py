"""Every knob is documented where it is declared, and can be given at start."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from batcher.cli import app
from batcher.config import (
    BatchingConfig,
    ModelConfig,
    ServerConfig,
    SlotsConfig,
    TensorRTConfig,
    backends,
    schema,
)
from batcher.scheduling import POLICIES

SOURCES = [Path(str(module.__file__)) for module in (schema, backends)]

UNITS = ("_s", "_ms", "_us", "_mb")
"""Endings of fields with a unit, which a flag may leave out."""

FLAGS_OF_MODELS: dict[str, tuple[type[Any], str]] = {
    "engine": (ModelConfig, "engine"),
    "max_batch": (ModelConfig, "max_batch"),
    "policy": (BatchingConfig, "policy"),
    "max_delay_us": (BatchingConfig, "max_delay_us"),
    "max_queue": (BatchingConfig, "max_queue"),
    "timeout_ms": (BatchingConfig, "timeout_ms"),
    "batch_axis": (ModelConfig, "batch_axis"),
    "slots": (SlotsConfig, "count"),
    "isolation": (SlotsConfig, "isolation"),
    "precision": (TensorRTConfig, "precision"),
}
"""Knobs of models that are flags too."""


def documented() -> Iterator[tuple[str, str | None]]:
    """Every field of every class of the schema, and its docstring."""
    for node in (n for path in SOURCES for n in ast.parse(path.read_text()).body):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = None
                if isinstance(below, ast.Expr) and isinstance(
                    below.value, ast.Constant
                ):
                    text = str(below.value.value)
                yield f"{node.name}.{field.target.id}", text


def serve_options() -> dict[str, click.Option]:
    """The options of `batcher serve` by parameter name."""
    command = typer.main.get_command(app)
    serve = command.commands["serve"]  # type: ignore[attr-defined]
    return {p.name: p for p in serve.params if p.param_type_name == "option"}


def option_of(field: str) -> click.Option:
    """The option that sets a field of `ServerConfig`."""
    options = serve_options()
    names = [field, *(field.removesuffix(u) for u in UNITS if field.endswith(u))]
    return next(options[name] for name in names if name in options)


def test_every_field_has_a_docstring() -> None:
    """No knob is without a sentence that ends with a full stop."""
    fields = dict(documented())

    assert len(fields) > 35
    assert [
        name for name, text in fields.items() if not (text or "").endswith(".")
    ] == []


def test_every_class_is_walked() -> None:
    """The docstrings that were looked at are those of all fields there are."""
    declared = {
        f"{kind.__name__}.{field.name}"
        for kind in (vars(schema) | vars(backends)).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }

    assert {name for name, _ in documented()} == declared


def test_durations_and_sizes_have_their_unit_in_the_name() -> None:
    """A field whose text speaks of a unit has that unit in its name."""
    units = {
        "microsecond": "_us",
        "millisecond": "_ms",
        "(seconds)": "_s",
        "MiB": "_mb",
    }

    wrong = [
        name
        for name, text in documented()
        for word, ending in units.items()
        if word in (text or "").lower() + (text or "") and not name.endswith(ending)
    ]

    assert wrong == []


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ServerConfig)])
def test_every_server_knob_has_a_flag_and_a_variable(field: str) -> None:
    """Each field of `ServerConfig` is a flag of `serve`, and a BATCHER_… variable."""
    option = option_of(field)

    assert "--" + str(option.name).replace("_", "-") in option.opts
    assert option.envvar == "BATCHER_" + str(option.name).upper()
    assert option.help


def test_every_flag_sets_a_knob() -> None:
    """There is no option that neither a server's nor a model's field stands behind."""
    server = {option_of(f.name).name for f in dataclasses.fields(ServerConfig)}

    assert set(serve_options()) - server - {"help"} == set(FLAGS_OF_MODELS)


@pytest.mark.parametrize("flag", FLAGS_OF_MODELS)
def test_flags_of_models_have_a_variable(flag: str) -> None:
    """A model's knob that is a flag is a BATCHER_… variable too."""
    option = serve_options()[flag]

    assert option.envvar == "BATCHER_" + flag.upper()


def test_the_defaults_in_the_help_are_those_of_the_schema() -> None:
    """What `--help` calls the default is what the dataclass has."""
    server = {option_of(f.name).name: f for f in dataclasses.fields(ServerConfig)}
    models = {
        flag: next(f for f in dataclasses.fields(kind) if f.name == name)
        for flag, (kind, name) in FLAGS_OF_MODELS.items()
    }
    shown = {
        name: found[1]
        for name, option in serve_options().items()
        if (found := re.search(r"\[default: (.*)\]", str(option.help)))
    }
    expected = {}
    for name, field in {**server, **models}.items():
        value = field.default
        if isinstance(value, tuple):
            value = " ".join(value)
        if isinstance(value, float):
            value = f"{value:g}"
        expected[str(name)] = str(value)
    expected["socket_mode"] = f"0{ServerConfig().socket_mode:o}"
    expected["max_batch"] = "64"  # 0 stands for it
    expected["slots"] = "1, on a GPU 2"  # so does this 0
    expected["io_threads"] = "one per four cores, at most 4"
    expected["plan_cache"] = "batcher/plans in the user's cache folder"
    del expected["plugin_folder"]  # none
    expected["max_in_flight_mb"] = "a quarter of memory"  # so does this 0
    del expected["strict_triton_codes"]  # a switch, off unless given

    assert shown == expected


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("transport", typing.get_args(schema.TransportName)),
        ("engine", typing.get_args(schema.EngineName)),
        ("log_format", ("text", "json")),
        ("log_level", ("debug", "info", "warning", "error")),
        ("policy", tuple(POLICIES)),
        ("isolation", typing.get_args(schema.IsolationName)),
        ("precision", typing.get_args(backends.PrecisionName)),
    ],
)
def test_choices_in_the_help_are_all_there_are(
    flag: str, values: tuple[str, ...]
) -> None:
    """The values that `--help` names are those that are accepted."""
    assert serve_options()[flag].metavar == "|".join(values)
