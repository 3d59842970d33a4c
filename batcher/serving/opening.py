"""From a model's files and its configuration to the engines that run it.

An engine of TensorRT is built for the batches that will be run, so what a model takes
is read from its file first, and the engines are opened once the rungs are known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import engines
from batcher.config import ModelConfig
from batcher.errors import ConfigError
from batcher.serving.host import Host, isolated
from batcher.serving.repository import ModelSource
from engines import Engine, EngineLoadError, FakeEngine, FakeOptions, TensorSpec
from engines.report import Report

if TYPE_CHECKING:
    from engines.tensorrt.modelfile import OnnxFile

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH: Final = 64
_SLOTS_PER_GPU: Final = 2
"""Two lanes keep a GPU busy where one leaves gaps or small kernels: 32 x 16 tokens of
BERT-base run at 1.5 times the rate (measured on an H200)."""


class Opener(Protocol):
    """A model whose engines can be opened.

    Attributes:
        inputs, outputs: of the model.
        slots: how many there are per engine.
        max_rows: the most rows that its engines can be given; 0 for any number.
        least_rows: the fewest.
        rungs: the batch sizes it was made for; empty for any, or if not known.
        every_size: whether all batch sizes are as good as a few.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    slots: int
    max_rows: int
    least_rows: int
    rungs: tuple[int, ...]
    every_size: bool

    def open(self, rungs: tuple[int, ...], report: Report) -> list[Engine]:
        """Engines for these batch sizes (empty: not batched), one per device.

        Raises:
            EngineLoadError: they cannot be made.
        """
        ...

    def reopen(self, opened: list[Engine]) -> None:
        """Closes what must be opened anew for other batch sizes, out of `opened`."""
        ...


def opener(source: ModelSource, config: ModelConfig, host: Host) -> Opener:
    """How to open a model.

    Raises:
        ConfigError: its configuration does not fit its files.
        EngineLoadError: its file cannot be read.
    """
    if config.fake is not None:
        fake = partial(FakeEngine, _fake_options(config))
        return _Ready(host.engine(fake, source.name, config), config)
    if source.path is None and source.plan is None:
        raise ConfigError(
            f"{source.config}: there is no <version>/model.onnx or model.plan beside "
            'it, and the engine is not "fake"'
        )
    if config.engine == "onnxruntime" or (
        config.engine == "auto" and source.plan is None
    ):
        if source.path is None:
            raise ConfigError(
                f'{source.plan}: a plan runs on TensorRT only, and engine = "'
                f'{config.engine}"; put model.onnx beside it, or use engine = "auto"'
            )
        return _onnxruntime(source, config, host)
    return _tensorrt(source, config, host)


class _Ready:
    """A model whose engine takes any batch: it is open already."""

    max_rows = 0
    least_rows = 1
    rungs: tuple[int, ...] = ()

    def __init__(self, engine: Engine, config: ModelConfig) -> None:
        self._engine = engine
        self.every_size = not engine.warmed_cells_only
        self.inputs = engine.inputs
        self.outputs = engine.outputs
        self.slots = config.slots.count or 1
        if config.slots.devices:
            log.warning("slots.devices has no effect: the engine runs on the CPU")

    def open(self, rungs: tuple[int, ...], report: Report) -> list[Engine]:
        return [self._engine]

    def reopen(self, opened: list[Engine]) -> None:
        """It takes any batch."""


def _onnxruntime(source: ModelSource, config: ModelConfig, host: Host) -> Opener:
    assert source.path is not None  # seen to by `opener`
    recipe = partial(engines.open, source.path, contexts=config.slots.count or 1)
    return _Ready(host.engine(recipe, source.name, config), config)


def _tensorrt(source: ModelSource, config: ModelConfig, host: Host) -> Opener:
    from engines.tensorrt.prepare import gpu_of

    if source.plan is not None:
        try:
            return _Plan(source.plan, source.name, config, host)
        except EngineLoadError as error:
            if source.path is None:
                raise
            log.warning(
                "model %r: %s; using %s in its place", source.name, error, source.path
            )
    assert source.path is not None  # else there is a plan, or `opener` has refused
    try:
        for device in _devices(config):
            gpu_of(device)
        return _Onnx(host.onnx_file(source.path), source.name, config, host)
    except EngineLoadError as error:
        if config.engine == "tensorrt":
            raise
        log.warning(
            "model %r is served by ONNX Runtime on the CPU: %s", source.name, error
        )
        return _onnxruntime(source, config, host)


class _Plan:
    """A plan that the user gave: its profiles say what it takes."""

    every_size = False

    def __init__(self, plan: Path, name: str, config: ModelConfig, host: Host) -> None:
        from engines.tensorrt.prepare import open_plan, plan_rungs

        settings = config.tensorrt
        self.slots = config.slots.count or _SLOTS_PER_GPU

        def make(device: int) -> Engine:
            recipe = partial(
                open_plan,
                plan,
                name=name,
                device=device,
                flavour=settings.flavour,
                graphs=settings.graphs,
                graph_bytes=settings.graph_memory_mb << 20 or None,
            )
            return host.engine(recipe, name, config, gpu=True)

        self._engines = on_each(_devices(config), make)
        first = self._engines[0]
        self.inputs, self.outputs = first.inputs, first.outputs
        tensor = self.inputs[0].name if self.inputs else ""
        sizes = [
            (p.min[tensor][0], p.max[tensor][0])
            for p in first.profiles
            if tensor and p.min[tensor]
        ]
        self.least_rows = min((least for least, _ in sizes), default=1)
        self.max_rows = max((most for _, most in sizes), default=1)
        self.rungs = tuple(r for r in plan_rungs(plan) if r <= self.max_rows)

    def open(self, rungs: tuple[int, ...], report: Report) -> list[Engine]:
        return self._engines

    def reopen(self, opened: list[Engine]) -> None:
        """A plan is what it is."""


