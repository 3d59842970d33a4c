"""Measures an engine without a server: alone on the device, and through slots.

    python -m benchmarks.bare MODELS/bert-base --cells 1x16,32x16 --plan-cache PLANS

MODEL is a folder that `benchmarks.models` made; a cell is its rows and the sizes of its
other dynamic axes. Per cell, one JSON object a line:

- `bare`: CUDA graphs of one stream back to back, inputs on the device already;
- `alone`: one run at a time, from page-locked memory to page-locked memory;
- `slot`: saturated slots fed by one thread, with 1 and 2 of them. Stagings are filled
  once, so the copies to and from the device are in it, and no copy on the host;
- `gap`: how long the device waits between runs then, by CUDA events.

With `--engine onnxruntime` only what needs no GPU is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import engines
from batcher.config import load_model_config
from batcher.serving.opening import plan_options
from benchmarks import models
from benchmarks.gpu_runs import BareLoop, Feeder, Gaps, alone
from engines import Cell, Engine, EngineError
from engines.tensorrt.profiles import Grid, grid
from engines.tensors import Shape

_SLOTS: Final = 2  # at most

Sizes = tuple[int, ...]
"""Of a cell: the rows, then the other dynamic axes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure, opened.

    Attributes:
        engine: what runs it.
        grid: all its cells.
    """

    engine: Engine
    grid: Grid

    def shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Of the inputs, in the engine's order."""
        made = self.grid.shapes(sizes)
        return tuple(made[spec.name] for spec in self.engine.inputs)


def opened(folder: Path, engine: str, plan_cache: Path) -> Subject:
    """Opens a model as the daemon does, so that both share a plan and its kernels.

    Args:
        folder: with `1/model.onnx` and `model.toml`.
        engine: "tensorrt" or "onnxruntime".
        plan_cache: the daemon's.

    Raises:
        EngineLoadError: it cannot be loaded.
        ConfigError: its model file is wrong.
    """
    config = load_model_config(folder / "model.toml", {"engine": engine})
    path = folder / "1" / "model.onnx"
    rungs = config.batching.rungs
    options = plan_options(path, config, rungs)
    loaded: Engine
    if engine == "tensorrt":
        # Not above: this module serves CPU engines too.
        from engines.tensorrt.prepare import prepare

        loaded = prepare(path, options, plan_cache, name=folder.name)
    else:
        loaded = engines.open(path, contexts=_SLOTS + 1)
    return Subject(loaded, grid(loaded.inputs, rungs=rungs, axes=options.axes))


# -- the command ------------------------------------------------------------------

Figures = dict[str, Any]


class Measurement:
    """All figures of a model, cell by cell.

    Args:
        subject: what is measured.
        seconds: of one measurement.

    Raises:
        EngineError: there is not the memory.
    """

    def __init__(self, subject: Subject, seconds: float) -> None:
        engine = subject.engine
        self._subject = subject
        self._seconds = seconds
        self._context = engine.create_context()
        self._context.enter_thread()
        self._gaps: Gaps | None = None
        self._loop: BareLoop | None = None
        lanes = [engine.create_context() for _ in range(_SLOTS)]
        if engine.backend == "tensorrt":
            self._gaps = Gaps(lanes)
            self._loop = BareLoop(engine)
        self._feeder = Feeder(engine, lanes)

    def cell(self, sizes: Sizes) -> Iterator[Figures]:
        """The figures of a cell, as they come.

        Raises:
            EngineError: something of it cannot be run.
        """
        engine = self._subject.engine
        shapes = self._subject.shapes(sizes)
        named = {spec.name: s for spec, s in zip(engine.inputs, shapes, strict=True)}
        arrays = list(models.example(engine.inputs, named).values())
        bare = math.nan
        if self._loop is not None:
            figures = self._loop.measure(arrays, self._seconds)
            bare = sizes[0] / figures["graph_us"] * 1e6
            yield {"kind": "bare", "rows_per_s": bare, **figures}
        self._context.warm(shapes)
        outputs = self._context.execute(arrays, [None] * len(engine.outputs))
        cell = Cell(shapes, [array.shape for array in outputs])
        yield {"kind": "alone", "p50_us": alone(engine, self._context, cell, arrays)}
        self._feeder.load(cell, arrays)
        for slots in range(1, _SLOTS + 1):
            batches_per_s, cpu_us = self._feeder.run(slots, cell, self._seconds)
            found: Figures = {
                "kind": "slot",
                "slots": slots,
                "rows_per_s": batches_per_s * sizes[0],
                "cpu_us_per_batch": cpu_us,
            }
            if self._gaps is not None:
                found["of_bare"] = found["rows_per_s"] / bare
                self._gaps.begin()
                self._feeder.run(slots, cell, self._seconds / 2, Gaps.MOST)
                found["gap"] = self._gaps.end()
            yield found

    def close(self) -> None:
        """Ends all lanes."""
        self._feeder.close()
        self._context.close()
        if self._loop is not None:
            self._loop.close()


def _products(grid: Grid) -> Iterator[Sizes]:
    cells: list[Sizes] = [()]
    for sizes in grid.axes:
        cells = [(*cell, size) for cell in cells for size in sizes]
    yield from cells


def cell_of(text: str) -> Sizes:
    """Reads "32x16".

    Raises:
        ValueError: it is not of that form.
    """
    return tuple(int(part) for part in text.split("x"))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--cells",
        type=lambda text: [cell_of(part) for part in text.split(",")],
        required=True,
        help="such as 1x16,32x16",
    )
    parser.add_argument("--engine", default="tensorrt")
    parser.add_argument("--plan-cache", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.7, help="of a measurement")
    args = parser.parse_args()
    begun = time.perf_counter()
    subject = opened(args.model, args.engine, args.plan_cache)
    measurement = Measurement(subject, args.seconds)
    opened_s = round(time.perf_counter() - begun, 2)
    print(json.dumps({"kind": "opened", "seconds": opened_s}), flush=True)
    known = set(_products(subject.grid))
    failed = False
    for sizes in args.cells:
        if sizes not in known:
            print(json.dumps({"kind": "not in the grid", "cell": sizes}), flush=True)
            continue
        try:
            for figures in measurement.cell(sizes):
                print(json.dumps({"cell": sizes, **figures}), flush=True)
        except EngineError:
            traceback.print_exc()
            failed = True
    measurement.close()
    subject.engine.save_warm()
    subject.engine.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
