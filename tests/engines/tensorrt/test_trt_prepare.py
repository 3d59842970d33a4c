"""From a model's file to its plan, without a GPU: built once, found, described."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import networks
import pytest

from engines import EngineError, EngineLoadError, Profile, TensorSpec
from engines.tensorrt import onnxfile, verify
from engines.tensorrt.build import BuildCancelled
from engines.tensorrt.cache import PlanCache
from engines.tensorrt.facts import Gpu
from engines.tensorrt.locks import exclusive
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.plans import Sidecar, sidecar_path, write_plan
from engines.tensorrt.prepare import (
    gpu_of,
    make_plan,
    open_checked,
    open_plan,
    plan_rungs,
    plan_specs,
    prepare,
)
from engines.tensorrt.profiles import AxisSizes
from engines.tensorrt.uint8 import Normalization
from engines.tensorrt.verify import CHECKED, MadePlan, PlanOptions, References

pytestmark = pytest.mark.usefixtures("rtx")

NO_GPU = 99  # an index that no machine has
WAIT_S = 30
BUILD = BuildOptions(flavour="tensorrt_rtx")
OPTIONS = PlanOptions(rungs=(1, 4), build=BUILD)
SPECS = (
    TensorSpec("image", "FP32", ("N", 3, 16, 16)),
    TensorSpec("scores", "FP32", ("N", 8)),
)


class Built(NamedTuple):
    """A plan that was built with `OPTIONS`, its model, and what was told meanwhile."""

    model: Path
    cache: PlanCache
    made: MadePlan
    told: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def built(rtx: object, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Of a convolution net; not to be changed."""
    folder = tmp_path_factory.mktemp("built")
    model = networks.save(networks.conv(layers=1), folder / "model.onnx")
    cache = PlanCache(folder / "plans")
    told: list[tuple[str, int, int]] = []
    made = make_plan(
        model, OPTIONS, cache, gpu=None, report=lambda *each: told.append(each)
    )
    return Built(model, cache, made, told)


def found(built: Built, options: PlanOptions, gpu: Gpu | None = None) -> MadePlan:
    """The plan for other options, if it is in the cache.

    Raises:
        BuildCancelled: it would have to be built.
    """
    return make_plan(built.model, options, built.cache, gpu=gpu, cancelled=lambda: True)


def until(condition: Callable[[], object]) -> bool:
    """Waits until something is so."""
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def references() -> list[threading.Thread]:
    """The threads that work out references."""
    return [t for t in threading.enumerate() if t.name == "references"]


# -- built and found ------------------------------------------------------------------


def test_a_plan_is_built_once(built: Built) -> None:
    """The second start finds what the first has built, and builds nothing."""
    told: list[str] = []
    again = make_plan(
        built.model,
        OPTIONS,
        PlanCache(built.cache.folder),
        gpu=None,
        report=lambda phase, done, total: told.append(phase),
    )

    assert (built.made.cached.built, again.cached.built) == (True, False)
    assert again.cached.plan == built.made.cached.plan
    assert again.cached.sidecar == built.made.cached.sidecar
    assert again.key == built.made.key
    assert "building" not in told


def test_a_build_tells_how_far_it_is(built: Built) -> None:
    """First the bytes of the file, then steps: each phase of TensorRT up to its end."""
    size = built.model.stat().st_size
    phases = [phase for phase, _, _ in built.told]

    assert phases == sorted(phases, key=["reading", "building"].index)
    assert [each for each in built.told if each[0] == "reading"] == [
        ("reading", size, size)
    ]
    assert ("building", 1, 1) in built.told
    assert all(0 <= done <= total for _, done, total in built.told)


def test_a_plan_fits_its_options(built: Built) -> None:
    """Its profile holds the batch sizes; without a GPU nothing is compared."""
    (profile,) = built.made.cached.sidecar.settings["profiles"]

    assert profile["min"] == {"image": [1, 3, 16, 16]}
    assert profile["max"] == {"image": [4, 3, 16, 16]}
    assert built.made.cached.sidecar.model == str(built.model)
    assert built.made.cached.sidecar.flavour == "tensorrt_rtx"
    assert built.made.references is None
    assert not built.made.checked
    assert built.made.specs == SPECS


def test_another_process_that_builds_is_waited_for(built: Built) -> None:
    """Who waits is told of it, and can give up."""
    options = replace(OPTIONS, rungs=(1, 16))
    before = set(built.cache.folder.glob("*.lock"))
    with pytest.raises(BuildCancelled, match="the build was cancelled"):
        found(built, options)
    (lock,) = set(built.cache.folder.glob("*.lock")) - before
    told: list[tuple[str, int, int]] = []

    with (
        exclusive(lock),
        pytest.raises(BuildCancelled, match="another process builds it"),
    ):
        make_plan(
            built.model,
            options,
            built.cache,
            gpu=None,
            report=lambda *each: told.append(each),
            cancelled=lambda: True,
        )
    assert told[-1] == ("waiting", 0, 0)


