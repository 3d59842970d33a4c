"""Builds a plan (a serialized engine) from an ONNX file.

The result is bytes in memory: nothing is written here but the timing cache, so a build
that is killed leaves nothing half done (`engines.tensorrt.cache` writes plans). No GPU
code of ours: TensorRT itself asks for the GPU where the flavour needs one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from engines.errors import EngineLoadError
from engines.tensorrt.messages import collected_errors, logger
from engines.tensorrt.modelfile import OnnxFile
from engines.tensorrt.module import TensorRT, find
from engines.tensorrt.options import BuildOptions, check, target_name
from engines.tensorrt.plans import write_whole
from engines.tensorrt.remedies import remedy, with_remedy

_MIB: Final = 1 << 20
_log = logging.getLogger(__name__)


class BuildCancelled(EngineLoadError):
    """The build was given up because its caller wished so."""


class BuildStep(NamedTuple):
    """How far a build is.

    Attributes:
        phase: what is being done, in TensorRT's words; "Parsing" before that.
        depth: 0 for the whole build, 1 for a phase of it, …
        done, total: steps of the phase.
    """

    phase: str
    depth: int
    done: int
    total: int


Progress = Callable[[BuildStep], object]
"""Called from the build's thread at every step; must be quick."""


def build(
    onnx_path: Path | str,
    options: BuildOptions,
    progress: Progress | None = None,
    *,
    cancelled: Callable[[], bool] | None = None,
    on_thread: Callable[[], None] | None = None,
) -> bytes:
    """Builds a plan.

    The build runs in a thread of its own; Ctrl-C in the caller's ends it at its next
    step, and is then raised here.

    Args:
        onnx_path: the model; external weight files lie beside it.
        options: how to build.
        progress: told of every step.
        cancelled: asked at every step whether to give up.
        on_thread: called first in the build's thread (to choose its GPU).

    Returns:
        The plan.

    Raises:
        EngineLoadError: the model or the options cannot be built; the text names the
            node or the option, and what to do.
        BuildCancelled: `cancelled` said so.
    """
    from engines.tensorrt import onnxfile  # see `options.check`

    tensorrt = find(options.flavour)
    file = onnxfile.read(Path(onnx_path))
    check(file, options, tensorrt)
    run = _Build(tensorrt, file, options, progress, cancelled, on_thread)
    thread = threading.Thread(target=run.run, name="tensorrt-build", daemon=True)
    try:
        thread.start()
        # In short waits: without a limit, a signal would wait for the build.
        while not run.ended.wait(0.2):
            pass
    except BaseException:  # Ctrl-C, or a signal handler that raises
        run.stop = True
        if thread.ident is not None:
            run.ended.wait()
        raise
    if run.error is not None:
        raise run.error
    return run.plan


