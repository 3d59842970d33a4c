"""How a plan is built, and which of it a flavour of TensorRT cannot do.

Pure but for looking at whether plugin libraries exist; TensorRT is not called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engines.base import Profile
from engines.errors import EngineLoadError
from engines.tensorrt.modelfile import OnnxFile
from engines.tensorrt.module import FlavourChoice, TensorRT
from engines.tensorrt.profiles import check_profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How a plan is built. Paths but for plugins do not change the plan."""

    profiles: tuple[Profile, ...] = ()
    """Optimization profiles; built in ascending order of their max shapes."""

    flavour: FlavourChoice = "auto"
    """Which TensorRT builds."""

    optimization_level: int | None = None
    """0 (quick build) to 5 (quick engine); None: TensorRT's default (3)."""

    workspace_mb: int | None = None
    """Scratch memory that a layer may use, in MiB; None: all of the GPU's."""

    tactic_dram_mb: int | None = None
    """Device memory that trying kernels may use, in MiB; None: no limit but the GPU."""

    tf32: bool = True
    """Whether FP32 products may be rounded to TF32 (10 bits of mantissa)."""

    timing_cache: Path | None = None
    """A file that keeps kernel timings between builds, for flavours that time."""

    version_compatible: bool = False
    """Whether the plan must load in later versions too (at some cost of speed)."""

    hardware_compatibility: Literal[
        "none", "ampere_plus", "same_compute_capability"
    ] = "none"
    """On which other GPUs the plan must load."""

    compute_capabilities: tuple[str, ...] = ()
    """GPUs to build for ("8.9", "12.0"), for flavours that build without a GPU; empty:
    any that the flavour supports."""

    plugins: tuple[Path, ...] = ()
    """Plugin libraries to load. They are code: only those in `plugin_folders` are."""

    plugin_folders: tuple[Path, ...] = ()
    """The allow-list: folders whose libraries may be loaded. From the operator, never
    from a model's file."""

    threads: int | None = None
    """Threads that TensorRT may build with; None: one."""

    def settings(self) -> dict[str, Any]:
        """What of this changes a plan, as JSON: equal settings, equal plans."""
        return {
            "profiles": [
                {
                    kind: {n: list(s) for n, s in sorted(getattr(p, kind).items())}
                    for kind in ("min", "opt", "max")
                }
                for p in self.ordered_profiles()
            ],
            "optimization_level": self.optimization_level,
            "workspace_mb": self.workspace_mb,
            "tactic_dram_mb": self.tactic_dram_mb,
            "tf32": self.tf32,
            "version_compatible": self.version_compatible,
            "hardware_compatibility": self.hardware_compatibility,
            "compute_capabilities": sorted(self.compute_capabilities),
        }

    def ordered_profiles(self) -> list[Profile]:
        """The profiles in the order in which they are built."""

        def order(profile: Profile) -> list[list[tuple[str, tuple[int, ...]]]]:
            shapes = (profile.max, profile.opt, profile.min)
            return [sorted((n, tuple(s)) for n, s in each.items()) for each in shapes]

        return sorted(self.profiles, key=order)


def check(file: OnnxFile, options: BuildOptions, tensorrt: TensorRT) -> None:
    """Refuses what cannot be built, before anything is started.

    Raises:
        EngineLoadError: names the option, its value, and what is possible.
    """
    if file.is_dynamic and not options.profiles:
        shapes = "; ".join(f"{s.name} {list(s.wire_shape)}" for s in file.inputs)
        raise EngineLoadError(
            f"{file.path}: its inputs have dynamic axes ({shapes}) and no optimization "
            "profile says which sizes will be run: set max_batch, and [axes.NAME] "
            "buckets for axes that are not the batch"
        )
    check_profiles(file.inputs, options.profiles)
    # Here, as it imports onnx, which a start that finds its plan can do without.
    from engines.tensorrt import onnxfile

    onnxfile.check_quantization(file, tensorrt)
    rtx = tensorrt.flavour == "tensorrt_rtx"
    level = options.optimization_level
    if level is not None and not 0 <= level <= 5:
        raise EngineLoadError(f"optimization level {level} is not between 0 and 5")
    if options.version_compatible and not tensorrt.version_compatible:
        raise EngineLoadError(f"{tensorrt} makes no version-compatible plans")
    if options.hardware_compatibility not in ("none", *tensorrt.hardware_levels):
        raise EngineLoadError(
            f"{tensorrt} has no hardware compatibility level "
            f"{options.hardware_compatibility!r} (it has "
            f"{', '.join(tensorrt.hardware_levels)})"
            + ("; its plans load on all GPUs that it supports" if rtx else "")
        )
    for capability in options.compute_capabilities:
        if target_name(capability) not in tensorrt.compute_capabilities:
            known = ", ".join(tensorrt.compute_capabilities) or "none"
            raise EngineLoadError(
                f"{tensorrt} cannot be told to build for compute capability "
                f"{capability!r} (possible: {known})"
            )
    for plugin in options.plugins:
        _check_plugin(plugin, options.plugin_folders)


def target_name(capability: str) -> str:
    """The name in `ComputeCapability`: "8.9" is SM89."""
    digits = capability.lower().removeprefix("sm").replace(".", "")
    return f"SM{digits}" if digits.isdigit() else capability.upper()


def _check_plugin(plugin: Path, folders: tuple[Path, ...]) -> None:
    real = plugin.resolve()
    if not any(real.is_relative_to(folder.resolve()) for folder in folders):
        allowed = ", ".join(map(str, folders)) or "none"
        raise EngineLoadError(
            f"plugin library {plugin} is not in an allowed folder (allowed: {allowed})"
        )
    if not real.is_file():
        raise EngineLoadError(f"plugin library {plugin}: no such file")
