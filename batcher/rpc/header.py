"""The header cache: a request whose header was seen before is not parsed again.

Everything of a ModelInferRequest before its raw contents is its header. Callers send
the same header over and over, so what was parsed and checked once (`InferPlan`) is
found again by the header's bytes, and the contents are used where they lie in the
message. The id, which differs from request to request, is left out of the key.

A hit is exact: header, tags and lengths are equal byte for byte to those of a request
that went through protobuf and `batcher.rpc.request.validate`, so the message means the
same. Requests whose contents must be looked at (BYTES, BOOL, typed contents) are never
cached. The cache is bounded in entries and in bytes, whatever callers send.
"""

from __future__ import annotations

from typing import Any, Final

from batcher.rpc import messages, wire
from batcher.rpc.request import ParsedRequest, RequestParameters, Shape
from batcher.rpc.signature import ModelSignature

MAX_ENTRIES: Final = 1024
MAX_HEADER_BYTES: Final = 4096
_MAX_CANDIDATES: Final = 4


class InferPlan:
    """What a request's header determines, made once and shared by equal requests.

    Attributes:
        model: who serves it (the serving layer's object).
        signature: the model's signature.
        rows: rows it brings.
        shapes: per model input, the whole shape as sent.
        outputs: indices of the outputs to answer.
        parameters: the request parameters.
        spans: per model input, (offset, size) in bytes of its contents, counted from
            the request's `base` within its payload.
        objects: see `ParsedRequest.objects`.
        group: the scheduler's group (set by the serving layer).
        fit: how the rows go into a batch (set by the serving layer).
        timeout_ns: how long it may wait in the queue, 0 for ever (set likewise).
        meta: the answer's encoded output descriptions, by output shapes (bounded).
    """

    __slots__ = (
        "fit",
        "group",
        "meta",
        "model",
        "objects",
        "outputs",
        "parameters",
        "rows",
        "shapes",
        "signature",
        "spans",
        "timeout_ns",
    )

    def __init__(
        self,
        model: Any,
        signature: ModelSignature,
        parsed: ParsedRequest,
        spans: tuple[tuple[int, int], ...],
    ) -> None:
        self.model = model
        self.signature = signature
        self.rows: int = parsed.rows
        self.shapes: tuple[Shape, ...] = parsed.shapes
        self.outputs: tuple[int, ...] = parsed.outputs
        self.parameters: RequestParameters = parsed.parameters
        self.spans = spans
        self.objects = parsed.objects
        self.group: Any = None
        self.fit: Any = None
        self.timeout_ns = 0
        self.meta: dict[Any, Any] = {}


class Header:
    """Where things lie in one message whose contents are raw and in order.

    Attributes:
        id_start, id_end: of the whole id field (equal when there is none).
        base: where the contents of the first raw entry begin.
        spans: see `InferPlan.spans`.
        checks: (offset from base, bytes) of the tags and lengths between contents.
    """

    __slots__ = ("base", "checks", "id_end", "id_start", "spans")

    def __init__(
        self,
        id_start: int,
        id_end: int,
        base: int,
        spans: tuple[tuple[int, int], ...],
        checks: tuple[tuple[int, bytes], ...],
    ) -> None:
        self.id_start = id_start
        self.id_end = id_end
        self.base = base
        self.spans = spans
        self.checks = checks


def locate(
    payload: bytes, request: messages.ModelInferRequest, parsed: ParsedRequest
) -> Header | None:
    """Finds the contents in a parsed message, or None when it is written otherwise.

    None for typed contents, for fields in another order than their numbers', for
    unknown fields at the end: all legal, and then handled without a header.
    """
    if not parsed.raw_order or len(payload) < 3:
        return None
    sizes = [len(parsed.data[i]) for i in parsed.raw_order]
    prefixes = [wire.prefix(wire.RAW_INPUT, size) for size in sizes]
    at = first = len(payload) - sum(map(len, prefixes)) - sum(sizes)
    try:
        id_start, id_end = wire.id_span(payload)
    except IndexError:
        return None
    if payload[0] != wire.MODEL_NAME or not id_end <= first:
        return None
    base = first + len(prefixes[0])
    spans: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    checks = []
    for index, tag, size in zip(parsed.raw_order, prefixes, sizes, strict=True):
        if payload[at : at + len(tag)] != tag:
            return None
        if at != first:
            checks.append((at - base, tag))
        at += len(tag)
        spans[index] = (at - base, size)
        at += size
    if not _means_the_same(payload, request, id_start, id_end, first):
        return None
    return Header(id_start, id_end, base, tuple(spans), tuple(checks))


