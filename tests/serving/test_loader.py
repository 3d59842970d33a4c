"""Loading: what can be batched, what the warm-up finds, which configurations fit."""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from onnx import helper

import engines
from batcher.errors import ConfigError
from batcher.scheduling import POLICIES, PolicyOptions, Scheduler
from batcher.serving.loader import LoadedModel, batch_obstacle, load, seed_costs
from batcher.serving.repository import ModelSource
from engines import EngineLoadError
from engines.tensorrt.facts import gpu_fact

from .parts import spec

MAGIKA = Path(str(files("magika"))) / "models" / "standard_v3_3" / "model.onnx"

FIXED_FIRST = "the first axis of {} is fixed at {}"

OBSTACLES: dict[str, str | None] = {
    **dict.fromkeys(models.BUILDERS, None),
    "baked": FIXED_FIRST.format("output 'y'", 1),
    "scal": "input 'sr' is a scalar",
    "ax1": FIXED_FIRST.format("input 'st'", 2),
    "nz": FIXED_FIRST.format("output 'where'", 2),
}
"""Why each tiny model cannot batch on axis 0; None where it can."""


FIRST = 'batch_axis = "first"\n'
"""For models whose rows tell of their batch (`models`, "witnesses")."""


def sourced(model: onnx.ModelProto, folder: Path, toml: str = "") -> ModelSource:
    """A model's files in a folder."""
    path = models.save(model, folder / "m" / "1" / "model.onnx")
    config = None
    if toml:
        config = folder / "m" / "model.toml"
        config.write_text(toml)
    return ModelSource("m", "1", path, config)


def loaded(
    model: onnx.ModelProto, folder: Path, toml: str = "", **overrides: Any
) -> LoadedModel:
    """A loaded model."""
    return load(sourced(model, folder, toml), overrides)


def refusal(model: onnx.ModelProto, folder: Path, toml: str) -> str:
    """The text with which a configuration is refused; it names the file."""
    source = sourced(model, folder, toml)
    with pytest.raises(ConfigError) as caught:
        load(source, {})
    assert str(caught.value).startswith(f"{source.config}: ")
    return str(caught.value)


# -- the batch axis, from the file ----------------------------------------------------


@pytest.mark.parametrize("name", models.BUILDERS)
def test_obstacles_of_the_tiny_models(name: str, tmp_path: Path) -> None:
    """Each model batches, or the reason why not is the right one."""
    engine = engines.open(models.save(models.BUILDERS[name](), tmp_path / "m.onnx"))

    assert batch_obstacle(engine.inputs, engine.outputs) == OBSTACLES[name]


def test_a_real_model_batches() -> None:
    """Magika's axes are called differently on each side, and are the batch."""
    engine = engines.open(MAGIKA)

    assert batch_obstacle(engine.inputs, engine.outputs) is None


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ((), (spec("y", "FP32", "N"),), "it has no inputs"),
        ((spec("x", "FP32", None),), (spec("y", "FP32", None, 2),), None),
        ((spec("x", "FP32", "N"),), (spec("y", "FP32", "M"),), None),
        ((spec("x", "FP32", "N"), spec("z", "FP32", None)), (), None),
        (
            (spec("x", "FP32", 1, 4),),
            (spec("y", "FP32", "N"),),
            "the first axis of input 'x' is fixed at 1",
        ),
        (
            (spec("a", "FP32", "N"), spec("b", "FP32", "M")),
            (),
            "the first axis is 'N' in input 'a' but 'M' in 'b'",
        ),
        (
            (spec("a", "FP32", "N", 2), spec("b", "FP32", None, "N")),
            (),
            "axis 'N' is the first of one input and an inner one of another",
        ),
        (
            (spec("x", "FP32", "N", "S"),),
            (spec("y", "FP32", "S"),),
            "the first axis of output 'y' is 'S'",
        ),
        (
            (spec("x", "FP32", "N", "S"),),
            (spec("y", "FP32", "N", "N"),),
            "output 'y' has the batch on another axis too",
        ),
        ((spec("x", "FP32", "N"),), (spec("y", "FP32"),), "output 'y' is a scalar"),
    ],
)
def test_obstacles_of_shapes(inputs: Any, outputs: Any, expected: str | None) -> None:
    """Axis 0 is the batch when it can be that of every tensor, by size and name."""
    assert batch_obstacle(inputs, outputs) == expected


# -- the batch axis, from a run -------------------------------------------------------


