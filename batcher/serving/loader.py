"""From a model's file to a `Model` that can be served. Blocking: run it on a thread."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batcher.config import ModelConfig, load_model_config
from batcher.errors import ConfigError
from batcher.rpc.signature import ModelSignature, TensorSignature
from batcher.scheduling import Group
from batcher.serving.host import Host
from batcher.serving.opening import DEFAULT_MAX_BATCH, Opener, opener
from batcher.serving.progress import loading
from batcher.serving.readying import Tails, make_ready, rung_ladder
from batcher.serving.repository import ModelSource, check_name
from batcher.serving.shapes import ModelShapes
from batcher.serving.warmup import WarmUp, warm_up
from engines import Engine, EngineLoadError, Slot, TensorSpec
from engines.costs import CellCost
from engines.report import Report

log = logging.getLogger(__name__)

_ROWS_PER_BATCH: Final = 64  # default of max_request_rows, in largest batches

_PLATFORMS: Final = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that a `Model` is made of.

    Attributes:
        signature: what callers see.
        config: the model's file.
        engines: one per device.
        slots: of all engines.
        shapes: the shape rules.
        rungs: batch sizes worth running.
        warm: per row shapes of a group, the rungs that may be run; empty where any
            may.
        cold: what is to be warmed while the model is served: (row shapes, rung).
        warm_up: what the first runs have shown.
        costs: run times of warm cells.
    """

    signature: ModelSignature
    config: ModelConfig
    engines: tuple[Engine, ...]
    slots: tuple[Slot, ...]
    shapes: ModelShapes
    rungs: tuple[int, ...]
    warm: dict[Tails, tuple[int, ...]]
    cold: tuple[tuple[Tails, int], ...]
    warm_up: WarmUp
    costs: tuple[CellCost, ...] = ()


def load(
    source: ModelSource, overrides: Mapping[str, Any], host: Host | None = None
) -> LoadedModel:
    """Loads, checks and warms up one model version.

    Args:
        source: where it is.
        overrides: values that win over its `model.toml`.
        host: what the daemon gives; the defaults if None.

    Raises:
        ConfigError: its configuration is wrong, or does not fit the model.
        EngineLoadError: the engine cannot load it.
    """
    check_name(source)
    config = load_model_config(source.config, overrides)
    where = str(source.config or source.place)
    host = host or Host()
    with loading(source.name, host.bar) as report:
        model = opener(source, config, host)
        return _prepared(source, config, model, where, report)


def _prepared(
    source: ModelSource,
    config: ModelConfig,
    model: Opener,
    where: str,
    report: Report,
) -> LoadedModel:
    opened: list[Engine] = []
    try:
        return _checked(source, config, model, where, report, opened)
    except BaseException:
        for engine in opened:
            engine.close()
        raise


def _checked(
    source: ModelSource,
    config: ModelConfig,
    model: Opener,
    where: str,
    report: Report,
    opened: list[Engine],
) -> LoadedModel:
    """Loads the model; `opened` is kept up to date with what must be closed."""
    trusted = config.batch_axis == "first"
    obstacle = obstacle_of(config, model.inputs, model.outputs)
    _check_wanted(where, config, obstacle)
    batched = obstacle is None
    disproved = False
    clock = [time.monotonic()]
    while True:
        rungs = _rungs(where, config, batched, model)
        opened[:] = model.open(rungs if batched else (), report)
        engine = opened[0]
        clock[1:] = [time.monotonic()]
        try:
            shapes = ModelShapes(engine.inputs, engine.outputs, batched, config.axes)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if engine.warmed_cells_only:
            _check_bounded(where, shapes)
        context = engine.create_context()
        try:
            warmed = warm_up(engine, context, shapes, rungs, report)
        except MemoryError as error:
            raise ConfigError(
                f"{where}: the memory does not hold a batch of {rungs[-1]} rows of the "
                f"largest shapes ({error}): lower max_batch or the buckets"
            ) from None
        if warmed.obstacle is None or not batched or trusted:
            break
        # The file promised a batch axis, the run did not keep it.
        obstacle = warmed.obstacle
        _check_wanted(where, config, obstacle)
        batched, disproved = False, True
        context.close()
        model.reopen(opened)
    if engine.warmed_cells_only and warmed.failure is not None:
        raise EngineLoadError(f"{where}: the plan does not run: {warmed.failure}")
    if obstacle is not None:
        # A surprise only where the file had promised a batch axis.
        level = logging.WARNING if disproved else logging.INFO
        text = "model %r is served without batching: %s"
        if disproved:
            text += ' (if you know better: batch_axis = "first")'
        log.log(level, text, source.name, obstacle)
    if trusted and warmed.obstacle is not None:
        warmed.warnings.append(f'{warmed.obstacle}, but batch_axis is "first"')
    if warmed.failure is not None:
        text = "model %r: made-up input does not run (%s): nothing is warmed"
        if batched:
            text += ", and whether rows depend on each other is not known"
        log.warning(text, source.name, warmed.failure)
    shapes.predict_outputs = warmed.predicted
    for warning in warmed.warnings:
        log.warning("model %r: %s", source.name, warning)
    largest = rungs[-1]
    if config.batching.max_queue < largest:
        log.warning(
            "model %r: batching.max_queue = %d keeps batches of max_batch = %d rows "
            "from filling with requests of one row",
            source.name,
            config.batching.max_queue,
            largest,
        )
    signature = ModelSignature(
        name=source.name,
        version=source.version,
        platform=_PLATFORMS.get(engine.backend, engine.backend),
        inputs=_signatures(engine.inputs),
        outputs=_signatures(engine.outputs),
        batched=batched,
        max_batch=largest,
        max_rows=(config.batching.max_request_rows or largest * _ROWS_PER_BATCH)
        if batched
        else 1,
        utf8_strings=opened[0].backend == "onnxruntime",
    )
    clock += [time.monotonic()]
    ready = make_ready(
        f"{source.name}/{source.version}",
        opened,
        context,
        shapes,
        rungs,
        warmed,
        per_engine=model.slots,
        report=report,
    )
    clock += [time.monotonic()]
    log.debug(
        "model %r: opened in %.2f s, first runs in %.2f s, slots in %.2f s",
        source.name,
        *(b - a for a, b in itertools.pairwise(clock)),
    )
    return LoadedModel(
        signature,
        config,
        tuple(opened),
        ready.slots,
        shapes,
        rungs,
        ready.warm,
        ready.cold,
        warmed,
        ready.costs,
    )


