"""The contract of every back end, kept by TensorRT on a GPU, here and in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import models
import numpy as np
import pytest
import test_engine_contract as contract

from engines import Engine, EngineLoadError, EngineRunError
from engines.process import open_in_process
from engines.tensorrt.prepare import PlanOptions, prepare
from engines.tensorrt.profiles import AxisSizes

SUPPORTED = ["BOOL", "INT32", "INT64", "FP16", "BF16", "FP32"]
ODD = ["UINT8", "INT8"]
"""Types that go in and out, though little can be computed on them."""

Make = Callable[[str], Engine]


@pytest.fixture(params=["thread", "process"])
def make(request: pytest.FixtureRequest, tmp_path: Path, plans: Path) -> Iterator[Make]:
    """Opens x [N, D] -> y = x of a datatype."""
    opened: list[Engine] = []

    def one(datatype: str) -> Engine:
        model = models.identity(contract.KINDS[datatype])
        path = models.save(model, tmp_path / f"{datatype}.onnx")
        options = PlanOptions(rungs=(1, 2, 3, 8), axes=(AxisSizes("D", (1, 2, 5, 8)),))
        recipe = partial(prepare, path, options, plans, name=datatype)
        if request.param == "process":
            opened.append(open_in_process(recipe, name=datatype))
        else:
            opened.append(recipe())
        return opened[-1]

    yield one
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("datatype", SUPPORTED + ODD)
def test_values_come_back_bit_for_bit(make: Make, datatype: str) -> None:
    """Extreme values, NaN and -0.0 included."""
    contract.test_values_come_back_bit_for_bit(make, datatype)


@pytest.mark.parametrize("datatype", SUPPORTED)
def test_given_outputs_are_filled(make: Make, datatype: str) -> None:
    """An output array that is given is filled and handed back."""
    contract.test_given_outputs_are_filled(make, datatype)


@pytest.mark.parametrize("datatype", SUPPORTED)
def test_host_buffers_are_read_and_filled(make: Make, datatype: str) -> None:
    """Runs from and into the engine's own memory."""
    contract.test_host_buffers_are_read_and_filled(make, datatype)


test_runs_do_not_depend_on_each_other = contract.test_runs_do_not_depend_on_each_other
test_contexts_of_an_engine_are_independent = (
    contract.test_contexts_of_an_engine_are_independent
)
test_new_outputs_outlive_the_inputs = contract.test_new_outputs_outlive_the_inputs
test_closing_twice_is_allowed = contract.test_closing_twice_is_allowed
test_run_by_name_converts_and_copies = contract.test_run_by_name_converts_and_copies
test_run_by_name_wants_every_input = contract.test_run_by_name_wants_every_input


def test_shapes_outside_the_profiles_fail_and_the_next_run_does_not(make: Make) -> None:
    """Rows of no elements, and more rows than any profile holds, are run errors."""
    context = make("FP32").create_context()

    for shape in ((1, 0), (9, 5), (0, 5)):
        with pytest.raises(EngineRunError, match="no profile holds the shapes"):
            context.execute([np.zeros(shape, np.float32)], [None])

    (y,) = context.execute([np.ones((2, 5), np.float32)], [None])
    np.testing.assert_array_equal(y, np.ones((2, 5)))
    context.close()


@pytest.mark.parametrize("datatype", ["FP64", "UINT16", "BYTES"])
def test_types_that_tensorrt_lacks_are_refused_at_load(
    make: Make, datatype: str
) -> None:
    """The text names the tensor and the way out."""
    with pytest.raises(EngineLoadError, match=r"input 'x' has the type .*onnxruntime"):
        make(datatype)
