"""Rows into a batch and back out: bit-equal to the same batch run by the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from batcher.config import AxisConfig
from batcher.config.schema import OutputAxisConfig
from batcher.errors import EngineFailure
from batcher.rpc import response
from batcher.scheduling import POLICIES, Batch, Dispatch, PolicyOptions, Scheduler
from batcher.serving.answer import BatchOutputs, encode, joined
from batcher.serving.request import InferRequest

from .parts import Harness, decoded, raw, same

RNG = np.random.default_rng(5)
PAD_S = {"S": AxisConfig(buckets=(4, 8), pad={"ids": 3.0, "mask": 0.0})}


def floats(*shape: int) -> Any:
    """Random FP32."""
    return RNG.normal(0, 1, shape).astype(np.float32)


def tokens(rows: int, width: int) -> dict[str, Any]:
    """Random ids with a mask of ones."""
    return {
        "ids": RNG.integers(0, 100, (rows, width)),
        "mask": np.ones((rows, width), np.int64),
    }


def padded(inputs: dict[str, Any], width: int) -> dict[str, Any]:
    """The same rows, padded as `PAD_S` says."""
    values = {"ids": 3, "mask": 0}
    return {
        name: np.pad(
            array, ((0, 0), (0, width - array.shape[1])), constant_values=values[name]
        )
        for name, array in inputs.items()
    }


def graph_of(nodes: list[onnx.NodeProto], *tensors: Any) -> onnx.ModelProto:
    """A model of these nodes with these (inputs, outputs, constants)."""
    inputs, outputs, *constants = tensors
    graph = helper.make_graph(nodes, "graph", inputs, outputs, *constants)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


def frames() -> onnx.ModelProto:
    """x FP32 [N, T, 2] -> steps = -x [N, T, 2], half = every other step of it."""
    x = helper.make_tensor_value_info("x", 1, ["N", "T", 2])
    steps = helper.make_tensor_value_info("steps", 1, ["N", "T", 2])
    half = helper.make_tensor_value_info("half", 1, ["N", "H", 2])
    constants = [
        numpy_helper.from_array(np.array([value]), name)
        for name, value in (("start", 0), ("end", 2**31), ("axis", 1), ("step", 2))
    ]
    nodes = [
        helper.make_node("Neg", ["x"], ["steps"]),
        helper.make_node("Slice", ["x", "start", "end", "axis", "step"], ["half"]),
    ]
    return graph_of(nodes, [x], [steps, half], constants)


@pytest.fixture
def probe(tmp_path: Path) -> Harness:
    """The model whose answers say where a row ran."""
    return Harness(models.probe(), tmp_path)


# -- rows as they are -----------------------------------------------------------------


def test_each_caller_gets_its_own_rows(probe: Harness) -> None:
    """Requests of 2, 1 and 3 rows in one batch of 6 get the rows they brought."""
    sent = [floats(n, 4) for n in (2, 1, 3)]

    answers = probe.answers(probe.batch(*[probe.request(x=x) for x in sent]))

    assert [same(a["y"], x + x) for a, x in zip(answers, sent, strict=True)] == [
        True
    ] * 3
    assert [a["pos"][:, 0].tolist() for a in answers] == [[0, 1], [2], [3, 4, 5]]
    assert {int(n) for a in answers for n in a["n"][:, 0]} == {6}


def test_spare_rows_are_copies_of_row_0(probe: Harness) -> None:
    """A batch that does not fill its rung is filled with its first row."""
    first, second = floats(1, 4), floats(2, 4)
    batch = probe.batch(probe.request(x=first), probe.request(x=second), rung=8)

    (gathered,) = probe.gathered(batch)

    assert same(gathered, np.concatenate([first, second, *[first] * 5]))


def test_spare_rows_are_not_answered(probe: Harness) -> None:
    """With spare rows each caller still gets just its own, from a run of the rung."""
    sent = [floats(1, 4), floats(2, 4)]
    batch = probe.batch(*[probe.request(x=x) for x in sent], rung=8)

    answers = probe.answers(batch)

    assert [len(a["y"]) for a in answers] == [1, 2]
    assert [a["n"][0, 0] for a in answers] == [8, 8]


def test_leftovers_of_a_larger_batch_do_not_show(probe: Harness) -> None:
    """The buffers are used again: a small batch after a large one is its own."""
    probe.run(probe.batch(probe.request(x=floats(8, 4))))
    x = floats(1, 4)

    (answer,) = probe.answers(probe.batch(probe.request(x=x), rung=2))

    assert same(answer["y"], x + x)
    assert answer["n"].tolist() == [[2]]


def test_outputs_come_in_the_order_asked_for(probe: Harness) -> None:
    """Requests with different outputs share a batch; each gets what it named."""
    x = floats(1, 4)
    wanted = [("pos", "y"), ("y", "pos"), ("n",), ()]
    requests = [probe.request_for(names, {"x": x}) for names in wanted]

    answers = probe.answers(probe.batch(*requests))

    assert [tuple(a) for a in answers] == [*wanted[:3], ("y", "n", "pos")]
    assert [same(a["y"], x + x) for a in answers if "y" in a] == [True] * 3
    assert [a["pos"].tolist() for a in answers if "pos" in a] == [[[0]], [[1]], [[3]]]


def test_inputs_may_come_in_any_order(tmp_path: Path) -> None:
    """The contents of each input are found where the caller put them."""
    harness = Harness(models.seq(), tmp_path)
    sent = [tokens(1, 3), dict(reversed(tokens(1, 3).items()))]

    answers = harness.answers(harness.batch(*[harness.request(**s) for s in sent]))

    assert [list(s) for s in sent] == [["ids", "mask"], ["mask", "ids"]]
    for answer, inputs in zip(answers, sent, strict=True):
        assert answer["rawsum"][0, 0] == (inputs["ids"] + 1).sum()


@pytest.mark.parametrize("width", [1, 1023, 1024, 1025, 5000])
def test_rows_of_every_size_are_copied(tmp_path: Path, width: int) -> None:
    """Small rows and large ones take different ways, with one result."""
    harness = Harness(models.identity("fp32"), tmp_path)
    sent = [floats(n, width) for n in (1, 3)]

    answers = harness.answers(
        harness.batch(*[harness.request(x=x) for x in sent], rung=5)
    )

    assert [same(a["y"], x) for a, x in zip(answers, sent, strict=True)] == [True] * 2


@pytest.mark.parametrize("kind", models.ID_TYPES)
def test_every_datatype_comes_back(tmp_path: Path, kind: str) -> None:
    """Any bit pattern of any type passes through a batch with spare rows."""
    harness = Harness(models.identity(kind), tmp_path)
    dtype = harness.engine.inputs[0].numpy
    if kind == "string":
        flat = np.array([b"", b"a\0", "é".encode(), b"x" * 9000], dtype=object)
        sent = [flat[:2].reshape(1, 2), flat.reshape(2, 2)]
    else:
        sizes = [n * 2 * dtype.itemsize for n in (1, 2)]
        high = 2 if kind == "bool" else 256
        sent = [
            RNG.integers(0, high, size, np.uint8).view(dtype).reshape(-1, 2)
            for size in sizes
        ]

    answers = harness.answers(
        harness.batch(*[harness.request(x=x) for x in sent], rung=4)
    )

    assert [raw(a["y"]) for a in answers] == [raw(x) for x in sent]


@pytest.mark.parametrize("predicted", [True, False])
def test_empty_rows_come_back_empty(tmp_path: Path, predicted: bool) -> None:
    """Rows without elements have answers of the same shape, with no bytes."""
    harness = Harness(models.identity("fp32"), tmp_path, predicted=predicted)
    requests = [harness.request(x=floats(n, 0)) for n in (1, 3)]

    answers = harness.answers(harness.batch(*requests, rung=8))

    assert [a["y"].shape for a in answers] == [(1, 0), (3, 0)]


def test_requests_run_alone_where_the_model_does_not_batch(tmp_path: Path) -> None:
    """Without a batch axis the whole tensors go in and out, scalars included."""
    harness = Harness(models.ax1(), tmp_path, batched=False)
    x, st_ = floats(3, 4), floats(2, 3, 3)

    (answer,) = harness.answers(harness.batch(harness.request(x=x, st=st_)))

    expected = harness.engine.run({"x": x, "st": st_})
    assert {n: same(answer[n], expected[n]) for n in expected} == {
        "y": True,
        "stN": True,
    }


def test_a_scalar_input_is_handed_over(tmp_path: Path) -> None:
    """A tensor of rank 0 reaches the engine as one."""
    harness = Harness(models.scal(), tmp_path, batched=False)
    x = floats(2, 4)

    (answer,) = harness.answers(
        harness.batch(harness.request(x=x, sr=np.array(8000, np.int64)))
    )

    assert same(answer["y"], x * np.float32(8000))


def test_outputs_whose_shape_depends_on_the_data(tmp_path: Path) -> None:
    """What the engine makes by itself is answered with the shape it has."""
    harness = Harness(models.nz(), tmp_path, batched=False)

    shapes = [
        harness.answers(harness.batch(harness.request(x=x)))[0]["where"].shape
        for x in (floats(1, 4), np.zeros((1, 4), np.float32), floats(2, 4))
    ]

    assert shapes == [(2, 4), (2, 0), (2, 8)]


@pytest.mark.parametrize(
    ("model", "shape"),
    [(models.baked("N"), "[1, 8]"), (models.nz(transposed=True), "[8, 2]")],
    ids=["baked", "nz"],
)
def test_outputs_without_the_batchs_rows_are_a_failure(
    tmp_path: Path, model: onnx.ModelProto, shape: str
) -> None:
    """Rows are never cut out of an output that has other rows than the batch."""
    harness = Harness(model, tmp_path, predicted=False)
    batch = harness.batch(*[harness.request(x=floats(1, 4)) for _ in range(2)])

    with pytest.raises(EngineFailure) as caught:
        harness.run(batch)

    assert f"has shape {shape} for a batch of 2 rows" in str(caught.value)
    assert "max_batch = 1" in str(caught.value)


# -- rows that are padded or cut ------------------------------------------------------


def test_padded_rows_equal_the_padded_batch(tmp_path: Path) -> None:
    """Rows of different lengths run as one batch, which is what the engine is given."""
    harness = Harness(models.seq(), tmp_path, axes=PAD_S)
    sent = [tokens(2, 5), tokens(1, 8), tokens(1, 6)]
    batch = harness.batch(*[harness.request(**s) for s in sent], rung=6)
    rows = [padded(s, 8) for s in sent]
    whole = {
        name: np.concatenate([*[r[name] for r in rows], *[rows[0][name][:1]] * 2])
        for name in ("ids", "mask")
    }

    gathered = harness.gathered(batch)
    answers = harness.answers(batch)

    expected = harness.engine.run(whole)
    assert same(gathered[0], whole["ids"])
    assert same(gathered[1], whole["mask"])
    at = 0
    for answer, inputs in zip(answers, sent, strict=True):
        end = at + len(inputs["ids"])
        assert {n: same(answer[n], expected[n][at:end]) for n in expected} == (
            dict.fromkeys(expected, True)
        )
        at = end


def test_a_row_without_elements_is_all_padding(tmp_path: Path) -> None:
    """A length of 0 is a length: the row is padding from end to end."""
    harness = Harness(models.seq(), tmp_path, axes=PAD_S)
    requests = [harness.request(**tokens(1, 0)), harness.request(**tokens(1, 2))]

    ids, mask = harness.gathered(harness.batch(*requests))

    assert ids[0].tolist() == [3, 3, 3, 3]
    assert mask[0].tolist() == [0, 0, 0, 0]


def test_padding_of_an_earlier_batch_is_overwritten(tmp_path: Path) -> None:
    """Every batch writes all of its padding anew."""
    harness = Harness(models.seq(), tmp_path, axes=PAD_S)
    harness.run(harness.batch(harness.request(**tokens(1, 4))))

    ids, _ = harness.gathered(harness.batch(harness.request(**tokens(1, 1))))

    assert ids[0, 1:].tolist() == [3, 3, 3]


def test_long_rows_are_truncated(tmp_path: Path) -> None:
    """With `truncate` the end of a long row is left out, and the rest runs."""
    axes = {"S": AxisConfig(buckets=(4,), pad=PAD_S["S"].pad, too_long="truncate")}
    harness = Harness(models.seq(), tmp_path, axes=axes)
    long, short = tokens(2, 9), tokens(1, 2)

    ids, _ = harness.gathered(
        harness.batch(harness.request(**long), harness.request(**short))
    )

    assert ids[:2].tolist() == long["ids"][:, :4].tolist()
    assert ids[2].tolist() == [*short["ids"][0], 3, 3]


@pytest.mark.parametrize("too_long", ["reject", "truncate"])
def test_outputs_are_cut_back_to_each_callers_size(
    tmp_path: Path, too_long: Any
) -> None:
    """Outputs that have the axis, whole or at a ratio, lose the padding's part."""
    cuts = {
        "steps": OutputAxisConfig(axis=1),
        "half": OutputAxisConfig(axis=1, ratio=0.5),
    }
    axes = {
        "T": AxisConfig(buckets=(8,), pad={"x": 9.0}, outputs=cuts, too_long=too_long)
    }
    harness = Harness(frames(), tmp_path, axes=axes, predicted=False)
    sizes = [3, 8, 1] if too_long == "reject" else [3, 11, 1]
    sent = [floats(1, size, 2) for size in sizes]

    answers = harness.answers(
        harness.batch(*[harness.request(x=x) for x in sent], rung=4)
    )

    for answer, x in zip(answers, sent, strict=True):
        assert same(answer["steps"], -x[:, :8])
        assert same(answer["half"], x[:, :8:2])