def test_a_model_that_batches_has_every_size(tmp_path: Path) -> None:
    """Without configuration a model has rungs up to 64, and requests of up to 4096."""
    model = loaded(models.twin_a(), tmp_path)

    assert model.rungs == tuple(range(1, 65))
    assert (model.signature.batched, model.signature.max_batch) == (True, 64)
    assert model.signature.max_rows == 4096
    assert (model.warm_up.obstacle, model.warm_up.predicted) == (None, True)
    assert model.warm_up.warnings == []


def of_nodes(
    nodes: list[onnx.NodeProto],
    kind: int,
    axes: list[Any],
    *constants: onnx.TensorProto,
) -> onnx.ModelProto:
    """A model x -> y of these nodes, both of this type and these axes."""
    x = helper.make_tensor_value_info("x", kind, axes)
    y = helper.make_tensor_value_info("y", kind, axes)
    graph = helper.make_graph(nodes, "graph", [x], [y], list(constants))
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


def sorts(axis: int) -> onnx.ModelProto:
    """Puts the rows into order, the largest first or last."""
    nodes = [
        helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
        helper.make_node("TopK", ["x", "rows"], ["y", "at"], axis=0, largest=axis),
    ]
    return of_nodes(nodes, 1, ["N", 1])


def running_sum(kind: int, axes: list[Any]) -> onnx.ModelProto:
    """Sums up along axis 0: what a model does that has time there."""
    axis = helper.make_tensor("axis", 7, [], [0])
    node = helper.make_node("CumSum", ["x", "axis"], ["y"])
    return of_nodes([node], kind, axes, axis)


MIXES: dict[str, Any] = {
    "mixrow": models.mixrow,
    "probe": models.probe,  # its witnesses tell of the batch
    "time-major": lambda: running_sum(1, ["L", "N"]),
    "time-major integers": lambda: running_sum(7, ["L"]),
    "ascending": lambda: sorts(0),
    "descending": lambda: sorts(1),
    "distinct": lambda: of_nodes(
        [helper.make_node("Unique", ["x"], ["y"], axis=0)], 1, ["N", 4]
    ),
    "below the largest": lambda: of_nodes(
        [
            helper.make_node("ReduceMax", ["x"], ["most"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["x", "most"], ["y"]),
        ],
        7,
        ["N", 4],
    ),
}
"""Models whose rows depend on each other, though their files say nothing of it."""


@pytest.mark.parametrize("mix", MIXES)
def test_rows_that_depend_on_each_other_are_kept_apart(
    mix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that mixes rows is served unbatched, and the log says why."""
    with caplog.at_level(logging.WARNING):
        model = loaded(MIXES[mix](), tmp_path)

    assert (model.signature.batched, model.rungs) == (False, (1,))
    (record,) = caplog.records
    assert "model 'm' is served without batching" in record.getMessage()
    assert 'batch_axis = "first"' in record.getMessage()


@pytest.mark.parametrize("mix", ["mixrow", "probe", "ascending"])
def test_a_batch_axis_can_be_vouched_for(
    mix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `batch_axis = "first"` rows share batches whatever the runs have shown."""
    with caplog.at_level(logging.WARNING):
        model = loaded(MIXES[mix](), tmp_path, 'batch_axis = "first"')

    assert (model.signature.batched, model.rungs[-1]) == (True, 64)
    assert "rows depend on each other, but" in caplog.text


def test_rounding_is_no_dependence(tmp_path: Path) -> None:
    """A scale that is that of the whole batch, as after dynamic quantization, warns."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    model = of_nodes(nodes, 1, ["N", 4])

    assert loaded(model, tmp_path).signature.batched is True


@pytest.mark.parametrize(
    "model",
    [models.baked("N"), models.nz(transposed=True)],
    ids=["baked", "nz"],
)
def test_a_batch_axis_that_a_run_disproves_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: onnx.ModelProto
) -> None:
    """A file that promises a batch axis the run does not keep is served unbatched."""
    with caplog.at_level(logging.WARNING):
        served = loaded(model, tmp_path)

    assert (served.signature.batched, served.rungs) == (False, (1,))
    assert (served.signature.max_batch, served.signature.max_rows) == (1, 1)
    assert "model 'm' is served without batching" in caplog.text


@pytest.mark.parametrize("name", [n for n in OBSTACLES if OBSTACLES[n]])
def test_a_model_with_an_obstacle_is_served_unbatched(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot batch is served all the same, without a word."""
    with caplog.at_level(logging.WARNING):
        model = loaded(models.BUILDERS[name](), tmp_path)

    assert model.signature.batched is False
    assert caplog.records == []


@pytest.mark.parametrize("name", [n for n in OBSTACLES if not OBSTACLES[n]])
def test_every_other_model_is_warmed(name: str, tmp_path: Path) -> None:
    """The smallest and the largest rung have run, and their times are known."""
    model = loaded(models.BUILDERS[name](), tmp_path, FIRST, max_batch=2)

    assert model.rungs == (1, 2)
    assert [rung for _, rung, _ in model.warm_up.costs] == [1, 2]
    assert min(ns for _, _, ns in model.warm_up.costs) > 0


def test_a_real_model_is_warmed_without_warnings(tmp_path: Path) -> None:
    """Magika's rows agree but for rounding, alone and in a batch (B068)."""
    model = load(ModelSource("magika", "1", MAGIKA, None), {"max_batch": 8})

    assert (model.signature.batched, model.warm_up.warnings) == (True, [])
    assert model.warm_up.costs[0][:2] == (((2048,),), 1)


def test_a_model_that_made_up_input_breaks_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warm-up that cannot run is left out: the log says so, and nothing is known."""
    ids = helper.make_tensor_value_info("x", 7, ["N", 1])
    y = helper.make_tensor_value_info("y", 7, ["N", 1])
    empty = helper.make_tensor("table", 7, [0, 1], [])
    # A table without rows fails on every index.
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["deep"]),
        helper.make_node("Flatten", ["deep"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "graph", [ids], [y], [empty])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    with caplog.at_level(logging.INFO):
        served = loaded(model, tmp_path)

    assert (served.signature.batched, served.warm_up.costs) == (True, [])
    assert "model 'm': made-up input does not run (" in caplog.text
    assert "whether rows depend on each other is not known" in caplog.text


def test_rows_whose_outputs_differ_in_shape_are_kept_apart(tmp_path: Path) -> None:
    """An output that is as wide as the batch's widest row depends on its neighbours."""
    x = helper.make_tensor_value_info("x", 1, ["N", 64])
    y = helper.make_tensor_value_info("y", 1, ["N", "K"])
    zero = helper.make_tensor("zero", 1, [], [0.0])
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["above"]),
        helper.make_node("Cast", ["above"], ["ones"], to=6),
        helper.make_node("ReduceMax", ["ones"], ["any"], axes=[0], keepdims=0),
        helper.make_node("Cast", ["any"], ["keep"], to=9),
        helper.make_node("Compress", ["x", "keep"], ["y"], axis=1),
    ]
    graph = helper.make_graph(nodes, "graph", [x], [y], [zero])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)

    served = loaded(model, tmp_path)

    assert served.signature.batched is False


