"""The header cache: a hit means exactly what a full parse of that message means."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.errors import BatcherError
from batcher.rpc import messages, wire
from batcher.rpc.header import MAX_ENTRIES, MAX_HEADER_BYTES, HeaderCache, InferPlan
from batcher.rpc.header import locate as locate_header
from batcher.rpc.request import ParsedRequest, parse, validate
from batcher.rpc.signature import ModelSignature

from .builders import Input, model, parameter, request, tensor

MODELS = {
    "one": model(tensor("x", "INT8", "N", "D"), name="one"),
    "two": model(
        tensor("ids", "INT64", "N", "S"),
        tensor("m", "INT8", "N", "S"),
        outputs=(tensor("y", "FP32", "N"), tensor("z", "FP32", "N")),
        name="two",
    ),
    "three": model(*[tensor(n, "INT8", "N", None) for n in "abc"], name="three"),
    "bool": model(tensor("x", "INT8", "N", 1), tensor("b", "BOOL", "N", 1)),
    "bytes": model(tensor("x", "INT8", "N", 1), tensor("s", "BYTES", "N", 1)),
}


class Front:
    """Feeds messages to a cache as the service does, and checks every hit."""

    def __init__(self) -> None:
        self.cache = HeaderCache()

    def feed(self, payload: bytes) -> bool:
        """Whether the message's header was known; its meaning is checked if so."""
        found = self.cache.find(payload)
        if found is None:
            self._learn(payload)
            return False
        message, parsed = full(payload)
        plan, id_start, id_end, base = found
        id_field = messages.ModelInferResponse.FromString(payload[id_start:id_end])
        assert plan.model == (message.model_name, message.model_version)
        assert facts(plan) == facts(parsed)
        assert [
            payload[base + at : base + at + n] for at, n in plan.spans
        ] == parsed.data
        assert id_field == messages.ModelInferResponse(id=message.id)
        return True

    def _learn(self, payload: bytes) -> None:
        try:
            message, parsed = full(payload)
        except (BatcherError, KeyError):
            return
        header = locate_header(payload, message, parsed)
        if header is not None:
            key = (message.model_name, message.model_version)
            signature = MODELS[message.model_name]
            plan = InferPlan(key, signature, parsed, header.spans)
            self.cache.learn(payload, header, plan)


def full(payload: bytes) -> tuple[messages.ModelInferRequest, ParsedRequest]:
    """The message and what validation makes of it, without any cache."""
    message = parse(payload)
    return message, validate(message, MODELS[message.model_name])


def facts(source: InferPlan | ParsedRequest) -> tuple[object, ...]:
    """What a request's header determines."""
    return (
        source.rows,
        source.shapes,
        source.outputs,
        source.parameters,
        source.objects,
    )


def inputs_of(
    signature: ModelSignature, rows: int, width: int, fill: int
) -> list[Input]:
    """Raw inputs for a model whose free axes are `width` long."""
    found: list[Input] = []
    for spec in signature.inputs:
        shape = [rows, 1 if isinstance(spec.axes[1], int) else width]
        if spec.datatype == "BYTES":
            content = (b"\1\0\0\0" + bytes([fill])) * rows
        elif spec.datatype == "BOOL":
            content = bytes([fill % 2]) * rows
        else:
            content = bytes([fill]) * (rows * shape[1] * spec.type.itemsize)
        found.append((spec.name, spec.datatype, shape, content))
    return found


def message_to(
    name: str, *, rows: int = 1, width: int = 2, fill: int = 7, **fields: Any
) -> messages.ModelInferRequest:
    """A good raw request to one of `MODELS`."""
    message = request(*inputs_of(MODELS[name], rows, width, fill), **fields)
    message.model_name = name
    return message


def encoded(name: str, **fields: Any) -> bytes:
    """The bytes of a good raw request to one of `MODELS`."""
    return message_to(name, **fields).SerializeToString()