def test_two_padded_axes_are_cut_back_together(tmp_path: Path) -> None:
    """A picture that is padded in height and width comes back in its own size."""
    x, y = (helper.make_tensor_value_info(n, 1, ["N", "H", "W"]) for n in "xy")
    model = graph_of([helper.make_node("Neg", ["x"], ["y"])], [x], [y])
    axes = {
        name: AxisConfig(
            buckets=(4, 8), pad={"x": 0.0}, outputs={"y": OutputAxisConfig(axis=axis)}
        )
        for name, axis in (("H", 1), ("W", 2))
    }
    harness = Harness(model, tmp_path, axes=axes)
    sent = [floats(1, 3, 5), floats(1, 4, 8), floats(1, 1, 6)]

    answers = harness.answers(harness.batch(*[harness.request(x=x) for x in sent]))

    assert [same(a["y"], -x) for a, x in zip(answers, sent, strict=True)] == [True] * 3


def test_one_request_is_padded_without_a_batch_axis(tmp_path: Path) -> None:
    """A model that does not batch can have buckets too."""
    x, y = (helper.make_tensor_value_info(n, 1, [2, "T"]) for n in "xy")
    model = graph_of([helper.make_node("Neg", ["x"], ["y"])], [x], [y])
    axes = {
        "T": AxisConfig(
            buckets=(4,), pad={"x": 0.0}, outputs={"y": OutputAxisConfig(axis=1)}
        )
    }
    harness = Harness(model, tmp_path, axes=axes, batched=False)
    sent = floats(2, 3)

    (answer,) = harness.answers(harness.batch(harness.request(x=sent)))

    assert same(answer["y"], -sent)


