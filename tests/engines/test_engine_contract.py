"""What every back end keeps: shapes, dtypes, buffers, errors, being closed.

(This folder must not become a package: it would hide the `engines` under test.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import models
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import engines
from engines import (
    DTYPES,
    Engine,
    EngineRunError,
    ExecutionContext,
    FakeEngine,
    FakeOptions,
    TensorSpec,
)
from engines.process import ProcessEngine, open_in_process

Make = Callable[[str], Engine]
"""Makes an engine that gives x [N, D] of a datatype back as y."""

KINDS = {datatype: kind for kind, (datatype, _) in models.ID_TYPES.items()}
NUMERIC = [datatype for datatype in DTYPES if datatype != "BYTES"]
POISON = 99
BACK_ENDS = ["fake", "onnxruntime", "fake-process", "onnxruntime-process"]


class Opened:
    """Opens engines here, or each kind once in a process of its own."""

    def __init__(self) -> None:
        self._kept: dict[str, ProcessEngine] = {}

    def open(self, kind: str, recipe: Callable[[], Engine], what: str) -> Engine:
        """The engine of `recipe`; `kind` says where, and `what` which it is."""
        if not kind.endswith("-process"):
            return recipe()
        name = f"{kind}-{what}"
        kept = self._kept.get(name)
        if kept is None or kept.lost is not None:
            kept = self._kept[name] = open_in_process(recipe, name=name)
        return kept

    def close(self) -> None:
        """Ends the processes."""
        for engine in self._kept.values():
            engine.close()


@pytest.fixture(scope="module")
def opened_engines() -> Iterator[Opened]:
    """Shared by the tests, since a process takes long to start."""
    shared = Opened()
    yield shared
    shared.close()


@pytest.fixture(params=BACK_ENDS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, opened_engines: Opened
) -> Make:
    """Each back end in turn."""
    kind: str = request.param

    def make_one(datatype: str) -> Engine:
        if kind.startswith("fake"):
            x, y = (TensorSpec(name, datatype, ("N", "D")) for name in "xy")
            options = FakeOptions(inputs=(x,), outputs=(y,))
            return opened_engines.open(kind, partial(FakeEngine, options), datatype)
        model = models.identity(KINDS[datatype])
        path = models.save(model, tmp_path / f"{datatype}.onnx")
        return opened_engines.open(kind, partial(engines.open, path), datatype)

    return make_one


@pytest.fixture(params=BACK_ENDS)
def poisoned(
    request: pytest.FixtureRequest, tmp_path: Path, opened_engines: Opened
) -> Engine:
    """An engine whose runs fail when they hold the value `POISON`."""
    kind: str = request.param
    if kind.startswith("fake"):
        x, y = (TensorSpec(name, "INT64", ("N", 1)) for name in ("ids", "y"))
        options = FakeOptions(inputs=(x,), outputs=(y,), fail_value=POISON)
        return opened_engines.open(kind, partial(FakeEngine, options), "poisoned")
    path = models.save(models.emb(), tmp_path / "emb.onnx")
    return opened_engines.open(kind, partial(engines.open, path), "poisoned")


def sample(datatype: str, rows: int, width: int) -> Any:
    """An array with the extreme values of its type, repeated to the shape."""
    kind = DTYPES[datatype]
    if datatype == "BYTES":
        values: Any = np.array(
            [b"", b"a\0b", "é".encode(), b"x" * 70_000], dtype=object
        )
    elif datatype.startswith(("FP", "BF")):
        limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
        values = [limits.max, limits.smallest_subnormal, -0.0, np.nan, -np.inf]
    elif datatype == "BOOL":
        values = [True, False]
    else:
        values = [np.iinfo(kind).min, np.iinfo(kind).max, 1]
    flat = np.resize(np.array(values, kind), rows * width)
    return np.ascontiguousarray(flat.reshape(rows, width))


def same(actual: Any, expected: Any) -> bool:
    """Whether two arrays are equal bit for bit, shape and dtype included."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    if actual.dtype == object:
        return bool(actual.tolist() == expected.tolist())
    return bool(actual.tobytes() == expected.tobytes())


def run(context: ExecutionContext, *inputs: Any, outputs: int = 1) -> list[Any]:
    """Runs once with new outputs, and copies them."""
    return [np.array(a) for a in context.execute(inputs, [None] * outputs)]