def test_axes_with_lying_names_are_noticed(tmp_path: Path) -> None:
    """Where an output has not the size that its axis names promise, none is trusted."""
    x = helper.make_tensor_value_info("x", 1, ["N", "S"])
    y = helper.make_tensor_value_info("y", 1, ["N", "S"])
    pads = helper.make_tensor("pads", 7, [4], [0, 0, 0, 1])
    node = helper.make_node("Pad", ["x", "pads"], ["y"])
    graph = helper.make_graph([node], "graph", [x], [y], [pads])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)

    served = loaded(model, tmp_path)

    assert served.warm_up.predicted is False
    assert served.shapes.fit(((1, 3),)).group.cell(1).outputs == [None]


# -- padding, from a run --------------------------------------------------------------

SEQ = "[axes.S]\nbuckets = [4, 8]\npad = {{ ids = 0, mask = {} }}\n"


def test_every_bucket_is_warmed(tmp_path: Path) -> None:
    """Each bucket runs with the smallest and the largest rung."""
    model = loaded(models.seq(), tmp_path, FIRST + SEQ.format(0), max_batch=2)

    assert [(tails[0], rung) for tails, rung, _ in model.warm_up.costs] == [
        ((4,), 1),
        ((4,), 2),
        ((8,), 1),
        ((8,), 2),
    ]


def test_outputs_that_padding_changes_are_warned_of(tmp_path: Path) -> None:
    """What betrays padding is named; the masked output, which does not, is not."""
    model = loaded(models.seq(), tmp_path, FIRST + SEQ.format(0))

    changed = [w.split("'")[1] for w in model.warm_up.warnings if "is padded" in w]
    assert changed == ["rawsum", "len"]


def test_a_wrong_pad_value_is_warned_of(tmp_path: Path) -> None:
    """A mask that is padded with ones lets the padding through to the output."""
    model = loaded(models.seq(), tmp_path, FIRST + SEQ.format(1))

    changed = [w.split("'")[1] for w in model.warm_up.warnings if "is padded" in w]
    assert changed == ["y", "rawsum", "len"]


