"""Facts for `batcher doctor`: what is installed, and which GPUs there are.

Nothing here raises: whatever is wrong is itself the fact. Nothing is decided here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from engines.tensorrt.module import (
    EXTRAS,
    FLAVOURS,
    Flavour,
    ModuleMissing,
    load,
)


@dataclass(frozen=True, slots=True)
class ModuleFact:
    """What is known of one flavour.

    Attributes:
        flavour: the module's name.
        state: "found", "missing" (not installed) or "broken" (does not load).
        version: where it was found, else "".
        detail: what it can do, or why it cannot be used, in a sentence.
    """

    flavour: Flavour
    state: Literal["found", "missing", "broken"]
    version: str
    detail: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `name` is CUDA's; `compute_capability` is like "9.0"."""

    index: int
    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class GpuFact:
    """What is known of the GPUs.

    Attributes:
        state: "found"; "no-bindings" (cuda-python is not installed), "no-driver" (its
            library is missing), "no-gpu" (there is none, or none is visible), or
            "error" (the driver answers with one).
        cuda_version: the newest CUDA that the driver takes, like "13.0"; "" without.
        gpus: in CUDA's order.
        detail: a sentence; where something is missing, with the way out.
    """

    state: Literal["found", "no-bindings", "no-driver", "no-gpu", "error"]
    cuda_version: str
    gpus: tuple[Gpu, ...]
    detail: str


def module_facts() -> list[ModuleFact]:
    """One fact for each flavour, in the order in which `auto` tries them."""
    return [_module_fact(flavour) for flavour in FLAVOURS]


def _module_fact(flavour: Flavour) -> ModuleFact:
    try:
        found = load(flavour)
    except ModuleMissing as error:
        return ModuleFact(flavour, "missing", "", str(error))
    except Exception as error:
        return ModuleFact(flavour, "broken", "", str(error))
    typed = "by the ONNX only" if found.strongly_typed_only else "by ONNX or flags"
    return ModuleFact(flavour, "found", found.version, f"precision is set {typed}")


def gpu_fact() -> GpuFact:
    """Asks the driver which GPUs there are; makes no CUDA context."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except Exception as error:
        return GpuFact(
            "no-bindings",
            "",
            (),
            f"cuda-python cannot be imported ({type(error).__name__}: {error}); "
            f"{EXTRAS['tensorrt']} or {EXTRAS['tensorrt_rtx']} brings it",
        )
    try:
        return _asked(driver)
    except Exception as error:  # the binding raises its own when libcuda is missing
        return GpuFact(
            "no-driver",
            "",
            (),
            "the NVIDIA driver's library (libcuda) is missing: install the driver, or "
            "start the container with GPUs (docker run --gpus all) "
            f"({type(error).__name__}: {error})",
        )


def _asked(driver: Any) -> GpuFact:
    status = driver.cuInit(0)[0]
    name = str(getattr(status, "name", status))
    number = driver.cuDriverGetVersion()[1]
    version = f"{number // 1000}.{number % 1000 // 10}" if number else ""
    if name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE"):
        detail = "the driver finds no GPU (is CUDA_VISIBLE_DEVICES empty or wrong?)"
        return GpuFact("no-gpu", version, (), detail)
    if int(status) != 0:
        detail = f"the driver answers {name} (is it the one that the kernel runs?)"
        return GpuFact("error", version, (), detail)
    gpus = tuple(_gpu(driver, i) for i in range(driver.cuDeviceGetCount()[1]))
    if not gpus:
        return GpuFact("no-gpu", version, (), "the driver counts no GPU")
    return GpuFact("found", version, gpus, f"{len(gpus)} found")


def _gpu(driver: Any, index: int) -> Gpu:
    device = driver.cuDeviceGet(index)[1]
    kinds = driver.CUdevice_attribute
    major, minor = (
        driver.cuDeviceGetAttribute(kind, device)[1]
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    name = driver.cuDeviceGetName(256, device)[1].split(b"\0", 1)[0].decode()
    memory = driver.cuDeviceTotalMem(device)[1]
    return Gpu(index, name, f"{major}.{minor}", int(memory))