@pytest.mark.parametrize("datatype", DTYPES)
def test_values_come_back_bit_for_bit(make: Make, datatype: str) -> None:
    """Every datatype keeps its extreme values, NaN and -0.0 included."""
    value = sample(datatype, 3, 5)
    with_context = make(datatype)
    context = with_context.create_context()

    (actual,) = run(context, value)

    assert same(actual, value)
    assert [s.dtype for s in (*with_context.inputs, *with_context.outputs)] == [
        datatype
    ] * 2
    context.close()
    with_context.close()


@pytest.mark.parametrize("datatype", NUMERIC)
def test_given_outputs_are_filled(make: Make, datatype: str) -> None:
    """An output array that is given is filled and handed back, not replaced."""
    value = sample(datatype, 3, 5)
    given = np.zeros_like(value)
    context = make(datatype).create_context()

    (actual,) = context.execute([value], [given])

    assert actual is given
    assert same(given, value)


@pytest.mark.parametrize("datatype", NUMERIC)
def test_host_buffers_are_read_and_filled(make: Make, datatype: str) -> None:
    """Arrays anywhere in the engine's host buffers run, again and again."""
    value = sample(datatype, 3, 5)
    engine = make(datatype)
    context = engine.create_context()
    buffers = [engine.host_buffer(3 * value.nbytes) for _ in range(2)]
    given, filled = (
        np.frombuffer(b, value.dtype, value.size, offset=value.nbytes).reshape(3, 5)
        for b in buffers
    )

    for turn in (value, value[::-1]):
        given[:] = turn
        (actual,) = context.execute([given], [filled])

        assert actual is filled
        assert same(filled, np.ascontiguousarray(turn))


@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_empty_axes_run(make: Make, datatype: str, rows: int) -> None:
    """A tensor without elements runs, into a given output and into a new one."""
    value = np.empty((rows, 0), DTYPES[datatype])
    context = make(datatype).create_context()

    (new,) = run(context, value)
    (given,) = context.execute([value], [np.empty_like(value)])

    assert (new.shape, new.dtype) == (value.shape, value.dtype)
    assert given.shape == value.shape


def test_runs_do_not_depend_on_each_other(make: Make) -> None:
    """One context runs any sequence of shapes, and each run gives its own values."""
    context = make("FP32").create_context()
    values = [sample("FP32", rows, width) for rows, width in ((3, 5), (1, 2), (8, 5))]

    actual = [run(context, value)[0] for value in values * 2]

    assert [same(a, b) for a, b in zip(actual, values * 2, strict=True)] == [True] * 6


def test_contexts_of_an_engine_are_independent(make: Make) -> None:
    """The outputs of one context stay as they are while another runs."""
    engine = make("INT64")
    one, two = engine.create_context(), engine.create_context()
    first, second = np.array([[1, 2]]), np.array([[3, 4]])
    given = np.zeros((1, 2), np.int64)

    one.execute([first], [given])
    two.execute([second], [np.zeros((1, 2), np.int64)])
    one.close()

    assert given.tolist() == [[1, 2]]
    assert run(two, second)[0].tolist() == [[3, 4]]


def test_new_outputs_outlive_the_inputs(make: Make) -> None:
    """An output does not alias its input's buffer, which is filled anew at once."""
    context = make("INT64").create_context()
    value = np.array([[1, 2]])

    (actual,) = context.execute([value], [None])
    value[:] = 7

    assert actual.tolist() == [[1, 2]]


def test_a_failed_run_does_not_stop_the_next(poisoned: Engine) -> None:
    """After an error the same context runs as if nothing had been."""
    context = poisoned.create_context()
    outputs = len(poisoned.outputs)
    good = np.array([[1], [2]])
    before = run(context, good, outputs=outputs)

    for _ in range(2):
        with pytest.raises(EngineRunError, match=str(POISON)):
            run(context, np.array([[1], [POISON]]), outputs=outputs)

    after = run(context, good, outputs=outputs)
    assert [same(a, b) for a, b in zip(after, before, strict=True)] == [True] * outputs


def test_closing_twice_is_allowed(make: Make) -> None:
    """Contexts and engines may be closed again, used or not."""
    engine = make("FP32")
    used, unused = engine.create_context(), engine.create_context()
    run(used, sample("FP32", 1, 1))

    for _ in range(2):
        used.close()
        unused.close()
    for _ in range(2):
        engine.close()


