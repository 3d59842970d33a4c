"""Which TensorRT is installed, and what it can do.

TensorRT comes as two Python modules with one API: `tensorrt` (data centre; versions 10
and 11) and `tensorrt_rtx` (TensorRT for RTX). This file finds one of them when it is
needed, and is the only place that asks what a flavour has. Facts for people who look
for a fault are in `facts`; nothing is built or run here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, Final, Literal

from engines.errors import EngineLoadError

Flavour = Literal["tensorrt", "tensorrt_rtx"]
FlavourChoice = Literal["auto", "tensorrt", "tensorrt_rtx"]

FLAVOURS: Final[tuple[Flavour, ...]] = ("tensorrt", "tensorrt_rtx")
"""In the order in which `auto` tries them: the data-centre one runs on every GPU."""

EXTRAS: Final[dict[Flavour, str]] = {
    "tensorrt": "pip install 'trt-batcher[tensorrt]'",
    "tensorrt_rtx": "pip install 'trt-batcher[tensorrt-rtx]'",
}
"""What installs a flavour."""

_TITLES: Final[dict[Flavour, str]] = {
    "tensorrt": "TensorRT",
    "tensorrt_rtx": "TensorRT for RTX",
}
# Named explicitly, set at once, `create_execution_context` without memory: 10.0.
_OLDEST_TENSORRT: Final = 10

_log = logging.getLogger(__name__)


class ModuleMissing(EngineLoadError):
    """No TensorRT is installed; the text says what to install."""


class ModuleBroken(EngineLoadError):
    """A TensorRT is installed but does not load; the text says why."""


@dataclass(frozen=True, slots=True)
class TensorRT:
    """An installed TensorRT.

    Attributes:
        trt: the module. Everything that is asked of it goes through a variable called
            `trt`, which is what `manifest.json` is compared with.
        flavour: the module's name.
        version: as the module says it: "1.6.1.120".
        strongly_typed_only: whether the types of a network can come from its ONNX only
            (there is no builder flag for a precision).
        builder_flags: names of `BuilderFlag`.
        timing_cache: whether timings of an earlier build are used again.
        version_compatible: whether plans can be made to load in later versions.
        hardware_levels: how plans can be made to load on other GPUs
            ("ampere_plus", …); "none" is always there.
        compute_capabilities: names of `ComputeCapability` that a build can be aimed
            at ("SM89", "CURRENT"); empty where the GPU of the build is the aim.
        int8_activations: whether layers can run on int8 activations.
        uint8_quantization: whether Q/DQ with a UINT8 zero point keeps its meaning.
    """

    trt: Any
    flavour: Flavour
    version: str
    strongly_typed_only: bool
    builder_flags: frozenset[str]
    timing_cache: bool
    version_compatible: bool
    hardware_levels: tuple[str, ...]
    compute_capabilities: tuple[str, ...]
    int8_activations: bool
    uint8_quantization: bool = False

    def __str__(self) -> str:
        return f"{_TITLES[self.flavour]} {self.version}"


def find(flavour: FlavourChoice = "auto") -> TensorRT:
    """The TensorRT to use, imported now if it was not.

    Raises:
        ModuleMissing: it is not installed.
        ModuleBroken: it is installed, but does not load or is too old.
        EngineLoadError: there is no such flavour.
    """
    if flavour != "auto":
        if flavour not in FLAVOURS:
            raise EngineLoadError(
                f"no TensorRT flavour {flavour!r} (possible: auto, "
                f"{', '.join(FLAVOURS)})"
            )
        return load(flavour)
    broken: ModuleBroken | None = None
    for candidate in FLAVOURS:
        try:
            found = load(candidate)
        except ModuleMissing:
            continue
        except ModuleBroken as error:
            broken = broken or error
            continue
        if broken is not None:
            _log.warning("%s; using %s", broken, found)
        return found
    if broken is not None:
        raise broken
    raise ModuleMissing(
        "no TensorRT is installed. For a data-centre GPU: "
        f"{EXTRAS['tensorrt']} (from NVIDIA's index); for a GeForce or RTX card: "
        f"{EXTRAS['tensorrt_rtx']}"
    )


def load(flavour: Flavour) -> TensorRT:
    """Imports a flavour and looks at what it has.

    Raises:
        ModuleMissing, ModuleBroken: as for `find`.
    """
    if not is_installed(flavour):
        raise ModuleMissing(
            f"{_TITLES[flavour]} is not installed (no Python module {flavour!r}); "
            f"install it with {EXTRAS[flavour]}"
        )
    again = f"install it again with {EXTRAS[flavour]}"
    try:
        trt = importlib.import_module(flavour)
    except Exception as error:  # OSError, ImportError, whatever its loader raises
        raise ModuleBroken(
            f"{_TITLES[flavour]} is installed but does not load: "
            f"{type(error).__name__}: {_one_line(error)}; its libraries are missing or "
            f"of another version than its bindings: {again}"
        ) from error
    if not hasattr(trt, "Builder") or not hasattr(trt, "OnnxParser"):
        where = getattr(trt, "__file__", None)
        raise ModuleBroken(
            f"the module {flavour!r} at {where} is no TensorRT (it has no Builder or "
            f"OnnxParser): {again}"
        )
    version = str(getattr(trt, "__version__", "0"))
    if flavour == "tensorrt" and _major(version) < _OLDEST_TENSORRT:
        raise ModuleBroken(
            f"TensorRT {version} is too old: {_OLDEST_TENSORRT} or newer is needed; "
            f"{EXTRAS[flavour]}"
        )
    return _described(trt, flavour, version)


def is_installed(flavour: Flavour) -> bool:
    """Whether the module can be found, without importing it."""
    try:
        spec = importlib.util.find_spec(flavour)
    except (ImportError, ValueError):  # a module without a spec is in sys.modules
        return False
    # A folder of that name on the path is found as a package without a file.
    return spec is not None and spec.origin is not None


def _described(trt: Any, flavour: Flavour, version: str) -> TensorRT:
    flags = frozenset(_members(trt, "BuilderFlag"))
    rtx = flavour == "tensorrt_rtx"
    levels = tuple(n.lower() for n in _members(trt, "HardwareCompatibilityLevel"))
    targets: tuple[str, ...] = ()
    if hasattr(trt.IBuilderConfig, "num_compute_capabilities"):
        targets = tuple(n for n in _members(trt, "ComputeCapability") if n != "NONE")
    return TensorRT(
        trt=trt,
        flavour=flavour,
        version=version,
        strongly_typed_only=rtx or "FP16" not in flags,
        builder_flags=flags,
        # TensorRT for RTX has the names but says "no-ops", "unsupported", and comes
        # without the lean runtime that a version-compatible plan needs (seen, 1.6.1).
        timing_cache=not rtx,
        version_compatible=not rtx and "VERSION_COMPATIBLE" in flags,
        hardware_levels=("none",) if rtx else levels,
        compute_capabilities=targets,
        # Its Myelin back end takes float, half, bfloat16 and fp8 (seen, 1.6.1).
        int8_activations=not rtx,
    )


def _members(trt: Any, enum: str) -> list[str]:
    return list(getattr(getattr(trt, enum, None), "__members__", ()))


def _major(version: str) -> int:
    head = version.split(".", 1)[0]
    return int(head) if head.isdigit() else 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