@pytest.mark.parametrize("batch_axis", ["first", "none"])
@pytest.mark.parametrize("buckets", ["[4]", "[4, 8]"])
@pytest.mark.parametrize("outputs", ["", "outputs = { y = { axis = 1, ratio = 0.5 } }"])
def test_outputs_that_are_not_cut_back_are_warned_of(
    batch_axis: str, buckets: str, outputs: str, tmp_path: Path
) -> None:
    """An output that follows a padded axis in another way than declared is named."""
    toml = (
        f'batch_axis = "{batch_axis}"\n[axes.D]\nbuckets = {buckets}\n'
        f"pad = {{ x = 0 }}\n{outputs}\n"
    )
    model = loaded(models.identity("fp32"), tmp_path, toml)

    (warning,) = (w for w in model.warm_up.warnings if "is padded" in w)
    assert "axes.D.outputs says how it follows the axis" in warning


def test_buckets_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    """A bucket of terabytes is one clear error."""
    toml = "[axes.D]\nbuckets = [1000000000000]\npad = { x = 0 }\n"
    text = refusal(models.identity("fp32"), tmp_path, toml)

    assert "lower max_batch or the buckets" in text


# -- configurations -------------------------------------------------------------------


@pytest.mark.parametrize("toml", ["max_batch = 8", "[batching]\nrungs = [1, 8]"])
@pytest.mark.parametrize("name", ["baked", "scal", "ax1", "nz"])
def test_a_batch_that_a_model_cannot_have_is_refused(
    name: str, toml: str, tmp_path: Path
) -> None:
    """Asking for batches of a model that has none names the knob and the reason."""
    text = refusal(models.BUILDERS[name](), tmp_path, toml)

    assert toml.split(" =")[0].split("\n")[-1] in text
    assert f"but the model cannot batch: {OBSTACLES[name]}" in text


def test_a_fixed_first_axis_of_1_is_named(tmp_path: Path) -> None:
    """A model exported for one row says so when asked for eight, and serves one."""
    text = refusal(models.probe(1), tmp_path, "max_batch = 8")
    model = loaded(models.probe(1), tmp_path / "other")

    assert "max_batch = 8" in text
    assert "the first axis of input 'x' is fixed at 1" in text
    assert model.signature.inputs[0].wire_shape == [1, 4]
    assert model.signature.max_batch == 1


def test_a_batch_that_a_run_disproves_is_refused_when_asked_for(tmp_path: Path) -> None:
    """Where the file promises and the run does not keep, the wish is refused."""
    text = refusal(models.baked("N"), tmp_path, "max_batch = 8")

    assert "max_batch = 8, but the model cannot batch" in text
    assert "its outputs do not have the batch's rows" in text


def test_batching_can_be_switched_off(tmp_path: Path) -> None:
    """With `batch_axis = "none"` every request is a run with its shapes as they are."""
    model = loaded(models.mixrow(), tmp_path, 'batch_axis = "none"')

    assert (model.signature.batched, model.rungs) == (False, (1,))
    assert model.warm_up.warnings == []


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        (
            '[batching]\npolicy = "windw"',
            ("batching.policy 'windw' is none of eager, window",),
        ),
        (
            "[axes.T]\nbuckets = [4]",
            ("axes.T: no input has an axis of that name", "'ids' axis 1: S"),
        ),
        (
            "[axes.S]\nbuckets = [4]",
            ("axes.S.pad: a value for input 'ids' is needed",),
        ),
        ("max_batch = -1", ("max_batch must be at least 0, got -1",)),
    ],
)
def test_a_configuration_that_does_not_fit_names_its_file(
    tmp_path: Path, toml: str, says: tuple[str, ...]
) -> None:
    """Faults that only the model shows are told like those of the file alone."""
    text = refusal(models.seq(), tmp_path, toml)

    assert [piece for piece in says if piece not in text] == [], text


