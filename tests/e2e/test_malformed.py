"""Malformed requests: each kind has its code and a text that helps, neighbours live.

Every case is sent between two good requests to a model that runs pairs: the pair must
come back as one run, so the bad one was refused in the same window without a trace.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import grpc
import hpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from .client import Client, Raw, assert_refused, ones, request, result, set_parameter
from .daemon import Daemon

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED

Message = pb.ModelInferRequest
Change = Callable[[Message], Any]


def twice(message: Message) -> None:
    """The input is given twice."""
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(message.raw_input_contents[0])


def extra(message: Message) -> None:
    """An input that the model has not."""
    message.inputs.add(name="extra", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(bytes(16))


def parameter(name: str, value: Any) -> Change:
    """A request parameter."""
    return lambda m: set_parameter(m.parameters[name], value)


def tensor_parameter(name: str, value: Any) -> Change:
    """A parameter of the input."""
    return lambda m: set_parameter(m.inputs[0].parameters[name], value)


def output_parameter(name: str, value: Any) -> Change:
    """An output asked for with a parameter."""
    return lambda m: set_parameter(m.outputs.add(name="y").parameters[name], value)


def shape(*sizes: int) -> Change:
    """Another shape with the same bytes."""

    def change(message: Message) -> None:
        message.inputs[0].shape[:] = sizes

    return change


def content(data: bytes) -> Change:
    """Other bytes."""

    def change(message: Message) -> None:
        message.raw_input_contents[0] = data

    return change


def contents(field: str, *values: Any, raw: bool = False) -> Change:
    """Typed contents instead of raw ones, or beside them."""

    def change(message: Message) -> None:
        getattr(message.inputs[0].contents, field).extend(values)
        if not raw:
            message.ClearField("raw_input_contents")

    return change


def field(**values: Any) -> Change:
    """Other values of the message's own fields."""

    def change(message: Message) -> None:
        for name, value in values.items():
            setattr(message, name, value)

    return change


def input_field(**values: Any) -> Change:
    """Other values of the input's fields."""

    def change(message: Message) -> None:
        for name, value in values.items():
            setattr(message.inputs[0], name, value)

    return change


def outputs(*names: str) -> Change:
    """Outputs asked for."""
    return lambda m: [m.outputs.add(name=name) for name in names]


def many_parameters(message: Message) -> None:
    """Ten thousand parameters."""
    for i in range(10_000):
        message.parameters[f"p{i}"].int64_param = i


