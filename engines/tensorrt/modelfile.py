"""What is known of an ONNX file, and notes that save reading it again.

A start that finds its plan needs of the model what goes in and out, and the SHA-256 of
its bytes. Both are noted in the plan cache, and believed as long as the files have the
same size, times and inode as when they were read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines.tensorrt.plans import write_whole
from engines.tensors import TensorSpec

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

_FORMAT: Final = 1
_TICK_NS: Final = 20_000_000  # times of files are only as fine as the kernel's ticks


class OnnxFile:
    """A model that was read, now or by an earlier start.

    Args:
        path: as it was given.
        folder_of: the file beside which the weight files lie: `path`, or what it
            links to. The parser must be given this one.
        inputs, outputs: as the graph declares them.
        weight_files: external weights, each once, in the order of the graph.
        model: the graph, without external weights; None to read it when it is asked
            for.
        sha256: see `engines.tensorrt.cache.hash_model`; "" if not known yet.

    The arguments are attributes too.
    """

    __slots__ = (
        "_model",
        "folder_of",
        "inputs",
        "outputs",
        "path",
        "sha256",
        "weight_files",
    )

    def __init__(
        self,
        path: Path,
        folder_of: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        weight_files: Sequence[Path],
        model: onnx.ModelProto | None = None,
        sha256: str = "",
    ) -> None:
        self.path = path
        self.folder_of = folder_of
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.weight_files = tuple(weight_files)
        self.sha256 = sha256
        self._model = model

    @property
    def model(self) -> onnx.ModelProto:
        """The graph, without external weights.

        Raises:
            EngineLoadError: it cannot be read any more.
        """
        if self._model is None:
            from engines.tensorrt import onnxfile

            self._model = onnxfile.read(self.path).model
        return self._model

    @property
    def is_dynamic(self) -> bool:
        """Whether an input has an axis without a fixed size."""
        return any(-1 in spec.wire_shape for spec in self.inputs)


def recall(path: Path, folder: Path) -> OnnxFile | None:
    """What an earlier start has noted of a model whose files are the same still.

    Args:
        path: the `.onnx` file.
        folder: the plan cache.
    """
    try:
        note = json.loads(_note(path, folder).read_bytes())
        if note["format"] != _FORMAT or note["path"] != os.path.abspath(path):
            return None
        files = [Path(file) for file, *_ in note["files"]]
        if note["files"] != [_seen(file) for file in files]:
            return None
        return OnnxFile(
            path,
            files[0],
            [_spec(each) for each in note["inputs"]],
            [_spec(each) for each in note["outputs"]],
            files[1:],
            sha256=str(note["sha256"]),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def remember(file: OnnxFile, sha256: str, folder: Path, began_ns: int) -> None:
    """Notes a model for `recall`; where that is not possible, nothing is noted.

    Args:
        file: the model.
        sha256: of its files.
        folder: the plan cache.
        began_ns: when the first of them was opened, since 1970. What has changed since
            then, or so shortly before that its times may not show it, is not noted.
    """
    try:
        files = (file.folder_of, *file.weight_files)
        if any(f.stat().st_ctime_ns > began_ns - _TICK_NS for f in files):
            return
        folder.mkdir(parents=True, exist_ok=True)
        note = {
            "format": _FORMAT,
            "path": os.path.abspath(file.path),
            "files": [_seen(each) for each in files],
            "inputs": [described(spec) for spec in file.inputs],
            "outputs": [described(spec) for spec in file.outputs],
            "sha256": sha256,
        }
        write_whole(_note(file.path, folder), json.dumps(note, indent=1).encode())
    except OSError as error:
        log.debug("no note of %s: %s", file.path, error)


def described(spec: TensorSpec) -> dict[str, Any]:
    """A tensor as JSON."""
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _spec(given: dict[str, Any]) -> TensorSpec:
    return TensorSpec(given["name"], given["dtype"], tuple(given["shape"]))


def _note(path: Path, folder: Path) -> Path:
    stem = hashlib.sha256(os.path.abspath(path).encode()).hexdigest()
    return folder / f"{stem}.seen"


def _seen(file: Path) -> list[Any]:
    """What changes when a file does. (Times can be set back, but for the last one.)"""
    status = file.stat()
    return [
        str(file),
        status.st_size,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]
