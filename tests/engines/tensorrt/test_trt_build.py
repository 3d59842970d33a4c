"""Plans are built for real, without a GPU; what cannot be built is refused in words."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import networks
import onnx
import pytest
from onnx import TensorProto

from engines import EngineLoadError, Profile, TensorSpec
from engines.tensorrt import onnxfile
from engines.tensorrt.build import BuildCancelled, BuildStep, build
from engines.tensorrt.module import TensorRT
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.profiles import grid, make_profiles

pytestmark = pytest.mark.usefixtures("rtx")

RTX_MAGIC = b"vtrt"
X4 = Profile({"x": (1, 4)}, {"x": (2, 4)}, {"x": (4, 4)})


def options(*profiles: Profile, **more: Any) -> BuildOptions:
    """Options for TensorRT for RTX."""
    return BuildOptions(flavour="tensorrt_rtx", profiles=profiles, **more)


def built(path: Path, *profiles: Profile, **more: Any) -> bytes:
    """The plan of a model."""
    return build(path, options(*profiles, **more))


# -- what is built --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["probe", "emb", "names", "scal", "mixrow", "i64", "id_bf16", "id_uint8"]
)
def test_tiny_models_are_built(name: str, tmp_path: Path) -> None:
    """Odd names, scalars, INT64, bfloat16 and uint8 tensors make plans."""
    path = models.save(models.BUILDERS[name](), tmp_path / "model.onnx")
    spread = {"D": (2, 4)} if name.startswith("id_") else {}

    plan = built(path, *networks.profiles(path, (1, 2), **spread))

    assert plan.startswith(RTX_MAGIC)


def test_a_transformer_is_built_with_four_profiles(tmp_path: Path) -> None:
    """The split grid of batch and length is what TensorRT takes."""
    path = networks.save(networks.transformer(), tmp_path / "model.onnx")
    profiles = networks.profiles(path, (1, 8, 32), S=(4, 16, 128))

    plan = built(path, *profiles)

    assert len(profiles) == 4
    assert plan.startswith(RTX_MAGIC)
    assert len(plan) > len(built(path, profiles[0]))


def test_a_static_model_needs_no_profile(tmp_path: Path) -> None:
    """Without dynamic axes a plan is built with a profile and without."""
    path = networks.save(networks.conv(batch=1), tmp_path / "model.onnx")
    (profile,) = make_profiles(grid(onnxfile.read(path).inputs))

    assert built(path).startswith(RTX_MAGIC)
    assert built(path, profile).startswith(RTX_MAGIC)


def test_the_order_of_profiles_does_not_change_the_plan(tmp_path: Path) -> None:
    """Equal settings make equal plans, which the cache relies on."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    other = Profile({"x": (5, 4)}, {"x": (8, 4)}, {"x": (8, 4)})

    assert built(path, X4, other) == built(path, other, X4)
    assert options(X4, other).settings() == options(other, X4).settings()
    assert options(X4, other).settings() != options(X4).settings()


def test_options_reach_tensorrt(tmp_path: Path) -> None:
    """Limits, levels, targets and threads are taken; none stops a build."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")

    plan = built(
        path,
        X4,
        optimization_level=1,
        workspace_mb=64,
        tactic_dram_mb=256,
        tf32=False,
        compute_capabilities=("8.6", "sm120"),
        timing_cache=tmp_path / "timings",
        threads=2,
    )

    assert plan.startswith(RTX_MAGIC)
    assert not (tmp_path / "timings").exists()  # the flavour keeps none


def test_external_weights_are_found_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By absolute path, by relative path, and through a link to the model."""
    path = networks.save(networks.conv(), tmp_path / "a" / "model.onnx", external=True)
    profiles = networks.profiles(path)
    link = tmp_path / "b" / "linked.onnx"
    link.parent.mkdir()
    link.symlink_to(path)
    monkeypatch.chdir(tmp_path / "b")

    plans = {
        built(given, *profiles)
        for given in (path, Path("../a/model.onnx"), Path("linked.onnx"))
    }

    assert len(plans) == 1


def test_progress_is_told_in_phases_and_steps(tmp_path: Path) -> None:
    """From parsing to the end; no phase has more steps than it said."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    steps: list[BuildStep] = []

    build(path, options(X4), steps.append)

    assert steps[0] == BuildStep("Parsing", 1, 0, 1)
    assert steps[-1] == BuildStep("Built", 0, 1, 1)
    assert all(0 <= step.done <= step.total for step in steps)
    assert "Building engine" in {step.phase for step in steps if step.depth == 0}
    assert max(step.depth for step in steps) >= 2


# -- how a build ends early -----------------------------------------------------------


def test_a_build_is_given_up_when_its_caller_says_so(tmp_path: Path) -> None:
    """`cancelled` is asked at every step, and ends the build."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 10

    with pytest.raises(BuildCancelled, match="was cancelled"):
        build(path, options(X4), cancelled=cancelled)

    assert len(asked) < 20


