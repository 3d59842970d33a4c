"""What a model is and how it runs: load, execute, stage. Usable alone.

    import engines
    engine = engines.open("model.onnx")
    outputs = engine.run({"x": array})

Knows arrays, profiles, contexts and buffers; nothing of requests, queues or gRPC. A
back end's library is imported when an engine of it is opened.
"""

from __future__ import annotations

from pathlib import Path

from engines.base import Engine, ExecutionContext, Profile
from engines.errors import (
    EngineDeadError,
    EngineError,
    EngineLoadError,
    EngineLostError,
    EngineRunError,
)
from engines.fake import FakeEngine, FakeOptions
from engines.slot import Completion, Slot
from engines.staging import Arrays, Cell, Staging
from engines.tensors import DTYPES, TensorSpec

__all__ = [
    "DTYPES",
    "Arrays",
    "Cell",
    "Completion",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EngineLoadError",
    "EngineLostError",
    "EngineRunError",
    "ExecutionContext",
    "FakeEngine",
    "FakeOptions",
    "Profile",
    "Slot",
    "Staging",
    "TensorSpec",
    "open",
]


def open(path: Path | str, *, contexts: int = 1) -> Engine:
    """Opens the model at `path` with the back end for its kind of file.

    Args:
        path: an `.onnx` file, or a TensorRT `.plan`.
        contexts: how many runs will be made at the same time.

    Raises:
        EngineLoadError: the file cannot be loaded, or no back end takes it.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        from engines.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(path, contexts=contexts)
    if path.suffix == ".plan":
        from engines.tensorrt.prepare import open_plan

        return open_plan(path, name=path.stem)
    raise EngineLoadError(f"{path}: no engine for files ending in {path.suffix!r}")
