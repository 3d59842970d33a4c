"""What is particular to one back end: the tables `[tensorrt]` and `[fake]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import StrictBool, StrictFloat, StrictInt

from batcher.config.limits import DAY_MS, FORBID, HOUR_US, MAX_INT32, between

PrecisionName = Literal["keep", "fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTensorConfig:
    """An input or output of a fake engine."""

    __pydantic_config__ = FORBID

    name: str
    """Its name."""

    dtype: str = "FP32"
    """Its datatype, such as FP32 or BYTES."""

    shape: tuple[StrictInt, ...] = ()
    """Its shape without the batch axis; -1 for a dynamic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """`[fake]`: what a model with `engine = "fake"` pretends to be."""

    __pydantic_config__ = FORBID

    base_ms: StrictFloat = 0.0
    """Milliseconds of every run."""

    per_row_us: StrictFloat = 0.0
    """Microseconds a run takes longer per row."""

    sleep: StrictBool = True
    """Whether the time is really slept."""

    fail_value: StrictFloat | None = None
    """When set, a run whose first input holds this value fails."""

    cold_ms: StrictFloat = 0.0
    """When above 0, batches are of warmed sizes only, as on TensorRT, and to warm one
    takes so many milliseconds."""

    inputs: tuple[FakeTensorConfig, ...] = ()
    """The inputs."""

    outputs: tuple[FakeTensorConfig, ...] = ()
    """The outputs; each echoes the input of the same position."""

    def __post_init__(self) -> None:
        between("fake.base_ms", self.base_ms, 0, DAY_MS)
        between("fake.cold_ms", self.cold_ms, 0, DAY_MS)
        between("fake.per_row_us", self.per_row_us, 0, HOUR_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTConfig:
    """`[tensorrt]`: how a plan is built from the model's ONNX, and how it runs."""

    __pydantic_config__ = FORBID

    flavour: Literal["auto", "tensorrt", "tensorrt_rtx"] = "auto"
    """Which TensorRT; `auto` takes the data-centre one where both are installed."""

    precision: PrecisionName = "keep"
    """What an FP32 model is converted to before it is built; inputs and outputs keep
    their types."""

    input_u8: dict[str, str] = field(default_factory=dict)
    """Per input that travels as UINT8: SCALE,MEAN of (byte - MEAN) * SCALE, each one
    number, or one per channel with colons between."""

    check: StrictBool = True
    """Whether a new plan is compared with ONNX Runtime before it is served."""

    samples: str = ""
    """An `.npz` file of inputs to compare on, beside the model's file. Default: random
    values."""

    graphs: StrictBool = True
    """Whether runs become CUDA graphs, where they are not slower so."""

    graph_memory_mb: StrictInt = 0
    """The most device memory of graphs, per GPU (MiB); 0 for a sixteenth of it."""

    optimization_level: StrictInt | None = None
    """0 (quick build) to 5 (quick engine). Default: TensorRT's own, 3."""

    workspace_mb: StrictInt | None = None
    """Scratch memory that a layer may use (MiB). Default: all of the GPU's."""

    tf32: StrictBool = True
    """Whether FP32 products may be rounded to TF32."""

    version_compatible: StrictBool = False
    """Whether plans load in later versions too (data-centre TensorRT only)."""

    hardware_compatibility: Literal[
        "none", "ampere_plus", "same_compute_capability"
    ] = "none"
    """On which other GPUs a plan loads (data-centre TensorRT only)."""

    plugins: tuple[str, ...] = ()
    """Plugin libraries; they must lie in a `--plugin-folder` of the daemon."""

    def check_values(self) -> None:
        """Checks the values."""
        between("tensorrt.graph_memory_mb", self.graph_memory_mb, 0, MAX_INT32)
        between("tensorrt.optimization_level", self.optimization_level or 0, 0, 5)
        if self.workspace_mb is not None:
            between("tensorrt.workspace_mb", self.workspace_mb, 1, MAX_INT32)
