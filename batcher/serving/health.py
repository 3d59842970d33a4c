"""`grpc.health.v1` and server reflection, by grpcio's own servicers."""

from __future__ import annotations

import contextlib

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from batcher.rpc import messages

_SERVICES = ("", messages.SERVICE_NAME)


class Health:
    """Readiness for those who watch (`Watch`); checks ask the directory itself."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    async def set_ready(self, ready: bool) -> None:
        """Tells the watchers."""
        kind = health_pb2.HealthCheckResponse
        for service in _SERVICES:
            status = kind.SERVING if ready else kind.NOT_SERVING
            await self._servicer.set(service, status)

    def install(self, server: grpc.aio.Server) -> None:
        """Adds health and reflection to a grpcio server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        with contextlib.suppress(TypeError):  # it is in the pool already
            messages.POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
        names = (messages.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=messages.POOL)
