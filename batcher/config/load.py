"""Reads configuration into the dataclasses of `batcher.config.schema`.

Order, the later wins: defaults, the model's file, `BATCHER_…` variables and flags
(both arrive here as `overrides`). Every fault is one line with its key path.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from batcher.config.schema import ModelConfig
from batcher.errors import ConfigError

T = TypeVar("T")

_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""Kept, as making one takes milliseconds, which every model would pay again."""


def from_mapping(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """Makes a configuration dataclass of plain values.

    Raises:
        ConfigError: a key is unknown or a value wrong; `source` is named first.
    """
    try:
        adapter = _adapters.get(kind) or _adapters.setdefault(kind, TypeAdapter(kind))
        made: T = adapter.validate_python(dict(values))
    except ValidationError as error:
        lines = [_line(source, fault) for fault in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return made


def load_model_config(
    path: Path | None, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The configuration of one model.

    Args:
        path: its `model.toml`; None where there is none.
        overrides: values that win over the file, nested as in the file.

    Raises:
        ConfigError: the file cannot be read or a value is wrong.
    """
    values: dict[str, Any] = {}
    source = "options"
    if path is not None:
        source = str(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{source}: {error}") from error
    if overrides:
        values = merged(values, overrides)
        source = f"{source} with the options given" if path is not None else source
    return from_mapping(ModelConfig, values, source)


def check_overrides(overrides: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Sees to it that values given for all models can be right for some model.

    Args:
        overrides: as in `load_model_config`.
        flags: what errors call them by: flags, and the key path that each one sets.

    Raises:
        ConfigError: a value is wrong whatever the models' files say, or two contradict.
    """
    values = dict(overrides)
    if values.get("engine") == "fake":
        del values["engine"]  # the table that it needs is in the models' files
    faults = []
    given = {}
    for flag, path in flags.items():
        alone = _only(values, path.split("."))
        if alone is not None:
            given[flag] = path
            try:
                from_mapping(ModelConfig, alone, flag)
            except ConfigError as error:
                faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        from_mapping(ModelConfig, values, "")
    except ConfigError as error:
        text = str(error).removeprefix(": ")
        both = [f for f, path in given.items() if path in text] or list(given)
        raise ConfigError(f"{' and '.join(both)}: {text}") from None


def _only(values: Mapping[str, Any], path: list[str]) -> dict[str, Any] | None:
    """The value at a key path, in its tables and without its neighbours."""
    first, *rest = path
    value = values.get(first)
    if rest and value is not None:
        value = _only(value, rest)
    return None if value is None else {first: value}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def _line(source: str, fault: Any) -> str:
    where = ".".join(str(p) for p in fault["loc"])
    kind = fault["type"]
    if kind == "unexpected_keyword_argument":
        return f"{source}: {where}: no such knob"
    if kind in ("missing", "missing_argument"):
        return f"{source}: {where}: is needed"
    return f"{source}: {where}: {fault['msg']} (got {fault['input']!r})"
