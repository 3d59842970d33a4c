"""Links, keys, defaults, flags, metrics and codes in the documents are the code's."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from batcher import errors
from batcher.cli import app
from batcher.config import (
    AxisConfig,
    BatchingConfig,
    FakeConfig,
    ModelConfig,
    ServerConfig,
    SlotsConfig,
    from_mapping,
    load_model_config,
)
from batcher.config.backends import FakeTensorConfig, TensorRTConfig
from batcher.config.schema import OutputAxisConfig
from batcher.rpc.status import StatusTable
from batcher.serving.budget import Budget
from batcher.serving.metrics import collect, exposition
from docs.documents import (
    DOCUMENTS,
    ROOT,
    Table,
    anchors,
    blocks,
    commands,
    name,
    prose,
    tables,
)

MODEL_FILE = ROOT / "docs" / "model-file.md"
OPERATIONS = ROOT / "docs" / "operations.md"
README = ROOT / "README.md"

SECTIONS: dict[str, type[Any]] = {
    "Top level": ModelConfig,
    "`[batching]`": BatchingConfig,
    "`[tensorrt]`": TensorRTConfig,
    "`[slots]`": SlotsConfig,
    "`[axes.NAME]`": AxisConfig,
    "`[axes.NAME.outputs]`": OutputAxisConfig,
    "`[fake]`": FakeConfig,
    "`[[fake.inputs]]` and `[[fake.outputs]]`": FakeTensorConfig,
}
"""Headings of docs/model-file.md, and what their tables describe."""

TABLES_OF_THEIR_OWN = {"batching", "slots", "axes", "tensorrt", "fake"}

UNITS = {
    "_us": "µs",
    "_ms": "ms",
    "_s": "s",
    "_mb": "MiB",
    "_rows": "rows",
}

COMMANDS = ("serve", "bench", "build", "doctor")

OTHERS_FLAGS = {"--strict"}
"""Flags in the documents that are not of `batcher`: mypy's."""

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name)


def default(field: dataclasses.Field[Any]) -> Any:
    """A default as TOML has it; the text "needed" or "none" where there is none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        return "needed"
    if field.default is None:
        return "none"
    return list(field.default) if isinstance(field.default, tuple) else field.default


def shown(cell: str) -> Any:
    """The value in a cell: TOML in backticks, or a word."""
    if not cell.startswith("`"):
        return cell
    return tomllib.loads(f"value = {cell.strip('`')}")["value"]


def options(command: str) -> dict[str, click.Option]:
    """The options of a `batcher` command by their flag."""
    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    flags = {f: p for p in parameters for f in (*p.opts, *p.secondary_opts)}
    return {flag: option for flag, option in flags.items() if flag.startswith("--")}


def table_with(document: Path, *columns: str) -> Table:
    """The first table with these columns first."""
    for table in tables(document):
        if tuple(table.columns[: len(columns)]) == columns:
            return table
    raise LookupError(f"{name(document)} has no table {columns}")


@every_document
def test_relative_links_resolve(document: Path) -> None:
    """Every link within the repository leads to a file, and to a heading in it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)

    assert broken == []


@pytest.mark.parametrize("heading", SECTIONS)
def test_model_file_describes_every_key(heading: str) -> None:
    """docs/model-file.md has exactly the schema's keys, with their defaults."""
    table = next(t for t in tables(MODEL_FILE) if t.heading == heading)
    described = dict(zip(table.column("key"), table.column("default"), strict=True))
    expected = {
        f"`{field.name}`": default(field)
        for field in dataclasses.fields(SECTIONS[heading])
        if heading != "Top level" or field.name not in TABLES_OF_THEIR_OWN
    }

    assert {key: shown(cell) for key, cell in described.items()} == expected


def test_units_follow_the_names() -> None:
    """A key that ends in a unit has that unit in its table."""
    wrong = []
    for document in (MODEL_FILE, README):
        for table in tables(document):
            if "unit" not in table.columns or table.columns[0] != "key":
                continue
            pairs = zip(table.column("key"), table.column("unit"), strict=True)
            for key, unit in pairs:
                wanted = [u for end, u in UNITS.items() if key.strip("`").endswith(end)]
                if wanted and unit != wanted[0]:
                    wrong.append((name(document), key, unit))

    assert wrong == []


def test_readme_knobs_have_the_schemas_defaults() -> None:
    """The README's table of knobs agrees with the schema, and its flags exist."""
    table = table_with(README, "key", "default", "unit", "flag")
    flags = {f"`{flag}`" for flag in options("serve")}
    found = []
    for key, cell, _unit, flag, *_ in table.rows:
        value: Any = ModelConfig()
        for part in key.strip("`").split("."):
            value = getattr(value, part)
        value = list(value) if isinstance(value, tuple) else value
        found.append((key, shown(cell) == value, flag in flags or not flag))

    assert found == [(key, True, True) for key, *_ in table.rows]


