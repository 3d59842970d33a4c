"""Every datatype there and back: raw, typed, with the extreme values of its type."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from .client import Client, Raw, assert_refused, decode, pack, request, unpack

INVALID = grpc.StatusCode.INVALID_ARGUMENT

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FIELDS = {
    "bool": "bool_contents",
    "int8": "int_contents",
    "int16": "int_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
    "uint8": "uint_contents",
    "uint16": "uint_contents",
    "uint32": "uint_contents",
    "uint64": "uint64_contents",
    "fp32": "fp32_contents",
    "fp64": "fp64_contents",
    "string": "bytes_contents",
}


def extremes(kind: str) -> np.ndarray:
    """Values at the edges of a type, as one row."""
    if kind == "bool":
        return np.array([[True, False, True]])
    if kind in INTEGERS:
        info = np.iinfo(kind)
        return np.array([[info.min, 0, 1, info.max]], kind)
    dtype = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[kind]
    info = np.finfo(dtype)
    values = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0, 1 / 3]
    return np.array([[*values, np.nan, np.inf, -np.inf]], dtype)


def typed(model: str, field: str, shape: tuple[int, ...], values: Any) -> Any:
    """A request whose contents are in a typed field."""
    message = request(model)
    datatype = model.removeprefix("id_").upper().replace("STRING", "BYTES")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=shape)
    getattr(tensor.contents, field).extend(values)
    return message


@pytest.mark.parametrize("kind", ["bool", *INTEGERS, "fp16", "fp32", "fp64"])
def test_raw(client: Client, kind: str) -> None:
    """Raw bytes come back bit by bit, NaN and -0.0 included (B066, B069)."""
    sent = extremes(kind)
    for _ in range(2):  # the second time the header is known
        answer = client.stub.ModelInfer(request(f"id_{kind}", x=sent))

        assert answer.outputs[0].datatype == kind.upper()
        assert list(answer.outputs[0].shape) == list(sent.shape)
        assert answer.raw_output_contents[0] == sent.tobytes()


def test_raw_bf16(client: Client) -> None:
    """BF16 travels as the two high bytes of FP32, whatever they are (B066)."""
    data = bytes.fromhex("803f 00c0 7f7f 0100 c07f 807f 0080".replace(" ", ""))
    answer = client.stub.ModelInfer(request("id_bf16", x=Raw("BF16", [1, 7], data)))

    assert answer.outputs[0].datatype == "BF16"
    assert answer.raw_output_contents[0] == data


@pytest.mark.parametrize("kind", ["bool", *INTEGERS, "fp32", "fp64"])
def test_typed(client: Client, kind: str) -> None:
    """Typed contents mean the same; the answer is raw (B086)."""
    sent = extremes(kind)
    message = typed(f"id_{kind}", FIELDS[kind], sent.shape, sent.ravel().tolist())
    answer = client.stub.ModelInfer(message)

    assert not answer.outputs[0].HasField("contents")
    assert answer.raw_output_contents[0] == sent.tobytes()


def test_typed_strings(client: Client) -> None:
    """Typed bytes come back in raw form."""
    words = [b"hello world", b"", "wörld".encode()]
    answer = client.stub.ModelInfer(typed("id_string", "bytes_contents", (1, 3), words))

    assert unpack(answer.raw_output_contents[0]) == words


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_no_typed_halves(client: Client, kind: str) -> None:
    """FP16 and BF16 have no typed field: raw is asked for (B066)."""
    message = typed(f"id_{kind}", "fp32_contents", (1, 1), [1.0])

    assert_refused(
        lambda: client.stub.ModelInfer(message), INVALID, kind, "raw_input_contents"
    )


@pytest.mark.parametrize(
    ("kind", "value"),
    [("int8", 300), ("int8", -129), ("int16", 1 << 15), ("uint8", 256)],
)
def test_typed_out_of_range(client: Client, kind: str, value: int) -> None:
    """A typed value outside its datatype is refused, not wrapped (B086)."""
    message = typed(f"id_{kind}", FIELDS[kind], (1, 2), [1, value])

    assert_refused(
        lambda: client.stub.ModelInfer(message), INVALID, str(value), kind.upper()
    )


@pytest.mark.parametrize("kind", FIELDS)
def test_typed_in_the_wrong_field(client: Client, kind: str) -> None:
    """Typed contents in any field but the right one are refused (B086)."""
    for field in sorted(set(FIELDS.values()) - {FIELDS[kind]}):
        values: list[Any] = [b"1"] if field == "bytes_contents" else [1]
        message = typed(f"id_{kind}", field, (1, 1), values)

        assert_refused(
            lambda message=message: client.stub.ModelInfer(message),
            INVALID,
            field,
            FIELDS[kind],
        )


def test_bool_bytes(client: Client) -> None:
    """A BOOL byte other than 0 and 1 is refused (B066)."""
    for data in (b"\x01\x02", b"\xff\x00"):
        message = request("id_bool", x=Raw("BOOL", [1, 2], data))

        assert_refused(
            lambda message=message: client.stub.ModelInfer(message), INVALID, "BOOL"
        )
    message = request("id_bool", x=Raw("BOOL", [1, 2], b"\x01\x00"))
    assert client.stub.ModelInfer(message).raw_output_contents[0] == b"\x01\x00"


@pytest.mark.parametrize("kind", ["fp32", "int8", "string"])
@pytest.mark.parametrize("rows", [1, 3])
def test_zero_size(client: Client, kind: str, rows: int) -> None:
    """A tensor with an inner axis of 0 comes back as it is (B069)."""
    datatype = "BYTES" if kind == "string" else kind.upper()
    message = request(f"id_{kind}", x=Raw(datatype, [rows, 0], b""))
    answer = client.stub.ModelInfer(message)

    assert list(answer.outputs[0].shape) == [rows, 0]
    assert list(answer.raw_output_contents) == [b""]


def test_strings_in_a_batch(client: Client) -> None:
    """Strings of two callers in one run stay whole and apart (B013)."""
    before = client.books("string2")
    words = [[b"hello world", b""], [b"\0nul", b"x" * 70_000]]
    calls = [
        client.start("string2", x=Raw("BYTES", [1, 2], pack(pair))) for pair in words
    ]
    answers = [unpack(call.result().raw_output_contents[0]) for call in calls]

    assert answers == words
    assert (client.books("string2") - before).batches == {2: 1}


def test_strings_that_are_no_utf8(client: Client) -> None:
    """The engine takes UTF-8 only: other bytes are refused, and named."""
    bad = client.start("string2", x=Raw("BYTES", [1, 2], pack([b"\x00\xff", b"a"])))
    good = client.start("string2", x=Raw("BYTES", [1, 2], pack([b"b", b"c"])))

    assert_refused(bad.result, INVALID, "'x'", "element 0", "UTF-8")
    other = client.start("string2", x=Raw("BYTES", [1, 2], pack([b"d", b"e"])))
    assert unpack(good.result().raw_output_contents[0]) == [b"b", b"c"]
    assert unpack(other.result().raw_output_contents[0]) == [b"d", b"e"]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (pack([b"a"]), ["expected 2", "found 1"]),
        (pack([b"a", b"b", b"c"]), ["expected 2", "more than 2"]),
        (b"\xff\xff\xff\xff" + b"ab", ["4294967295", "2 are left", "expected 2"]),
        (pack([b"a", b"b"]) + b"abc", ["3 stray bytes", "expected 2"]),
        (pack([b"a"]) + b"\x05\0\0\0abcd", ["says it has 5", "4 are left"]),
        (b"", ["expected 2", "found 0"]),
    ],
)
def test_malformed_strings(client: Client, data: bytes, texts: list[str]) -> None:
    """Counts and lengths of BYTES elements are checked to the end (B023)."""
    message = request("id_string", x=Raw("BYTES", [1, 2], data))

    assert_refused(lambda: client.stub.ModelInfer(message), INVALID, *texts)


def test_64_bit_range(client: Client) -> None:
    """INT64 is exact over its whole range."""
    values = np.array([[-(2**63)], [2**53 + 1], [2**63 - 2]])

    assert client.infer("i64", v=values)["w"].tolist() == (values + 1).tolist()


def test_large_strings_of_many_elements(client: Client) -> None:
    """Thousands of elements of every length come back in order."""
    words = [bytes([65 + i % 26]) * (i % 97) for i in range(5000)]
    message = request("id_string", x=Raw("BYTES", [10, 500], pack(words)))
    answer: pb.ModelInferResponse = client.stub.ModelInfer(message)

    assert decode(answer)["y"].ravel().tolist() == words
