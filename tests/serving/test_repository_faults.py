"""What looks like a model and is none: one warning each, with what to do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from batcher.errors import ConfigError
from batcher.serving.loader import load
from batcher.serving.repository import find_models

from .test_repository import file


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said above debug."""
    return [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG]


def dangling(path: Path) -> None:
    """A link that leads nowhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/nowhere/at/all")


def folder(path: Path) -> None:
    """An empty folder, with those above it."""
    path.mkdir(parents=True)


def pipe(path: Path) -> None:
    """A named pipe, which would block its reader."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


LINK = "is a link to /nowhere/at/all, which is not there"
FOLDER = "should be a file, is a folder"
PIPE = "should be a file, is a pipe, socket or device"


@pytest.mark.parametrize(
    ("what", "where", "path", "text"),
    [
        (dangling, "bad/1/model.onnx", "bad/1/model.onnx", LINK),
        (
            folder,
            "bad/1/model.onnx",
            "bad/1/model.onnx",
            FOLDER,
        ),
        (pipe, "bad/1/model.onnx", "bad/1/model.onnx", PIPE),
        (folder, "bad/1", "bad/1", "no model.onnx or model.plan in it; put the"),
        (file, "bad/1/resnet.onnx", "bad/1", "no model.onnx or model.plan in it"),
        (file, "bad/1", "bad/1", "should be a version's folder"),
        (dangling, "bad/1", "bad/1", LINK),
        (file, "bad/model.onnx", "bad/model.onnx", "move it to"),
        (file, "bad/latest/model.onnx", "bad/latest", "a positive number"),
        (file, "bad/0/model.onnx", "bad/0", "a positive number"),
        (folder, "bad", "bad", "no model in it"),
        (file, "group/m/1/model.onnx", "group", "no model in it"),
        (dangling, "bad", "bad", LINK),
        (file, "bad.onnx", "bad.onnx", "in no model's folder; move it to"),
        (dangling, "bad.onnx", "bad.onnx", "in no model's folder"),
        (file, "model.toml", "model.toml", "beside the models"),
        (folder, "model.toml", "model.toml", "beside the models"),
        (file, "good/config.pbtxt", "good/config.pbtxt", "not read"),
        (file, "good/Model.toml", "good/Model.toml", "not read"),
        (folder, "good/2", "good/2", "no model.onnx or model.plan in it"),
        (dangling, "good/2/model.onnx", "good/2/model.onnx", LINK),
    ],
)
def test_what_is_broken_is_one_warning_and_the_rest_is_served(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    what: Callable[[Path], object],
    where: str,
    path: str,
    text: str,
) -> None:
    """The warning begins with the path, says what is wrong, and what to do."""
    file(tmp_path / "good" / "1" / "model.onnx")
    what(tmp_path / where)

    found = find_models([tmp_path])

    assert [(source.name, source.version) for source in found] == [("good", "1")]
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{tmp_path / path}: ")
    assert text in warning


def test_a_link_in_a_circle_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be looked at is a fault of that model only."""
    file(tmp_path / "good" / "1" / "model.onnx")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "1").symlink_to("1")

    assert [source.name for source in find_models([tmp_path])] == ["good"]
    (warning,) = warnings(caplog)
    assert "bad/1: should be a version's folder" in warning
    assert "is out of reach (Too many levels of symbolic links)" in warning


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One such folder (say, lost+found) does not keep the others from being served."""
    file(tmp_path / "good" / "1" / "model.onnx")
    (tmp_path / "bad").mkdir(mode=0)

    assert [source.name for source in find_models([tmp_path])] == ["good"]
    assert warnings(caplog) == [
        f"{tmp_path}/bad: Permission denied; let the daemon's user read it, or remove "
        "it"
    ]


def test_hidden_names_are_a_debug_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What begins with a dot is passed over, and a reader of the log can know."""
    caplog.set_level(logging.DEBUG)
    file(tmp_path / "good" / "1" / "model.onnx")
    file(tmp_path / ".bad" / "1" / "model.onnx")
    file(tmp_path / ".bad.onnx")

    assert [source.name for source in find_models([tmp_path])] == ["good"]
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("DEBUG", f"{tmp_path}/{name}: passed over, as its name begins with a dot")
        for name in (".bad", ".bad.onnx")
    ]


def test_a_repository_without_faults_is_found_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that nobody takes for a model need no word, nor do several versions."""
    for version in ("1", "2"):
        file(tmp_path / "good" / version / "model.onnx")
        file(tmp_path / "good" / version / "model.onnx.data")
    file(tmp_path / "1" / "1" / "model.onnx")
    file(tmp_path / "good" / "model.toml")
    file(tmp_path / "good" / "labels.txt")
    file(tmp_path / "README.md")
    file(tmp_path / "fake" / "model.toml")

    assert len(find_models([tmp_path])) == 3
    assert warnings(caplog) == []


@pytest.mark.parametrize("given", [".", ".."])
def test_where_nothing_is_served_the_reason_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    """A model's folder without a model is refused, after what is wrong in it."""
    folder(tmp_path / "m" / "1")

    with pytest.raises(ConfigError, match="no models; expected <model>/<version>"):
        find_models([Path(os.path.normpath(tmp_path / "m" / given))])
    assert warnings(caplog) == [
        f"{tmp_path}/m/1: no model.onnx or model.plan in it; put the model's file "
        "there under that name, or remove the folder"
    ]


def test_a_path_that_is_a_dangling_link_is_named(tmp_path: Path) -> None:
    """A path given that leads nowhere is not said to be missing."""
    dangling(tmp_path / "m.onnx")

    with pytest.raises(ConfigError, match=LINK):
        find_models([tmp_path / "m.onnx"])


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (folder, FOLDER),
        (dangling, f"should be a file, {LINK}"),
        (pipe, PIPE),
    ],
)
@pytest.mark.parametrize("version", ["1/model.onnx", None])
@pytest.mark.parametrize("given", ["", "m"])
def test_knobs_that_are_no_file_are_an_error_of_the_model(
    tmp_path: Path,
    what: Callable[[Path], object],
    text: str,
    version: str | None,
    given: str,
) -> None:
    """The model is not served with the defaults instead."""
    what(tmp_path / "m" / "model.toml")
    if version is not None:
        file(tmp_path / "m" / version)

    (source,) = find_models([tmp_path / given])

    with pytest.raises(ConfigError) as caught:
        load(source, {})
    assert str(caught.value) == (
        f"{tmp_path}/m/model.toml: {text}; put the model's knobs there, or remove it "
        "for the defaults"
    )
