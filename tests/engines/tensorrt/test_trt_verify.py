"""Plans against their models: what ONNX Runtime answers, and who waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import networks
import numpy as np
import onnx
import pytest
from onnx import helper

import engines
from engines import Engine, EngineLoadError, EngineRunError, ExecutionContext
from engines.base import Array
from engines.tensorrt import onnxfile, verify
from engines.tensorrt.cache import CachedPlan, PlanKey
from engines.tensorrt.module import TensorRT
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.plans import Sidecar
from engines.tensorrt.profiles import AxisSizes, grid
from engines.tensorrt.uint8 import Normalization
from engines.tensorrt.verify import (
    CHECKED,
    MadePlan,
    PlanOptions,
    References,
    changed_model,
    compare_with_model,
)

WAIT_S = 30
LENGTHS = (AxisSizes("S", (4, 8, 16)),)
BYTES_OF_IMAGES = Normalization((0.5,), (127.0,))


def file_of(made: onnx.ModelProto, folder: Path) -> Any:
    """A model, as it was read."""
    return onnxfile.read(models.save(made, folder / "model.onnx"))


def references(file: Any, options: PlanOptions) -> References:
    """Of a model, on the shapes of its options."""
    return References(
        file, grid(file.inputs, rungs=options.rungs, axes=options.axes), options
    )


def answered(given: References) -> list[tuple[Mapping[str, Array], Any]]:
    """Every sample with its answer."""
    return [(sample, given.expected(sample)) for sample in given.samples()]


def running() -> list[threading.Thread]:
    """The threads that work out references."""
    return [t for t in threading.enumerate() if t.name == "references"]


def until(condition: Any) -> bool:
    """Waits until something is so."""
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def same(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    """Whether tensors are equal, to the last bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


# -- samples and answers --------------------------------------------------------------


def test_every_corner_is_answered_in_order(tmp_path: Path) -> None:
    """Each rung at the ends of the lengths, with what ONNX Runtime makes of it."""
    file = file_of(networks.transformer(), tmp_path)
    given = references(file, PlanOptions(rungs=(1, 4), axes=LENGTHS))
    pairs = answered(given)

    model = engines.open(file.path)
    shapes = [sample["input_ids"].shape for sample, _ in pairs]
    assert shapes == [(1, 4), (1, 16), (4, 4), (4, 16)]
    assert given.total == 4
    assert all(same(expected, model.run(sample)) for sample, expected in pairs)
    assert all(0 <= s["input_ids"].min() <= s["input_ids"].max() < 50 for s, _ in pairs)
    assert until(lambda: not running())


def test_samples_that_are_given_are_used(tmp_path: Path) -> None:
    """In the order of their numbers, and nothing else."""
    file = file_of(models.emb(), tmp_path)
    arrays: Any = {f"ids.{i}": np.array([[9 - i]]) for i in (2, 0, 1)}
    np.savez(tmp_path / "samples.npz", **arrays)
    options = PlanOptions(rungs=(1, 4), samples=tmp_path / "samples.npz")
    given = references(file, options)
    pairs = answered(given)

    assert given.total == 3
    assert [s["ids"].item() for s, _ in pairs] == [9, 8, 7]
    assert [e["y"][0, 0] for _, e in pairs] == [36, 32, 28]


def test_a_model_for_bytes_is_asked_with_bytes(tmp_path: Path) -> None:
    """In full precision, whatever the plan has."""
    made = networks.conv()
    file = file_of(made, tmp_path)
    options = PlanOptions(rungs=(2,), precision="fp16", input_u8={"": BYTES_OF_IMAGES})
    ((sample, expected),) = answered(references(file, options))

    image = sample["image"]
    assert image.dtype == np.uint8
    assert image.shape == (2, 3, 16, 16)
    assert expected["scores"].dtype == np.float32
    floats = {"image": BYTES_OF_IMAGES.apply(image, 1)}
    wanted = engines.open(file.path).run(floats)["scores"]
    np.testing.assert_allclose(expected["scores"], wanted, rtol=1e-4)


