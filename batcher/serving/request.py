"""One request of a caller, from the message to the answer."""

from __future__ import annotations

from typing import Any

from batcher.rpc.header import InferPlan
from batcher.rpc.transport import Reply
from batcher.scheduling import Request


class InferRequest(Request):
    """A scheduler's request with what it takes to run and to answer it.

    Attributes:
        plan: what its header determines.
        payload, base: the message, and where its contents begin within.
        id_field: the encoded id field, sent back as it came (empty for none).
        reply, call: where the answer goes; None once it went, or nobody wants it.
        chunks: of a part of a split request, its rows of every output, once run.
    """

    __slots__ = (
        "base",
        "call",
        "chunks",
        "id_field",
        "payload",
        "plan",
        "reply",
    )

    def __init__(
        self,
        plan: InferPlan,
        payload: bytes,
        base: int,
        id_field: bytes,
        reply: Reply | None,
        call: Any,
        deadline_ns: int,
        expires_ns: int,
    ) -> None:
        # The fields of Request, set here to spare a call on the hot path.
        self.group = plan.group
        self.rows = plan.rows
        self.deadline_ns = deadline_ns
        self.expires_ns = expires_ns
        self.arrival_ns = 0
        self.state = 0
        self.parent = None
        self.parts = None
        self.first_row = 0
        self.plan = plan
        self.payload = payload
        self.base = base
        self.id_field = id_field
        self.reply = reply
        self.call = call
        self.chunks: list[tuple[Any, tuple[int, ...]]] | None = None