CASES: dict[str, tuple[Change, grpc.StatusCode, tuple[str, ...]]] = {
    # names (B087)
    "model": (field(model_name="nope"), NOT_FOUND, ("nope", "not found")),
    "no model": (field(model_name=""), NOT_FOUND, ("''",)),
    "version 99": (field(model_version="99"), NOT_FOUND, ("version 99", "there is 1")),
    "version abc": (field(model_version="abc"), INVALID, ("'abc'",)),
    "version -1": (field(model_version="-1"), INVALID, ("'-1'",)),
    "version 01": (field(model_version="01"), INVALID, ("'01'",)),
    "output": (outputs("total_garbage"), INVALID, ("total_garbage", "'y', 'n', 'pos'")),
    "output twice": (outputs("y", "n", "y"), INVALID, ("duplicate", "'y'")),
    "input name": (input_field(name="X"), INVALID, ("unexpected input 'X'", "'x'")),
    "input twice": (twice, INVALID, ("'x' is given twice",)),
    "extra input": (extra, INVALID, ("unexpected input 'extra'",)),
    "no input": (lambda m: m.ClearField("inputs"), INVALID, ("missing input 'x'",)),
    # datatypes and shapes
    "datatype": (input_field(datatype="FP64"), INVALID, ("'FP64'", "expects FP32")),
    "no datatype": (input_field(datatype="fp32"), INVALID, ("'fp32'", "FP32")),
    "rank": (shape(4), INVALID, ("[-1, 4]", "got [4]")),
    "no shape": (shape(), INVALID, ("[-1, 4]", "got []")),
    "width": (shape(1, 5), INVALID, ("[-1, 4]", "got [1, 5]")),
    "negative rows": (shape(-1, 4), INVALID, ("got [-1, 4]",)),
    "no rows": (shape(0, 4), INVALID, ("0 rows",)),
    "rows over 31 bits": (shape(2**31 + 1, 4), INVALID, ("batch-size must be <= 128",)),
    "rows over 32 bits": (shape(2**32 + 1, 4), INVALID, ("batch-size must be <= 128",)),
    "rows of 63 bits": (shape(2**62, 4), INVALID, ("batch-size must be <= 128",)),
    "thousand axes": (shape(*[1] * 1000), INVALID, ("1000 axes",)),
    # contents (B086)
    "few bytes": (content(bytes(15)), INVALID, ("has 15 bytes", "is 16 bytes")),
    "many bytes": (content(bytes(17)), INVALID, ("has 17 bytes", "is 16 bytes")),
    "no bytes": (content(b""), INVALID, ("has 0 bytes",)),
    "no contents": (
        lambda m: m.ClearField("raw_input_contents"),
        INVALID,
        ("no data",),
    ),
    "raw left over": (
        lambda m: m.raw_input_contents.append(b""),
        INVALID,
        ("expected 1 raw_input_contents", "got 2"),
    ),
    "raw and typed": (
        contents("fp32_contents", 1, 2, 3, 4, raw=True),
        INVALID,
        ("typed contents", "raw_input_contents too"),
    ),
    "typed, too few": (
        contents("fp32_contents", 1, 2, 3),
        INVALID,
        ("3 elements", "has 4"),
    ),
    "typed elsewhere": (
        contents("int_contents", 1, 2, 3, 4),
        INVALID,
        ("int_contents", "use fp32_contents"),
    ),
    # parameters (B026, B088)
    "timeout -1": (parameter("timeout", -1), INVALID, ("timeout", "negative")),
    "timeout text": (parameter("timeout", "5"), INVALID, ("timeout", "integer")),
    "timeout bool": (parameter("timeout", True), INVALID, ("timeout", "integer")),
    "timeout unset": (parameter("timeout", None), INVALID, ("timeout", "no value")),
    "timeout double": (parameter("timeout", 1.5), INVALID, ("timeout", "double")),
    "priority -1": (parameter("priority", -1), INVALID, ("priority", "negative")),
    "priority text": (parameter("priority", "1"), INVALID, ("priority", "integer")),
    "priority 2**40": (parameter("priority", 2**40), INVALID, (str(2**40),)),
    "triton_": (parameter("triton_x", "1"), INVALID, ("'triton_x'", "reserved")),
    "sequence_id": (parameter("sequence_id", 5), UNIMPLEMENTED, ("sequence_id",)),
    "sequence name": (parameter("sequence_id", "a"), UNIMPLEMENTED, ("sequence_id",)),
    "sequence bool": (parameter("sequence_id", True), INVALID, ("sequence_id",)),
    "sequence_start": (parameter("sequence_start", 1), INVALID, ("sequence_start",)),
    "10,000 parameters": (many_parameters, INVALID, ("10000", "at most 256")),
    "shm": (
        tensor_parameter("shared_memory_region", "r"),
        UNIMPLEMENTED,
        ("'x'", "shared memory"),
    ),
    "shm output": (
        output_parameter("shared_memory_region", "r"),
        UNIMPLEMENTED,
        ("'y'", "shared memory"),
    ),
    "shm offset": (
        tensor_parameter("shared_memory_offset", 0),
        INVALID,
        ("shared_memory_offset", "without shared_memory_region"),
    ),
    "classification": (
        output_parameter("classification", 3),
        UNIMPLEMENTED,
        ("classification",),
    ),
    "large id": (field(id="i" * 1_000_000), INVALID, ("1000000", "65536")),
}


def good_request(client: Client, value: float) -> Any:
    """A good request to the model that runs pairs."""
    return client.start("probe2", x=ones(1, value))