# -- what hits ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_same_header_hits_whatever_id_and_contents(name: str) -> None:
    """After one request its likes are known: other contents, other or no id."""
    front = Front()

    first = front.feed(encoded(name, id="first", fill=1))
    likes = [
        front.feed(encoded(name, id=id_, fill=fill))
        for fill, id_ in enumerate(["", "a", "é" * 63, "i" * 127, "\x1a\x02ab", "\0"])
    ]

    assert first is False
    assert likes == [True] * 6


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 2},
        {"width": 3},
        {"model_version": "1"},
        {"parameters": {"timeout": parameter(5)}},
        {"outputs": [{"name": "z"}]},
    ],
    ids=str,
)
def test_another_header_does_not_hit(other: dict[str, Any]) -> None:
    """Rows, shape, version, parameters and outputs are part of what is compared."""
    front = Front()
    front.feed(encoded("two"))

    first = front.feed(encoded("two", **other))
    again = front.feed(encoded("two", **other))

    assert (first, again) == (False, True)


def test_inputs_in_any_order_hit_with_their_own_spans() -> None:
    """Each order of the inputs is known by itself, and finds its contents."""
    front = Front()
    orders = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        given_inputs = inputs_of(MODELS["three"], 2, 3, 9)
        contents = [bytes(range(i, i + 6)) for i in range(3)]
        message = request(*[(*given_inputs[i][:3], contents[i]) for i in order])
        message.model_name = "three"
        orders.append(message.SerializeToString())

    seen = [front.feed(payload) for payload in orders * 2]

    assert seen == [False] * 3 + [True] * 3


def test_empty_contents_hit() -> None:
    """Tensors without elements are found too, between and behind others."""
    front = Front()
    payload = encoded("three", width=0)

    assert [front.feed(payload), front.feed(payload)] == [False, True]


def test_forgotten_headers_do_not_hit() -> None:
    """After `clear` every header is unknown again."""
    front = Front()
    front.feed(encoded("one"))

    front.cache.clear()

    assert front.feed(encoded("one")) is False
    assert front.feed(encoded("one")) is True


# -- what never hits ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bool", "bytes"])
def test_contents_that_must_be_looked_at_are_never_cached(name: str) -> None:
    """A model with a BOOL or BYTES input has every request validated in full."""
    front = Front()

    assert [front.feed(encoded(name)) for _ in range(3)] == [False] * 3


def test_typed_contents_are_never_cached() -> None:
    """Typed contents are part of no header."""
    message = request(("x", "INT8", [1, 2], None))
    message.model_name = "one"
    message.inputs[0].contents.int_contents.extend([1, 2])
    front = Front()

    assert [front.feed(message.SerializeToString()) for _ in range(3)] == [False] * 3


def test_an_id_that_is_no_utf8_does_not_hit() -> None:
    """An id that protobuf refuses is refused behind a known header as well."""
    front = Front()
    front.feed(encoded("one", id="ab"))
    payload = encoded("one", id="ab").replace(b"\x1a\x02ab", b"\x1a\x02\xff\xfe")

    assert front.cache.find(payload) is None


@pytest.mark.parametrize(
    "other",
    [b"\x7a\x02mm", b"\x3a\x01m\x78", b"\x3a\x00\x3a\x00", b"\x3b\x3c\x78\x05"],
    ids=["an unknown field", "a shorter one", "two empty ones", "a group"],
)
def test_what_stands_between_contents_is_compared(other: bytes) -> None:
    """Behind a known header, in the same length, second contents must follow."""
    front = Front()
    two = MODELS["two"]
    message = request(*inputs_of(two, 1, 2, 7), id="i")
    message.model_name = "two"
    payload = message.SerializeToString()
    front.feed(payload)
    assert payload.endswith(b"\x3a\x02\x07\x07")

    changed = payload[: -len(other)] + other

    assert front.feed(payload) is True
    assert front.cache.find(changed) is None


@pytest.mark.parametrize("second", [b"ab", b"xy"])
def test_of_two_ids_the_last_counts(second: bytes) -> None:
    """A message with two id fields is never taken for one with the first of them."""
    front = Front()
    plain = encoded("one", id="ab")
    field = b"\x1a\x02"
    front.feed(plain.replace(field + b"ab", field + b"ab" + field + second))

    front.feed(plain.replace(field + b"ab", field + b"cd" + field + second))


@pytest.mark.parametrize("length", [128, 300, 20_000])
def test_a_long_id_is_served_without_the_cache(length: int) -> None:
    """An id whose length takes two bytes is parsed in full, every time."""
    front = Front()
    payload = encoded("one", id="i" * length)

    assert [front.feed(payload), front.feed(payload)] == [False, False]


