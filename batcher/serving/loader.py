"""From a model's file to a `Model` that can be served. Blocking: run it on a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import engines
from batcher.config import ModelConfig, load_model_config
from batcher.errors import ConfigError
from batcher.rpc.signature import ModelSignature, TensorSignature
from batcher.scheduling import Group
from batcher.serving.repository import ModelSource, check_name
from batcher.serving.shapes import ModelShapes
from batcher.serving.warmup import WarmUp, warm_up
from engines import Engine, EngineLoadError, FakeEngine, FakeOptions, TensorSpec

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH: Final = 64
_ROWS_PER_BATCH: Final = 64  # default of max_request_rows, in largest batches

_PLATFORMS: Final = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that a `Model` is made of."""

    signature: ModelSignature
    config: ModelConfig
    engine: Engine
    shapes: ModelShapes
    rungs: tuple[int, ...]
    warm_up: WarmUp


def load(source: ModelSource, overrides: Mapping[str, Any]) -> LoadedModel:
    """Loads, checks and warms up one model version.

    Args:
        source: where it is.
        overrides: values that win over its `model.toml`.

    Raises:
        ConfigError: its configuration is wrong, or does not fit the model.
        EngineLoadError: the engine cannot load it.
    """
    check_name(source)
    config = load_model_config(source.config, overrides)
    where = str(source.config or source.path)
    engine = _open(source, config)
    try:
        return _prepared(source, config, engine, where)
    except BaseException:
        engine.close()
        raise


def _prepared(
    source: ModelSource, config: ModelConfig, engine: Engine, where: str
) -> LoadedModel:
    trusted = config.batch_axis == "first"
    obstacle = batch_obstacle(engine.inputs, engine.outputs, names=not trusted)
    if config.batch_axis == "none":
        obstacle = 'batch_axis is "none"'
    _check_wanted(where, config, obstacle)
    batched = obstacle is None
    warmed = WarmUp()
    disproved = False
    for _ in range(2):
        rungs = _rungs(config, batched)
        try:
            shapes = ModelShapes(engine.inputs, engine.outputs, batched, config.axes)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        try:
            warmed = warm_up(engine, shapes, rungs)
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
        utf8_strings=engine.backend == "onnxruntime",
    )
    return LoadedModel(signature, config, engine, shapes, rungs, warmed)


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


def _rungs(config: ModelConfig, batched: bool) -> tuple[int, ...]:
    if not batched:
        return (1,)
    if config.batching.rungs:
        return config.batching.rungs
    # Without graphs or profiles every size is worth running: nothing is padded.
    return tuple(range(1, (config.max_batch or DEFAULT_MAX_BATCH) + 1))


def _open(source: ModelSource, config: ModelConfig) -> Engine:
    if config.fake is not None:
        fake = config.fake
        return FakeEngine(
            FakeOptions(
                inputs=_fake_tensors(fake.inputs),
                outputs=_fake_tensors(fake.outputs),
                base_ms=fake.base_ms,
                per_row_us=fake.per_row_us,
                sleep=fake.sleep,
                fail_value=fake.fail_value,
            )
        )
    if config.engine == "tensorrt":
        raise EngineLoadError("the tensorrt engine is not built yet; use onnxruntime")
    if source.path is None:
        raise ConfigError(
            f"{source.config}: there is no <version>/model.onnx beside it, and the "
            'engine is not "fake"'
        )
    return engines.open(source.path, contexts=config.slots.count)


def _fake_tensors(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for t in tensors:
        if t.dtype not in engines.DTYPES:
            raise ConfigError(f"fake tensor {t.name!r}: no datatype {t.dtype!r}")
        axes = (None if size < 0 else size for size in t.shape)
        specs.append(TensorSpec(t.name, t.dtype, ("batch", *axes)))
    return tuple(specs)


def _signatures(specs: Sequence[TensorSpec]) -> tuple[TensorSignature, ...]:
    return tuple(TensorSignature(s.name, s.dtype, s.shape) for s in specs)


def seed_costs(
    warmed: WarmUp,
    group: Callable[[Any, tuple[int, ...]], Group],
    rungs: tuple[int, ...],
) -> list[Group]:
    """Puts the run times of the warm-up into the groups they are of."""
    groups = []
    for tails, rung, run_ns in warmed.costs:
        known = group(tails, rungs)
        known.cost.record(rung, run_ns)
        groups.append(known)
    return groups