@pytest.mark.parametrize("case", CASES)
def test_refused(client: Client, case: str) -> None:
    """A malformed request gets its code and text; its neighbours share their run."""
    change, code, texts = CASES[case]
    message = request("probe2", x=ones())
    change(message)
    first = good_request(client, 1)
    assert_refused(lambda: client.stub.ModelInfer(message, timeout=5), code, *texts)
    second = good_request(client, 2)

    assert [result(first)["y"][0, 0], result(second)["y"][0, 0]] == [2, 4]
    assert result(first)["n"].tolist() == result(second)["n"].tolist() == [[2]]


def test_inputs_that_disagree_on_rows(client: Client) -> None:
    """Inputs with different row counts: both are named with their sizes (B020)."""
    two, one = np.ones((2, 4), np.int64), np.ones((1, 4), np.int64)
    first = client.start("seq2", ids=one, mask=one)
    assert_refused(
        lambda: client.infer("seq2", ids=two, mask=one),
        INVALID,
        "'ids' has 2 rows",
        "'mask' has 1",
    )
    second = client.start("seq2", ids=one, mask=one)

    assert result(first)["n"].tolist() == result(second)["n"].tolist() == [[2]]


def test_inputs_that_disagree_on_an_axis(client: Client) -> None:
    """An axis that two inputs share has one size."""
    for model in ("seq2", "seq_padded"):
        assert_refused(
            lambda model=model: client.infer(
                model, ids=np.ones((1, 4), np.int64), mask=np.ones((1, 5), np.int64)
            ),
            INVALID,
            "'S' has 4 elements in input 'ids' but 5 in 'mask'",
        )


def test_one_input_typed_one_raw(client: Client) -> None:
    """Typed and raw contents are not mixed within a request (B086)."""
    message = request("seq2", ids=np.ones((1, 2), np.int64))
    tensor = message.inputs.add(name="mask", datatype="INT64", shape=[1, 2])
    tensor.contents.int64_contents.extend([1, 1])

    assert_refused(lambda: client.stub.ModelInfer(message), INVALID, "'mask'", "typed")


def test_a_missing_input_is_named(client: Client) -> None:
    """Of several inputs the missing one is named."""
    assert_refused(
        lambda: client.infer("seq2", ids=np.ones((1, 2), np.int64)),
        INVALID,
        "missing input 'mask'",
    )


@pytest.mark.parametrize("sizes", [[2**62, 4], [2**32, 2**32], [1, 2**62], [2**31, 0]])
def test_shapes_that_overflow(client: Client, daemon: Daemon, sizes: list[int]) -> None:
    """Products of sizes beyond 64 bits are no smaller than they are (B016)."""
    before = daemon.rss_kib("VmHWM")
    message = request("id_fp32", x=Raw("FP32", sizes, bytes(16)))
    assert_refused(lambda: client.stub.ModelInfer(message), INVALID)

    assert daemon.rss_kib("VmHWM") - before < 20_000


@pytest.mark.parametrize("what", ["outputs", "inputs", "parameters"])
def test_hundred_thousand_entries(client: Client, daemon: Daemon, what: str) -> None:
    """A message of very many entries is refused, at little cost (B097)."""
    message = request("id_fp32", x=np.ones((1, 4), np.float32))
    for i in range(100_000):
        if what == "outputs":
            message.outputs.add(name="y")
        elif what == "inputs":
            message.inputs.add(name=f"i{i}", datatype="FP32", shape=[0])
        else:
            message.parameters[f"p{i}"].bool_param = True
    payload = message.SerializeToString()
    before = daemon.rss_kib("VmHWM")
    started = time.monotonic()
    call = client.raw.future(payload, timeout=10)

    assert call.code() == INVALID
    assert time.monotonic() - started < 2
    assert len(call.details()) <= 4096
    assert daemon.rss_kib("VmHWM") - before < 100_000


def test_long_names_are_cut_in_texts(client: Client) -> None:
    """An error text that quotes the caller stays short."""
    for message in (
        request("m" * 1_000_000, x=ones()),
        request("probe", **{"i" * 1_000_000: ones()}),
        request("probe", x=ones(), outputs=["o" * 1_000_000]),
        request("probe", x=Raw("D" * 1_000_000, [1, 4], bytes(16))),
        request("probe", x=Raw("FP32", [1] * 100_000, bytes(16))),
        request("probe", x=ones(), version="9" * 1_000_000),
    ):
        call = client.send(message)

        assert call.code() in (INVALID, NOT_FOUND)
        assert 20 < len(call.details()) <= 4096