# -- requests in parts ----------------------------------------------------------------


def split(harness: Harness, request: InferRequest, rungs: tuple[int, ...]) -> Any:
    """The batches that a scheduler makes of a request that is too large for one."""
    scheduler = Scheduler(POLICIES["eager"](PolicyOptions()), slots=1, max_queue=100)
    request.group = scheduler.group("all", rungs)
    scheduler.submit(request, 0)

    def batches() -> Iterator[Batch]:
        now_ns = 0
        decisions = scheduler.poll(now_ns)
        while decisions:
            for decision in decisions:
                assert isinstance(decision, Dispatch)
                yield decision.batch
                now_ns += 1000
                scheduler.complete(0, now_ns, run_ns=1000)
            decisions = scheduler.poll(now_ns)

    return batches()


def whole_answer(harness: Harness, request: InferRequest, batches: Any) -> Any:
    """Runs the batches and puts the request's answer together."""
    for batch in batches:
        outputs = harness.run(batch)
        (part,) = batch.requests
        part.chunks = outputs.chunks(part, 0)
    return decoded(encode(response.head(harness.signature), request, joined(request)))


def test_a_large_request_is_put_together_in_order(probe: Harness) -> None:
    """A request of 10 rows and runs of at most 4 has its 10 rows, in their order."""
    x = floats(10, 4)
    request = probe.request_for(("pos", "y"), {"x": x})

    answer = whole_answer(probe, request, split(probe, request, (1, 2, 4)))

    assert list(answer) == ["pos", "y"]
    assert same(answer["y"], x + x)
    assert answer["pos"][:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_parts_are_padded_like_whole_requests(tmp_path: Path) -> None:
    """Each part takes its own rows of the padded request, and is cut back."""
    cuts = {"steps": OutputAxisConfig(axis=1)}
    axes = {"T": AxisConfig(buckets=(8,), pad={"x": 9.0}, outputs=cuts)}
    harness = Harness(frames(), tmp_path, axes=axes, predicted=False)
    x = floats(7, 3, 2)
    request = harness.request_for(("steps",), {"x": x})

    answer = whole_answer(harness, request, split(harness, request, (2, 4)))

    assert same(answer["steps"], -x)


def test_parts_of_strings_are_put_together(tmp_path: Path) -> None:
    """BYTES are split by rows of elements, not by bytes."""
    harness = Harness(models.identity("string"), tmp_path)
    x = np.array([[b"a" * i, b""] for i in range(5)], dtype=object)
    request = harness.request(x=x)

    answer = whole_answer(harness, request, split(harness, request, (2,)))

    assert answer["y"].tolist() == x.tolist()


def test_parts_with_outputs_of_different_shape_are_a_failure(tmp_path: Path) -> None:
    """Rows of different width are no tensor: better no answer than a wrong one."""
    x = helper.make_tensor_value_info("x", 1, ["N", 4])
    y = helper.make_tensor_value_info("y", 1, ["N", "K"])
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["above"]),
        helper.make_node("Cast", ["above"], ["ones"], to=6),
        helper.make_node("ReduceMax", ["ones"], ["any"], axes=[0], keepdims=0),
        helper.make_node("Cast", ["any"], ["keep"], to=9),
        helper.make_node("Compress", ["x", "keep"], ["y"], axis=1),
    ]
    harness = Harness(graph_of(nodes, [x], [y], [zero]), tmp_path, predicted=False)
    request = harness.request(x=np.array([[1, 0, 0, 0], [1, 1, 1, 0]], np.float32))

    with pytest.raises(EngineFailure):
        whole_answer(harness, request, split(harness, request, (1,)))