# -- what goes wrong ------------------------------------------------------------------


def test_a_sample_that_fails_is_told_after_those_before(tmp_path: Path) -> None:
    """The error arrives where the sample would."""
    file = file_of(models.emb(), tmp_path)
    arrays: Any = {"ids.0": np.array([[3]]), "ids.1": np.array([[99]])}
    np.savez(tmp_path / "samples.npz", **arrays)
    given = references(file, PlanOptions(samples=tmp_path / "samples.npz", rungs=(1,)))
    samples = given.samples()

    assert next(samples)["ids"].item() == 3
    with pytest.raises(EngineRunError, match="99"):
        next(samples)


def test_samples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """With the file, the input and what it must be."""
    file = file_of(models.emb(), tmp_path)
    np.savez(tmp_path / "samples.npz", ids=np.zeros((1, 2), np.int64))
    given = references(file, PlanOptions(samples=tmp_path / "samples.npz", rungs=(1,)))

    with pytest.raises(EngineLoadError, match=r"samples\.npz: input 'ids' must be"):
        next(given.samples())


def test_a_model_that_only_tensorrt_knows_has_no_references(tmp_path: Path) -> None:
    """What ONNX Runtime says of it is the error."""
    graph = helper.make_graph(
        [helper.make_node("Unheard", ["x"], ["y"], domain="of.plugins")],
        "network",
        [networks.value_info("x", 1, ["N", 2])],
        [networks.value_info("y", 1, ["N", 2])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("of.plugins", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    given = references(file_of(made, tmp_path), PlanOptions(rungs=(1,)))

    with pytest.raises(EngineLoadError, match=r"model\.onnx: .*Unheard"):
        next(given.samples())


# -- nobody waits for ever ------------------------------------------------------------


def test_references_wait_for_whoever_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not fill the memory, and all of them arrive in the end."""
    monkeypatch.setattr(verify, "_AHEAD_BYTES", 0)
    file = file_of(networks.conv(), tmp_path)
    given = references(file, PlanOptions(rungs=(1, 2, 4, 8)))
    assert until(lambda: given._ready)
    time.sleep(0.1)

    assert len(given._ready) == 1
    assert [len(sample["image"]) for sample, _ in answered(given)] == [1, 2, 4, 8]
    assert given._bytes == 0


def test_references_end_though_nobody_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that fails does not leave them behind."""
    monkeypatch.setattr(verify, "_AHEAD_BYTES", 0)
    file = file_of(networks.conv(), tmp_path)
    given = references(file, PlanOptions(rungs=(1, 2, 4, 8)))
    assert until(lambda: given._ready)
    waiting = running()

    given.stop()

    assert waiting
    assert until(lambda: not running())


# -- compared -------------------------------------------------------------------------


def made_plan(file: Any, options: PlanOptions, rtx: TensorRT) -> MadePlan:
    """A plan that was never built, to be compared with its model."""
    key = PlanKey(
        model_sha256="",
        settings={},
        flavour="tensorrt_rtx",
        version="",
        gpu="",
        compute_capability="",
    )
    sidecar = Sidecar(
        model="",
        model_sha256="",
        flavour="tensorrt_rtx",
        version="",
        plan_sha256="",
        plan_bytes=0,
    )
    return MadePlan(
        cached=CachedPlan(b"", None, sidecar, built=True),
        key=key,
        file=file,
        grid=grid(file.inputs, rungs=options.rungs, axes=options.axes),
        tensorrt=rtx,
        options=options,
    )


def test_an_engine_is_compared_on_every_sample(tmp_path: Path, rtx: TensorRT) -> None:
    """Here the engine is ONNX Runtime itself: with the same weights it passes, with
    others it does not."""
    engine: Any = engines.open(models.save(models.twin_a(), tmp_path / "a.onnx"))
    told: list[tuple[str, int, int]] = []
    results = []
    for twin in (models.twin_a, models.twin_b):
        file = file_of(twin(), tmp_path / twin.__name__)
        made = made_plan(file, PlanOptions(rungs=(1, 4)), rtx)
        results.append(
            compare_with_model(made, engine, lambda *each: told.append(each))
        )

    assert [(r.passed, r.samples) for r in results] == [(True, 2), (False, 2)]
    assert told == [("checking", 1, 2), ("checking", 2, 2)] * 2
    assert until(lambda: not running())


@pytest.mark.parametrize(
    ("precision", "counts"), [(None, "fp32"), ("fp32", "fp32"), ("bf16", "bf16")]
)
def test_the_precision_of_the_plan_decides_how_close_it_must_be(
    precision: Any, counts: str, tmp_path: Path, rtx: TensorRT
) -> None:
    """What it was converted to, else what the model has."""
    file = file_of(models.twin_a(), tmp_path)
    engine: Any = engines.open(file.path)
    made = made_plan(file, PlanOptions(rungs=(1,), precision=precision), rtx)

    assert compare_with_model(made, engine).precision == counts


class Full(Engine):
    """Has no room for a context."""

    backend = "full"

    def create_context(self) -> ExecutionContext:
        raise EngineLoadError("no memory for a lane")


def test_references_end_when_nothing_can_be_compared(
    tmp_path: Path, rtx: TensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the GPU has no memory for the comparison, the host's is given back."""
    monkeypatch.setattr(verify, "_AHEAD_BYTES", 0)
    file = file_of(networks.conv(), tmp_path)
    options = PlanOptions(rungs=(1, 2, 4, 8))
    given = references(file, options)
    made = replace(made_plan(file, options, rtx), references=given)
    assert until(lambda: given._ready)
    full: Any = Full()

    with pytest.raises(EngineLoadError, match="no memory for a lane"):
        compare_with_model(made, full)
    assert until(lambda: not running())


@pytest.mark.parametrize(
    ("notes", "checked"),
    [
        ({}, False),
        ({CHECKED: {"passed": True}}, True),
        ({CHECKED: {"passed": False}}, False),
        ({CHECKED: {}}, False),
    ],
)
def test_a_plan_is_checked_when_it_has_passed(
    notes: dict[str, Any], checked: bool, tmp_path: Path, rtx: TensorRT
) -> None:
    """The numbers beside it say so."""
    file = file_of(models.twin_a(), tmp_path)
    made = made_plan(file, PlanOptions(rungs=(1,)), rtx)
    sidecar = replace(made.cached.sidecar, notes=notes)

    assert (
        replace(made, cached=replace(made.cached, sidecar=sidecar)).checked is checked
    )
    assert made.specs == (*file.inputs, *file.outputs)


# -- changed --------------------------------------------------------------------------


def test_a_model_that_stays_as_it_is_is_not_written(tmp_path: Path) -> None:
    """The plan is built from the file itself."""
    file = file_of(networks.conv(), tmp_path)

    changed = changed_model(file, PlanOptions(build=BuildOptions()), tmp_path / "work")

    assert changed == file.path
    assert not (tmp_path / "work").exists()


def test_changes_of_a_model_follow_each_other(tmp_path: Path) -> None:
    """Bytes in first, then 16 bits inside; the given file is not touched."""
    file = file_of(networks.conv(), tmp_path)
    before = file.path.read_bytes()
    options = PlanOptions(precision="fp16", input_u8={"image": BYTES_OF_IMAGES})

    changed = onnxfile.read(changed_model(file, options, tmp_path / "work"))

    assert changed.path.is_relative_to(tmp_path / "work")
    assert changed.inputs[0].dtype == "UINT8"
    assert any(
        tensor.data_type == onnx.TensorProto.FLOAT16
        for tensor in changed.model.graph.initializer
    )
    assert file.path.read_bytes() == before


def test_a_change_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    """An input that is not there, with the names of those that are."""
    file = file_of(networks.conv(), tmp_path)
    options = PlanOptions(input_u8={"picture": BYTES_OF_IMAGES})

    with pytest.raises(EngineLoadError, match=r"no input 'picture' .*\(it has image\)"):
        changed_model(file, options, tmp_path / "work")
