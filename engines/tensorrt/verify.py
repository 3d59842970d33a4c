"""A plan and the model it was made from: what is built, and whether both agree."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines.base import Array
from engines.report import Report, unheard
from engines.tensorrt import checks
from engines.tensorrt.cache import CachedPlan, PlanKey
from engines.tensorrt.engine import TensorRTEngine
from engines.tensorrt.modelfile import OnnxFile
from engines.tensorrt.module import TensorRT
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.profiles import AxisSizes, Grid
from engines.tensors import TensorSpec

if TYPE_CHECKING:  # these import onnx, which a start that finds its plan does without
    from engines.tensorrt.precision import ModelPrecision
    from engines.tensorrt.uint8 import Normalization

CHECKED: Final = "check"
"""Where a sidecar's notes have the numbers of the comparison."""

Outputs = Mapping[str, Array]  # inputs too: arrays by the names of tensors

_SPARED: Final = 2  # cores, for the build and what TensorRT does when it loads a plan

_AHEAD_BYTES: Final = 512 << 20
"""Samples and answers that may wait for the plan to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is made of an ONNX file.

    Attributes:
        rungs: the batch sizes that will be run; empty for a model that is not batched.
        axes: the sizes of all other dynamic axes.
        build: how to build; its profiles are made from `rungs` and `axes` unless given.
        precision: what an FP32 model is converted to; None takes it as it is.
        input_u8: inputs that become UINT8, with their normalisation; the name "" stands
            for the only input that can be an image.
        samples: an `.npz` file to compare on; None for random values.
        check: whether a new plan is compared with ONNX Runtime.
    """

    rungs: tuple[int, ...] = ()
    axes: tuple[AxisSizes, ...] = ()
    build: BuildOptions = field(default_factory=BuildOptions)
    precision: ModelPrecision | None = None
    input_u8: Mapping[str, Normalization] = field(default_factory=dict)
    samples: Path | None = None
    check: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePlan:
    """A plan, and what it was made from.

    Attributes:
        cached: the plan with its sidecar.
        key: in the cache.
        file: the ONNX file.
        grid: the shapes that it is for.
        tensorrt: what built it.
        options: as they were given.
        references: what the plan is to be compared with, if that has begun.
    """

    cached: CachedPlan
    key: PlanKey
    file: OnnxFile
    grid: Grid
    tensorrt: TensorRT
    options: PlanOptions
    references: References | None = None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Names of all tensors, and of their axes."""
        return (*self.file.inputs, *self.file.outputs)

    @property
    def checked(self) -> bool:
        """Whether it was compared with its model, and passed."""
        return bool(self.cached.sidecar.notes.get(CHECKED, {}).get("passed"))


class References:
    """What ONNX Runtime answers on the samples, worked out on a thread of its own.

    So that it can be done while the plan is built: every rung, at the smallest and the
    largest size of all other axes; or the samples given.

    Args:
        file: the model.
        grid: the shapes that will be run.
        options: how the model is changed, and where samples are.
    """

    def __init__(self, file: OnnxFile, grid: Grid, options: PlanOptions) -> None:
        self.total = 0
        self._file = file
        self._corners = grid.corners()
        self._options = options
        self._ready: deque[tuple[Outputs, Outputs]] = deque()
        self._bytes = 0
        self._over = False
        self._stop = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._expected: Outputs = {}
        thread = threading.Thread(target=self._run, name="references", daemon=True)
        thread.start()

    def stop(self) -> None:
        """Ends it after the sample under way."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    def samples(self) -> Iterator[Outputs]:
        """The samples in order; `expected` is of the one given last.

        Raises:
            EngineLoadError: ONNX Runtime cannot load the model, or the samples do not
                fit.
            EngineRunError: a sample cannot be run.
        """
        while True:
            with self._changed:
                while not self._ready and not self._over:
                    self._changed.wait()
                if not self._ready:
                    if self._error is not None:
                        raise self._error
                    return
                sample, self._expected = self._ready.popleft()
                self._bytes -= _size(sample) + _size(self._expected)
                self._changed.notify_all()
            yield sample

    def expected(self, sample: Outputs) -> Outputs:
        """The outputs for the sample that was given last."""
        return self._expected

    def _run(self) -> None:
        try:
            self._answer_all()
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _answer_all(self) -> None:
        # Here, as it takes long to import, and is not needed where a plan was checked.
        from engines.onnxruntime import OnnxRuntimeEngine
        from engines.tensorrt.samples import (
            load_samples,
            random_samples,
            vocabulary_sizes,
        )

        options = self._options
        whole = replace(options, precision=None)
        with tempfile.TemporaryDirectory(prefix="batcher-check-") as folder:
            path = changed_model(self._file, whole, Path(folder))
            model = OnnxRuntimeEngine(path, spared=_SPARED)
            samples: Iterable[Outputs]
            if options.samples is not None:
                given = load_samples(options.samples, model.inputs)
                samples, self.total = given, len(given)
            else:
                samples = random_samples(
                    model.inputs,
                    self._corners,
                    vocabularies=vocabulary_sizes(self._file.model),
                )
                self.total = len(self._corners)
            for sample in samples:
                outputs = model.run(sample)
                with self._changed:
                    while self._bytes > _AHEAD_BYTES and not self._stop:
                        self._changed.wait()
                    if self._stop:
                        return
                    self._ready.append((sample, outputs))
                    self._bytes += _size(sample) + _size(outputs)
                    self._changed.notify_all()


def compare_with_model(
    made: MadePlan, engine: TensorRTEngine, report: Report = unheard
) -> checks.Comparison:
    """Runs a plan on the samples that ONNX Runtime has answered, and compares.

    Raises:
        EngineLoadError, EngineRunError: see `References`; or the plan does not run.
    """
    from engines.tensorrt.precision import lowest_precision

    options = made.options
    precision = lowest_precision(made.file.model)
    if options.precision is not None and options.precision != "fp32":
        precision = options.precision
    references = made.references or References(made.file, made.grid, options)
    try:
        lane = engine.create_context()
    except BaseException:
        references.stop()
        raise
    try:
        names = [spec.name for spec in engine.outputs]

        def candidate(sample: Outputs) -> Outputs:
            arrays = [sample[spec.name] for spec in engine.inputs]
            results = lane.execute(arrays, [None] * len(names))
            return dict(zip(names, results, strict=True))

        return checks.check(
            references.expected,
            candidate,
            references.samples(),
            precision,
            progress=lambda done: report("checking", done, references.total),
        )
    finally:
        references.stop()
        lane.close()


def _size(arrays: Outputs) -> int:
    return sum(array.nbytes for array in arrays.values())


def changed_model(file: OnnxFile, options: PlanOptions, folder: Path) -> Path:
    """The model as it is built, or as it is compared: written where it is changed.

    Args:
        file: the model as it was given.
        options: what to do to it.
        folder: for what is written; keep it while the model is in use.

    Raises:
        EngineLoadError: it cannot be changed like that.
    """
    from engines.tensorrt import onnxfile, uint8
    from engines.tensorrt.precision import convert_file

    for position, (name, normalization) in enumerate(options.input_u8.items()):
        model = uint8.bake(file, normalization, inputs=(name,) if name else ())
        target = folder / f"u8-{position}" / "model.onnx"
        onnxfile.save_whole(model, target)
        file = onnxfile.read(target)
    if options.precision is None:
        return file.path
    return convert_file(file, options.precision, folder / "converted" / "model.onnx")