class _Build:
    """One build, run once in its own thread.

    Attributes:
        stop: set from outside to end it at its next step.
        ended: set when it is over.
        plan, error: what came of it.
    """

    def __init__(
        self,
        tensorrt: TensorRT,
        file: OnnxFile,
        options: BuildOptions,
        progress: Progress | None,
        cancelled: Callable[[], bool] | None,
        on_thread: Callable[[], None] | None,
    ) -> None:
        self.stop = False
        self.ended = threading.Event()
        self.plan = b""
        self.error: BaseException | None = None
        self._tensorrt = tensorrt
        self._file = file
        self._options = options
        self._progress = progress
        self._cancelled = cancelled
        self._on_thread = on_thread
        self._phases: dict[str, tuple[int, int]] = {}  # name to (depth, steps)

    def run(self) -> None:
        try:
            if self._on_thread is not None:
                self._on_thread()
            self.plan = self._built()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.ended.set()

    def _built(self) -> bytes:
        trt = self._tensorrt.trt
        log = logger(self._tensorrt)
        path = self._file.path
        with collected_errors() as said:
            builder = trt.Builder(log)
            if self._options.threads is not None:
                builder.max_threads = self._options.threads
            self._load_plugins(builder)
            flags = trt.NetworkDefinitionCreationFlag
            network = builder.create_network(1 << int(flags.STRONGLY_TYPED))
            parser = trt.OnnxParser(network, log)
            self._step(BuildStep("Parsing", 1, 0, 1))
            if not parser.parse_from_file(str(self._file.folder_of)):
                raise EngineLoadError(f"{path}: {_parser_errors(parser, self._file)}")
            _check_shape_inputs(network, path)
            config = builder.create_builder_config()
            monitor = self._monitor()
            config.progress_monitor = monitor
            self._configure(builder, config)
            timings = self._load_timings(config)
            started = time.monotonic()
            memory = builder.build_serialized_network(network, config)
            if memory is None:
                if self.error is not None:
                    raise self.error
                if self.stop:
                    raise BuildCancelled(f"{path}: the build was cancelled")
                raise EngineLoadError(
                    f"{path}: {self._tensorrt} could not build it: "
                    f"{with_remedy(str(said))}"
                )
            self._save_timings(timings)
        plan = bytes(memory)
        self._step(BuildStep("Built", 0, 1, 1))
        seconds = time.monotonic() - started
        _log.info("%s: built in %.1f s, %d bytes", path, seconds, len(plan))
        return plan

    def _load_plugins(self, builder: Any) -> None:
        for plugin in self._options.plugins:
            registry = builder.get_plugin_registry()
            if registry.load_library(str(plugin.resolve())) is None:
                raise EngineLoadError(f"plugin library {plugin} cannot be loaded")

    def _configure(self, builder: Any, config: Any) -> None:
        trt, options = self._tensorrt.trt, self._options
        for number, profile in enumerate(options.ordered_profiles()):
            shapes = builder.create_optimization_profile()
            for spec in self._file.inputs:
                if -1 in spec.wire_shape:
                    name = spec.name
                    shapes.set_shape(
                        name, profile.min[name], profile.opt[name], profile.max[name]
                    )
            if config.add_optimization_profile(shapes) < 0:
                raise EngineLoadError(f"profile {number} was refused by TensorRT")
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        pools = trt.MemoryPoolType
        if options.workspace_mb is not None:
            config.set_memory_pool_limit(pools.WORKSPACE, options.workspace_mb * _MIB)
        if options.tactic_dram_mb is not None:
            limit = options.tactic_dram_mb * _MIB
            config.set_memory_pool_limit(pools.TACTIC_DRAM, limit)
        if not options.tf32:
            config.clear_flag(trt.BuilderFlag.TF32)
        if options.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.hardware_compatibility != "none":
            levels = trt.HardwareCompatibilityLevel
            level = getattr(levels, options.hardware_compatibility.upper())
            config.hardware_compatibility_level = level
        if options.compute_capabilities:
            targets = [target_name(c) for c in options.compute_capabilities]
            config.num_compute_capabilities = len(targets)
            for number, target in enumerate(targets):
                capability = getattr(trt.ComputeCapability, target)
                if not config.set_compute_capability(capability, number):
                    raise EngineLoadError(f"compute capability {target} was refused")

    def _load_timings(self, config: Any) -> Any:
        path = self._options.timing_cache
        if path is None or not self._tensorrt.timing_cache:
            return None
        try:
            known = path.read_bytes()
        except OSError:
            known = b""
        timings = config.create_timing_cache(known)
        # One from another GPU or version is refused by TensorRT: then start anew.
        if not config.set_timing_cache(timings, False):
            timings = config.create_timing_cache(b"")
            config.set_timing_cache(timings, False)
        return timings

    def _save_timings(self, timings: Any) -> None:
        path = self._options.timing_cache
        if timings is None or path is None:
            return
        try:
            write_whole(path, bytes(timings.serialize()))
        except OSError as error:
            _log.warning("timing cache %s cannot be written: %s", path, error)

    def _monitor(self) -> Any:
        """TensorRT's view of this build; must not raise into it."""
        outer, trt = self, self._tensorrt.trt

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)

            def phase_start(self, name: str, parent: str | None, steps: int) -> None:
                outer._phase(name, parent, steps)

            def step_complete(self, name: str, step: int) -> bool:
                depth, steps = outer._phases.get(name, (1, step + 1))
                return outer._step(BuildStep(name, depth, step + 1, steps))

            def phase_finish(self, name: str) -> None:
                depth, steps = outer._phases.pop(name, (1, 1))
                outer._step(BuildStep(name, depth, steps, steps))

        return Monitor()

    def _phase(self, name: str, parent: str | None, steps: int) -> None:
        depth = self._phases[parent][0] + 1 if parent in self._phases else 0
        self._phases[name] = (depth, steps)
        self._step(BuildStep(name, depth, 0, steps))

    def _step(self, step: BuildStep) -> bool:
        """Tells of a step; returns whether to go on."""
        try:
            if self._progress is not None and not self.stop:
                self._progress(step)
            if self._cancelled is not None and self._cancelled():
                self.stop = True
        except BaseException as error:
            self.error = self.error or error
            self.stop = True
        return not self.stop


def _parser_errors(parser: Any, file: OnnxFile) -> str:
    texts: dict[str, None] = {}
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        what = " ".join(error.desc().split())
        operator = error.node_operator()
        if operator:
            name = error.node_name() or _unnamed(file, error.node(), operator)
            advice = remedy(what)
            what = f"node {name!r} (operator {operator}): {what}"
            what += f"; {advice}" if advice else ""
        else:
            what = with_remedy(what)
        texts[what] = None
    return " | ".join(texts) or "TensorRT's parser refuses it and gives no reason"


def _unnamed(file: OnnxFile, number: int, operator: str) -> str:
    """What a node without a name makes; the number may be one of a subgraph's."""
    nodes = file.model.graph.node
    if 0 <= number < len(nodes) and nodes[number].op_type == operator:
        return ", ".join(nodes[number].output)
    return f"#{number}"


def _check_shape_inputs(network: Any, path: Path) -> None:
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.is_shape_tensor:
            raise EngineLoadError(
                f"{path}: the values of input {tensor.name!r} decide shapes, and "
                "profiles here bound shapes only; export the model with that value "
                'fixed, or serve it with engine = "onnxruntime"'
            )
