"""Find the models that paths name: files, model folders, repositories.

What looks like a model and is none is said in a warning, with the way out: a model
that is left out in silence is missed by its callers first.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batcher.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG_NAME: Final = "model.toml"
MODEL_FILES: Final = ("model.onnx", "model.plan")
MAX_NAME: Final = 128
_SUFFIX: Final = ".onnx"
_PLAN: Final = ".plan"
_FILE: Final = "a file"
_FOLDER: Final = "a folder"
_NOTHING: Final = "nothing"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model version to load.

    Attributes:
        name, version: as callers address it.
        path: the ONNX file; None for a model that is a plan only, or needs no file (a
            fake engine).
        config: its `model.toml`, None where there is none.
        plan: the TensorRT plan, None where there is none.
    """

    name: str
    version: str
    path: Path | None
    config: Path | None
    plan: Path | None = None

    @property
    def place(self) -> Path | None:
        """What to call it by in messages."""
        return self.path or self.plan or self.config


def find_models(paths: Iterable[Path]) -> list[ModelSource]:
    """The models at `paths`, in order.

    A path is an `.onnx` or `.plan` file (served under its stem as version 1), a model's
    folder (`<version>/model.onnx` or `model.plan`, `model.toml`), or a repository, a
    folder of such folders.
    Of several versions the highest is served. What is broken or in the wrong place is
    passed over with a warning.

    Raises:
        ConfigError: nothing is there, or two models have one name.
    """
    found: list[ModelSource] = []
    for path in paths:
        path = path.expanduser()
        if path.is_file():
            if path.suffix == _SUFFIX:
                found.append(ModelSource(path.stem, "1", path, None))
            elif path.suffix == _PLAN:
                found.append(ModelSource(path.stem, "1", None, None, path))
            else:
                raise ConfigError(
                    f"{path}: not an .onnx or .plan file, nor a folder of models"
                )
        elif path.is_dir():
            found.extend(_folder(path))
        elif (kind := _kind(path)) != _NOTHING:
            raise ConfigError(f"{path}: should be a file or folder, is {kind}")
        else:
            raise ConfigError(f"{path}: no such file or folder")
    names: dict[str, ModelSource] = {}
    for source in found:
        if source.name in names:
            first, second = (s.place for s in (names[source.name], source))
            raise ConfigError(
                f"two models are called {source.name!r}: {first} and {second}"
            )
        names[source.name] = source
    return found


def _folder(path: Path) -> list[ModelSource]:
    """The models in a folder: itself, or else those of its folders."""
    children = _children(path)
    alone, own_faults = _model(path, children)
    if alone is None or not (alone.path or alone.plan):
        models, faults = _repository(path, children)
        if models:
            _warn(faults)
            return models
        if alone is None and not any(is_version(child.name) for child in children):
            own_faults = faults
    _warn(own_faults)
    if alone is not None:
        return [alone]
    raise ConfigError(
        f"{path}: no models; expected <model>/<version>/{MODEL_FILES[0]} or "
        f"<model>/{CONFIG_NAME}"
    )


def _repository(
    path: Path, children: list[Path]
) -> tuple[list[ModelSource], list[str]]:
    """The models in a repository's folders, and what is wrong there."""
    models = []
    faults = []
    for child in children:
        kind = _kind(child)
        if child.name == CONFIG_NAME:
            faults.append(
                f"{child}: not read, as it is beside the models; move it into a "
                "model's folder, or remove it"
            )
        elif kind == _FOLDER:
            try:
                model, more = _model(child, _children(child))
            except OSError as error:
                faults.append(
                    f"{child}: {error.strerror}; let the daemon's user read it, or "
                    "remove it"
                )
                continue
            faults += more
            if model is not None:
                models.append(model)
            elif not more:
                faults.append(
                    f"{child}: no model in it; put <version>/{MODEL_FILES[0]} or "
                    f"{CONFIG_NAME} there, or remove it"
                )
        elif child.suffix in (_SUFFIX, _PLAN):
            there = path / child.stem / "1" / f"model{child.suffix}"
            faults.append(
                f"{child}: not served, as it is in no model's folder; move it to "
                f"{there}, or name the file itself as a PATH"
            )
        elif kind != _FILE:
            faults.append(
                f"{child}: should be a model's folder, is {kind}; mend or remove it"
            )
    return models, faults


