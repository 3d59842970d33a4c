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


def from_mapping(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """Makes a configuration dataclass of plain values.

    Raises:
        ConfigError: a key is unknown or a value wrong; `source` is named first.
    """
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        lines = [_line(source, fault) for fault in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


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