def test_a_folder_that_cannot_be_written_is_no_error(
    built: Built, tmp_path: Path
) -> None:
    """The plan is made, described and not kept."""
    (tmp_path / "plans").write_text("a file, and no folder")

    made = make_plan(built.model, OPTIONS, PlanCache(tmp_path / "plans"), gpu=None)

    assert made.cached.path is None
    assert made.cached.sidecar.notes == built.made.cached.sidecar.notes


def test_a_model_without_dynamic_axes_needs_no_sizes(tmp_path: Path) -> None:
    """It is built without profiles, and says that it is not batched."""
    model = networks.save(networks.conv(batch=1, layers=1), tmp_path / "model.onnx")
    cache = PlanCache(tmp_path / "plans")

    made = make_plan(model, PlanOptions(build=BUILD), cache, gpu=None)

    assert made.cached.path is not None
    assert made.cached.sidecar.settings["profiles"] == []
    assert plan_rungs(made.cached.path) == ()
    assert plan_specs(made.cached.path)[0].shape == (1, 3, 16, 16)


def test_bytes_and_16_bits_are_built_as_they_were_asked_for(
    built: Built, tmp_path: Path
) -> None:
    """The plan is another one, under a key that says what it is."""
    options = replace(
        OPTIONS, precision="fp16", input_u8={"": Normalization((0.5,), (127.0,))}
    )
    made = make_plan(built.model, options, PlanCache(tmp_path), gpu=None)

    assert made.cached.sidecar.precision == "fp16"
    assert made.key.changes == {"input_u8": {"": {"scale": [0.5], "mean": [127.0]}}}
    assert made.cached.plan != built.made.cached.plan
    assert list(tmp_path.glob("*.plan")) == [made.cached.path]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (replace(OPTIONS, rungs=()), "it is the batch, add to model.toml: max_batch"),
        (replace(OPTIONS, axes=(AxisSizes("S", (4,)),)), "no input has an axis named"),
        (replace(OPTIONS, input_u8={"y": Normalization((1,), (0,))}), "no input 'y'"),
        (
            replace(OPTIONS, build=replace(BUILD, plugins=(Path("absent.so"),))),
            r"model\.onnx: .*absent\.so",
        ),
    ],
)
def test_options_that_fit_no_model_are_refused(
    built: Built, options: PlanOptions, says: str
) -> None:
    """With what to do; nothing is left in the cache but a lock."""
    before = set(built.cache.folder.glob("*.plan*"))

    with pytest.raises(EngineLoadError, match=says):
        make_plan(built.model, options, built.cache, gpu=None)
    assert set(built.cache.folder.glob("*.plan*")) == before


# -- keys -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, check=False),
        replace(OPTIONS, samples=Path("samples.npz")),
        replace(OPTIONS, rungs=(1, 2, 4)),  # a profile holds what lies between
        replace(OPTIONS, build=replace(BUILD, threads=2)),
        replace(OPTIONS, build=replace(BUILD, timing_cache=Path("timings"))),
        replace(OPTIONS, build=replace(BUILD, plugin_folders=(Path("plugins"),))),
    ],
)
def test_what_does_not_change_a_plan_finds_it(
    built: Built, options: PlanOptions
) -> None:
    """How it is compared, and how the build goes about it."""
    again = found(built, options)

    assert not again.cached.built
    assert again.key == built.made.key


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, rungs=(1, 8)),
        replace(OPTIONS, rungs=(2, 4)),
        replace(OPTIONS, precision="fp16"),
        replace(OPTIONS, precision="bf16"),
        replace(OPTIONS, input_u8={"": Normalization((1.0,), (0.0,))}),
        replace(OPTIONS, build=replace(BUILD, tf32=False)),
        replace(OPTIONS, build=replace(BUILD, optimization_level=1)),
        replace(OPTIONS, build=replace(BUILD, compute_capabilities=("8.9",))),
        replace(
            OPTIONS,
            build=replace(
                BUILD,
                profiles=(
                    Profile(
                        {"image": (1, 3, 16, 16)},
                        {"image": (2, 3, 16, 16)},
                        {"image": (4, 3, 16, 16)},
                    ),
                ),
            ),
        ),
    ],
)
def test_what_changes_a_plan_builds_it_anew(built: Built, options: PlanOptions) -> None:
    """Sizes, types, and how it is built."""
    with pytest.raises(BuildCancelled, match="the build was cancelled"):
        found(built, options)


def test_numbers_of_a_normalization_count(built: Built, tmp_path: Path) -> None:
    """Images that are normalized otherwise make another plan."""
    keys = set()
    for mean in (0.0, 127.0):
        options = replace(OPTIONS, input_u8={"": Normalization((1.0,), (mean,))})
        made = make_plan(built.model, options, PlanCache(tmp_path), gpu=None)
        keys.add(made.key.digest)

    assert len(keys) == 2


