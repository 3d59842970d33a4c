"""Tensors of every datatype, in and out again, read by tritonclient as well."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferInput, InferResult, model_config_pb2, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from batcher.rpc import messages, response, wire
from batcher.rpc.datatypes import CONTENTS_FIELDS, DATATYPES
from batcher.rpc.request import Shape, parse, validate
from engines import DTYPES

from .builders import checked, model, request, tensor

FIXED = [name for name, kind in DATATYPES.items() if kind.itemsize]
TYPED = [name for name, kind in DATATYPES.items() if kind.field is not None]

shapes = st.tuples(st.integers(1, 4), st.integers(0, 5))
ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


def contents(datatype: str, count: int) -> st.SearchStrategy[bytes]:
    """Raw contents of `count` elements, every bit pattern that is allowed."""
    if datatype == "BYTES":
        items = st.lists(st.binary(max_size=20), min_size=count, max_size=count)
        return items.map(framed)
    if datatype == "BOOL":
        bits = st.lists(st.sampled_from([0, 1]), min_size=count, max_size=count)
        return bits.map(bytes)
    size = count * DATATYPES[datatype].itemsize
    return st.binary(min_size=size, max_size=size)


def values(datatype: str, count: int) -> st.SearchStrategy[list[Any]]:
    """Typed contents of `count` elements."""
    kind = DATATYPES[datatype]
    one: st.SearchStrategy[Any]
    if datatype == "BYTES":
        one = st.binary(max_size=20)
    elif datatype == "BOOL":
        one = st.booleans()
    elif datatype.startswith("FP"):
        one = st.floats(width=32 if datatype == "FP32" else 64)
    else:
        limits = np.iinfo(kind.numpy)
        one = st.integers(int(limits.min), int(limits.max))
    return st.lists(one, min_size=count, max_size=count)


def framed(items: list[bytes]) -> bytes:
    """Elements behind their 4-byte lengths."""
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def answer(datatype: str, shape: Shape, raw: bytes, id_: str) -> bytes:
    """An encoded response with one output of these bytes."""
    signature = model(outputs=[tensor("y", datatype, "N", "D")])
    return b"".join(
        (
            response.head(signature),
            wire.field(wire.REQUEST_ID, id_.encode()),
            response.describe(signature, [0], [shape]),
            response.raw_prefix(len(raw)),
            raw,
        )
    )


@pytest.mark.parametrize("datatype", DATATYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=shapes, id_=ids)
def test_raw_contents_come_back_bit_for_bit(
    datatype: str, data: st.DataObject, shape: tuple[int, int], id_: str
) -> None:
    """What a request holds raw is what the engine gets and what the caller reads."""
    raw = data.draw(contents(datatype, shape[0] * shape[1]))
    signature = model(tensor("x", datatype, "N", "D"))

    parsed = checked(request(("x", datatype, shape, raw), id=id_), signature)
    back = raw
    if parsed.objects is not None:
        back = response.serialize_bytes(parsed.objects[0])
    encoded = answer(datatype, shape, back, id_)
    read = messages.ModelInferResponse.FromString(encoded)

    assert parsed.data == [raw]
    assert parsed.shapes == (shape,)
    assert (read.model_name, read.model_version, read.id) == ("m", "1", id_)
    assert [(o.name, o.datatype, tuple(o.shape)) for o in read.outputs] == [
        ("y", datatype, shape)
    ]
    assert list(read.raw_output_contents) == [raw]


@pytest.mark.parametrize("datatype", TYPED)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=shapes)
def test_typed_contents_become_raw(
    datatype: str, data: st.DataObject, shape: tuple[int, int]
) -> None:
    """Typed values have the bytes that numpy gives them, BYTES their framing."""
    kind = DATATYPES[datatype]
    given_values = data.draw(values(datatype, shape[0] * shape[1]))
    message = request(("x", datatype, shape, None))
    getattr(message.inputs[0].contents, str(kind.field)).extend(given_values)

    parsed = checked(message, model(tensor("x", datatype, "N", "D")))

    if datatype == "BYTES":
        assert parsed.data == [framed(given_values)]
        assert parsed.objects is not None
        assert parsed.objects[0].shape == shape
        assert parsed.objects[0].reshape(-1).tolist() == given_values
    else:
        expected = np.array(given_values, kind.numpy)
        actual = np.frombuffer(parsed.data[0], kind.numpy)
        np.testing.assert_array_equal(actual, expected, strict=True)
        assert parsed.objects is None


@pytest.mark.parametrize("datatype", DATATYPES)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), shape=st.tuples(st.integers(1, 4), st.integers(1, 5)))
def test_tritonclient_reads_what_it_sent(
    datatype: str, data: st.DataObject, shape: tuple[int, int]
) -> None:
    """An array that tritonclient sends, echoed by us, is the array that it reads."""
    raw = data.draw(contents(datatype, shape[0] * shape[1]))
    if datatype == "BYTES":
        elements = [item for _, item in parsed_frames(raw)]
        array = np.array(elements, dtype=object).reshape(shape)
    else:
        array = np.frombuffer(raw, DTYPES[datatype]).reshape(shape)
    sent = InferInput("x", shape, datatype)
    sent.set_data_from_numpy(array)
    message = service_pb2.ModelInferRequest(model_name="m", inputs=[sent._get_tensor()])
    message.raw_input_contents.append(sent._get_content())

    signature = model(tensor("x", datatype, "N", "D"))
    parsed = validate(parse(message.SerializeToString()), signature)
    encoded = answer(datatype, shape, parsed.data[0], "7")
    result = InferResult(service_pb2.ModelInferResponse.FromString(encoded))
    back = result.as_numpy("y")

    assert result.get_response().id == "7"
    assert back.shape == shape
    if datatype == "BYTES":
        assert back.tolist() == array.tolist()
    else:
        assert back.tobytes() == array.tobytes()


def parsed_frames(raw: bytes) -> list[tuple[int, bytes]]:
    """Offsets and elements of serialized BYTES."""
    found = []
    at = 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        found.append((at, raw[at + 4 : at + 4 + size]))
        at += 4 + size
    return found


@settings(max_examples=50, deadline=None)
@given(items=st.lists(st.binary(max_size=300), min_size=1, max_size=8))
def test_bytes_are_framed_as_tritonclient_frames_them(items: list[bytes]) -> None:
    """The serialized form of BYTES equals that of tritonclient's own function."""
    array = np.empty(len(items), dtype=object)
    array[:] = items

    assert response.serialize_bytes(array) == serialize_byte_tensor(array).item()