def test_operations_describes_every_flag_of_the_daemon() -> None:
    """docs/operations.md has every flag of `serve`, with its variable."""
    daemon = table_with(OPERATIONS, "flag", "variable", "default")
    models = table_with(OPERATIONS, "flag", "variable", "key")
    rows = [row[:2] for row in (*daemon.rows, *models.rows)]
    expected = [
        [f"`{flag}`", f"`{option.envvar}`"]
        for flag, option in options("serve").items()
        if flag != "--help"
    ]

    assert sorted(rows) == sorted(expected)


def test_operations_has_the_schemas_defaults() -> None:
    """The daemon's flags have the schema's defaults, in the form of a flag."""
    table = table_with(OPERATIONS, "flag", "variable", "default")
    expected = {}
    for field in dataclasses.fields(ServerConfig):
        flag = re.sub("_s$", "", field.name).replace("_", "-")
        value = default(field)
        if field.name == "socket_mode":
            text = f"`{value:04o}`"
        elif isinstance(value, bool):
            text = "on" if value else "off"
        elif value in ("", []):
            text = "none"
        elif isinstance(value, list):
            text = f"`{' '.join(value)}`"
        else:
            text = f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
        expected[f"`--{flag}`"] = text

    found = dict(zip(table.column("flag"), table.column("default"), strict=True))
    assert found == expected


@every_document
def test_flags_and_variables_exist(document: Path) -> None:
    """Flags and `BATCHER_…` variables that a document names are the command line's."""
    every = [each for command in COMMANDS for each in options(command).items()]
    known = {flag for flag, _ in every}
    variables = {str(option.envvar) for _, option in every if option.envvar}
    text = document.read_text()
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))

    assert flags - known - OTHERS_FLAGS - {"--help", "--version"} == set()
    assert set(re.findall(r"BATCHER_[A-Z_]+", text)) - variables == set()


@every_document
def test_commands_are_what_the_command_line_takes(document: Path) -> None:
    """A `batcher` command in a document has a command's name and its flags only."""
    wrong = []
    for line in commands(document):
        found = re.match(r"(?:\S*/)?batcher (\w+)(.*)", line)
        if found is None:
            continue
        flags = set(re.findall(r"--[a-z0-9-]+", found[2]))
        if found[1] not in COMMANDS or flags - set(options(found[1])):
            wrong.append(line)

    assert wrong == []


@every_document
def test_make_targets_exist(document: Path) -> None:
    """`make` is asked only for what the Makefile has."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    asked = re.findall(r"`make ([a-z-]+)`", prose(document))
    asked += [line.split()[1] for line in commands(document) if line[:5] == "make "]

    assert set(asked) - targets == set()


@every_document
def test_toml_blocks_are_model_files(document: Path) -> None:
    """Every TOML block is a `model.toml` that the daemon takes."""
    for block in blocks(document, "toml"):
        from_mapping(ModelConfig, tomllib.loads(block), name(document))


@every_document
def test_python_blocks_parse(document: Path) -> None:
    """Every Python block is Python."""
    for block in blocks(document, "python"):
        ast.parse(block)


def test_example_files_are_model_files() -> None:
    """The examples' `model.toml` files are what the daemon takes."""
    files = sorted((ROOT / "docs" / "examples").rglob("model.toml"))
    models = [load_model_config(file) for file in files]

    assert [model.max_batch for model in models] == [32]


def test_minilm_page_shows_the_example_as_it_is() -> None:
    """The block in docs/minilm.md says the same as the file that it shows."""
    file = ROOT / "docs" / "examples" / "minilm" / "model.toml"
    (block,) = blocks(ROOT / "docs" / "minilm.md", "toml")

    assert tomllib.loads(block) == tomllib.loads(file.read_text())


def test_metrics_are_those_of_the_daemon() -> None:
    """docs/operations.md has exactly the metrics of the page that Prometheus reads."""
    page = exposition(collect([], Budget(1))).decode()
    exposed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    # Triton's counters are exposed as untyped (docs/operations.md says why).
    kinds = {n: "counter" if k == "untyped" else k for n, k in exposed.items()}
    table = table_with(OPERATIONS, "metric", "kind")

    described = zip(table.column("metric"), table.column("kind"), strict=True)
    assert {metric.strip("`"): kind for metric, kind in described} == kinds


def test_status_codes_are_those_of_the_table() -> None:
    """The README's codes are those that the daemon can answer with."""
    numbers = set()
    kinds = [errors.BatcherError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        numbers.add(StatusTable().code(kind("")))
    described = set(table_with(README, "what happened", "code").column("code"))

    import grpc

    codes = {code.name for code in grpc.StatusCode if code.value[0] in numbers}
    assert described == codes


def test_readme_keeps_a_place_for_figures() -> None:
    """What is measured has its place in the README."""
    assert README.read_text().count("figures -->") >= 1


def test_contributing_is_short() -> None:
    """CONTRIBUTING.md is read, so it has at most 120 lines."""
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 120


def test_lines_of_prose_are_short() -> None:
    """Prose wraps at 90 columns; tables, links, blocks and output may be longer."""
    long = [
        (name(document), line)
        for document in DOCUMENTS
        for line in prose(document).splitlines()
        if len(line) > 90 and not line.startswith(("|", "    ")) and "](" not in line
    ]

    assert long == []