def test_run_by_name_converts_and_copies(make: Make) -> None:
    """`Engine.run` takes anything array-like by name and gives arrays by name."""
    engine = make("FP32")

    given: Any = [[1, 2]]
    actual = engine.run({"x": given})

    assert list(actual) == ["y"]
    assert same(actual["y"], np.array([[1, 2]], np.float32))


def test_run_by_name_wants_every_input(make: Make) -> None:
    """A missing input is a KeyError with its name."""
    with pytest.raises(KeyError, match="x"):
        make("FP32").run({})


# -- the fake engine ------------------------------------------------------------------


def fake(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], **options: Any
) -> FakeEngine:
    """A fake engine with these tensors."""
    return FakeEngine(FakeOptions(inputs=inputs, outputs=outputs, **options))


def test_fake_outputs_are_cut_or_repeated_to_their_shape() -> None:
    """An output of another shape than its input has the row's values in turn."""
    engine = fake(
        (TensorSpec("x", "INT64", ("N", 3)),),
        (
            TensorSpec("short", "INT64", ("N", 2)),
            TensorSpec("long", "INT64", ("N", 4)),
            TensorSpec("deep", "INT64", ("N", 2, 1)),
        ),
    )

    actual = engine.run({"x": np.array([[1, 2, 3], [4, 5, 6]])})

    assert actual["short"].tolist() == [[1, 2], [4, 5]]
    assert actual["long"].tolist() == [[1, 2, 3, 1], [4, 5, 6, 4]]
    assert actual["deep"].tolist() == [[[1], [2]], [[4], [5]]]


def test_fake_time_is_base_and_rows() -> None:
    """A run takes the base time and the time per row."""
    tensors = (TensorSpec("x", "FP32", ("N", 1)),)
    engine = fake(tensors, tensors, base_ms=2.0, per_row_us=500.0)

    assert [engine.run_time_s(rows) for rows in (1, 4)] == [0.0025, 0.004]


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        ((), ("FP32",), "at least one input and output"),
        (("FP32",), (), "at least one input and output"),
        (("FP32",), ("INT8",), "'y0' is INT8, but it echoes input 'x0', which is FP32"),
        (
            ("FP32", "INT8"),
            ("FP32", "INT8", "FP32"),
            "'y2' is FP32, but it echoes input 'x1', which is INT8",
        ),
    ],
)
def test_fake_tensors_must_fit(
    inputs: tuple[str, ...], outputs: tuple[str, ...], says: str
) -> None:
    """A fake engine that cannot echo is refused when it is made."""
    with pytest.raises(engines.EngineLoadError, match=says):
        fake(
            tuple(TensorSpec(f"x{i}", d, ("N", 1)) for i, d in enumerate(inputs)),
            tuple(TensorSpec(f"y{i}", d, ("N", 1)) for i, d in enumerate(outputs)),
        )


def test_fake_tensors_need_different_names() -> None:
    """Two inputs (or outputs) of one name could not be told apart by callers."""
    x = TensorSpec("x", "FP32", ("N", 1))
    y = TensorSpec("y", "FP32", ("N", 1))

    with pytest.raises(engines.EngineLoadError, match="two inputs are called 'x'"):
        fake((x, x), (y,))
    with pytest.raises(engines.EngineLoadError, match="two outputs are called 'y'"):
        fake((x,), (y, y))


# -- ONNX Runtime ---------------------------------------------------------------------


def opened(model: onnx.ModelProto, tmp_path: Path) -> Engine:
    """An engine of this model."""
    return engines.open(models.save(model, tmp_path / "model.onnx"))


def test_strings_that_are_no_utf8_are_refused_clearly(tmp_path: Path) -> None:
    """ONNX Runtime takes UTF-8 only: the error says so, and the next run works."""
    engine = opened(models.identity("string"), tmp_path)
    context = engine.create_context()
    bad = np.array([[b"\x00\xff"]], dtype=object)

    with pytest.raises(EngineRunError, match="ONNX Runtime takes strings as UTF-8"):
        context.execute([bad], [None])

    good = np.array([[b"ok"]], dtype=object)
    assert engine.run({"x": good})["y"].tolist() == [[b"ok"]]


