"""Builds plans ahead of the daemon's start, as it would: configured, compared, written.

How a plan is built and compared is in `engines.tensorrt`; the command is in
`batcher.cli_build`.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from batcher.errors import ConfigError
from batcher.serving.describe import ladder
from batcher.serving.loader import obstacle_of
from batcher.serving.opening import DEFAULT_MAX_BATCH, plan_options
from batcher.serving.readying import rung_ladder
from engines import EngineLoadError
from engines.tensorrt.facts import Gpu, gpu_fact
from engines.tensorrt.module import TensorRT, find

if TYPE_CHECKING:  # what reads ONNX is imported when there is a model to read
    from batcher.config import ModelConfig
    from engines.report import Report
    from engines.tensorrt.checks import Comparison
    from engines.tensorrt.plans import Sidecar
    from engines.tensorrt.verify import MadePlan, PlanOptions

log = logging.getLogger(__name__)

_MIB: Final = 1 << 20


class Result(NamedTuple):
    """What came of a build.

    Attributes:
        plan: the file that was written; None if the plan was refused.
        rungs: batch sizes that it is for; empty if it is not batched.
        sidecar: what is known of it.
        comparison: with its model; None if they were not compared.
        unchecked: why they were not.
    """

    plan: Path | None
    rungs: tuple[int, ...]
    sidecar: Sidecar
    comparison: Comparison | None
    unchecked: str

    @property
    def passed(self) -> bool:
        """Whether there is a plan, and nothing speaks against it."""
        return self.plan is not None

    def to_json(self, config: Path | None) -> dict[str, Any]:
        """All of it under stable keys; `config` is the model's file that was read."""
        known = self.sidecar
        return {
            "plan": None if self.plan is None else str(self.plan),
            "plan_bytes": known.plan_bytes,
            "plan_sha256": known.plan_sha256,
            "model": known.model,
            "model_sha256": known.model_sha256,
            "config": None if config is None else str(config),
            "flavour": known.flavour,
            "version": known.version,
            "gpu": known.gpu,
            "compute_capability": known.compute_capability,
            "precision": known.precision,
            "rungs": list(self.rungs),
            "settings": known.settings,
            "build_seconds": known.build_seconds,
            "unchecked": self.unchecked,
            "comparison": self.comparison and self.comparison.to_json(),
        }

    def __str__(self) -> str:
        known = self.sidecar
        lines = []
        if self.comparison is not None:
            lines += [self.comparison.table(), ""]
        size = f"{known.plan_bytes / _MIB:.1f} MiB"
        by = f"{known.flavour} {known.version}"
        where = f"on {known.gpu}" if known.gpu else "without a GPU"
        text = f"{size}, built by {by} {where} in {known.build_seconds:.1f} s"
        lines.append(f"{self.plan or 'refused, and not written'}: {text}")
        if self.rungs:
            lines.append(f"batch sizes: {ladder(self.rungs)}")
        for number, profile in enumerate(known.settings["profiles"]):
            shapes = (
                f"{name} {low} to {profile['max'][name]}"
                for name, low in profile["min"].items()
            )
            lines.append(f"profile {number}: {'; '.join(shapes)}")
        if self.unchecked:
            lines.append(f"NOT compared with the model: {self.unchecked}")
        return "\n".join(lines)


def plan_wanted(
    model: Path, config: ModelConfig, plugin_folders: Sequence[Path] = ()
) -> PlanOptions:
    """What the daemon would make of a model with this configuration.

    Raises:
        ConfigError: the model cannot batch and is meant to, or there is nothing to
            build.
        EngineLoadError: it cannot be read.
    """
    from engines.tensorrt import onnxfile

    if config.fake is not None:
        raise ConfigError(f'{model}: there is nothing to build of engine = "fake"')
    file = onnxfile.read(model)
    obstacle = obstacle_of(config, file.inputs, file.outputs)
    rungs = config.batching.rungs
    if obstacle is None:
        rungs = rungs or rung_ladder(1, config.max_batch or DEFAULT_MAX_BATCH)
    elif config.max_batch > 1 or rungs not in ((), (1,)):
        raise ConfigError(
            f"{model}: batches of several rows are asked for (--max-batch, --rungs or "
            f"its model.toml), but the model cannot batch: {obstacle}"
        )
    else:
        rungs = ()
    made: PlanOptions = plan_options(model, config, rungs, plugin_folders)
    return made