# -- properties -----------------------------------------------------------------------


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_batch_equals_the_engines_own_run(
    data: st.DataObject, tmp_path: Path
) -> None:
    """Whatever rows, lengths, buckets and rungs: answers are the rows of one run."""
    harness = Harness(models.seq(), tmp_path, axes=PAD_S)
    bucket, smallest = data.draw(st.sampled_from([(4, 0), (8, 5)]))
    sizes = st.tuples(st.integers(1, 3), st.integers(smallest, bucket))
    sent = [
        tokens(*size) for size in data.draw(st.lists(sizes, min_size=1, max_size=4))
    ]
    rows = sum(len(s["ids"]) for s in sent)
    rung = rows + data.draw(st.integers(0, 4))
    whole = {
        name: np.concatenate([padded(s, bucket)[name] for s in sent])
        for name in ("ids", "mask")
    }
    whole = {
        name: np.concatenate([a, *[a[:1]] * (rung - rows)]) for name, a in whole.items()
    }

    answers = harness.answers(
        harness.batch(*[harness.request(**s) for s in sent], rung=rung)
    )

    expected = harness.engine.run(whole)
    for name, array in expected.items():
        together = np.concatenate([answer[name] for answer in answers])
        assert same(together, array[:rows])


def test_the_layout_of_answers_is_kept_per_shape(tmp_path: Path) -> None:
    """Answers to one plan follow the shapes of each run, however many there are."""
    harness = Harness(models.nz(), tmp_path, batched=False)
    request = harness.request(x=floats(1, 4))
    head = response.head(harness.signature)
    shapes = []
    for size in [*range(100), *range(100)]:
        ran = BatchOutputs([np.zeros((2, size), np.int64)], 1, harness.shapes)
        layout = ran.layout(request.plan)
        answer = decoded(ran.answer(head, request, 0, layout))
        shapes.append(answer["where"].shape)

    assert shapes == [(2, size) for size in [*range(100), *range(100)]]
    assert len(request.plan.meta) <= 64