def _means_the_same(
    payload: bytes,
    request: messages.ModelInferRequest,
    id_start: int,
    id_end: int,
    first: int,
) -> bool:
    """Whether name, id and the rest are really separate fields of the message.

    A protobuf message is the merge of its fields, wherever it is cut between two.
    """
    try:
        name = messages.ModelInferRequest.FromString(payload[:id_start])
        rest = messages.ModelInferRequest.FromString(
            payload[:id_start] + payload[id_end:first]
        )
    except Exception:
        return False
    return (
        name.model_name == request.model_name == rest.model_name
        and name.model_version == request.model_version == rest.model_version
        and not rest.id
        and request.id.encode() == payload[id_start + 2 : id_end]
        and not rest.raw_input_contents
        and len(rest.inputs) == len(request.inputs)
    )


class HeaderCache:
    """Plans by header bytes; not thread-safe, and meant for the event loop only."""

    def __init__(self) -> None:
        # With each plan the checks of its header, and the length from its base on.
        self._plans: dict[
            bytes, tuple[InferPlan, tuple[tuple[int, bytes], ...], int]
        ] = {}
        # The length of the message behind the id says where its contents begin.
        self._lengths: dict[int, tuple[int, ...]] = {}

    def find(self, payload: bytes) -> tuple[InferPlan, int, int, int] | None:
        """The plan of a message with a known header, and where its parts lie.

        Returns:
            (plan, id_start, id_end, base), see `Header`; None for an unknown header.
        """
        try:
            # The same as wire.id_span, without the call.
            id_start = payload[1] + 2
            if payload[id_start] == 0x12:
                id_start += payload[id_start + 1] + 2
            id_end = id_start
            if payload[id_start] == 0x1A:
                size = payload[id_start + 1]
                if size > 0x7F:
                    return None
                id_end += size + 2
        except IndexError:
            return None
        for head in self._lengths.get(len(payload) - id_end, ()):
            base = id_end + head
            key = payload[:base]
            if id_end > id_start:
                key = payload[:id_start] + payload[id_end:base]
            found = self._plans.get(key)
            if found is None:
                continue
            plan, checks, length = found
            if len(payload) - base != length:
                continue  # cut off, or longer: the candidate is of another header
            for offset, tag in checks:
                at = base + offset
                if payload[at : at + len(tag)] != tag:
                    break
            else:
                if id_end > id_start and not _utf8(payload[id_start + 2 : id_end]):
                    return None
                return plan, id_start, id_end, base
        return None

    def learn(self, payload: bytes, header: Header, plan: InferPlan) -> None:
        """Remembers the plan of a message for messages with the same header."""
        if header.base > MAX_HEADER_BYTES or plan.objects is not None:
            return
        if any(t.datatype == "BOOL" for t in plan.signature.inputs):
            return  # its bytes must be looked at, in every request
        if len(self._plans) >= MAX_ENTRIES:
            self.clear()
        length = len(payload) - header.id_end
        heads = self._lengths.get(length, ())
        head = header.base - header.id_end
        if head not in heads:
            self._lengths[length] = (head, *heads[: _MAX_CANDIDATES - 1])
        key = payload[: header.id_start] + payload[header.id_end : header.base]
        self._plans[key] = (plan, header.checks, len(payload) - header.base)

    def clear(self) -> None:
        """Forgets everything (a model was loaded, unloaded or changed)."""
        self._plans.clear()
        self._lengths.clear()


def _utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
