"""Lanes of one engine: nothing stale, nothing mixed up, nothing lost, on a real GPU."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from conftest import LENGTHS, RUNGS, Open
from onnx import TensorProto, helper

from engines import Cell, EngineLoadError, Slot, cuda
from engines.costs import measure
from engines.onnxruntime import OnnxRuntimeEngine
from engines.tensorrt.cache import PlanCache
from engines.tensorrt.engine import TensorRTEngine
from engines.tensorrt.module import find
from engines.tensorrt.prepare import (
    PlanOptions,
    PlanRefused,
    gpu_of,
    make_plan,
    open_checked,
    prepare,
)
from engines.tensorrt.uint8 import parse

CELLS = [(rows, length) for rows in RUNGS for length in LENGTHS]

Batch = tuple[np.ndarray, np.ndarray]


def batch(rng: np.random.Generator, rows: int, length: int) -> Batch:
    """ids and mask for `models.seq`."""
    mask = (rng.random((rows, length)) < 0.7).astype(np.int64)
    return rng.integers(0, 100, (rows, length)), mask


def answers(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`y` of `models.seq` by numpy."""
    total = (models.seq_table()[ids] * mask[..., None]).sum(axis=1)
    return total / np.maximum(mask.sum(axis=1, keepdims=True), 1)


def run(lane: Any, inputs: Batch) -> list[np.ndarray]:
    """Runs with new outputs."""
    return [np.array(o) for o in lane.execute(list(inputs), [None] * 5)]


