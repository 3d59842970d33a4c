"""A server to bench, a process of its own: `bench_server.py KIND ADDRESS [JSON]`.

It echoes inputs as outputs. KIND `front` is pygrpc-native's low-level API, `aio` is
grpc.aio without ModelStatistics; both obey a request's parameters:

* `fail`: end with this code (and the call's details as text);
* `sleep_ms`: answer so much later;
* `flip_every`: the answer to every n-th such request is wrong in its last byte.

The options of `front`: `stall_after` requests it stands still for `stall_ms`, once;
`max_concurrent_streams`.
Those of `aio` are gRPC channel arguments. The port is printed when it listens.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
import time
from collections import Counter
from typing import Any

from batcher.rpc.messages import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
)

SERVICE = "inference.GRPCInferenceService"
METHODS = ("ModelInfer", "ModelMetadata", "ModelStatistics")
INPUTS = (("ids", "INT64", (-1, -1)), ("x", "FP32", (-1, 4)), ("text", "BYTES", (-1,)))


class Echo:
    """The model: what is answered to a request."""

    def __init__(self) -> None:
        self.flips = 0
        self.requests = 0

    def parameter(self, request: ModelInferRequest, name: str) -> int:
        found = request.parameters.get(name)
        return found.int64_param if found is not None else 0

    def infer(self, request: ModelInferRequest) -> ModelInferResponse:
        self.requests += 1
        answer = ModelInferResponse(model_name=request.model_name, id=request.id)
        for tensor in request.inputs:
            output = answer.outputs.add(name=tensor.name, datatype=tensor.datatype)
            output.shape.extend(tensor.shape)
        answer.raw_output_contents.extend(request.raw_input_contents)
        every = self.parameter(request, "flip_every")
        if every:
            self.flips += 1
            if self.flips % every == 0:
                raw = answer.raw_output_contents[-1]
                answer.raw_output_contents[-1] = raw[:-1] + bytes([raw[-1] ^ 1])
        return answer

    def metadata(self, request: ModelMetadataRequest) -> ModelMetadataResponse:
        answer = ModelMetadataResponse(name=request.name, versions=["1"])
        for name, datatype, shape in INPUTS:
            answer.inputs.add(name=name, datatype=datatype, shape=shape)
        return answer


def statistics(echo: Echo, batches: Counter[int]) -> ModelStatisticsResponse:
    """Batches are what one wake-up of the front brought; a request waits 1 ms."""
    answer = ModelStatisticsResponse()
    stats = answer.model_stats.add(name="echo", version="1")
    stats.inference_count = echo.requests
    stats.execution_count = batches.total()
    stats.inference_stats.success.count = echo.requests
    stats.inference_stats.queue.count = echo.requests
    stats.inference_stats.queue.ns = echo.requests * 1_000_000
    for size, count in batches.items():
        stats.batch_stats.add(batch_size=size).compute_infer.count = count
    return answer


def serve_front(address: str, options: dict[str, int]) -> None:
    from pygrpc_native import EVENT_CALL, NativeGrpcFront

    front = NativeGrpcFront(
        address,
        [(f"/{SERVICE}/{name}", False) for name in METHODS],
        call_details=True,
        max_concurrent_streams=options.get("max_concurrent_streams", 1024),
    )
    front.start()
    sys.stdout.write(f"{front.bound_port}\n")
    sys.stdout.flush()
    echo = Echo()
    batches: Counter[int] = Counter()
    later: list[tuple[float, int, bytes]] = []
    while True:
        wait_ms = None
        if later:
            wait_ms = max(0, round((later[0][0] - time.monotonic()) * 1000))
        events = front.recv_batch_details(64, wait_ms)
        if events is None:
            return
        inferred = 0
        for kind, call, method, payload, _, details in events:
            if kind != EVENT_CALL:
                continue
            if method == 1:
                request = ModelMetadataRequest.FromString(payload or b"")
                front.respond(call, echo.metadata(request).SerializeToString())
                continue
            if method == 2:
                ModelStatisticsRequest.FromString(payload or b"")
                front.respond(call, statistics(echo, batches).SerializeToString())
                continue
            infer = ModelInferRequest.FromString(payload or b"")
            code = echo.parameter(infer, "fail")
            if infer.model_name != "echo":
                front.fail(call, 5, f"unknown model: '{infer.model_name}' not found")
            elif code:
                front.fail(call, code, f"asked to fail; {details}")
            else:
                inferred += 1
                data = echo.infer(infer).SerializeToString()
                at = time.monotonic() + echo.parameter(infer, "sleep_ms") / 1000
                heapq.heappush(later, (at, call, data))
            if echo.requests == options.get("stall_after", -1):
                options["stall_after"] = -1
                time.sleep(options["stall_ms"] / 1000)
        if inferred:
            batches[inferred] += 1
        while later and later[0][0] <= time.monotonic():
            _, call, data = heapq.heappop(later)
            front.respond(call, data)


async def serve_aio(address: str, options: dict[str, int]) -> None:
    import grpc

    echo = Echo()
    codes = {code.value[0]: code for code in grpc.StatusCode}

    async def infer(request: ModelInferRequest, context: Any) -> ModelInferResponse:
        code = echo.parameter(request, "fail")
        if code:
            await context.abort(codes[code], "asked to fail")
        await asyncio.sleep(echo.parameter(request, "sleep_ms") / 1000)
        return echo.infer(request)

    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), *options.items()]
    )
    handler = grpc.unary_unary_rpc_method_handler(
        infer, ModelInferRequest.FromString, ModelInferResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": handler}),)
    )
    port = server.add_insecure_port(address)
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    given: dict[str, int] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    if sys.argv[1] == "front":
        serve_front(sys.argv[2], given)
    else:
        asyncio.run(serve_aio(sys.argv[2], given))
