"""Notes of models: believed while the files are the same, and never after."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import models
import onnx
import pytest

from engines.tensorrt import onnxfile
from engines.tensorrt.cache import hash_model
from engines.tensorrt.modelfile import OnnxFile, recall, remember

LATER = 10**9  # a second: as if the files had been there before they were read


def noted(path: Path, folder: Path) -> OnnxFile:
    """A model that was read and noted."""
    file = onnxfile.read(path)
    remember(file, hash_model(file), folder, time.time_ns() + LATER)
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model with its weights in a file of their own."""
    path = tmp_path / "m" / "seq.onnx"
    path.parent.mkdir()
    model = models.seq()
    onnx.save(
        model,
        str(path),
        save_as_external_data=True,
        location="seq.weights",
        size_threshold=0,
    )
    return path


def test_what_was_noted_is_what_was_read(path: Path, tmp_path: Path) -> None:
    """Inputs, outputs, weight files and SHA-256, without reading the model."""
    file = noted(path, tmp_path)

    known = recall(path, tmp_path)

    assert known is not None
    assert known.inputs == file.inputs
    assert known.outputs == file.outputs
    assert known.weight_files == file.weight_files == (path.parent / "seq.weights",)
    assert known.sha256 == hash_model(file) == hash_model(known)
    assert known.is_dynamic
    assert known.model == file.model  # read when it is asked for


@pytest.mark.parametrize("which", ["seq.onnx", "seq.weights"])
@pytest.mark.parametrize("how", ["written", "replaced", "set back", "gone"])
def test_a_file_that_has_changed_is_read_again(
    path: Path, tmp_path: Path, which: str, how: str
) -> None:
    """Whatever of the model changes, even where its time is set back."""
    noted(path, tmp_path)
    target = path.parent / which
    data, status = target.read_bytes(), target.stat()
    if how == "gone":
        target.unlink()
    elif how == "replaced":
        other = target.with_suffix(".other")
        other.write_bytes(data)
        other.replace(target)
    else:
        target.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        if how == "set back":
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert recall(path, tmp_path) is None


def test_a_file_that_is_new_is_not_noted(path: Path, tmp_path: Path) -> None:
    """It may have changed while it was read, and its times would not show it."""
    began_ns = path.stat().st_ctime_ns
    file = onnxfile.read(path)

    remember(file, hash_model(file), tmp_path, began_ns)

    assert recall(path, tmp_path) is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"null", b'{"format": 1}'])
def test_a_damaged_note_counts_as_none(
    path: Path, tmp_path: Path, damage: bytes
) -> None:
    """Nothing that stands in its place is an error."""
    noted(path, tmp_path)
    (note,) = tmp_path.glob("*.seen")
    note.write_bytes(damage)

    assert recall(path, tmp_path) is None


def test_a_folder_that_cannot_be_written_is_no_error(
    path: Path, tmp_path: Path
) -> None:
    """Then the model is read each time."""
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")

    noted(path, blocked)

    assert recall(path, blocked) is None


def test_a_start_that_finds_its_plan_imports_no_onnx() -> None:
    """It takes a fifth of a second, which a second start can do without."""
    code = (
        "import sys, engines.tensorrt.prepare; "
        "print([m for m in ('onnx', 'onnxruntime', 'ml_dtypes.x') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout == "[]\n"
