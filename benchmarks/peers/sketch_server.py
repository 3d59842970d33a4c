"""Floor: the least that a batching server on the native transport can be.

    python sketch_server.py 127.0.0.1:PORT

Protobuf is parsed and built, and up to 32 rows are batched and dispatched as soon as
the slot is free, one batch ahead of it. No validation, copies, statistics, deadlines,
cancellation or errors: what our daemon costs above this is what its features cost.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any, Final

import uvloop
from fake_model import FakeModel
from inference import grpc_service_pb2 as pb
from pygrpc_native import EVENT_CALL, NativeGrpcFront

_MAX_BATCH: Final = 32
_AHEAD: Final = 2
"""Batches handed to the slot at a time: one running, one ready."""

Batch = list[tuple[Any, pb.ModelInferRequest]]


class Sketch:
    """A receiver thread, a slot thread, and a loop woken once for all that is new."""

    def __init__(self, address: str) -> None:
        method = "/inference.GRPCInferenceService/ModelInfer"
        self._front = NativeGrpcFront(address, [(method, False)], io_threads=1)
        self._received: deque[list[Any]] = deque()
        self._finished: deque[Batch] = deque()
        self._waiting: deque[tuple[Any, pb.ModelInferRequest]] = deque()
        self._ready: SimpleQueue[Batch] = SimpleQueue()
        self._in_slot = 0
        self._woken = False

    async def serve(self) -> None:
        """Serves until it is killed."""
        self._loop = asyncio.get_running_loop()
        for work in (self._receive, self._run_slot):
            threading.Thread(target=work, daemon=True).start()
        await asyncio.Event().wait()

    def _receive(self) -> None:
        self._front.start()
        while (events := self._front.recv_batch(256)) is not None:
            self._received.append(events)
            self._wake()

    def _run_slot(self) -> None:
        model = FakeModel()
        while True:
            batch = self._ready.get()
            model.run(len(batch))
            self._finished.append(batch)
            self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        self._woken = False
        parse = pb.ModelInferRequest.FromString
        while self._received:
            for kind, call, _method, payload, _client in self._received.popleft():
                if kind == EVENT_CALL:
                    self._waiting.append((call, parse(payload)))
        self._feed()
        while self._finished:
            batch = self._finished.popleft()
            self._in_slot -= 1
            self._feed()
            for call, request in batch:
                self._front.respond(call, _reply(request).SerializeToString())

    def _feed(self) -> None:
        waiting = self._waiting
        while self._in_slot < _AHEAD and (
            len(waiting) >= _MAX_BATCH or (waiting and not self._in_slot)
        ):
            rows = min(_MAX_BATCH, len(waiting))
            self._ready.put([waiting.popleft() for _ in range(rows)])
            self._in_slot += 1


def _reply(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    reply = pb.ModelInferResponse(
        model_name=request.model_name, model_version="1", id=request.id
    )
    output = reply.outputs.add(name="OUTPUT0", datatype="FP32")
    output.shape.extend(request.inputs[0].shape)
    reply.raw_output_contents.append(request.raw_input_contents[0])
    return reply


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)
    uvloop.run(Sketch(sys.argv[1]).serve())