def test_ctrl_c_ends_a_build(tmp_path: Path) -> None:
    """KeyboardInterrupt comes out of `build` soon, and nothing goes on building."""
    path = networks.save(networks.conv(layers=12), tmp_path / "model.onnx")
    steps: list[BuildStep] = []

    def interrupt(step: BuildStep) -> None:
        steps.append(step)
        if len(steps) == 20:
            _thread.interrupt_main()
        time.sleep(0.01)  # so that there is still something to end

    with pytest.raises(KeyboardInterrupt):
        build(path, options(*networks.profiles(path)), interrupt)

    told = len(steps)
    time.sleep(0.1)

    assert told == len(steps) < 100


def test_what_a_progress_callback_raises_ends_the_build(tmp_path: Path) -> None:
    """It does not get lost in TensorRT, which cannot pass it on."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")

    def fail(step: BuildStep) -> None:
        if step.phase != "Parsing":
            raise LookupError(step.phase)

    with pytest.raises(LookupError, match="Building engine"):
        build(path, options(X4), fail)


def test_two_builds_run_side_by_side(tmp_path: Path) -> None:
    """Each gets its own plan, and its own errors."""
    good = models.save(models.twin_a(), tmp_path / "good.onnx")
    bad = models.save(models.nz(), tmp_path / "bad.onnx")
    results: dict[str, object] = {}

    def make(name: str, path: Path) -> None:
        try:
            results[name] = built(path, X4)
        except EngineLoadError as error:
            results[name] = str(error)

    threads = [
        threading.Thread(target=make, args=(f"{kind}{i}", path))
        for i in range(3)
        for kind, path in (("good", good), ("bad", bad))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({results[f"good{i}"] for i in range(3)}) == 1
    assert all("NonZero" in str(results[f"bad{i}"]) for i in range(3))


def test_the_thread_can_be_prepared(tmp_path: Path) -> None:
    """`on_thread` runs in the build's thread, before TensorRT does."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    names: list[str] = []

    build(
        path,
        options(X4),
        lambda step: names.append(step.phase),
        on_thread=lambda: names.append(threading.current_thread().name),
    )

    assert names[:2] == ["tensorrt-build", "Parsing"]


