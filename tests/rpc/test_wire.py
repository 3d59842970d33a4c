"""The encoding rules applied by hand, against protobuf's own."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.internal import encoder
from hypothesis import given
from hypothesis import strategies as st

from batcher.rpc import messages, wire

NUMBERS: dict[str, tuple[Any, str]] = {
    "MODEL_NAME": (messages.ModelInferRequest, "model_name"),
    "MODEL_VERSION": (messages.ModelInferRequest, "model_version"),
    "REQUEST_ID": (messages.ModelInferRequest, "id"),
    "RAW_INPUT": (messages.ModelInferRequest, "raw_input_contents"),
    "RAW_OUTPUT": (messages.ModelInferResponse, "raw_output_contents"),
}


@pytest.mark.parametrize("constant", NUMBERS)
def test_tags_are_those_of_the_message(constant: str) -> None:
    """Each tag is its field's number, length-delimited, and takes one byte."""
    message, name = NUMBERS[constant]
    number = message.DESCRIPTOR.fields_by_name[name].number

    assert getattr(wire, constant) == number << 3 | 2
    assert getattr(wire, constant) < 0x80


@given(st.integers(0, 2**64 - 1))
def test_varints_are_protobufs(value: int) -> None:
    """A varint has the bytes that protobuf writes."""
    assert wire.varint(value) == encoder._VarintBytes(value)  # type: ignore[attr-defined]


@given(st.binary(max_size=300))
def test_a_field_is_what_protobuf_writes(value: bytes) -> None:
    """A field made by hand parses to its value; an empty one is left out."""
    field = wire.field(wire.RAW_OUTPUT, value)

    expected = messages.ModelInferResponse(raw_output_contents=[value])
    assert field == (expected.SerializeToString() if value else b"")
    assert wire.prefix(wire.RAW_OUTPUT, len(value)) + value == (
        expected.SerializeToString()
    )


@given(
    name=st.text("aé", min_size=1, max_size=60),
    version=st.text("1", max_size=120),
    id_=st.text("iü", max_size=60),
)
def test_the_id_lies_where_protobuf_puts_it(name: str, version: str, id_: str) -> None:
    """With or without a version, the id's whole field is found; or its empty place."""
    message = messages.ModelInferRequest(
        model_name=name, model_version=version, id=id_, raw_input_contents=[b"x"]
    )
    payload = message.SerializeToString()

    start, end = wire.id_span(payload)

    field = messages.ModelInferRequest(id=id_).SerializeToString()
    assert payload[start:end] == field
    message.ClearField("id")
    assert payload[:start] + payload[end:] == message.SerializeToString()


@pytest.mark.parametrize(
    "payload", [b"", b"\n", b"\n\x05ab", b"\n\x01m", b"\n\x01m\x1a"]
)
def test_a_message_too_short_for_an_id_is_an_index_error(payload: bytes) -> None:
    """What ends before the id could be found is said to be of another form."""
    with pytest.raises(IndexError):
        wire.id_span(payload)