def mixed(*kinds: str) -> onnx.ModelProto:
    """A model that gives one tensor [N, 1] of each kind back: x0 -> y0, x1 -> y1."""
    numbers = [models.ID_TYPES[kind][1] for kind in kinds]
    names = [[f"{side}{i}" for i in range(len(kinds))] for side in "xy"]
    inputs, outputs = (
        [
            helper.make_tensor_value_info(name, number, ["N", 1])
            for name, number in zip(side, numbers, strict=True)
        ]
        for side in names
    )
    pairs = zip(*names, strict=True)
    nodes = [helper.make_node("Identity", [x], [y]) for x, y in pairs]
    return one_graph(nodes, inputs, outputs)


def one_graph(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: list[onnx.TensorProto] | None = None,
) -> onnx.ModelProto:
    """A model of these nodes."""
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


def test_a_model_of_strings_and_numbers_runs(tmp_path: Path) -> None:
    """A model that takes BYTES keeps its other tensors bit for bit."""
    numbers = np.array([[1], [np.nan], [-0.0]], np.float32)
    strings: Any = [[b"a"], [b""], ["é".encode()]]
    engine = opened(mixed("string", "fp32"), tmp_path)

    actual = engine.run({"x0": strings, "x1": numbers})

    assert actual["y0"].tolist() == strings
    assert same(actual["y1"], numbers)


def test_given_outputs_of_a_model_with_strings_are_filled(tmp_path: Path) -> None:
    """Beside BYTES outputs, which are new, an array that is given is filled."""
    context = opened(mixed("string", "fp32"), tmp_path).create_context()
    strings = np.array([[b"a"]], dtype=object)
    given = np.zeros((1, 1), np.float32)

    outputs = context.execute([strings, np.ones((1, 1), np.float32)], [None, given])

    assert outputs[0].tolist() == [[b"a"]]
    assert outputs[1] is given
    assert given == 1


def test_strings_and_bf16_in_one_model_are_refused_at_load(tmp_path: Path) -> None:
    """What could never run is said when the model is loaded, not with every run."""
    with pytest.raises(engines.EngineLoadError, match="BYTES and BF16"):
        opened(mixed("string", "bf16"), tmp_path)


def test_a_shape_the_model_does_not_take_is_a_run_error(tmp_path: Path) -> None:
    """A run with a wrong shape fails with the runtime's reason, on one line."""
    context = opened(models.probe(), tmp_path).create_context()

    with pytest.raises(EngineRunError) as caught:
        context.execute([np.zeros((1, 5), np.float32)], [None] * 3)

    assert "Expected: 4" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_given_output_of_another_shape_is_a_run_error(tmp_path: Path) -> None:
    """An output that does not fit its array fails the run instead of memory."""
    context = opened(models.baked("N"), tmp_path).create_context()
    given = np.zeros((2, 4), np.float32)

    with pytest.raises(EngineRunError):
        context.execute([np.ones((2, 4), np.float32)], [given])

    assert context.execute([np.ones((2, 4), np.float32)], [None])[0].shape == (1, 8)


def test_axes_are_read_from_the_file(tmp_path: Path) -> None:
    """Fixed sizes are numbers, named axes their names, anything else is None."""
    x = helper.make_tensor_value_info("x", 1, ["batch-1", None, "?", "-1", 5])
    y = helper.make_tensor_value_info("y", 1, ["batch-1", None, "?", "-1", 5])
    model = one_graph([helper.make_node("Neg", ["x"], ["y"])], [x], [y])

    engine = opened(model, tmp_path)

    assert engine.inputs == (TensorSpec("x", "FP32", ("batch-1", None, None, None, 5)),)
    assert engine.inputs[0].wire_shape == (-1, -1, -1, -1, 5)


def test_scalars_have_no_axes(tmp_path: Path) -> None:
    """A tensor of rank 0 goes in and out with an empty shape."""
    one = numpy_helper.from_array(np.array(1.0, np.float32), "one")
    x, y = (helper.make_tensor_value_info(name, 1, []) for name in "xy")
    node = helper.make_node("Add", ["x", "one"], ["y"])
    engine = opened(one_graph([node], [x], [y], [one]), tmp_path)
    given = np.zeros((), np.float32)

    engine.create_context().execute([np.array(2.0, np.float32)], [given])

    assert engine.inputs[0].shape == ()
    assert given.shape == ()
    assert given == 3.0