# -- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (models.nz, r"node 'where' \(operator NonZero\): .*plugin library that has it"),
        (models.slow, r"operator Identity\): .*body of a Loop, If or Scan"),
        (lambda: models.identity("string"), "input 'x' has the type STRING.*onnxrun"),
        (lambda: models.identity("fp64"), "input 'x' has the type DOUBLE.*cast it ins"),
        (lambda: models.identity("int16"), "input 'x' has the type INT16"),
        (
            lambda: networks.conv(qdq=TensorProto.INT8),
            r"node 'quantize_a_0' \(QuantizeLinear\) quantizes activations to int8",
        ),
        (
            lambda: networks.conv(qdq=TensorProto.UINT8),
            "node 'quantize_a_0' .* unsigned zero point.*QInt8",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(
    make: Callable[[], onnx.ModelProto], expected: str, tmp_path: Path
) -> None:
    """The text names the node, its operator or the tensor, and the way out."""
    path = models.save(make(), tmp_path / "model.onnx")
    inputs = {"x": (4,), "image": (3, 16, 16), "iters": (1,)}
    names = [value.name for value in onnx.load(path).graph.input]
    shapes = [{n: (rows, *inputs[n]) for n in names} for rows in (1, 2, 4)]

    with pytest.raises(EngineLoadError, match=expected):
        built(path, Profile(*shapes))


def test_a_dynamic_model_without_profiles_is_refused(tmp_path: Path) -> None:
    """No size of 1 is made up; the text says what to set."""
    path = networks.save(networks.transformer(), tmp_path / "model.onnx")

    with pytest.raises(EngineLoadError, match=r"input_ids \[-1, -1\].*set max_batch"):
        built(path)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"optimization_level": 6}, "level 6 is not between 0 and 5"),
        ({"version_compatible": True}, "makes no version-compatible plans"),
        ({"hardware_compatibility": "ampere_plus"}, "no hardware compatibility level"),
        ({"compute_capabilities": ("9.9",)}, r"'9\.9' \(possible: .*SM89"),
        ({"plugins": (Path("/tmp/evil.so"),)}, "not in an allowed folder .*none"),
    ],
)
def test_options_that_the_flavour_has_not_are_refused(
    more: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """They are not silently left out."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")

    with pytest.raises(EngineLoadError, match=expected):
        built(path, X4, **more)


def test_a_plugin_library_must_really_be_in_an_allowed_folder(tmp_path: Path) -> None:
    """A link out of the folder is outside; a file that is no library does not load."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    allowed = tmp_path / "plugins"
    allowed.mkdir()
    (tmp_path / "outside.so").write_bytes(b"no library")
    (allowed / "inside.so").write_bytes(b"no library")
    (allowed / "link.so").symlink_to(tmp_path / "outside.so")

    for name, expected in (
        ("link.so", "not in an allowed folder"),
        ("absent.so", "no such file"),
        ("inside.so", "cannot be loaded"),
    ):
        with pytest.raises(EngineLoadError, match=expected):
            built(path, X4, plugins=(allowed / name,), plugin_folders=(allowed,))


def test_a_profile_for_another_input_is_refused(tmp_path: Path) -> None:
    """A name in the wrong case is no profile (TensorRT would take it)."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    shapes = {"X": (1, 4)}

    with pytest.raises(EngineLoadError, match=r"no input 'X' \(it has x \[N, 4\]\)"):
        built(path, Profile(shapes, shapes, shapes))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not an ONNX model"),
        (b"\xff" * 100, "not an ONNX model"),
        (b"<html>no such page</html>", "not an ONNX model"),
    ],
)
def test_files_that_are_no_models_are_refused(
    content: bytes, expected: str, tmp_path: Path
) -> None:
    """Empty, random and foreign files are told apart from models."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    with pytest.raises(EngineLoadError, match=expected):
        built(path, X4)


def test_a_missing_weight_file_is_named(tmp_path: Path) -> None:
    """The file that is missing is named, not the tensor."""
    path = networks.save(networks.conv(), tmp_path / "model.onnx", external=True)
    path.with_suffix(".weights").unlink()

    with pytest.raises(EngineLoadError, match=r"weight file .*model\.weights is miss"):
        built(path)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"offset": 0, "length": 64}, "has 32 bytes, and the model needs 64"),
        ({"offset": 16, "length": 32}, "has 32 bytes, and the model needs 48"),
    ],
)
def test_weights_that_were_cut_short_are_refused(
    place: dict[str, int], text: str, tmp_path: Path
) -> None:
    """TensorRT maps weight files: reading past the end would end the process."""
    made = networks.conv()
    onnx.external_data_helper.set_external_data(
        made.graph.initializer[0], "weights.bin", **place
    )
    path = models.save(made, tmp_path / "model.onnx")
    (tmp_path / "weights.bin").write_bytes(b"\0" * 32)

    with pytest.raises(EngineLoadError, match=text):
        onnxfile.read(path)


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/passwd", "a/../../b"])
def test_weights_outside_the_folder_are_refused(location: str, tmp_path: Path) -> None:
    """A model cannot make us read files from elsewhere."""
    made = networks.conv()
    onnx.external_data_helper.set_external_data(made.graph.initializer[0], location)
    path = models.save(made, tmp_path / "model.onnx")

    with pytest.raises(EngineLoadError, match="not below the model's folder; refused"):
        onnxfile.read(path)


def test_weights_in_subgraphs_and_attributes_count(tmp_path: Path) -> None:
    """External weights are found wherever a tensor can be stored."""
    made = models.slow(8)
    constant = onnx.helper.make_node(
        "Constant",
        [],
        ["unused"],
        value=onnx.numpy_helper.from_array(networks.np.ones(4), "inner"),
    )
    (loop,) = [node for node in made.graph.node if node.op_type == "Loop"]
    loop.attribute[0].g.node.append(constant)
    tensor = loop.attribute[0].g.node[-1].attribute[0].t
    onnx.external_data_helper.set_external_data(tensor, "inner.bin")
    path = models.save(made, tmp_path / "model.onnx")
    (tmp_path / "inner.bin").write_bytes(b"\0" * 32)

    assert onnxfile.read(path).weight_files == (tmp_path / "inner.bin",)


def test_specs_are_those_of_the_graph(tmp_path: Path) -> None:
    """Names, dtypes and axes, without initializers that are listed as inputs."""
    made = networks.transformer()
    made.graph.input.append(networks.value_info("beta", TensorProto.FLOAT, [16]))
    path = models.save(made, tmp_path / "model.onnx")

    file = onnxfile.read(path)

    assert file.inputs == (
        TensorSpec("input_ids", "INT64", ("N", "S")),
        TensorSpec("attention_mask", "INT64", ("N", "S")),
    )
    assert file.outputs == (TensorSpec("hidden", "FP32", ("N", "S", 16)),)


def test_no_build_leaves_anything_behind(tmp_path: Path, rtx: TensorRT) -> None:
    """A build, good or bad, writes nothing beside the model."""
    good = models.save(models.twin_a(), tmp_path / "good.onnx")
    bad = models.save(models.nz(), tmp_path / "bad.onnx")

    built(good, X4)
    with pytest.raises(EngineLoadError, match="NonZero"):
        built(bad, X4)

    assert sorted(os.listdir(tmp_path)) == ["bad.onnx", "good.onnx"]