class _Onnx:
    """An ONNX file that a plan is built from."""

    max_rows = 0
    least_rows = 1
    rungs: tuple[int, ...] = ()
    every_size = False

    def __init__(
        self, file: OnnxFile, name: str, config: ModelConfig, host: Host
    ) -> None:
        self.inputs = file.inputs
        self.outputs = file.outputs
        self.slots = config.slots.count or _SLOTS_PER_GPU
        self._path = file.path
        self._name = name
        self._config = config
        self._host = host

    def open(self, rungs: tuple[int, ...], report: Report) -> list[Engine]:
        from engines.tensorrt.prepare import prepare

        settings = self._config.tensorrt
        host = self._host
        options = plan_options(self._path, self._config, rungs, host.plugin_folders)

        def make(device: int) -> Engine:
            recipe = partial(
                prepare,
                self._path,
                options,
                host.plans,
                name=self._name,
                device=device,
                graphs=settings.graphs,
                graph_bytes=settings.graph_memory_mb << 20 or None,
                max_bytes=host.plan_cache_mb << 20 or None,
                # Another process logs how far it is.
                report=None if isolated(self._config, gpu=True) else report,
            )
            return host.engine(recipe, self._name, self._config, gpu=True)

        return on_each(_devices(self._config), make)

    def reopen(self, opened: list[Engine]) -> None:
        for engine in opened:
            engine.close()
        opened.clear()


def plan_options(
    path: Path,
    config: ModelConfig,
    rungs: tuple[int, ...],
    plugin_folders: Sequence[Path] = (),
) -> Any:
    """What is made of a model's ONNX file (`engines.tensorrt.prepare.PlanOptions`).

    Args:
        path: the `.onnx` file; samples and plugins may lie beside it.
        config: the model's file.
        rungs: batch sizes; empty for a model that is not batched.
        plugin_folders: the allow-list of the daemon.

    Raises:
        EngineLoadError: a value of `[tensorrt]` cannot be read.
    """
    from engines.tensorrt.options import BuildOptions
    from engines.tensorrt.prepare import PlanOptions
    from engines.tensorrt.profiles import AxisSizes
    from engines.tensorrt.uint8 import parse

    settings = config.tensorrt
    return PlanOptions(
        rungs=rungs,
        axes=tuple(
            AxisSizes(name, axis.buckets or axis.sizes, axis.inputs)
            for name, axis in config.axes.items()
        ),
        build=BuildOptions(
            flavour=settings.flavour,
            optimization_level=settings.optimization_level,
            workspace_mb=settings.workspace_mb,
            tf32=settings.tf32,
            version_compatible=settings.version_compatible,
            hardware_compatibility=settings.hardware_compatibility,
            plugins=tuple(path.parent / plugin for plugin in settings.plugins),
            plugin_folders=tuple(plugin_folders),
        ),
        precision=None if settings.precision == "keep" else settings.precision,
        input_u8={name: parse(text) for name, text in settings.input_u8.items()},
        samples=path.parent / settings.samples if settings.samples else None,
        check=settings.check,
    )


def on_each(devices: Sequence[int], make: Callable[[int], Engine]) -> list[Engine]:
    """An engine for each device; the first alone, as it may build a plan for all.

    Raises:
        EngineLoadError: one could not be made; the others are closed.
    """
    opened = [make(devices[0])]
    with ThreadPoolExecutor(max(len(devices) - 1, 1)) as threads:
        others = [threads.submit(make, device) for device in devices[1:]]
    failed = [other.exception() for other in others if other.exception() is not None]
    opened += [other.result() for other in others if other.exception() is None]
    if failed and failed[0] is not None:
        for engine in opened:
            engine.close()
        raise failed[0]
    return opened


def _devices(config: ModelConfig) -> Sequence[int]:
    if config.slots.devices:
        return config.slots.devices
    from engines.tensorrt.facts import gpu_fact

    return [gpu.index for gpu in gpu_fact().gpus] or [0]


def _fake_options(config: ModelConfig) -> FakeOptions:
    fake = config.fake
    assert fake is not None
    return FakeOptions(
        inputs=_fake_tensors(fake.inputs),
        outputs=_fake_tensors(fake.outputs),
        base_ms=fake.base_ms,
        per_row_us=fake.per_row_us,
        sleep=fake.sleep,
        fail_value=fake.fail_value,
        cold_ms=fake.cold_ms,
    )


def _fake_tensors(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for t in tensors:
        if t.dtype not in engines.DTYPES:
            raise ConfigError(f"fake tensor {t.name!r}: no datatype {t.dtype!r}")
        axes = (None if size < 0 else size for size in t.shape)
        specs.append(TensorSpec(t.name, t.dtype, ("batch", *axes)))
    return tuple(specs)