def test_id_that_is_no_text(client: Client) -> None:
    """An id that is no UTF-8 is refused, also when the rest is known already."""
    payload = request("probe", x=ones(), id="AB").SerializeToString()
    assert client.raw(payload)
    broken = payload.replace(b"\x1a\x02AB", b"\x1a\x02\xff\xfe")

    assert_refused(lambda: client.raw(broken, timeout=5), INVALID)


def test_contents_of_another_length(client: Client) -> None:
    """A message that is cut off or too long is refused, though its header is known.

    Lengths are chosen so that messages of the same header length, which are good, have
    them: a truncated row would shift those of its neighbours.
    """
    bodies = [
        request("id_fp32", x=np.full((1, n), n, np.float32)).SerializeToString()
        for n in (3, 4, 5)
    ]
    for body in bodies * 2:
        assert client.raw(body)
    short, good, long = bodies
    for broken in (
        good[: len(short)],
        good + b"\x3a\x02xy",
        good + bytes(len(long) - len(good)),
        short + good[len(short) :],
    ):
        assert_refused(lambda broken=broken: client.raw(broken, timeout=5), INVALID)
    pair = request("probe2", x=ones(1, 1)).SerializeToString()
    calls = [client.raw.future(pair) for _ in range(2)]
    assert {call.code() for call in calls} == {grpc.StatusCode.OK}
    first, second = good_request(client, 2), client.raw.future(pair[:-4], timeout=5)
    third = good_request(client, 3)

    assert second.code() == INVALID
    assert [result(c)["y"][0, 0] for c in (first, third)] == [4, 6]


def test_damaged_messages(client: Client) -> None:
    """A message with any byte changed is answered as what it then says, or refused."""
    chance = random.Random(1)
    payload = request(
        "seq", ids=np.ones((1, 3), np.int64), mask=np.ones((1, 3), np.int64), id="ab"
    ).SerializeToString()
    damaged = []
    for _ in range(400):
        copy = bytearray(payload)
        at = chance.randrange(len(copy) - 60)  # names, lengths, shapes and tags
        copy[at] = chance.randrange(256)
        kept = len(copy) if chance.random() < 0.8 else chance.randrange(len(copy))
        damaged.append(bytes(copy[:kept]))
    calls = [client.raw.future(d, timeout=10) for d in damaged]
    for sent, call in zip(damaged, calls, strict=True):
        code = call.code()

        assert code in (grpc.StatusCode.OK, INVALID, NOT_FOUND), (sent, call.details())
        if code == grpc.StatusCode.OK:
            meant = pb.ModelInferRequest.FromString(sent)
            answer = pb.ModelInferResponse.FromString(call.result())
            assert (answer.id, answer.model_name) == (meant.id, meant.model_name)


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """A frame of HTTP/2, of stream 1 if it is headers or data."""
    stream = 1 if kind in (0, 1) else 0
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + payload


@pytest.mark.parametrize("cut", [b"", b"\0\0\0\0\x08abc"], ids=["none", "half"])
def test_a_call_without_a_whole_message(daemon: Daemon, cut: bytes) -> None:
    """A call that ends before its message does is answered, and with an error."""
    host, port = daemon.grpc.split(":")
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/inference.GRPCInferenceService/ModelInfer"),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    data = frame(0, 1, cut) if cut else b""
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b""))
        block = hpack.Encoder().encode(headers)
        connection.sendall(frame(1, 4 if cut else 5, block) + data)
        with connection.makefile("rb") as answers:
            decoder, status = hpack.Decoder(), None
            while status is None:
                head = answers.read(9)
                content = answers.read(int.from_bytes(head[:3], "big"))
                if head[3] == 1:
                    status = dict(decoder.decode(content)).get("grpc-status")

    assert status in {"3", "13"}  # INVALID_ARGUMENT; the Rust front says INTERNAL