def _model(folder: Path, children: list[Path]) -> tuple[ModelSource | None, list[str]]:
    """The model in a folder, None when it holds none, and what is wrong there."""
    faults: list[str] = []
    versions: list[tuple[int, dict[str, Path]]] = []
    config = None
    for child in children:
        if child.name == CONFIG_NAME:
            config = child  # whatever it is: loading the model says what it cannot be
        elif is_version(child.name):
            files = _version(child, faults)
            if files:
                versions.append((int(child.name), files))
        elif any(os.path.lexists(child / name) for name in MODEL_FILES):
            faults.append(
                f"{child}: not served, as a version is called by a positive number; "
                "rename it, or remove it"
            )
        elif child.suffix in (_SUFFIX, _PLAN):
            there = folder / "1" / f"model{child.suffix}"
            faults.append(
                f"{child}: not served, as it is in no version's folder; move it to "
                f"{there}"
            )
        elif child.suffix == ".toml" or child.name == "config.pbtxt":
            faults.append(
                f"{child}: not read; the model's knobs are in {folder / CONFIG_NAME}"
            )
    name = os.path.basename(os.path.abspath(folder))  # of a link its own, for "." too
    if versions:
        number, files = max(versions, key=lambda version: version[0])
        onnx, plan = (files.get(file) for file in MODEL_FILES)
        return ModelSource(name, str(number), onnx, config, plan), faults
    if config is not None:
        return ModelSource(name, "1", None, config), faults
    return None, faults


def _version(folder: Path, faults: list[str]) -> dict[str, Path]:
    """The model's files in a version's folder; without one a fault is added."""
    kind = _kind(folder)
    if kind != _FOLDER:
        faults.append(
            f"{folder}: should be a version's folder with {MODEL_FILES[0]} in it, is "
            f"{kind}; mend or remove it"
        )
        return {}
    found = {}
    for name in MODEL_FILES:
        kind = _kind(folder / name)
        if kind == _FILE:
            found[name] = folder / name
        elif kind != _NOTHING:
            faults.append(
                f"{folder / name}: should be a file, is {kind}; put the model's file "
                f"there, or remove {folder}"
            )
            return {}
    if not found:
        faults.append(
            f"{folder}: no {' or '.join(MODEL_FILES)} in it; put the model's file "
            "there under that name, or remove the folder"
        )
    return found


def _children(folder: Path) -> list[Path]:
    """What is in a folder, but for what is hidden."""
    children = sorted(folder.iterdir())
    for child in children:
        if child.name[0] == ".":
            log.debug("%s: passed over, as its name begins with a dot", child)
    return [child for child in children if child.name[0] != "."]


def _kind(path: Path) -> str:
    """What is at a path, in words; `_FILE` and `_FOLDER` are what can be used."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno != errno.ENOENT:
            return f"out of reach ({error.strerror})"
        if path.is_symlink():
            return f"a link to {os.readlink(path)}, which is not there"
        return _NOTHING
    if stat.S_ISREG(mode):
        return _FILE
    return _FOLDER if stat.S_ISDIR(mode) else "a pipe, socket or device"


def _warn(faults: list[str]) -> None:
    for fault in faults:
        log.warning("%s", fault)


def is_version(text: str) -> bool:
    """Whether this is a version as the protocol knows them: a positive number."""
    return text.isascii() and text.isdecimal() and text[0] != "0" and len(text) < 19


def check_name(source: ModelSource) -> None:
    """Sees to it that a model can be addressed by its name everywhere, and that what
    configures it is a file.

    Raises:
        ConfigError: it cannot, and why.
    """
    name, path = source.name, source.place
    if not name.isprintable() or any(c in "/\\\"'" for c in name):
        raise ConfigError(
            f"{path}: {name!r} cannot be a model's name (no quotes, slashes or "
            "control characters)"
        )
    if len(name) > MAX_NAME:
        raise ConfigError(f"{path}: a model's name has at most {MAX_NAME} characters")
    if source.config is not None and (kind := _kind(source.config)) != _FILE:
        raise ConfigError(
            f"{source.config}: should be a file, is {kind}; put the model's knobs "
            "there, or remove it for the defaults"
        )
