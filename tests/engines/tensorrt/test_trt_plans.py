"""Plans as files, and why a plan that a user gives cannot run here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest

from engines import EngineLoadError, Profile
from engines.tensorrt.build import build
from engines.tensorrt.cache import check_user_plan
from engines.tensorrt.module import TensorRT
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.plans import (
    Sidecar,
    read_sidecar,
    sha256,
    write_plan,
    write_whole,
)
from engines.tensorrt.remedies import remedy, with_remedy

DATA_CENTRE = TensorRT(
    trt=None,
    flavour="tensorrt",
    version="10.9.0.34",
    strongly_typed_only=False,
    builder_flags=frozenset(),
    timing_cache=True,
    version_compatible=True,
    hardware_levels=("none", "ampere_plus"),
    compute_capabilities=(),
    int8_activations=True,
)
RTX = replace(DATA_CENTRE, flavour="tensorrt_rtx", version="1.6.1.120")
H200 = {"gpu": "NVIDIA H200", "compute_capability": "9.0"}
PLAN = b"ftrt" + bytes(60)
SIDECAR = Sidecar(
    model="model.onnx",
    model_sha256="0" * 64,
    flavour="tensorrt",
    version="10.9.0.34",
    plan_sha256=sha256(PLAN),
    plan_bytes=len(PLAN),
    settings={"profiles": [{"max": {"x:0/a": [4, 4]}}]},
    **H200,
)


def written(folder: Path, **changes: Any) -> Path:
    """A plan with its sidecar."""
    write_plan(folder / "model.plan", PLAN, replace(SIDECAR, **changes))
    return folder / "model.plan"


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With its sidecar, odd tensor names included."""
    path = written(tmp_path)

    assert check_user_plan(path, DATA_CENTRE, **H200) == PLAN
    assert read_sidecar(path) == SIDECAR
    assert sorted(os.listdir(tmp_path)) == ["model.plan", "model.plan.json"]


@pytest.mark.parametrize(
    ("changes", "tensorrt", "expected"),
    [
        (
            {"flavour": "tensorrt_rtx", "version": "1.6.1.120"},
            DATA_CENTRE,
            "built by tensorrt_rtx 1.6.1.120.*installed is TensorRT 10.9.0.34; install"
            " tensorrt_rtx, or build it again from its ONNX",
        ),
        ({"version": "10.3.0"}, DATA_CENTRE, "tensorrt 10.3.0.*install that version"),
        (
            {"compute_capability": "8.9", "gpu": "NVIDIA L4"},
            DATA_CENTRE,
            r"capability 8\.9 \(NVIDIA L4\), and this GPU \(NVIDIA H200\) has 9",
        ),
        ({"gpu": "NVIDIA H100"}, DATA_CENTRE, "built on NVIDIA H100, and this GPU is"),
        ({"plan_sha256": "0" * 64}, DATA_CENTRE, r"damaged, or model\.plan\.json bel"),
    ],
)
def test_a_foreign_plan_is_refused(
    changes: dict[str, Any], tensorrt: TensorRT, expected: str, tmp_path: Path
) -> None:
    """Flavour, version, GPU and compute capability are named, and what to do."""
    path = written(tmp_path, **changes)

    with pytest.raises(EngineLoadError, match=expected):
        check_user_plan(path, tensorrt, **H200)


@pytest.mark.parametrize(
    ("changes", "tensorrt"),
    [
        ({"version": "10.3.0", "settings": {"version_compatible": True}}, DATA_CENTRE),
        (
            {"gpu": "L4", "settings": {"hardware_compatibility": "ampere_plus"}},
            DATA_CENTRE,
        ),
        ({"flavour": "tensorrt_rtx", "version": "1.6.1.120", "gpu": "RTX 5090"}, RTX),
        ({"gpu": "", "compute_capability": ""}, DATA_CENTRE),
    ],
)
def test_a_portable_plan_is_taken(
    changes: dict[str, Any], tensorrt: TensorRT, tmp_path: Path
) -> None:
    """Compatible with versions or hardware, built for RTX, or built without a GPU."""
    assert check_user_plan(written(tmp_path, **changes), tensorrt, **H200) == PLAN


@pytest.mark.parametrize(
    ("plan", "tensorrt", "expected"),
    [
        (b"", RTX, "the file is empty"),
        (b"PK\3\4 a zip", RTX, r"no TensorRT plan \(it begins with b'PK"),
        (PLAN, RTX, "a plan of the data-centre TensorRT, and what is installed is Ten"),
    ],
)
def test_a_plan_without_sidecar_is_judged_by_its_first_bytes(
    plan: bytes, tensorrt: TensorRT, expected: str, tmp_path: Path
) -> None:
    """Files that are no plans, and plans of the other flavour."""
    path = tmp_path / "model.plan"
    path.write_bytes(plan)

    with pytest.raises(EngineLoadError, match=expected):
        check_user_plan(path, tensorrt)


def test_a_real_plan_tells_its_version(tmp_path: Path, rtx: TensorRT) -> None:
    """TensorRT for RTX writes it into the header; no sidecar is needed."""
    profile = Profile({"x": (1, 4)}, {"x": (2, 4)}, {"x": (4, 4)})
    source = models.save(models.twin_a(), tmp_path / "model.onnx")
    plan = build(source, BuildOptions(flavour="tensorrt_rtx", profiles=(profile,)))
    path = tmp_path / "model.plan"
    path.write_bytes(plan)

    assert check_user_plan(path, rtx) == plan
    with pytest.raises(EngineLoadError, match=rf"built by version {rtx.version}"):
        check_user_plan(path, replace(rtx, version="1.7.1.116"))
    with pytest.raises(EngineLoadError, match=rf"TensorRT for RTX {rtx.version}, and"):
        check_user_plan(path, DATA_CENTRE)


def test_a_missing_plan_is_an_error(tmp_path: Path) -> None:
    """The system's text, and the path."""
    with pytest.raises(EngineLoadError, match=r"absent\.plan: No such file"):
        check_user_plan(tmp_path / "absent.plan", RTX)


def test_writing_fails_without_a_trace(tmp_path: Path) -> None:
    """What was there before stays, and no draft is left."""
    target = tmp_path / "folder"
    target.mkdir()
    (target / "kept").touch()

    with pytest.raises(OSError, match="folder"):
        write_whole(target, b"data")

    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "kept"]


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("The engine plan file is not compatible with this version of TensorRT, "
         "expecting library version 10.9.0.34 got 10.3.0.26", "another TensorRT ver"),
        ("This version of TensorRT-RTX does not support this compute capability",
         "not for this GPU"),
        ("Cuda Runtime (In x at y (cudaError 35: CUDA driver version is insufficient "
         "for CUDA runtime version))", "batcher doctor"),
        ("Plugin not found, are the plugin name correct", "plugin library"),
        ("No importer registered for op: Foo", "plugin library"),
        ("cudaErrorMemoryAllocation: out of memory", "free it"),
        ("something quite new", ""),
    ],
)  # fmt: skip
def test_what_tensorrt_says_has_a_way_out(said: str, advice: str) -> None:
    """Known texts have one; others are passed on as they are."""
    assert advice in remedy(said)
    assert bool(remedy(said)) == bool(advice)
    assert with_remedy(said).startswith(said)