def test_a_long_header_is_not_learned() -> None:
    """A header beyond the limit of bytes is parsed every time."""
    front = Front()
    value = parameter("v" * MAX_HEADER_BYTES)
    payload = encoded("one", parameters={"p": value})

    assert [front.feed(payload), front.feed(payload)] == [False, False]


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 10])
def test_a_message_cut_off_does_not_hit(cut: int) -> None:
    """What is shorter than any request is unknown, and no index error."""
    front = Front()
    payload = encoded("two")
    front.feed(payload)

    assert front.cache.find(payload[:cut]) is None
    assert front.cache.find(payload[: len(payload) - cut - 1]) is None


def test_the_cache_is_bounded() -> None:
    """However many headers callers make up, a bounded number of plans is kept."""
    front = Front()
    for i in range(MAX_ENTRIES + 100):
        front.feed(encoded("one", parameters={f"p{i}": parameter(i)}))

    gc.collect()
    plans = sum(isinstance(o, InferPlan) for o in gc.get_objects())
    assert plans <= MAX_ENTRIES


def test_many_headers_of_one_length_are_all_found_or_relearned() -> None:
    """Headers of different lengths in messages of one length do not hide each other."""
    front = Front()
    payloads = [
        encoded("one", width=100 - n, parameters={"p" * n: parameter("")})
        for n in range(1, 20)
    ]
    lengths = {len(p) for p in payloads}
    for payload in payloads:
        front.feed(payload)

    for payload in payloads:
        front.feed(payload)
        again = front.feed(payload)

        assert again is True
    assert len(lengths) < len(payloads)


# -- fuzzing --------------------------------------------------------------------------

Chunk = tuple[int, bytes]
"""A whole field: where it goes in the order of serializers, and its bytes."""

ids = st.one_of(
    st.just(b""),
    st.text(max_size=20).map(lambda s: s.encode("utf-8", "replace")),
    st.binary(min_size=1, max_size=4),
    st.integers(120, 135).map(lambda n: b"i" * n),
)

UNKNOWN = st.sampled_from(
    [
        b"\x78\x05",  # field 15, a varint
        b"\x7a\x02hi",  # field 15, bytes
        b"\x7d\1\2\3\4",  # field 15, 32 bits
        b"\x79" + bytes(8),  # field 15, 64 bits
        b"\x7b\x08\x01\x7c",  # field 15, a group
        b"\x1b\x1c",  # field 3 as an empty group, where the id would be
        b"\x18\x05",  # field 3 as a varint
    ]
)


def padded_varint(value: int, extra: int) -> bytes:
    """A varint with `extra` needless bytes: legal, and what no serializer writes."""
    plain = bytearray(wire.varint(value))
    if extra:
        plain[-1] |= 0x80
        plain += b"\x80" * (extra - 1) + b"\x00"
    return bytes(plain)


def chunks_of(message: messages.ModelInferRequest) -> list[Chunk]:
    """The top-level fields of a message, each by itself."""
    found: list[Chunk] = []
    for name in ("model_name", "model_version", "id"):
        copy = messages.ModelInferRequest(**{name: getattr(message, name)})
        found.append((1, copy.SerializeToString()))
    for key, value in message.parameters.items():
        copy = messages.ModelInferRequest(parameters={key: value})
        found.append((4, copy.SerializeToString()))
    for number, field in ((5, "inputs"), (6, "outputs"), (7, "raw_input_contents")):
        for item in getattr(message, field):
            copy = messages.ModelInferRequest()
            getattr(copy, field).append(item)
            found.append((number, copy.SerializeToString()))
    return [chunk for chunk in found if chunk[1]]


def id_chunk(id_: bytes, extra: int = 0) -> list[Chunk]:
    """The id field, none for an empty id."""
    return [(3, b"\x1a" + padded_varint(len(id_), extra) + id_)] if id_ else []