def build_plan(
    model: Path,
    target: Path,
    options: PlanOptions,
    *,
    device: int | None = None,
    forced: bool = False,
    report: Report | None = None,
) -> Result:
    """Builds a plan, compares it where that is possible, and writes it if it passes.

    Args:
        model, target: the files.
        options: what to make of the model.
        device: index of the GPU, None for the first if there is any.
        forced: whether a comparison that cannot be made is an error.
        report: told how far it is.

    Raises:
        ConfigError: see `forced`.
        EngineError: it cannot be built, or not run.
        OSError: the plan cannot be written.
    """
    from engines.report import unheard
    from engines.tensorrt.cache import PlanCache
    from engines.tensorrt.plans import write_plan
    from engines.tensorrt.prepare import make_plan
    from engines.tensorrt.verify import CHECKED

    told = report or unheard
    tensorrt = find(options.build.flavour)
    gpu = _gpu(tensorrt, device)
    unchecked = _unchecked(options, gpu)
    if forced and unchecked:
        raise ConfigError(f"--check is not possible: {unchecked}")
    if options.build.timing_cache is not None and not tensorrt.timing_cache:
        log.warning("%s keeps no timings: --timing-cache has no effect", tensorrt)
    comparison = None
    options = dataclasses.replace(options, check=not unchecked)
    # A cache of its own: who asks for a build wants one, and its output elsewhere.
    with tempfile.TemporaryDirectory(prefix="batcher-plan-") as folder:
        made = make_plan(model, options, PlanCache(Path(folder)), gpu=gpu, report=told)
        if gpu is not None and not unchecked:
            comparison = _compared(made, gpu.index, told)
    notes = dict(made.cached.sidecar.notes)
    if comparison is not None:
        notes[CHECKED] = comparison.to_json()
    sidecar = dataclasses.replace(made.cached.sidecar, key="", notes=notes)
    refused = comparison is not None and not comparison.passed
    if not refused:
        write_plan(target, made.cached.plan, sidecar)
    written = None if refused else target
    return Result(written, options.rungs, sidecar, comparison, unchecked)


def _gpu(tensorrt: TensorRT, device: int | None) -> Gpu | None:
    """The GPU to build on, or None where there is none and none is needed.

    Raises:
        EngineLoadError: one is needed, or was asked for.
    """
    from engines.tensorrt.prepare import gpu_of

    if device is not None:
        return gpu_of(device)
    fact = gpu_fact()
    if fact.gpus:
        return fact.gpus[0]
    if tensorrt.flavour == "tensorrt":
        raise EngineLoadError(
            f"{tensorrt} builds on the GPU that will run the plan, and there is none: "
            f"{fact.detail}"
        )
    return None


def _unchecked(options: PlanOptions, gpu: Gpu | None) -> str:
    """Why the plan will not be compared; "" if it will."""
    from engines.tensorrt.options import target_name

    if not options.check:
        return "that is switched off"
    if gpu is None:
        return "that takes a GPU, and there is none (batcher doctor says more)"
    targets = {target_name(c) for c in options.build.compute_capabilities}
    if targets and not targets & {"CURRENT", target_name(gpu.compute_capability)}:
        return f"it is for other GPUs than this one ({gpu.name})"
    return ""


def _compared(made: MadePlan, device: int, report: Report) -> Comparison:
    from engines.tensorrt.engine import TensorRTEngine
    from engines.tensorrt.verify import compare_with_model

    engine = TensorRTEngine(
        made.cached.plan,
        name=made.file.path.name,
        device=device,
        flavour=made.tensorrt.flavour,
        specs=made.specs,
        graphs=False,
    )
    try:
        return compare_with_model(made, engine, report)
    finally:
        engine.close()
