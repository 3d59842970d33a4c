"""From a model's file to an engine that may be served: built, checked, loaded.

A plan comes from the cache, or is built; a new one is compared with ONNX Runtime before
anybody is served from it, and what the comparison gave is kept beside it, so that the
next start need not repeat it.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from engines import cuda
from engines.errors import EngineLoadError
from engines.report import Logged, Report, unheard
from engines.tensorrt import checks
from engines.tensorrt.build import BuildStep, build
from engines.tensorrt.cache import CachedPlan, PlanCache, check_user_plan, plan_key
from engines.tensorrt.engine import TensorRTEngine
from engines.tensorrt.facts import Gpu, gpu_fact
from engines.tensorrt.modelfile import described, recall, remember
from engines.tensorrt.module import FlavourChoice, find
from engines.tensorrt.plans import read_sidecar
from engines.tensorrt.profiles import grid, make_profiles
from engines.tensorrt.verify import (
    CHECKED,
    MadePlan,
    PlanOptions,
    References,
    changed_model,
    compare_with_model,
)
from engines.tensors import TensorSpec

log = logging.getLogger(__name__)

_TENSORS: Final = "tensors"  # of a sidecar's notes


class PlanRefused(EngineLoadError):
    """A plan computes something else than its model; the text has the numbers."""


def gpu_of(device: int) -> Gpu:
    """The GPU with this index.

    Raises:
        EngineLoadError: there is none; says what is wrong.
    """
    fact = gpu_fact()
    for gpu in fact.gpus:
        if gpu.index == device:
            return gpu
    if fact.gpus:
        raise EngineLoadError(f"there is no GPU {device}: {fact.detail}, from 0")
    raise EngineLoadError(f"no GPU to run on: {fact.detail}")


def make_plan(
    path: Path,
    options: PlanOptions,
    cache: PlanCache,
    *,
    gpu: Gpu | None,
    report: Report = unheard,
    cancelled: Callable[[], bool] | None = None,
) -> MadePlan:
    """Finds the plan of an ONNX file in the cache, or builds it. Runs nothing.

    Args:
        path: the `.onnx` file.
        options: what to make of it.
        cache: where plans are kept.
        gpu: where it will run; None where a flavour builds without a GPU.
        report: told how far it is ("reading", "building", "waiting").
        cancelled: asked now and then whether to give up.

    Raises:
        EngineLoadError: it cannot be built; the text names the cause and the way out.
        BuildCancelled: `cancelled` said so.
    """
    tensorrt = find(options.build.flavour)
    began_ns = time.time_ns()
    file = recall(path, cache.folder)
    if file is None:
        from engines.tensorrt import onnxfile

        file = onnxfile.read(path)
    cells = grid(file.inputs, rungs=options.rungs, axes=options.axes)
    how = options.build
    if not how.profiles and file.is_dynamic:
        how = replace(how, profiles=make_profiles(cells))
    if how.timing_cache is None and tensorrt.timing_cache:
        place = f"{tensorrt} {gpu.name if gpu else ''}"
        stem = hashlib.sha256(place.encode()).hexdigest()
        how = replace(how, timing_cache=cache.folder / f"{stem}.timing")
    changes: dict[str, Any] = {}
    if options.input_u8:
        changes["input_u8"] = {n: u.to_json() for n, u in options.input_u8.items()}
    key = plan_key(
        file,
        how,
        tensorrt,
        gpu=gpu.name if gpu else "",
        compute_capability=gpu.compute_capability if gpu else "",
        precision=options.precision or "",
        changes=changes,
        progress=lambda done, total: report("reading", done, total),
    )

    if not file.sha256:
        remember(file, key.model_sha256, cache.folder, began_ns)
    references: list[References] = []

    def build_now() -> bytes:
        if options.check and gpu is not None:
            references.append(References(file, cells, options))
        with tempfile.TemporaryDirectory(prefix="batcher-build-") as folder:
            source = changed_model(file, options, Path(folder))
            return build(
                source,
                how,
                lambda step: _tell(report, step),
                cancelled=cancelled,
                on_thread=None if gpu is None else lambda: cuda.use(gpu.index),
            )

    def waiting() -> None:
        report("waiting", 0, 0)

    try:
        cached = cache.get(
            key, build_now, model=str(path), on_wait=waiting, cancelled=cancelled
        )
    except BaseException:
        for begun in references:
            begun.stop()
        raise
    made = MadePlan(
        cached=cached,
        key=key,
        file=file,
        grid=cells,
        tensorrt=tensorrt,
        options=options,
        references=references[0] if references else None,
    )
    if _TENSORS not in cached.sidecar.notes:
        notes = {
            _TENSORS: [described(spec) for spec in made.specs],
            "rungs": list(options.rungs),
        }
        made = replace(made, cached=_noted(cache, made, notes))
    return made


def open_checked(
    made: MadePlan,
    cache: PlanCache,
    *,
    name: str,
    device: int = 0,
    graphs: bool = True,
    graph_bytes: int | None = None,
    report: Report = unheard,
) -> TensorRTEngine:
    """Loads a plan on its GPU, and compares it with its model if that was not done.

    Args:
        made: by `make_plan`.
        cache: where the numbers are noted.
        name: of the model, for messages.
        device: index of the GPU.
        graphs, graph_bytes: see `TensorRTEngine`.
        report: told how far it is ("checking").

    Raises:
        EngineLoadError: it cannot be loaded, or computes something else than the model
            (the text has the numbers); such a plan is out of the cache.
    """
    try:
        engine = TensorRTEngine(
            made.cached.plan,
            name=name,
            device=device,
            flavour=made.tensorrt.flavour,
            specs=made.specs,
            kernel_cache=made.cached.kernel_cache,
            graphs=graphs,
            graph_bytes=graph_bytes,
        )
    except BaseException:
        if made.references is not None:
            made.references.stop()
        raise
    if not made.options.check or made.checked:
        return engine
    try:
        result = compare_with_model(made, engine, report)
        cache.annotate(made.key, {CHECKED: result.to_json()})
    except BaseException:
        engine.close()
        raise
    if result.passed:
        log.info(
            "model %r: the plan agrees with ONNX Runtime on %d samples (%s): %s",
            name,
            result.samples,
            result.precision,
            _in_short(result),
        )
        return engine
    engine.close()
    cache.forget(made.key)
    raise PlanRefused(
        f"{made.file.path}: the plan built by {made.tensorrt} does not compute what "
        f"the model does, and is refused; build it in a higher precision, or give "
        f"samples of real inputs if random ones are no fair test\n{result.table()}"
    )


def prepare(
    path: Path,
    options: PlanOptions,
    cache: Path,
    *,
    name: str,
    device: int = 0,
    graphs: bool = True,
    graph_bytes: int | None = None,
    max_bytes: int | None = None,
    report: Report | None = None,
) -> TensorRTEngine:
    """An engine that may be served, of an ONNX file; can be sent to another process.

    A cached plan that TensorRT does not load is built again.

    Args:
        path: the `.onnx` file.
        options: what to make of it.
        cache: the folder where plans are kept.
        name: of the model, for messages.
        device: index of the GPU.
        graphs, graph_bytes: see `TensorRTEngine`.
        max_bytes: how large the folder may grow; None for no limit.
        report: told how far it is; by default it is logged every few seconds.

    Raises:
        EngineLoadError: see `make_plan` and `open_checked`.
    """
    told = report or Logged(name)
    plans = PlanCache(cache, max_bytes=max_bytes)
    gpu = gpu_of(device)
    for again in (True, False):
        made = make_plan(path, options, plans, gpu=gpu, report=told)
        try:
            return open_checked(
                made,
                plans,
                name=name,
                device=device,
                graphs=graphs,
                graph_bytes=graph_bytes,
                report=told,
            )
        except PlanRefused:
            raise
        except EngineLoadError as error:
            if made.cached.built or not again:
                raise
            log.warning("model %r: the cached plan is built again: %s", name, error)
            plans.forget(made.key)
    raise AssertionError("not reached")


def open_plan(
    path: Path,
    *,
    name: str,
    device: int = 0,
    flavour: FlavourChoice = "auto",
    graphs: bool = True,
    graph_bytes: int | None = None,
) -> TensorRTEngine:
    """An engine of a plan that a user gave; can be sent to another process.

    Raises:
        EngineLoadError: it cannot run here: why, and what to do.
    """
    tensorrt = find(flavour)
    gpu = gpu_of(device)
    plan = check_user_plan(
        path, tensorrt, gpu=gpu.name, compute_capability=gpu.compute_capability
    )
    return TensorRTEngine(
        plan,
        name=name,
        device=device,
        flavour=tensorrt.flavour,
        specs=plan_specs(path),
        kernel_cache=path.with_suffix(".kernels"),
        graphs=graphs,
        graph_bytes=graph_bytes,
    )


def plan_specs(path: Path) -> tuple[TensorSpec, ...]:
    """Names of a plan's tensors and axes, where its sidecar has them; else nothing."""
    sidecar = read_sidecar(path)
    notes = sidecar.notes if sidecar is not None else {}
    try:
        return tuple(
            TensorSpec(t["name"], t["dtype"], tuple(t["shape"]))
            for t in notes.get(_TENSORS, ())
        )
    except (KeyError, TypeError):
        return ()


def plan_rungs(path: Path) -> tuple[int, ...]:
    """The batch sizes that a plan was built for, where its sidecar has them."""
    sidecar = read_sidecar(path)
    rungs = sidecar.notes.get("rungs") if sidecar is not None else None
    if not isinstance(rungs, list):
        return ()
    return tuple(r for r in rungs if isinstance(r, int))


def _noted(cache: PlanCache, made: MadePlan, notes: dict[str, Any]) -> CachedPlan:
    cache.annotate(made.key, notes)
    sidecar = made.cached.sidecar
    return replace(
        made.cached, sidecar=replace(sidecar, notes={**sidecar.notes, **notes})
    )


def _tell(report: Report, step: BuildStep) -> None:
    if step.depth <= 1:
        report("building", step.done, step.total)


def _in_short(result: checks.Comparison) -> str:
    return "; ".join(f"{o.name}: cosine {o.cosine:.6f}" for o in result.outputs)


__all__ = [
    "Logged",
    "MadePlan",
    "PlanOptions",
    "PlanRefused",
    "Report",
    "gpu_of",
    "make_plan",
    "open_checked",
    "open_plan",
    "plan_rungs",
    "prepare",
]
