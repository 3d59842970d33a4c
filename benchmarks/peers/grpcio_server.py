"""Peer: the batcher that one writes first, in a hundred lines of grpc.aio.

    python grpcio_server.py 127.0.0.1:PORT [SWITCH_INTERVAL_MS]

A coroutine per request awaits a future; a batch goes when it is full, or 2 ms after its
first request. The tuned peer is this same file under SCHED_BATCH, without gRPC's
event-engine listener and with a short interpreter switch interval (`servers.py`).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from queue import SimpleQueue
from typing import Final

import grpc
import uvloop
from fake_model import FakeModel
from inference import grpc_service_pb2 as pb

_MAX_BATCH: Final = 32
_MAX_DELAY_S: Final = 0.002

Waiting = tuple[asyncio.Future[bytes], bytes, float]


class Batcher:
    """One queue, one timer, one engine thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: list[Waiting] = []
        self._batches: SimpleQueue[list[Waiting]] = SimpleQueue()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, row: bytes) -> asyncio.Future[bytes]:
        """Queues one row; the future is its result."""
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._queue.append((future, row, self._loop.time()))
        self._dispatch()
        return future

    def _dispatch(self) -> None:
        if self._busy or not self._queue:
            return
        age = self._loop.time() - self._queue[0][2]
        if len(self._queue) >= _MAX_BATCH or age >= _MAX_DELAY_S - 5e-5:
            batch = self._queue[:_MAX_BATCH]
            del self._queue[:_MAX_BATCH]
            self._busy = True
            self._batches.put(batch)
        elif self._timer is None:
            self._timer = self._loop.call_later(_MAX_DELAY_S - age, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._dispatch()

    def _run(self) -> None:
        model = FakeModel()
        while True:
            batch = self._batches.get()
            model.run(len(batch))
            self._loop.call_soon_threadsafe(self._finish, batch)

    def _finish(self, batch: list[Waiting]) -> None:
        self._busy = False
        self._dispatch()
        for future, row, _ in batch:
            if not future.done():
                future.set_result(row)


async def serve(address: str) -> None:
    """Serves until it is killed."""
    batcher = Batcher()

    async def infer(
        request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        row = await batcher.submit(request.raw_input_contents[0])
        reply = pb.ModelInferResponse(
            model_name=request.model_name, model_version="1", id=request.id
        )
        output = reply.outputs.add(name="OUTPUT0", datatype="FP32")
        output.shape.extend(request.inputs[0].shape)
        reply.raw_output_contents.append(row)
        return reply

    handler = grpc.unary_unary_rpc_method_handler(
        infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelInfer": handler}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.setswitchinterval(float(sys.argv[2]) / 1e3)
    uvloop.run(serve(sys.argv[1]))