def test_a_plan_is_for_one_kind_of_gpu(built: Built) -> None:
    """What was built without a GPU, or for another, is not found."""
    gpu = Gpu(index=NO_GPU, name="NVIDIA L4", compute_capability="8.9", memory_bytes=1)

    with pytest.raises(EngineError):  # it is built, on a GPU that is not there
        found(built, replace(OPTIONS, check=False), gpu)


# -- described ------------------------------------------------------------------------


def test_tensors_and_batch_sizes_lie_beside_a_plan(built: Built) -> None:
    """As they are in the model, the names of axes included."""
    path = built.made.cached.path

    assert path is not None
    assert plan_specs(path) == SPECS
    assert plan_rungs(path) == (1, 4)


def test_what_was_noted_later_leaves_them(built: Built, tmp_path: Path) -> None:
    """The numbers of a comparison are added, and the next start finds all of it."""
    shutil.copytree(built.cache.folder, tmp_path / "plans")
    cache = PlanCache(tmp_path / "plans")
    cache.annotate(built.made.key, {CHECKED: {"passed": True}})

    again = make_plan(built.model, OPTIONS, cache, gpu=None)

    assert again.checked
    assert plan_specs(cache.path(again.key)) == SPECS
    assert plan_rungs(cache.path(again.key)) == (1, 4)


def written(folder: Path, notes: Any) -> Path:
    """A plan with these notes beside it."""
    sidecar = Sidecar(
        model="m.onnx",
        model_sha256="",
        flavour="tensorrt",
        version="10",
        plan_sha256="",
        plan_bytes=1,
        notes=notes,
    )
    write_plan(folder / "model.plan", b"p", sidecar)
    return folder / "model.plan"


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"tensors": [], "rungs": []},
        {"tensors": None, "rungs": None},
        {"tensors": 5, "rungs": 5},
        {"tensors": "x", "rungs": "1, 4"},
        {"tensors": [{"name": "x", "dtype": "FP32"}], "rungs": ["1"]},
        {"tensors": [["x", "FP32", [1]]], "rungs": [[1]]},
        {"tensors": [{"name": "x", "dtype": "FP32", "shape": 4}], "rungs": {"1": 4}},
    ],
)
def test_notes_of_others_say_nothing(notes: dict[str, Any], tmp_path: Path) -> None:
    """A plan from elsewhere is taken without names."""
    path = written(tmp_path, notes)

    assert plan_specs(path) == ()
    assert plan_rungs(path) == ()


def test_a_damaged_sidecar_says_nothing(built: Built, tmp_path: Path) -> None:
    """Nor does one that is not there."""
    source = built.made.cached.path
    assert source is not None
    path = tmp_path / "model.plan"
    damaged = sidecar_path(source).read_bytes().replace(b"image", b"iMage")
    sidecar_path(path).write_bytes(damaged)

    for each in (path, tmp_path / "absent.plan"):
        assert plan_specs(each) == ()
        assert plan_rungs(each) == ()


# -- without a GPU --------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_named(built: Built, tmp_path: Path) -> None:
    """By whatever needs one, before anything is read or built."""
    with pytest.raises(EngineLoadError, match=r"^(there is no GPU 99|no GPU to run)"):
        gpu_of(NO_GPU)
    with pytest.raises(EngineLoadError, match=r"^(there is no GPU 99|no GPU to run)"):
        prepare(built.model, OPTIONS, tmp_path / "plans", name="model", device=NO_GPU)
    with pytest.raises(EngineLoadError, match=r"^(there is no GPU 99|no GPU to run)"):
        open_plan(
            tmp_path / "model.plan",
            name="model",
            device=NO_GPU,
            flavour="tensorrt_rtx",
        )
    assert os.listdir(tmp_path) == []


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """References wait after the first until somebody takes it."""
    monkeypatch.setattr(verify, "_AHEAD_BYTES", 0)


@pytest.mark.usefixtures("no_room")
def test_a_plan_that_is_not_loaded_leaves_no_references(built: Built) -> None:
    """The thread that works them out ends, and the model's name is in the error."""
    file = onnxfile.read(built.model)
    made = replace(built.made, references=References(file, built.made.grid, OPTIONS))

    with pytest.raises(EngineLoadError, match=f"^resnet: no GPU {NO_GPU}: "):
        open_checked(made, built.cache, name="resnet", device=NO_GPU)
    assert until(lambda: not references())


@pytest.mark.usefixtures("no_room")
def test_a_build_that_fails_leaves_no_references(built: Built, tmp_path: Path) -> None:
    """They have begun beside it, and end with it."""
    gpu = Gpu(index=NO_GPU, name="none", compute_capability="9.0", memory_bytes=1)

    with pytest.raises(EngineError):
        make_plan(built.model, OPTIONS, PlanCache(tmp_path), gpu=gpu)
    assert until(lambda: not references())