def test_a_queue_that_keeps_batches_from_filling_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue shorter than the largest batch by default is told, with both knobs."""
    with caplog.at_level(logging.WARNING):
        loaded(models.twin_a(), tmp_path, "[batching]\nmax_queue = 16")

    assert "batching.max_queue = 16" in caplog.text
    assert "max_batch = 64" in caplog.text


def test_overrides_win_over_the_models_file(tmp_path: Path) -> None:
    """What is given at start replaces what the file says."""
    model = loaded(models.twin_a(), tmp_path, "max_batch = 8", max_batch=4)

    assert model.signature.max_batch == 4


def test_rows_of_a_request_are_limited_as_configured(tmp_path: Path) -> None:
    """`max_request_rows` is what validation gets."""
    model = loaded(models.twin_a(), tmp_path, "[batching]\nmax_request_rows = 5")

    assert model.signature.max_rows == 5


def test_a_damaged_model_is_a_load_error(tmp_path: Path) -> None:
    """What the engine refuses is said in the engine's words, with the file."""
    source = sourced(models.probe(), tmp_path)
    assert source.path is not None
    source.path.write_bytes(b"")

    with pytest.raises(EngineLoadError, match=str(source.path)):
        load(source, {})


def test_tensorrt_without_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    """Asking for TensorRT where nothing can run it is refused, and says why."""
    if gpu_fact().gpus:
        pytest.skip("there is a GPU")

    with pytest.raises(EngineLoadError, match=r"no GPU to run on: .*(driver|GPU|cuda)"):
        loaded(models.probe(), tmp_path, 'engine = "tensorrt"')


def test_a_plan_that_cannot_run_gives_way_to_its_onnx(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the engine is left to the daemon, ONNX Runtime serves what TensorRT cannot,
    with a warning that says why."""
    if gpu_fact().gpus:
        pytest.skip("there is a GPU")
    source = sourced(models.probe(), tmp_path, "")
    plan = tmp_path / "m" / "1" / "model.plan"
    plan.write_bytes(b"vtrt no plan at all")

    model = load(ModelSource("m", "1", source.path, None, plan), {})

    assert model.engines[0].backend == "onnxruntime"
    assert "served by ONNX Runtime on the CPU: no GPU to run on" in caplog.text


def test_a_plan_alone_needs_tensorrt(tmp_path: Path) -> None:
    """A plan is not given to ONNX Runtime; the way out is named."""
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"vtrt")
    source = ModelSource("m", "1", None, None, plan)

    with pytest.raises(ConfigError, match=r"a plan runs on TensorRT only.*model\.onnx"):
        load(source, {"engine": "onnxruntime"})


def test_a_folder_without_a_model_file_is_named(tmp_path: Path) -> None:
    """A model.toml alone needs a fake engine."""
    config = tmp_path / "model.toml"
    config.write_text("max_batch = 8")

    with pytest.raises(
        ConfigError, match=r"there is no <version>/model.onnx or model.plan beside it"
    ):
        load(ModelSource("m", "1", None, config), {})


FAKE = """
engine = "fake"
max_batch = 4
[fake]
sleep = false
inputs = [{ name = "x", dtype = "INT8", shape = [2, -1] }]
outputs = [{ name = "y", dtype = "INT8", shape = [2, -1] }]
"""


def fake(tmp_path: Path, toml: str) -> LoadedModel:
    """A fake model of this file."""
    config = tmp_path / "model.toml"
    config.write_text(toml)
    return load(ModelSource("m", "1", None, config), {})


def test_a_fake_model_is_what_its_file_says(tmp_path: Path) -> None:
    """Tensors and batch size come from the file; the batch axis is added."""
    model = fake(tmp_path, FAKE)

    (x,) = model.signature.inputs
    assert (x.name, x.datatype, x.wire_shape) == ("x", "INT8", [-1, 2, -1])
    assert (model.signature.platform, model.signature.max_batch) == ("fake", 4)
    value = np.array([[[1], [2]]], np.int8)
    np.testing.assert_array_equal(model.engines[0].run({"x": value})["y"], value)


def test_a_fake_model_with_an_unknown_datatype_is_refused(tmp_path: Path) -> None:
    """A datatype that is none is named with its tensor."""
    with pytest.raises(ConfigError, match="fake tensor 'x': no datatype 'INT9'"):
        fake(tmp_path, FAKE.replace("INT8", "INT9"))


# -- costs ----------------------------------------------------------------------------


def test_measured_costs_are_known_to_the_scheduler(tmp_path: Path) -> None:
    """The run times of the warm-up are the first estimates of their groups."""
    model = loaded(models.twin_a(), tmp_path, max_batch=2)
    scheduler = Scheduler(POLICIES["eager"](PolicyOptions()), slots=1, max_queue=8)

    groups = seed_costs(model, lambda tails: scheduler.group(tails, model.rungs))

    key = model.shapes.fit(((1, 4),)).group.in_tails
    group = scheduler.group(key, model.rungs)
    assert group in groups
    assert group.cost.estimate_ns(1) is not None
    assert group.cost.estimate_ns(2) is not None