def test_several_outputs_line_up_with_their_contents() -> None:
    """Outputs are described, and their contents follow, in the order asked for."""
    signature = model(
        outputs=[tensor("a", "INT8", "N", "D"), tensor("b", "BYTES", "N", 1)]
    )
    encoded = b"".join(
        (
            response.head(signature),
            response.describe(signature, [1, 0], [(1, 1), (1, 0)]),
            response.raw_prefix(5),
            framed([b"z"]),
            response.raw_prefix(0),
        )
    )

    result = InferResult(service_pb2.ModelInferResponse.FromString(encoded))

    assert [o.name for o in result.get_response().outputs] == ["b", "a"]
    assert result.as_numpy("b").tolist() == [[b"z"]]
    assert result.as_numpy("a").shape == (1, 0)


def test_datatypes_are_tritons() -> None:
    """Names, numbers and numpy types of the table agree with tritonclient's."""
    numbers = {
        name.removeprefix("TYPE_"): number
        for name, number in model_config_pb2.DataType.items()
        if name != "TYPE_INVALID"
    }
    numbers["BYTES"] = numbers.pop("STRING")

    assert {name: kind.number for name, kind in DATATYPES.items()} == numbers
    assert {
        name: np_to_triton_dtype(kind.numpy)
        for name, kind in DATATYPES.items()
        if kind.numpy is not None
    } == {name: name for name in TYPED if name != "BYTES"}


def test_datatypes_are_the_engines() -> None:
    """Wire and engines know the same datatypes, with elements of the same size."""
    assert list(DATATYPES) == [
        "BOOL",
        *(f"UINT{n}" for n in (8, 16, 32, 64)),
        *(f"INT{n}" for n in (8, 16, 32, 64)),
        *("FP16", "FP32", "FP64", "BYTES", "BF16"),
    ]
    assert set(DTYPES) == set(DATATYPES)
    assert {name: DTYPES[name].itemsize for name in FIXED} == {
        name: DATATYPES[name].itemsize for name in FIXED
    }


def test_contents_fields_are_those_of_the_message() -> None:
    """Every typed field of the protocol's message is known."""
    fields = messages.InferTensorContents.DESCRIPTOR.fields_by_name

    assert set(CONTENTS_FIELDS) == set(fields)