def test_a_plan_computes_what_numpy_does(seq: TensorRTEngine) -> None:
    """All rungs and buckets, over several profiles, against the formula."""
    rng = np.random.default_rng(1)
    lane = seq.create_context()

    for rows, length in CELLS:
        ids, mask = batch(rng, rows, length)
        y, rawsum, width, n, pos = run(lane, (ids, mask))
        np.testing.assert_allclose(y, answers(ids, mask), rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(rawsum[:, 0], (ids + 1).sum(axis=1))
        assert width.tolist() == [[length]] * rows
        assert n.tolist() == [[rows]] * rows
        assert pos[:, 0].tolist() == list(range(rows))
    lane.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_no_row_is_stale_or_of_another_run(opened: Open, graphs: bool) -> None:
    """Three lanes, two runs ahead on each, random cells and buffers: bit for bit what
    each batch gives alone."""
    engine = opened(models.seq(), axes={"S": LENGTHS}, graphs=graphs)
    rng = np.random.default_rng(2)
    data = {cell: [batch(rng, *cell) for _ in range(3)] for cell in CELLS}
    alone = engine.create_context()
    for rows, length in CELLS:
        alone.warm([(rows, length)] * 2)
    expected = {
        (cell, k): [o.tobytes() for o in run(alone, inputs)]
        for cell, batches in data.items()
        for k, inputs in enumerate(batches)
    }
    alone.close()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        rung = threading.Semaphore(0)
        slot = Slot(engine, f"lane {seed}", rung.release)
        shapes = seq_cells(engine)
        for cell in choose.sample(CELLS, len(CELLS) // 2):  # the others run unprepared
            slot._context.warm(shapes[cell].inputs)
            slot.reserve(shapes[cell])
        asked: list[tuple[Any, int]] = []
        done = 0
        while done < 300:
            while len(asked) < 2:
                cell = choose.choice(CELLS)
                k = choose.randrange(3)
                staging = slot.acquire()
                for position, array in enumerate(data[cell][k]):
                    view = staging.reserve_input(position, array.nbytes)
                    view[: array.nbytes] = array.tobytes()
                slot.start(staging, shapes[cell])
                asked.append((cell, k))
            rung.acquire()
            for completion in slot.completions():
                key = asked.pop(0)
                done += 1
                if completion.error is not None:
                    wrong.append(completion.error)
                elif [o.tobytes() for o in completion.outputs] != expected[key]:
                    wrong.append(key)
                slot.release(completion.staging)
        while asked:
            rung.acquire()
            for completion in slot.completions():
                asked.pop(0)
                slot.release(completion.staging)
        slot.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def seq_cells(engine: TensorRTEngine) -> dict[tuple[int, int], Cell]:
    """The cells of `models.seq`, with the output shapes that the engine knows."""
    lane = engine.create_context()
    cells = {}
    for rows, length in CELLS:
        shapes = [(rows, length)] * 2
        known = lane.output_shapes(shapes)
        assert known == [(rows, 8)] + [(rows, 1)] * 4
        cells[rows, length] = Cell(shapes, known)
    lane.close()
    return cells


def test_graphs_change_nothing(opened: Open) -> None:
    """Runs by graph and plain runs give the same bits; graphs were really made."""
    plain = opened(models.seq(), axes={"S": LENGTHS}, graphs=False)
    graphed = opened(models.seq(), axes={"S": LENGTHS}, graphs=True)
    rng = np.random.default_rng(3)
    lanes = [plain.create_context(), graphed.create_context()]
    made = 0

    for rows, length in CELLS:
        inputs = batch(rng, rows, length)
        results = []
        for lane in lanes:
            lane.warm([(rows, length)] * 2)
            results.append([o.tobytes() for o in run(lane, inputs)])
        assert results[0] == results[1]
        made += lanes[1].timings[(rows, length), (rows, length)][1] > 0
        assert lanes[0].timings[(rows, length), (rows, length)][1] == 0
    assert made == len(CELLS)
    for lane in lanes:
        lane.close()


def test_small_batches_are_one_graph(seq: TensorRTEngine) -> None:
    """Copies and network are captured together for every staging, whatever was run on
    the context before."""
    slot = Slot(seq, "lane")
    cells = seq_cells(seq)
    for _ in range(2):
        for cell in cells.values():
            slot._context.warm(cell.inputs)
    slot.reserve(*cells.values())

    lane: Any = slot._context
    for staging in slot._stagings:
        for cell in cells.values():
            arrays = staging.arrays(cell)
            route = lane._routes[id(arrays.inputs)]
            assert route.inputs is arrays.inputs
            assert route.whole is not None
    slot.close()


def test_a_spent_graph_budget_leaves_plain_runs(opened: Open) -> None:
    """Cells beyond the budget run without graphs, and right."""
    engine = opened(models.seq(), axes={"S": LENGTHS}, graph_bytes=0)
    lane = engine.create_context()
    inputs = batch(np.random.default_rng(4), 3, 16)

    lane.warm([(3, 16)] * 2)

    assert lane.timings[(3, 16), (3, 16)][1] == 0
    np.testing.assert_allclose(
        run(lane, inputs)[0], answers(*inputs), rtol=1e-2, atol=1e-3
    )
    lane.close()


def test_outputs_whose_shape_the_values_decide(opened: Open) -> None:
    """Each run gives its own number of places, also after larger and smaller ones."""
    if find().flavour == "tensorrt_rtx":  # it has no NonZero
        with pytest.raises(EngineLoadError, match=r"node 'where' \(operator NonZero\)"):
            opened(models.nz(), rungs=(1, 3, 8))
        return
    engine = opened(models.nz(), rungs=(1, 3, 8))
    lane = engine.create_context()
    rng = np.random.default_rng(5)

    for rows in (8, 1, 3, 8, 3):
        for share in (0.0, 1.0, 0.3):
            x = (rng.random((rows, 4)) < share).astype(np.float32)
            (where,) = lane.execute([x], [None])
            np.testing.assert_array_equal(where, np.nonzero(x))
    lane.close()


def test_scalars_and_64_bits(opened: Open, tmp_path: Path) -> None:
    """An input of rank 0 goes in, and INT64 is exact over its whole range."""
    scalar = opened(models.scal(), rungs=(1, 4))
    given = {"x": np.ones((4, 4), np.float32), "sr": np.array(16000, np.int64)}
    reference = OnnxRuntimeEngine(models.save(models.scal(), tmp_path / "s.onnx"))

    np.testing.assert_allclose(
        scalar.run(given)["y"], reference.run(given)["y"], rtol=1e-3
    )

    exact = opened(models.i64(), rungs=(1, 4))
    limits = np.iinfo(np.int64)
    v = np.array([[limits.min], [limits.max - 1], [2**53], [-1]])
    np.testing.assert_array_equal(exact.run({"v": v})["w"], v + 1)


def test_odd_names(opened: Open) -> None:
    """Names with colons and slashes are taken as they are."""
    engine = opened(models.names())
    x = np.ones((2, 4), np.float32)

    outputs = engine.run({"x:0": x})

    assert list(outputs) == ["onnx::Shape_422", "a/b"]
    assert all(o.shape == (2, 4) for o in outputs.values())


def test_too_little_memory_is_said_in_numbers_and_hurts_nobody(
    seq: TensorRTEngine,
) -> None:
    """With the device nearly full a further lane is refused; the first runs on."""
    lane = seq.create_context()
    inputs = batch(np.random.default_rng(6), 8, 256)
    before = run(lane, inputs)
    filling: list[cuda.DeviceBuffer] = []
    size = cuda.memory()[0]
    while size > 1 << 10:
        try:
            filling.append(cuda.DeviceBuffer(size))
        except cuda.OutOfDeviceMemory:
            size //= 2

    text = r"memory for lane 2: .* MiB = .*weights"
    with pytest.raises(EngineLoadError, match=text):
        seq.create_context()

    assert [o.tobytes() for o in run(lane, inputs)] == [o.tobytes() for o in before]
    for buffer in filling:
        buffer.close()
    again = seq.create_context()
    assert [o.tobytes() for o in run(again, inputs)] == [o.tobytes() for o in before]
    again.close()
    lane.close()


def test_the_second_start_builds_nothing(tmp_path: Path) -> None:
    """The plan, its comparison and its kernels are found again; damage is mended."""
    path = models.save(models.probe(), tmp_path / "probe.onnx")
    options = PlanOptions(rungs=(1, 4))
    cache = PlanCache(tmp_path / "plans")
    first = make_plan(path, options, cache, gpu=gpu_of(0))
    engine = open_checked(first, cache, name="probe")
    engine.create_context().warm([(4, 4)])
    engine.save_warm()
    engine.close()
    kernels = first.cached.kernel_cache
    assert (first.cached.built, first.checked) == (True, False)
    assert kernels is not None
    assert kernels.stat().st_size > 0

    second = make_plan(path, options, cache, gpu=gpu_of(0))
    assert (second.cached.built, second.checked) == (False, True)

    assert second.cached.path is not None
    damaged = bytearray(second.cached.path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    second.cached.path.write_bytes(damaged)
    kernels.write_bytes(b"no kernels")
    third = make_plan(path, options, cache, gpu=gpu_of(0))
    assert third.cached.built
    open_checked(third, cache, name="probe").close()


def test_run_times_are_measured_alone_and_beside_others(seq: TensorRTEngine) -> None:
    """One cost for each cell and number of busy lanes, from the device's clock."""
    lanes = [seq.create_context() for _ in range(2)]
    cells = list(seq_cells(seq).values())[:3]

    costs = measure(seq, lanes, cells)

    assert [(c.inputs[0], c.busy) for c in costs] == [
        (tuple(cell.inputs[0]), busy) for cell in cells for busy in (1, 2)
    ]
    assert all(0 < c.device_ns < 50_000_000 and c.host_ns >= 0 for c in costs)
    for lane in lanes:
        lane.close()


def test_a_plan_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    """FP16 cannot hold what this network makes of its inputs: refused with the numbers,
    and out of the cache."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
    large = helper.make_tensor("large", TensorProto.FLOAT, [1], [300.0])
    nodes = [
        helper.make_node("Mul", ["x", "large"], ["a"]),
        helper.make_node("Mul", ["a", "large"], ["b"]),
        helper.make_node("Mul", ["b", "large"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "large", [x], [y], [large])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    path = models.save(model, tmp_path / "large.onnx")
    plans = tmp_path / "plans"

    for _ in range(2):  # it is refused again, and not found in the cache
        options = PlanOptions(rungs=(1, 4), precision="fp16")
        with pytest.raises(PlanRefused, match=r"FAILED: output 'y'"):
            prepare(path, options, plans, name="large")

    assert list(plans.glob("*.plan")) == []
    prepare(path, PlanOptions(rungs=(1, 4)), plans, name="large").close()


def test_images_travel_as_bytes(tmp_path: Path) -> None:
    """`input_u8` makes a float input UINT8; the answers are those of the normalised
    image."""
    model = models.probe()
    path = models.save(model, tmp_path / "probe.onnx")
    options = PlanOptions(
        rungs=(1, 4), input_u8={"x": parse("0.5,128")}, precision="fp16"
    )

    engine = prepare(path, options, tmp_path / "plans", name="probe")
    floats = prepare(path, PlanOptions(rungs=(1, 4)), tmp_path / "plans", name="f")

    assert [spec.dtype for spec in engine.inputs] == ["UINT8"]
    image = np.arange(0, 160, 10, dtype=np.uint8).reshape(4, 4)
    given = (image.astype(np.float32) - 128) * 0.5
    first = floats.outputs[0].name
    np.testing.assert_allclose(
        engine.run({"x": image})[first], floats.run({"x": given})[first], rtol=1e-2
    )
    engine.close()
    floats.close()
