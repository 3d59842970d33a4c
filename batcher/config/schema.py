"""Every knob of the daemon and of a model: one set of frozen dataclasses.

A field's docstring is its documentation; a test sees to it that every field has one.
Read from TOML, from `BATCHER_…` variables and from flags by `batcher.config.load`;
checks that involve several fields stand in `__post_init__`. Numbers and booleans are
strict: neither `"8"` nor `true` is an integer. An integer may stand for a float.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from pydantic import StrictBool, StrictFloat, StrictInt

from batcher.config.backends import FakeConfig, TensorRTConfig
from batcher.config.limits import (
    DAY_MS,
    FORBID,
    HOUR_US,
    MAX_BATCH,
    MAX_INT32,
    ascending,
    between,
)
from batcher.errors import ConfigError
from batcher.scheduling import POLICIES

EngineName = Literal["auto", "onnxruntime", "tensorrt", "fake"]
IsolationName = Literal["auto", "thread", "process"]
TransportName = Literal["auto", "native", "grpcio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """`[batching]`: when a batch closes and how large it is."""

    __pydantic_config__ = FORBID

    policy: str = "eager"
    """`eager` runs when a slot is free; `window` waits out `max_delay_us`, as Triton's
    dynamic batcher does."""

    max_delay_us: StrictInt = 0
    """The most a free slot may wait for a fuller batch (microseconds)."""

    preferred: tuple[StrictInt, ...] = ()
    """Batch sizes (rows) that leave before the delay is over (`window` only)."""

    rungs: tuple[StrictInt, ...] = ()
    """Batch sizes worth running, ascending; a batch is padded up to the next. Default:
    every size, or the ladder of the engine's profiles."""

    max_queue: StrictInt = 4096
    """The most requests that wait; one more is refused as UNAVAILABLE."""

    timeout_ms: StrictFloat = 0.0
    """The longest wait in the queue (milliseconds), 0 for none."""

    allow_timeout_override: StrictBool = True
    """Whether a request's `timeout` parameter may shorten `timeout_ms`, or set a limit
    where there is none."""

    max_request_rows: StrictInt = 0
    """The most rows of one request; one with more than `max_batch` is split. 0 for 64
    times the largest batch."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ConfigError(f"batching.policy {self.policy!r} is none of {known}")
        between("batching.max_delay_us", self.max_delay_us, 0, HOUR_US)
        between("batching.max_queue", self.max_queue, 1, MAX_INT32)
        between("batching.timeout_ms", self.timeout_ms, 0, DAY_MS)
        between("batching.max_request_rows", self.max_request_rows, 0, MAX_INT32)
        ascending("batching.rungs", self.rungs)
        if self.rungs:
            between("batching.rungs", self.rungs[-1], 1, MAX_BATCH)
        ascending("batching.preferred", self.preferred)
        if self.preferred and self.policy != "window":
            raise ConfigError(
                "batching.preferred has no effect under batching.policy = "
                f"{self.policy!r}; it needs 'window'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsConfig:
    """`[slots]`: how many batches run at the same time."""

    __pydantic_config__ = FORBID

    count: StrictInt = 0
    """Slots per device; 0 for 1 on a CPU and 2 on a GPU."""

    devices: tuple[StrictInt, ...] = ()
    """Which GPUs the model is on, by index. Default: all that are visible."""

    isolation: IsolationName = "auto"
    """Where the engine lives: in the daemon, or in a process of its own per device,
    which is started again when it ends. `auto` is `process` on a GPU under Linux, else
    `thread`."""

    def __post_init__(self) -> None:
        between("slots.count", self.count, 0, 64)
        if any(d < 0 for d in self.devices) or len(set(self.devices)) < len(
            self.devices
        ):
            raise ConfigError(
                f"slots.devices must be different GPUs, got {list(self.devices)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAxisConfig:
    """How an output follows a padded axis of the inputs."""

    __pydantic_config__ = FORBID

    axis: StrictInt
    """Which axis of the output is cut back (0 is the batch)."""

    ratio: StrictFloat = 1.0
    """Output elements per input element on that axis, such as 0.125 (rounded up)."""

    follows: str = ""
    """The axis it follows; may be left out, it is the table's own name."""

    def check(self, where: str) -> None:
        """Checks the values; `where` is the table's key path."""
        if self.axis < 1:
            raise ConfigError(f"{where}.axis must be at least 1, got {self.axis}")
        if not 0 < self.ratio < math.inf:
            raise ConfigError(f"{where}.ratio must be > 0, got {self.ratio}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisConfig:
    """`[axes.NAME]`: a dynamic axis that may be padded, or has listed sizes."""

    __pydantic_config__ = FORBID

    buckets: tuple[StrictInt, ...] = ()
    """Sizes an input is padded to on this axis, ascending."""

    sizes: tuple[StrictInt, ...] = ()
    """The only sizes allowed, where padding is not."""

    pad: dict[str, StrictFloat] = field(default_factory=dict)
    """Per input that has this axis, the value it is padded with."""

    inputs: dict[str, StrictInt] = field(default_factory=dict)
    """Per input, which of its axes this is. Default: where the model names it so."""

    outputs: dict[str, OutputAxisConfig] = field(default_factory=dict)
    """Per output that has this axis, how it is cut back. Outputs not named here must
    not depend on the axis's size."""

    too_long: Literal["reject", "truncate"] = "reject"
    """What to do with a request that is longer than the largest bucket."""

    def check(self, where: str) -> None:
        """Checks the values; `where` is the table's key path."""
        ascending(f"{where}.buckets", self.buckets)
        ascending(f"{where}.sizes", self.sizes)
        if bool(self.buckets) == bool(self.sizes):
            raise ConfigError(f"{where} needs either buckets or sizes")
        if self.sizes and self.pad:
            raise ConfigError(f"{where}.sizes and {where}.pad contradict: no padding")
        if self.sizes and self.too_long == "truncate":
            raise ConfigError(
                f'{where}.sizes and {where}.too_long = "truncate" contradict'
            )
        for name, output in self.outputs.items():
            output.check(f"{where}.outputs.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's file, `<model>/model.toml`; all of it is optional."""

    __pydantic_config__ = FORBID

    engine: EngineName = "auto"
    """The back end. `auto` goes by the kind of file: TensorRT for a plan, ONNX Runtime
    on the CPU for an ONNX file."""

    max_batch: StrictInt = 0
    """Rows of the largest batch; 0 for 64 (of a plan: what its profiles hold), or 1
    where the model cannot batch."""

    batch_axis: Literal["auto", "first", "none"] = "auto"
    """`auto`: axis 0, where the model's file has it dynamic in all inputs and outputs
    and a check at load finds rows independent; `first`: axis 0 by the user's word;
    `none`: every request is a run of its own, with its shapes as they are."""

    batching: BatchingConfig = field(default_factory=BatchingConfig)
    """When a batch closes."""

    slots: SlotsConfig = field(default_factory=SlotsConfig)
    """How many batches run at the same time."""

    axes: dict[str, AxisConfig] = field(default_factory=dict)
    """Dynamic axes that may be padded, by name."""

    tensorrt: TensorRTConfig = field(default_factory=TensorRTConfig)
    """How plans are built and run."""

    fake: FakeConfig | None = None
    """For `engine = "fake"`."""

    def __post_init__(self) -> None:
        between("max_batch", self.max_batch, 0, MAX_BATCH)
        if self.batch_axis == "none" and self.max_batch > 1:
            raise ConfigError(
                f'batch_axis = "none" and max_batch = {self.max_batch} contradict'
            )
        rungs = self.batching.rungs
        if rungs and self.max_batch and rungs[-1] != self.max_batch:
            raise ConfigError(
                f"batching.rungs ends at {rungs[-1]}, but max_batch is "
                f"{self.max_batch}; they must be equal, or leave one of them out"
            )
        preferred = self.batching.preferred
        if preferred and self.max_batch and preferred[-1] > self.max_batch:
            raise ConfigError(
                f"batching.preferred has {preferred[-1]}, but max_batch is "
                f"{self.max_batch}"
            )
        largest = self.max_batch or (rungs[-1] if rungs else 0)
        if self.batching.max_queue < largest:
            knob = "max_batch =" if self.max_batch else "batching.rungs up to"
            raise ConfigError(
                f"batching.max_queue = {self.batching.max_queue} keeps batches of "
                f"{knob} {largest} rows from filling; raise the one or lower the other"
            )
        if (self.engine == "fake") != (self.fake is not None):
            raise ConfigError('engine = "fake" and a [fake] table need each other')
        for name, axis in self.axes.items():
            axis.check(f"axes.{name}")
        self.tensorrt.check_values()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The daemon's own knobs; flags of `batcher serve`."""

    __pydantic_config__ = FORBID

    grpc_address: tuple[str, ...] = ("127.0.0.1:8001",)
    """Where to listen for gRPC: HOST:PORT or unix:PATH, any number of them."""

    http_address: str = "127.0.0.1:8002"
    """Where /metrics, /livez and /readyz are served; `none` for nowhere."""

    transport: TransportName = "auto"
    """Who speaks gRPC: `native` is fast and for trusted networks, `grpcio` does what it
    cannot; `auto` takes native on loopback and Unix sockets, grpcio elsewhere."""

    io_threads: StrictInt = 0
    """Threads of the native transport that read and write, per address; 0 for one per
    four cores, at most 4."""

    socket_mode: StrictInt = 0o660
    """Permission bits of Unix sockets."""

    max_message_mb: StrictInt = 64
    """Largest message (MiB); hard on grpcio, checked after receipt on native."""

    max_in_flight_mb: StrictInt = 0
    """Most bytes of requests in the daemon (MiB); 0 for a quarter of memory."""

    plan_cache: str = ""
    """The folder of TensorRT plans that were built, which other daemons may share.
    Default: batcher/plans in the user's cache folder."""

    plan_cache_mb: StrictInt = 0
    """How large the plan cache may grow (MiB), 0 for no limit; what was not used for
    longest goes first."""

    plugin_folder: tuple[str, ...] = ()
    """Folders whose libraries models may load as TensorRT plugins; none by default."""

    drain_timeout_s: StrictFloat = 30.0
    """How long SIGTERM waits for what was accepted (seconds)."""

    strict_triton_codes: StrictBool = False
    """Answer Triton's status codes where they differ from ours."""

    log_format: Literal["text", "json"] = "text"
    """One line of text, or one JSON object, per log record."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged."""

    def __post_init__(self) -> None:
        if not self.grpc_address:
            raise ConfigError("at least one gRPC address is needed")
        for address in self.grpc_address:
            if self.grpc_address.count(address) > 1:
                raise ConfigError(f"grpc_address {address!r} is given twice")
        # gRPC's lengths are signed 32-bit.
        between("max_message_mb", self.max_message_mb, 1, 2047)
        between("max_in_flight_mb", self.max_in_flight_mb, 0, MAX_INT32)
        between("io_threads", self.io_threads, 0, 64)
        between("plan_cache_mb", self.plan_cache_mb, 0, MAX_INT32)
        between("drain_timeout_s", self.drain_timeout_s, 0, DAY_MS // 1000)
        if not 0 <= self.socket_mode <= 0o777:
            raise ConfigError("socket_mode must be between 0 and 0777 (octal)")
