"""Plans as files: written whole or not at all, described, and judged before loading.

Beside each plan lies a sidecar, `<plan>.json`: what the plan is, how it was made, and
its SHA-256. It is written after the plan, so a plan with a sidecar that fits is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from engines.tensorrt.module import TensorRT

FORMAT: Final = 1
"""Of the sidecar; a later one is not read."""

_RTX_MAGIC: Final = b"vtrt"
_RTX_VERSION_AT: Final = 24  # four bytes; seen in plans of 1.4.0, 1.6.1 and 1.7.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What is known of a plan. All of it is JSON.

    Attributes:
        model: path of the ONNX file, as it was given (for people; not part of a key).
        model_sha256: of the ONNX file and its external weights.
        flavour, version: of the TensorRT that built it.
        gpu, compute_capability: of the GPU it was built on; "" for none.
        settings: see `BuildOptions.settings`.
        precision: that the ONNX was converted to, or "" if it was taken as it is.
        plan_sha256, plan_bytes: of the plan.
        built_at: seconds since 1970.
        build_seconds: how long it took.
        key: of the cache; "" outside of it.
        notes: whatever else is worth keeping, such as the numbers of its comparison.
    """

    model: str
    model_sha256: str
    flavour: str
    version: str
    gpu: str = ""
    compute_capability: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    precision: str = ""
    plan_sha256: str
    plan_bytes: int
    built_at: float = 0.0
    build_seconds: float = 0.0
    key: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As a file: readable JSON, with a checksum of itself."""
        body = {"format": FORMAT, **asdict(self)}
        body["checksum"] = _checksum(body)
        return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Sidecar:
        """Reads what `to_bytes` wrote.

        Raises:
            ValueError: it is damaged, or of another format.
        """
        body = json.loads(data)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError("not a sidecar of this format")
        checksum = body.pop("checksum", None)
        # Byte for byte: a change that JSON does not see is damage all the same.
        again = json.dumps({**body, "checksum": checksum}, indent=1, sort_keys=True)
        if checksum != _checksum(body) or data != again.encode() + b"\n":
            raise ValueError("its checksum is wrong")
        del body["format"]
        if set(body) != {f.name for f in fields(cls)}:
            raise ValueError("it has other fields")
        return cls(**body)


def sidecar_path(plan: Path) -> Path:
    """Where the sidecar of a plan lies."""
    return plan.with_name(plan.name + ".json")


def write_plan(path: Path, plan: bytes, sidecar: Sidecar) -> None:
    """Writes a plan and its sidecar, each whole or not at all.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # No old sidecar may ever stand beside a new plan.
    sidecar_path(path).unlink(missing_ok=True)
    write_whole(path, plan)
    write_whole(sidecar_path(path), sidecar.to_bytes())


def read_sidecar(plan: Path) -> Sidecar | None:
    """The sidecar of a plan, or None if there is none that can be read."""
    try:
        return Sidecar.from_bytes(sidecar_path(plan).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that others see all of it, or what was there before.

    What a killed process leaves behind ends in ".tmp".

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sha256(data: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def misfit(
    plan: Path,
    data: bytes,
    tensorrt: TensorRT,
    *,
    gpu: str = "",
    compute_capability: str = "",
) -> str:
    """Why a plan that a user gave cannot run here, and what to do; "" if nothing shows.

    Looks at the sidecar, and without one at the first bytes. TensorRT has the last
    word: what it says goes through `remedies.with_remedy`.

    Args:
        plan: the file.
        data: what it holds.
        tensorrt: what would run it.
        gpu, compute_capability: where; "" if not known.
    """
    again = "build it again from its ONNX file: batcher build model.onnx -o model.plan"
    sidecar = read_sidecar(plan)
    if sidecar is None:
        reason = _header_misfit(data, tensorrt)
        return f"{plan}: {reason}; {again}" if reason else ""
    if sidecar.plan_sha256 != sha256(data):
        return (
            f"{plan}: the plan is damaged, or {sidecar_path(plan).name} belongs to "
            f"another one (their SHA-256 differ); {again}"
        )
    versions = f"{sidecar.flavour} {sidecar.version}"
    compatible = sidecar.settings.get("version_compatible")
    if sidecar.flavour != tensorrt.flavour:
        reason = f"it was built by {versions}, and what is installed is {tensorrt}"
        return f"{plan}: {reason}; install {sidecar.flavour}, or {again}"
    if sidecar.version != tensorrt.version and not compatible:
        reason = f"it was built by {versions}, and what is installed is {tensorrt}"
        return f"{plan}: {reason}; install that version, or {again}"
    if not _portable(sidecar, tensorrt):
        built = sidecar.compute_capability
        if built and compute_capability and built != compute_capability:
            return (
                f"{plan}: it was built for compute capability {built} "
                f"({sidecar.gpu}), and this GPU ({gpu}) has {compute_capability}; "
                f"{again}, on this GPU"
            )
        if sidecar.gpu and gpu and sidecar.gpu != gpu:
            return (
                f"{plan}: it was built on {sidecar.gpu}, and this GPU is {gpu}; "
                f"{again}, on this GPU"
            )
    return ""


def _portable(sidecar: Sidecar, tensorrt: TensorRT) -> bool:
    """Whether it may run on other GPUs than the one it was built on."""
    level = sidecar.settings.get("hardware_compatibility", "none")
    # TensorRT for RTX chooses kernels where it runs, not where it builds.
    return tensorrt.flavour == "tensorrt_rtx" or level != "none"


def _header_misfit(data: bytes, tensorrt: TensorRT) -> str:
    if not data:
        return "the file is empty"
    magic = data[:4]
    if magic[1:] != b"trt":
        return f"it is no TensorRT plan (it begins with {magic!r})"
    version = data[_RTX_VERSION_AT : _RTX_VERSION_AT + 4]
    from_rtx = magic == _RTX_MAGIC and version[:1] == b"\x01"
    built = ".".join(map(str, version))
    if from_rtx != (tensorrt.flavour == "tensorrt_rtx"):
        by = f"TensorRT for RTX {built}" if from_rtx else "the data-centre TensorRT"
        return f"it is a plan of {by}, and what is installed is {tensorrt}"
    if from_rtx and built != tensorrt.version:
        return f"it was built by version {built}, and what is installed is {tensorrt}"
    return ""


def _checksum(body: dict[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
