"""The names of TensorRT that are used are those of the manifest, and they are there."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
import trt_names

from engines.tensorrt.module import FLAVOURS, ModuleMissing, TensorRT, load

MANIFEST: Final[dict[str, Any]] = json.loads(trt_names.MANIFEST.read_text())
NAMES: Final[dict[str, dict[str, Any]]] = MANIFEST["names"]

ONLY_RTX: Final = {
    "ComputeCapability",
    "ComputeCapability.CURRENT",
    "DynamicShapesKernelSpecializationStrategy",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IExecutionContext.is_stream_capturable",
    "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
}
"""What the data-centre flavour has not: the code asks for the flavour, or for the name,
before it uses one of these."""


def test_the_manifest_lists_what_is_used() -> None:
    """No name too few (print them with trt_names.py), and none that nothing uses."""
    used = trt_names.used_names()

    assert {name: used[name] for name in set(used) - set(NAMES)} == {}
    assert set(NAMES) - set(used) == set()


def test_the_scan_finds_names_of_every_kind() -> None:
    """Classes, values behind an alias, methods of objects, callbacks, strings."""
    used = trt_names.used_names()

    assert {
        "Builder",
        "MemoryPoolType.WORKSPACE",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "IBuilderConfig.set_memory_pool_limit",
        "OnnxParser.parse_from_file",
        "IProgressMonitor.step_complete",
        "BuilderFlag",
    } <= set(used)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_installed_module_has_what_is_used(flavour: Any, rtx: TensorRT) -> None:
    """Every name that the manifest has for a flavour, with kind and signature."""
    try:
        found = load(flavour)
    except ModuleMissing as error:
        pytest.skip(str(error))  # `rtx` makes sure of the one that CI has
    expected = {
        name: {key: entry[key] for key in ("kind", "signatures") if key in entry}
        for name, entry in NAMES.items()
        if flavour in entry
    }
    actual = {name: trt_names.describe(found.trt, name) for name in expected}

    if flavour == "tensorrt":  # other defaults and type names are no fault
        assert [name for name, what in actual.items() if what is None] == []
    else:
        assert actual == expected


def test_only_optional_names_are_missing_from_a_flavour() -> None:
    """The data-centre flavour has all but those; the other all but callbacks."""
    missing = {name for name, entry in NAMES.items() if "tensorrt" not in entry}
    unseen = {e["kind"] for e in NAMES.values() if "tensorrt_rtx" not in e}

    assert missing <= ONLY_RTX
    assert unseen <= {"callback"}


def test_versions_are_those_that_were_looked_at() -> None:
    """First and last version of every entry, in their order."""
    for entry in NAMES.values():
        for flavour in FLAVOURS:
            versions = MANIFEST["looked_at"][flavour]
            first, last = entry.get(flavour, (versions[0], versions[-1]))

            assert versions.index(first) <= versions.index(last)
