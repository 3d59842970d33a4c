"""A model with its scheduler, slots and books, and a caller's desk beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from batcher.config import BatchingConfig, ModelConfig, SlotsConfig
from batcher.rpc.header import locate
from batcher.rpc.request import parse, validate
from batcher.rpc.signature import ModelSignature
from batcher.rpc.status import StatusTable
from batcher.rpc.transport import Trailing
from batcher.serving.budget import Budget
from batcher.serving.loader import LoadedModel
from batcher.serving.model import Model
from batcher.serving.shapes import ModelShapes
from batcher.serving.warmup import WarmUp
from engines import Engine, FakeEngine, FakeOptions, Slot, TensorSpec

from .parts import Arrays, decoded, payload_of, signature_of

X = TensorSpec("x", "INT64", ("N", 2))
Y = TensorSpec("y", "INT64", ("N", 2))


def echo(**options: Any) -> FakeEngine:
    """A fake engine: x INT64 [N, 2] -> y."""
    return FakeEngine(FakeOptions(inputs=(X,), outputs=(Y,), **options))


def made_model(
    engine: Engine | None = None,
    *,
    name: str = "m",
    version: str = "1",
    rungs: Sequence[int] = (1, 2, 4, 8),
    slots: int = 1,
    budget: Budget | None = None,
    touch: Any = lambda model: None,
    touch_here: Any = lambda model: None,
    **batching: Any,
) -> Model:
    """A model of this engine (an echo by default) that nobody drives."""
    engine = engine or echo()
    shapes = ModelShapes(engine.inputs, engine.outputs, True, {})
    base = signature_of(engine, name=name)
    signature = ModelSignature(
        name=name,
        version=version,
        platform=base.platform,
        inputs=base.inputs,
        outputs=base.outputs,
        batched=True,
        max_batch=rungs[-1],
        max_rows=8 * rungs[-1],
    )
    config = ModelConfig(
        batching=BatchingConfig(**batching), slots=SlotsConfig(count=slots)
    )
    loaded = LoadedModel(
        signature,
        config,
        (engine,),
        tuple(Slot(engine, f"slot {name} #{i}") for i in range(slots)),
        shapes,
        tuple(rungs),
        {},
        (),
        WarmUp(),
    )
    return Model(
        loaded,
        budget or Budget(1 << 30),
        StatusTable(),
        1 << 30,
        touch,
        touch_here,
    )


class Desk:
    """Submits requests to a model, turns it by hand, and keeps the answers.

    Attributes:
        answers: by call, the outputs of answered requests.
        failures: by call, (code, text, trailing metadata) of refused ones.
        order: the calls, in the order they were answered.
    """

    def __init__(self, engine: Engine | None = None, **options: Any) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, tuple[int, str, Trailing]] = {}
        self.order: list[str] = []
        self.rung = threading.Semaphore(0)
        self.model = made_model(engine, touch=self._touch, **options)

    def _touch(self, model: Model) -> None:
        self.rung.release()

    def respond(self, call: str, payload: bytes, trailing: Trailing = ()) -> None:
        self.answers[call] = decoded(payload)
        self.order.append(call)

    def fail(self, call: str, code: int, text: str, trailing: Trailing = ()) -> None:
        self.failures[call] = (code, text, trailing)
        self.order.append(call)

    def submit(
        self, call: str, inputs: Arrays, *, deadline_ns: int | None = None, **more: Any
    ) -> Any:
        """Queues a request, as the service does with one whose header is new."""
        payload = payload_of(self.model.signature, inputs, id_=call, **more)
        message = parse(payload)
        parsed = validate(message, self.model.signature)
        header = locate(payload, message, parsed)
        assert header is not None
        plan = self.model.plan(parsed, header.spans)
        return self.model.submit(
            plan, payload, header.base, b"", self, call, deadline_ns
        )

    def turn(self) -> None:
        """One turn of the model, now."""
        self.model.turn(time.monotonic_ns())

    def wait(self) -> None:
        """Waits until a slot has finished something, and takes a turn."""
        assert self.rung.acquire(timeout=30)
        self.turn()

    def settle(self) -> None:
        """Turns until nothing waits and nothing runs."""
        self.turn()
        while not self.model.idle:
            self.wait()

    def close(self) -> None:
        """Ends the model's slots."""
        self.model.close()