@st.composite
def odd_chunks(draw: Callable[..., Any]) -> list[Chunk]:
    """The fields of a request to `MODELS`, perhaps as no serializer writes them."""
    message = message_to(
        draw(st.sampled_from(["one", "two", "three"])),
        rows=draw(st.integers(1, 2)),
        width=draw(st.sampled_from([0, 1, 2, 17])),
        fill=draw(st.sampled_from([0, 1, 0x1A, 0x3A, 0xFF])),
    )
    message.model_version = draw(st.sampled_from(["", "", "1", "v" * 130]))
    for key in draw(st.sets(st.sampled_from(["timeout", "priority", "k"]), max_size=2)):
        message.parameters[key].int64_param = draw(st.integers(0, 3))
    chunks = chunks_of(message)
    extra = draw(st.sampled_from([0, 0, 0, 1]))
    chunks[1:1] = id_chunk(draw(ids), extra)
    if draw(st.booleans()):
        chunks.sort(key=lambda chunk: chunk[0])
    if draw(st.sampled_from([False, False, True])):
        for _ in range(draw(st.integers(1, 2))):
            odd = draw(UNKNOWN | st.sampled_from([c for _, c in chunks]))
            chunks.insert(draw(st.integers(0, len(chunks))), (9, odd))
        if draw(st.booleans()):
            chunks = draw(st.permutations(chunks))
    return chunks


def joined(chunks: Sequence[Chunk]) -> bytes:
    """The message of these fields."""
    return b"".join(chunk for _, chunk in chunks)


odd_messages = odd_chunks().map(joined)


@st.composite
def twins(draw: Callable[..., Any], chunks: Sequence[Chunk]) -> bytes:
    """The same request with another id, somewhere, and other contents."""
    new = id_chunk(draw(ids))
    where = [i for i, (number, _) in enumerate(chunks) if number == 3]
    rest = [chunk for chunk in chunks if chunk[0] != 3]
    at = where[0] if where else draw(st.sampled_from([1, 2, len(rest)]))
    rest[at:at] = new
    fill = draw(st.integers(0, 255))
    return joined(
        [
            (number, field[:-1] + bytes([fill]) if number == 7 else field)
            for number, field in rest
        ]
    )


@st.composite
def mutants(draw: Callable[..., Any], payload: bytes) -> bytes:
    """The message with a few bytes changed, added, taken away or repeated."""
    bytes_ = bytearray(payload)
    at = draw(st.integers(0, len(bytes_)))
    how = draw(st.sampled_from(["set", "insert", "delete", "repeat", "id"]))
    if how == "set" and at < len(bytes_):
        bytes_[at] = draw(st.integers(0, 255))
    elif how == "insert":
        bytes_[at:at] = draw(st.binary(min_size=1, max_size=3))
    elif how == "delete":
        del bytes_[at : at + draw(st.integers(1, 3))]
    elif how == "repeat":
        end = draw(st.integers(at, len(bytes_)))
        bytes_[end:end] = bytes_[at:end]
    else:
        bytes_[at:at] = b"\x1a" + bytes([draw(st.integers(0, 130))])
    return bytes(bytes_)


@st.composite
def conversations(draw: Callable[..., Any]) -> list[bytes]:
    """Messages, their twins, their mutants, and all of them again."""
    bases = draw(st.lists(odd_chunks(), min_size=1, max_size=2))
    payloads = [joined(chunks) for chunks in bases]
    twin = st.sampled_from(bases).flatmap(twins)
    payloads += draw(st.lists(twin, max_size=4))
    mutant = st.sampled_from(payloads).flatmap(mutants)
    payloads += draw(st.lists(mutant, max_size=4))
    return payloads + payloads


@settings(max_examples=250, deadline=None)
@given(payloads=conversations())
def test_every_hit_means_what_the_full_parse_means(payloads: list[bytes]) -> None:
    """No message, however written or mutated, is taken for another than it is."""
    front = Front()
    for payload in payloads:
        front.feed(payload)


@settings(max_examples=40, deadline=None)
@given(payload=odd_messages, more=st.binary(max_size=40))
def test_contents_that_look_like_fields_are_contents(
    payload: bytes, more: bytes
) -> None:
    """A message whose contents hold another message is found where it is."""
    front = Front()
    front.feed(payload)
    inner = payload + more
    message = request(("x", "INT8", [1, len(inner)], inner), id="z")
    message.model_name = "one"
    outer = message.SerializeToString()

    assert [front.feed(outer), front.feed(outer)] == [False, True]
