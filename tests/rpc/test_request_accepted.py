"""Requests that are served: what validation makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batcher.rpc.request import MAX_ID_BYTES, MAX_PARAMETERS, RequestParameters

from .builders import PROBE, SEQ, checked, model, parameter, probe, request, tensor


def parameters(**values: object) -> RequestParameters:
    """What the daemon heeds of these request parameters."""
    message = probe(parameters={name: parameter(v) for name, v in values.items()})
    return checked(message, PROBE).parameters


def test_inputs_come_in_the_models_order() -> None:
    """Inputs sent in another order are put in the model's; the raw order is kept."""
    message = request(
        ("mask", "INT64", [1, 1], b"mmmmmmmm"), ("ids", "INT64", [1, 1], b"iiiiiiii")
    )

    parsed = checked(message, SEQ)

    assert parsed.data == [b"iiiiiiii", b"mmmmmmmm"]
    assert parsed.raw_order == (1, 0)


def test_all_outputs_are_answered_when_none_is_named() -> None:
    """An empty list of outputs stands for all of them, in the model's order."""
    assert checked(probe(), PROBE).outputs == (0, 1, 2)


def test_named_outputs_are_answered_in_the_order_asked_for() -> None:
    """Only the outputs that were named are answered, as the caller ordered them."""
    message = probe()
    for name in ("pos", "y"):
        message.outputs.add(name=name)

    assert checked(message, PROBE).outputs == (2, 0)


def test_rows_are_the_first_axis() -> None:
    """The rows of a request are the batch axis of its inputs, up to the limit."""
    assert [checked(probe(rows=n), PROBE).rows for n in (1, 8, 9, 16)] == [1, 8, 9, 16]


def test_a_model_that_does_not_batch_has_one_row() -> None:
    """Without batching the shapes are complete; an axis of size 0 is not the batch."""
    signature = model(tensor("x", "FP32", "T", 2), tensor("sr", "INT64"), batched=False)
    message = request(("x", "FP32", [0, 2], b""), ("sr", "INT64", [], bytes(8)))

    parsed = checked(message, signature)

    assert (parsed.rows, parsed.shapes) == (1, ((0, 2), ()))


def test_axes_without_a_name_may_differ() -> None:
    """Dynamic axes without a name, and those of different names, are independent."""
    signature = model(tensor("a", "INT8", "N", None), tensor("b", "INT8", "N", None))
    message = request(("a", "INT8", [1, 2], b"ab"), ("b", "INT8", [1, 3], b"abc"))

    assert checked(message, signature).shapes == ((1, 2), (1, 3))


@pytest.mark.parametrize("shape", [[1, 0], [3, 0], [2, 0, 2**20]])
def test_empty_inner_axes_pass(shape: list[int]) -> None:
    """A tensor without elements is a tensor, raw or typed."""
    signature = model(tensor("x", "FP32", "N", *[None] * (len(shape) - 1)))

    raw = checked(request(("x", "FP32", shape, b"")), signature)
    typed = checked(request(("x", "FP32", shape, None)), signature)

    assert raw.shapes == typed.shapes == (tuple(shape),)
    assert raw.data == typed.data == [b""]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RequestParameters()),
        ({"timeout": 300_000}, RequestParameters(timeout_us=300_000)),
        ({"timeout": 0}, RequestParameters()),
        ({"timeout": 2**63 - 1}, RequestParameters(timeout_us=2**63 - 1)),
        ({"timeout": 2**64 - 1}, RequestParameters(timeout_us=2**64 - 1)),
        ({"priority": 2**32 - 1}, RequestParameters(priority=2**32 - 1)),
        (
            {"triton_enable_empty_final_response": True},
            RequestParameters(empty_final_response=True),
        ),
        ({"sequence_id": 0, "sequence_start": False}, RequestParameters()),
        ({"sequence_id": "", "sequence_end": False}, RequestParameters()),
        ({"tag": "alpha", "k": 7, "f": 0.5, "b": True}, RequestParameters()),
        ({"nothing": None, "large": 2**64 - 1, "": "x"}, RequestParameters()),
    ],
)
def test_known_parameters_are_heeded_and_others_ignored(
    given: dict[str, Any], expected: RequestParameters
) -> None:
    """Each reserved parameter means what Triton says; the caller's own mean nothing."""
    assert parameters(**given) == expected


def test_limits_are_inclusive() -> None:
    """As many parameters, and as long an id, as the limits say are accepted."""
    many = {f"p{i}": parameter(i) for i in range(MAX_PARAMETERS)}

    parsed = checked(probe(parameters=many, id="i" * MAX_ID_BYTES), PROBE)

    assert parsed.parameters == RequestParameters()


def test_raw_and_typed_contents_give_the_same_bytes() -> None:
    """A typed request is indistinguishable from its raw twin, but for the raw order."""
    values = np.array([[1.5, -0.0, np.inf, 1e-45]], np.float32)
    typed = request(("x", "FP32", [1, 4], None))
    typed.inputs[0].contents.fp32_contents.extend(values.reshape(-1).tolist())

    from_raw = checked(probe(raw=values.tobytes()), PROBE)
    from_typed = checked(typed, PROBE)

    assert from_typed.data == from_raw.data
    assert (from_raw.raw_order, from_typed.raw_order) == ((0,), ())
