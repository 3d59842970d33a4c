"""Find the models that paths name: files, model folders, repositories."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batcher.errors import ConfigError

CONFIG_NAME: Final = "model.toml"
MODEL_FILES: Final = ("model.onnx",)
MAX_NAME: Final = 128


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model version to load.

    Attributes:
        name, version: as callers address it.
        path: the model's file, None for one that needs none (a fake engine).
        config: its `model.toml`, None where there is none.
    """

    name: str
    version: str
    path: Path | None
    config: Path | None


def find_models(paths: Iterable[Path]) -> list[ModelSource]:
    """The models at `paths`, in order.

    A path is an `.onnx` file (served under its stem as version 1), a model's folder
    (`<version>/model.onnx`, `model.toml`), or a repository, a folder of such folders.
    Of several versions the highest is served.

    Raises:
        ConfigError: nothing is there, or two models have one name.
    """
    found: list[ModelSource] = []
    for path in paths:
        path = path.expanduser()
        if path.is_file():
            if path.suffix != ".onnx":
                raise ConfigError(f"{path}: not an .onnx file, nor a folder of models")
            found.append(ModelSource(path.stem, "1", path, None))
        elif path.is_dir():
            found.extend(_folder(path))
        else:
            raise ConfigError(f"{path}: no such file or folder")
    names: dict[str, ModelSource] = {}
    for source in found:
        if source.name in names:
            first, second = (s.path or s.config for s in (names[source.name], source))
            raise ConfigError(
                f"two models are called {source.name!r}: {first} and {second}"
            )
        names[source.name] = source
    return found


def _folder(path: Path) -> list[ModelSource]:
    if model := _model(path):
        return [model]
    children = sorted(p for p in path.iterdir() if p.is_dir() and p.name[0] != ".")
    models = [m for child in children if (m := _model(child))]
    if not models:
        raise ConfigError(
            f"{path}: no models; expected <model>/<version>/{MODEL_FILES[0]} or "
            f"<model>/{CONFIG_NAME}"
        )
    return models


def _model(folder: Path) -> ModelSource | None:
    """The model in a folder, None when it holds none."""
    config = folder / CONFIG_NAME
    known = config if config.is_file() else None
    versions = sorted(
        (int(child.name), file)
        for child in folder.iterdir()
        if child.is_dir() and is_version(child.name)
        for name in MODEL_FILES
        if (file := child / name).is_file()
    )
    name = os.path.basename(os.path.abspath(folder))  # of a link its own, for "." too
    if versions:
        number, file = versions[-1]
        return ModelSource(name, str(number), file, known)
    if known is not None:
        return ModelSource(name, "1", None, known)
    return None


def is_version(text: str) -> bool:
    """Whether this is a version as the protocol knows them: a positive number."""
    return text.isascii() and text.isdecimal() and text[0] != "0" and len(text) < 19


def check_name(source: ModelSource) -> None:
    """Sees to it that a model can be addressed by its name everywhere.

    Raises:
        ConfigError: it cannot, and why.
    """
    name, path = source.name, source.path or source.config
    if not name.isprintable() or any(c in "/\\\"'" for c in name):
        raise ConfigError(
            f"{path}: {name!r} cannot be a model's name (no quotes, slashes or "
            "control characters)"
        )
    if len(name) > MAX_NAME:
        raise ConfigError(f"{path}: a model's name has at most {MAX_NAME} characters")