def obstacle_of(
    config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> str | None:
    """Why a model cannot batch, by its configuration or its file; None when it can."""
    if config.batch_axis == "none":
        return 'batch_axis is "none"'
    return batch_obstacle(inputs, outputs, names=config.batch_axis != "first")


def batch_obstacle(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, names: bool = True
) -> str | None:
    """Why axis 0 cannot be the batch of this model; None when it can.

    It is when axis 0 of every input and output is dynamic, and the inputs do not call
    it different names. (What the outputs call it is the exporter's whim: a run shows.)

    Args:
        inputs, outputs: of the engine.
        names: whether names of axes count.
    """
    firsts: dict[str, str] = {}
    for kind, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            if not spec.shape:
                return f"{kind} {spec.name!r} is a scalar"
            first = spec.shape[0]
            if isinstance(first, int):
                return f"the first axis of {kind} {spec.name!r} is fixed at {first}"
            if kind == "input" and first is not None:
                firsts[first] = spec.name
    if not inputs:
        return "it has no inputs"
    if not names:
        return None
    if len(firsts) > 1:
        (a, x), (b, y) = list(firsts.items())[:2]
        return f"the first axis is {a!r} in input {x!r} but {b!r} in {y!r}"
    batch = next(iter(firsts), None)
    inner = {a for spec in inputs for a in spec.shape[1:] if isinstance(a, str)}
    if batch is not None and batch in inner:
        return f"axis {batch!r} is the first of one input and an inner one of another"
    for spec in outputs:
        if spec.shape[0] in inner:
            return f"the first axis of output {spec.name!r} is {spec.shape[0]!r}"
        if batch is not None and batch in spec.shape[1:]:
            return f"output {spec.name!r} has the batch on another axis too"
    return None


def _check_bounded(where: str, shapes: ModelShapes) -> None:
    """Refuses an axis of which any size may come, where all sizes must be known."""
    governed = {place for rule in shapes.rules for place in rule.places}
    first = 1 if shapes.batched else 0
    for position, spec in enumerate(shapes.inputs):
        for axis, size in enumerate(spec.shape):
            if axis >= first and not isinstance(size, int):
                if (position, axis) in governed:
                    continue
                called = f" ({size!r})" if size else ""
                table = size if size and size.isidentifier() else "NAME"
                raise ConfigError(
                    f"{where}: axis {axis}{called} of input {spec.name!r} may have any "
                    "size, and only sizes that were warmed can be run; add to "
                    f"model.toml: [axes.{table}] / buckets = [32, 64, 128] / "
                    f"inputs = {{ {spec.name} = {axis} }} (`sizes` in place of "
                    "`buckets` where padding is not allowed)"
                )


def _check_wanted(where: str, config: ModelConfig, obstacle: str | None) -> None:
    if obstacle is None:
        return
    wanted = []
    if config.max_batch > 1:
        wanted.append(f"max_batch = {config.max_batch}")
    if config.batching.rungs and config.batching.rungs != (1,):
        wanted.append("batching.rungs")
    if wanted:
        raise ConfigError(
            f"{where}: {wanted[0]}, but the model cannot batch: {obstacle}"
        )


def _rungs(
    where: str, config: ModelConfig, batched: bool, model: Opener
) -> tuple[int, ...]:
    if not batched:
        return (1,)
    largest = config.max_batch or (config.batching.rungs or (0,))[-1]
    if model.max_rows and largest > model.max_rows:
        raise ConfigError(
            f"{where}: batches of {largest} rows are asked for, but the plan's "
            f"profiles end at {model.max_rows}; lower max_batch, or build it again: "
            f"batcher build model.onnx --max-batch {largest}"
        )
    if config.batching.rungs:
        return config.batching.rungs
    if not config.max_batch and model.rungs:
        return model.rungs
    most = config.max_batch or model.max_rows or DEFAULT_MAX_BATCH
    if model.every_size:
        # Without graphs or profiles every size is worth running: nothing is padded.
        return tuple(range(1, most + 1))
    return rung_ladder(model.least_rows, most)


def _signatures(specs: Sequence[TensorSpec]) -> tuple[TensorSignature, ...]:
    return tuple(TensorSignature(s.name, s.dtype, s.shape) for s in specs)


def seed_costs(loaded: LoadedModel, group: Callable[[Tails], Group]) -> list[Group]:
    """Puts the run times of the warm-up into the groups they are of.

    Where runs beside others were measured, those with all slots busy count: a batch is
    late more often than early when much waits.
    """
    busy = max((cost.busy for cost in loaded.costs), default=0)
    beside = {c.inputs: c.device_ns + c.host_ns for c in loaded.costs if c.busy == busy}
    groups = []
    for tails, rung, run_ns in loaded.warm_up.costs:
        inputs = tuple(map(tuple, loaded.shapes.group(tails).cell(rung).inputs))
        known = group(tails)
        known.cost.record(rung, beside.get(inputs, run_ns))
        groups.append(known)
    return groups
