"""Requests that can never be served: which error, and what its text says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from batcher.errors import BatcherError, InvalidRequest, Unsupported
from batcher.rpc import messages
from batcher.rpc.request import parse
from batcher.rpc.signature import ModelSignature

from .builders import PROBE, SEQ, checked, model, parameter, probe, request, tensor

ROW = bytes(16)
SCAL = model(
    tensor("x", "FP32", "N", 4), tensor("sr", "INT64"), batched=False, name="scal"
)


@dataclass
class Case:
    """A request, and the pieces that the text of its refusal must have."""

    name: str
    message: messages.ModelInferRequest
    says: tuple[str, ...]
    signature: ModelSignature = PROBE
    error: type[BatcherError] = InvalidRequest


def one(datatype: str, *axes: int | str) -> ModelSignature:
    """A model with one input `x` of this type, [N, 2] by default."""
    return model(tensor("x", datatype, *(axes or ("N", 2))))


def typed(datatype: str, shape: list[int], **contents: Any) -> Any:
    """A request whose input `x` has typed contents."""
    message = request(("x", datatype, shape, None))
    for field, values in contents.items():
        getattr(message.inputs[0].contents, field).extend(values)
    return message


def raw(datatype: str, shape: list[int], content: bytes) -> Any:
    """A request whose input `x` has raw contents."""
    return request(("x", datatype, shape, content))


def with_parameter(name: str, value: object) -> Any:
    """A good request with one request parameter."""
    return probe(parameters={name: parameter(value)})


def on_input(name: str, value: object) -> Any:
    """A good request with one parameter on its input."""
    message = probe()
    message.inputs[0].parameters[name].CopyFrom(parameter(value))
    return message


def on_output(name: str, value: object) -> Any:
    """A good request with one parameter on its output."""
    message = probe()
    message.outputs.add(name="y").parameters[name].CopyFrom(parameter(value))
    return message


def outputs(*names: str) -> Any:
    """A good request for these outputs."""
    message = probe()
    for name in names:
        message.outputs.add(name=name)
    return message


def mixed() -> Any:
    """A request with one input typed and the other raw."""
    message = request(
        ("ids", "INT64", [1, 1], None), ("mask", "INT64", [1, 1], ROW[:8])
    )
    message.inputs[0].contents.int64_contents.append(1)
    return message


def typed_and_raw() -> Any:
    """A request whose only input has both kinds of contents."""
    message = probe()
    message.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])
    return message


def seq(ids: list[int], mask: list[int]) -> Any:
    """A request to `SEQ` with these shapes and as many bytes as they have."""
    sizes = [8 * s[0] * s[1] for s in (ids, mask)]
    return request(
        ("ids", "INT64", ids, bytes(sizes[0])), ("mask", "INT64", mask, bytes(sizes[1]))
    )


NAMES = [
    Case(
        "unknown input",
        request(("X", "FP32", [1, 4], ROW)),
        ("unexpected input 'X'", "its inputs are 'x'"),
    ),
    Case(
        "extra input",
        request(("x", "FP32", [1, 4], ROW), ("z", "FP32", [1, 4], ROW)),
        ("unexpected input 'z'", "its inputs are 'x'"),
    ),
    Case(
        "missing input",
        request(("ids", "INT64", [1, 2], ROW)),
        ("missing input 'mask'", "expected 2 inputs, got 1"),
        SEQ,
    ),
    Case("no inputs", request(), ("missing input 'x'", "expected 1 inputs, got 0")),
    Case(
        "duplicate input",
        request(("x", "FP32", [1, 4], ROW), ("x", "FP32", [1, 4], ROW)),
        ("input 'x' is given twice",),
    ),
    Case(
        "100,000 empty inputs",
        request(*[("x", "FP32", [1, 0], b"")] * 100_000),
        ("input 'x' is given twice",),
    ),
    Case(
        "unknown output",
        outputs("total_garbage"),
        ("unexpected output 'total_garbage'", "its outputs are 'y', 'n', 'pos'"),
    ),
    Case("duplicate output", outputs("y", "n", "y"), ("duplicate output", "'y'")),
    Case(
        "100,000 times one output",
        outputs(*["y"] * 100_000),
        ("duplicate output: 'y' is asked for twice",),
    ),
    Case(
        "100,000 unknown outputs",
        outputs(*[f"o{i}" for i in range(100_000)]),
        ("unexpected output 'o0'",),
    ),
    Case(
        "a line break in a name",
        request(("x\nERROR forged", "FP32", [1, 4], ROW)),
        (r"'x\nERROR forged'",),
    ),
    Case("a name of 1 MB", outputs("o" * 1_000_000), ("'" + "o" * 200 + "…'",)),
]

SHAPES = [
    Case(
        "wrong datatype",
        request(("x", "FP64", [1, 4], bytes(32))),
        ("input 'x' has datatype 'FP64'", "expects FP32"),
    ),
    Case(
        "no datatype",
        request(("x", "", [1, 4], ROW)),
        ("input 'x' has datatype ''", "expects FP32"),
    ),
    Case(
        "rank too small",
        raw("FP32", [4], ROW),
        ("unexpected shape for input 'x'", "expected [-1, 4]", "got [4]"),
    ),
    Case(
        "rank too large",
        raw("FP32", [1, 1, 4], ROW),
        ("expected [-1, 4]", "got [1, 1, 4]"),
    ),
    Case("no shape", raw("FP32", [], ROW), ("expected [-1, 4]", "got []")),
    Case(
        "wrong fixed size",
        raw("FP32", [1, 5], bytes(20)),
        ("expected [-1, 4] (-1: any size; the first axis is the batch)", "got [1, 5]"),
    ),
    Case("negative rows", raw("FP32", [-1, 4], ROW), ("got [-1, 4]",)),
    Case(
        "negative dynamic axis",
        raw("FP32", [1, -4], ROW),
        ("input 'x'", "expected [-1, -1]", "got [1, -4]"),
        one("FP32", "N", "D"),
    ),
    Case(
        "two negative axes with the right product",
        raw("FP32", [-1, -4], ROW),
        ("got [-1, -4]",),
        one("FP32", "N", "D"),
    ),
    Case("no rows", raw("FP32", [0, 4], b""), ("0 rows", "at least 1")),
    Case(
        "more rows than a request may have",
        probe(rows=17),
        ("17 rows", "batch-size must be <= 16", "up to 8 rows"),
    ),
    Case(
        "rows beyond 31 bits",
        raw("FP32", [2**31 + 1, 4], ROW),
        (f"{2**31 + 1} rows", "batch-size must be <= 16"),
    ),
    Case(
        "rows beyond 32 bits",
        raw("FP32", [2**32 + 1, 4], ROW),
        (f"{2**32 + 1} rows", "batch-size must be <= 16"),
    ),
    Case(
        "a product that is 0 modulo 2**64",
        raw("FP32", [1, 2**62], b""),
        ("has 0 bytes", f"FP32 of shape [1, {2**62}] is {2**64} bytes"),
        one("FP32", "N", "D"),
    ),
    Case(
        "an empty tensor with a huge axis",
        raw("FP32", [1, 0, 2**40], b""),
        ("'x'", f"[1, 0, {2**40}]", "empty", str(2**24)),
        one("FP32", "N", "A", "B"),
    ),
    Case(
        "rows disagree",
        seq([2, 4], [1, 4]),
        ("inputs disagree on the batch", "'ids' has 2 rows", "'mask' has 1"),
        SEQ,
    ),
    Case(
        "an axis of one name disagrees",
        seq([1, 4], [1, 5]),
        ("axis 'S' has 4 elements in input 'ids' but 5 in 'mask'",),
        SEQ,
    ),
    Case(
        "a scalar with a shape",
        request(("x", "FP32", [1, 4], ROW), ("sr", "INT64", [1], ROW[:8])),
        ("input 'sr'", "expected [], got [1]"),
        SCAL,
    ),
    Case(
        "100,000 axes",
        raw("FP32", [1] * 100_000, ROW),
        ("expected [-1, 4]", "(100000 axes)"),
    ),
]

CONTENTS = [
    Case(
        "too few bytes",
        raw("FP32", [1, 4], ROW[:12]),
        ("input 'x' has 12 bytes", "FP32 of shape [1, 4] is 16 bytes"),
    ),
    Case("too many bytes", raw("FP32", [1, 4], bytes(20)), ("20 bytes", "16 bytes")),
    Case(
        "no contents at all",
        request(("x", "FP32", [1, 4], None)),
        ("input 'x' has no data", "shape [1, 4] has 4"),
    ),
    Case(
        "more raw contents than inputs",
        request(("x", "FP32", [1, 4], ROW), raw_input_contents=[ROW]),
        ("expected 1 raw_input_contents", "got 2"),
    ),
    Case(
        "fewer raw contents than inputs",
        request(("ids", "INT64", [1, 1], ROW[:8]), ("mask", "INT64", [1, 1], None)),
        ("expected 2 raw_input_contents", "got 1"),
        SEQ,
    ),
    Case(
        "typed and raw for one input",
        typed_and_raw(),
        ("input 'x' has typed contents", "raw_input_contents too"),
    ),
    Case(
        "one input typed, the other raw",
        mixed(),
        ("input 'ids' has typed contents", "raw_input_contents too"),
        SEQ,
    ),
    Case(
        "too few typed values",
        typed("FP32", [1, 4], fp32_contents=[1, 2, 3]),
        ("input 'x' has 3 elements in fp32_contents", "shape [1, 4] has 4"),
    ),
    Case(
        "too many typed values",
        typed("FP32", [1, 4], fp32_contents=[1] * 5),
        ("5 elements", "has 4"),
    ),
    Case(
        "typed values in the wrong field",
        typed("FP32", [1, 4], int_contents=[1, 2, 3, 4]),
        ("input 'x' is FP32", "contents are in int_contents", "use fp32_contents"),
    ),
    Case(
        "typed values in two fields",
        typed("FP32", [1, 4], fp32_contents=[1, 2, 3, 4], bool_contents=[True]),
        ("contents are in bool_contents", "use fp32_contents"),
    ),
    *[
        Case(
            f"{value} for {datatype}",
            typed(datatype, [1, 2], **{field: [0, value]}),
            ("input 'x'", f"{value} is outside the range of {datatype}", limits),
            one(datatype),
        )
        for datatype, field, value, limits in (
            ("INT8", "int_contents", 300, "(-128 to 127)"),
            ("INT8", "int_contents", -129, "(-128 to 127)"),
            ("INT16", "int_contents", 32768, "(-32768 to 32767)"),
            ("UINT8", "uint_contents", 256, "(0 to 255)"),
            ("UINT16", "uint_contents", 65536, "(0 to 65535)"),
        )
    ],
    *[
        Case(
            f"{datatype} typed",
            typed(datatype, [1, 2], fp32_contents=[1, 2]),
            (f"input 'x' is {datatype}", "fp32_contents", "use raw_input_contents"),
            one(datatype),
        )
        for datatype in ("FP16", "BF16")
    ],
    *[
        Case(
            f"{datatype} without contents",
            typed(datatype, [1, 2]),
            (f"input 'x' is {datatype}", "no typed contents", "use raw_input_contents"),
            one(datatype),
        )
        for datatype in ("FP16", "BF16")
    ],
    *[
        Case(
            f"a BOOL byte of {value}",
            raw("BOOL", [1, 2], bytes([1, value])),
            ("input 'x'", "no BOOL", "only 0 and 1"),
            one("BOOL"),
        )
        for value in (2, 255)
    ],
    Case(
        "one BYTES element of two",
        raw("BYTES", [1, 2], b"\1\0\0\0a"),
        ("input 'x': expected 2 elements for shape [1, 2], found 1",),
        one("BYTES"),
    ),
    Case(
        "three BYTES elements for two",
        raw("BYTES", [1, 2], b"\1\0\0\0a" * 3),
        ("expected 2 elements for shape [1, 2], found more than 2",),
        one("BYTES"),
    ),
    Case(
        "a BYTES element longer than what is left",
        raw("BYTES", [1, 2], b"\xff\xff\xff\xffab"),
        (f"element 0 says it has {2**32 - 1} bytes", "2 are left", "expected 2"),
        one("BYTES"),
    ),
    Case(
        "stray bytes behind BYTES elements",
        raw("BYTES", [1, 2], b"\1\0\0\0a\0\0\0\0\1\2\3"),
        ("3 stray bytes after 2 elements", "expected 2 elements"),
        one("BYTES"),
    ),
    Case(
        "a huge number of BYTES elements",
        raw("BYTES", [1, 2**62], b""),
        (f"expected {2**62} elements", "found 0"),
        one("BYTES", "N", "D"),
    ),
    Case(
        "typed BYTES of another count",
        typed("BYTES", [1, 2], bytes_contents=[b"a"]),
        ("1 elements in bytes_contents", "has 2"),
        one("BYTES"),
    ),
]

PARAMETERS = [
    Case(
        "10,000 parameters",
        probe(parameters={f"p{i}": parameter(i) for i in range(10_000)}),
        ("10000 request parameters", "at most 256"),
    ),
    Case("an id of 1 MB", probe(id="i" * 1_000_000), ("1000000", "at most 65536")),
    *[
        Case(
            f"{name} = {value!r}",
            with_parameter(name, value),
            (f"parameter {name} must be an integer", f"got {kind}"),
        )
        for name in ("timeout", "priority")
        for value, kind in (
            ("300000", "string"),
            (True, "bool"),
            (1.5, "double"),
            (None, "no value"),
        )
    ],
    *[
        Case(
            f"{name} = -1",
            with_parameter(name, -1),
            (f"parameter {name} must not be negative", "got -1"),
        )
        for name in ("timeout", "priority")
    ],
    *[
        Case(
            f"priority = {value}",
            with_parameter("priority", value),
            (f"priority {value} is above {2**32 - 1}",),
        )
        for value in (2**32, 2**63 - 1, 2**64 - 1)
    ],
    *[
        Case(
            f"sequence_id = {value!r}",
            with_parameter("sequence_id", value),
            ("parameter sequence_id must be an integer or a string", f"got {kind}"),
        )
        for value, kind in ((True, "bool"), (0.5, "double"), (None, "no value"))
    ],
    *[
        Case(
            f"{name} = {value!r}",
            with_parameter(name, value),
            (f"parameter {name} must be a bool", f"got {kind}"),
        )
        for name in (
            "sequence_start",
            "sequence_end",
            "triton_enable_empty_final_response",
        )
        for value, kind in ((1, "int64"), ("true", "string"), (None, "no value"))
    ],
    *[
        Case(
            f"{name} = {value!r}",
            with_parameter(name, value),
            (f"parameter {name}", "not built"),
            error=Unsupported,
        )
        for name, value in (
            ("sequence_id", 7),
            ("sequence_id", 2**64 - 1),
            ("sequence_id", "a"),
            ("sequence_start", True),
            ("sequence_end", True),
        )
    ],
    Case(
        "a reserved name",
        with_parameter("triton_x", "1"),
        ("parameter 'triton_x'", "reserved"),
    ),
    *[
        Case(
            f"{key} without a region on an {kind}",
            place(key, 0),
            (f"tensor {name}", f"{key} is given without shared_memory_region"),
        )
        for kind, place, name in (
            ("input", on_input, "'x'"),
            ("output", on_output, "'y'"),
        )
        for key in ("shared_memory_offset", "shared_memory_byte_size")
    ],
    *[
        Case(
            f"a shared memory region on an {kind}",
            place("shared_memory_region", "r"),
            (f"tensor {name}", "shared memory is not built"),
            error=Unsupported,
        )
        for kind, place, name in (
            ("input", on_input, "'x'"),
            ("output", on_output, "'y'"),
        )
    ],
    Case(
        "classification",
        on_output("classification", 3),
        ("classification", "not built"),
        error=Unsupported,
    ),
]

ALL = [*NAMES, *SHAPES, *CONTENTS, *PARAMETERS]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_refusal_names_what_was_wrong_and_what_was_expected(case: Case) -> None:
    """A malformed request has its one kind of error, whose short text tells all."""
    with pytest.raises(BatcherError) as caught:
        checked(case.message, case.signature)

    text = str(caught.value)
    assert type(caught.value) is case.error
    assert [piece for piece in case.says if piece not in text] == [], text
    assert text.isprintable()
    assert len(text) < 1024


@pytest.mark.parametrize(
    "payload",
    [
        b"\x0a\x05ab",
        b"\xff" * 20,
        b"\x1a\x02\xff\xfe",
        b"\x0a\x01\x80",
        b"\x00",
        probe().SerializeToString()[:-1],
    ],
    ids=[
        "a field cut off",
        "no varint",
        "an id that is no UTF-8",
        "a name that is no UTF-8",
        "field number 0",
        "contents cut off",
    ],
)
def test_what_is_no_message_is_an_invalid_request(payload: bytes) -> None:
    """Bytes that protobuf cannot parse are the caller's fault, not an internal one."""
    with pytest.raises(InvalidRequest, match="the message is no ModelInferRequest"):
        parse(payload)
