"""What the tests on a GPU share: models built once, and a cache that outlives tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import onnx
import pytest

from engines.tensorrt.engine import TensorRTEngine
from engines.tensorrt.prepare import PlanOptions, prepare
from engines.tensorrt.profiles import AxisSizes

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # the contract suite

RUNGS = (1, 2, 3, 8)
LENGTHS = (4, 16, 256)

Open = Callable[..., TensorRTEngine]


if not os.environ.get("BATCHER_TEST_GPU"):  # `make test-gpu` sets it
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan cache of this run."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def opened(tmp_path: Path, plans: Path) -> Iterator[Open]:
    """Builds, checks and opens a model; closed at the end."""
    made: list[TensorRTEngine] = []

    def open_one(
        model: onnx.ModelProto,
        rungs: tuple[int, ...] = RUNGS,
        axes: dict[str, tuple[int, ...]] | None = None,
        **more: Any,
    ) -> TensorRTEngine:
        path = models.save(model, tmp_path / f"{model.graph.name}.onnx")
        sizes = tuple(AxisSizes(n, s) for n, s in (axes or {}).items())
        options = PlanOptions(rungs=rungs, axes=sizes)
        engine = prepare(path, options, plans, name=model.graph.name, **more)
        made.append(engine)
        return engine

    yield open_one
    for engine in made:
        engine.close()


@pytest.fixture
def seq(opened: Open) -> TensorRTEngine:
    """`models.seq` on several profiles."""
    engine = opened(models.seq(), axes={"S": LENGTHS})
    assert len(engine.profiles) >= 2
    return engine
