"""Models that cannot batch, or not on axis 0: run alone (B019, B021, B022)."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from .client import Client, Raw, assert_refused, ones, result

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_fixed_first_axis(client: Client) -> None:
    """A model whose first axis is 1 serves one row a run, and says so (B021)."""
    calls = [client.start("probe_fixed", x=ones(1, i)) for i in range(4)]

    assert [result(c)["y"][0, 0] for c in calls] == [0, 2, 4, 6]
    assert [result(c)["n"].tolist() for c in calls] == [[[1]]] * 4
    assert_refused(lambda: client.infer("probe_fixed", x=ones(2)), INVALID, "[1, 4]")


def test_batch_on_axis_1(client: Client) -> None:
    """State that carries the batch on axis 1 is not joined on axis 0 (B022)."""
    states = [np.full((2, 1, 3), i, np.float32) for i in (1, 2, 3)]
    calls = [client.start("ax1", x=ones(1, i), st=s) for i, s in enumerate(states)]
    answers = [result(call) for call in calls]

    assert [a["y"][0, 0] for a in answers] == [0 + 6, 1 + 12, 2 + 18]
    assert [a["stN"].shape for a in answers] == [(2, 1, 3)] * 3
    assert [a["stN"][0, 0, 0] for a in answers] == [-1, -2, -3]


@pytest.mark.parametrize("model", ["nz", "nz_transposed"])
def test_rows_that_depend_on_data(client: Client, model: str) -> None:
    """An output with as many rows as the data wants goes to its caller whole (B022)."""
    few = np.array([[0, 1, 0, 0]], np.float32)
    many = np.array([[1, 1, 0, 1], [0, 0, 0, 1]], np.float32)
    calls = [client.start(model, x=x) for x in (few, many)]
    found = [result(call)["where"] for call in calls]
    expected = [np.argwhere(x) for x in (few, many)]
    if model == "nz":
        expected = [e.T for e in expected]

    assert [f.tolist() for f in found] == [e.tolist() for e in expected]


@pytest.mark.parametrize("model", ["baked", "baked_n"])
def test_batch_that_is_baked_in(client: Client, model: str) -> None:
    """A model that flattens its rows is run alone, whatever its file promises."""
    calls = [client.start(model, x=ones(2, i)) for i in (1, 2)]

    assert [result(c)["y"].tolist() for c in calls] == [[[1.0] * 8], [[2.0] * 8]]


def test_rows_that_depend_on_each_other(client: Client) -> None:
    """batch_axis = "none" keeps callers of a model that mixes rows apart."""
    calls = [client.start("mixrow_alone", x=ones(1, i)) for i in (1, 2)]
    one = np.array([[1, 1, 1, 1], [3, 3, 3, 3]], np.float32)

    assert [result(c)["y"].tolist() for c in calls] == [[[0, 0, 0, 0]]] * 2
    assert client.infer("mixrow_alone", x=one)["y"].tolist() == [[-1] * 4, [1] * 4]


def test_scalar_input(client: Client) -> None:
    """A scalar belongs to its own request, never to a neighbour's (B019)."""
    rates = [8000, 16000]
    calls = [client.start("scal", x=ones(2), sr=np.int64(r)) for r in rates]

    assert [result(c)["y"][0, 0] for c in calls] == rates
    assert_refused(
        lambda: client.infer("scal", x=ones(2), sr=Raw("INT64", [1], bytes(8))),
        INVALID,
        "'sr'",
        "got [1]",
    )


def test_scalar_metadata(client: Client) -> None:
    """A scalar has an empty shape in the metadata (B019)."""
    metadata = client.stub.ModelMetadata(pb.ModelMetadataRequest(name="scal"))

    assert {t.name: list(t.shape) for t in metadata.inputs} == {"x": [-1, 4], "sr": []}
