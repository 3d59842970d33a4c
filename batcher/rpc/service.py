"""The services: every unary method, from the message to the answer.

`ModelInfer` is the hot one: a request whose header is known is queued without being
parsed. The others are answered on the spot. Knows models by what `ServedModel` and
`Directory` say of them, and nothing of how they run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from grpc_health.v1 import health_pb2

from batcher.errors import (
    BatcherError,
    InvalidRequest,
    ModelNotFound,
    Unsupported,
)
from batcher.rpc import messages
from batcher.rpc.header import HeaderCache, InferPlan, locate
from batcher.rpc.request import ParsedRequest, parse, validate
from batcher.rpc.signature import ModelSignature
from batcher.rpc.status import StatusTable
from batcher.rpc.transport import Metadata, Reply

log = logging.getLogger(__name__)

INFER = f"/{messages.SERVICE_NAME}/ModelInfer"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

EXTENSIONS = ("model_configuration", "statistics", "parameters", "binary_tensor_data")


class ServedModel(Protocol):
    """What the services need of a model version."""

    signature: ModelSignature

    @property
    def ready(self) -> bool: ...

    def plan(
        self, parsed: ParsedRequest, spans: tuple[tuple[int, int], ...]
    ) -> InferPlan: ...

    def submit(
        self,
        plan: InferPlan,
        payload: bytes,
        base: int,
        id_field: bytes,
        reply: Reply,
        call: Any,
        deadline_ns: int | None,
    ) -> Any: ...

    def cancel(self, request: Any) -> None: ...

    def refused(self) -> None:
        """Counts a request that did not pass validation."""
        ...

    def message(self) -> messages.ModelStatistics: ...

    def config_message(self) -> messages.ModelConfig: ...


class Directory(Protocol):
    """Where the services find models."""

    @property
    def ready(self) -> bool:
        """Whether the daemon takes requests: all models loaded, not draining."""
        ...

    def get(self, name: str, version: str) -> ServedModel:
        """The model version; the highest one for an empty version.

        Raises:
            ModelNotFound, ModelNotReady, InvalidRequest (a malformed version).
        """
        ...

    def versions(self, name: str) -> list[str]:
        """The versions of a model."""
        ...

    def all(self) -> Iterable[ServedModel]:
        """Every model version."""
        ...


class Service:
    """The daemon's `Handler`: GRPCInferenceService and health checks.

    Args:
        directory: the models.
        status: the table of codes.
        server_version: for ServerMetadata.
    """

    def __init__(
        self, directory: Directory, status: StatusTable, server_version: str
    ) -> None:
        self._directory = directory
        self._status = status
        self._server_version = server_version
        self._headers = HeaderCache()
        service = f"/{messages.SERVICE_NAME}/"
        self._methods: dict[str, Callable[[bytes], bytes]] = {
            service + "ServerLive": self._server_live,
            service + "ServerReady": self._server_ready,
            service + "ModelReady": self._model_ready,
            service + "ServerMetadata": self._server_metadata,
            service + "ModelMetadata": self._model_metadata,
            service + "ModelConfig": self._model_config,
            service + "ModelStatistics": self._model_statistics,
            HEALTH_CHECK: self._health_check,
        }
        # What the protocol has and we have not is UNIMPLEMENTED with a reason.
        for method in messages.SERVICE.methods:
            if not method.client_streaming and method.name != "ModelInfer":
                name = method.name
                self._methods.setdefault(service + name, _not_built(name))

    @property
    def methods(self) -> list[str]:
        """Full names of all unary methods."""
        return [INFER, *self._methods]

    def models_changed(self) -> None:
        """Forgets what was known of requests: a model came or went."""
        self._headers.clear()

    # -- Handler --------------------------------------------------------------------

    def on_call(
        self,
        reply: Reply,
        call: Any,
        method: str,
        payload: bytes,
        metadata: Metadata,
        deadline_ns: int | None,
        peer: str,
    ) -> object | None:
        try:
            if method == INFER:
                found = self._headers.find(payload)
                if found is None:
                    return self._infer(reply, call, payload, deadline_ns)
                plan, id_start, id_end, base = found
                request: object = plan.model.submit(
                    plan,
                    payload,
                    base,
                    payload[id_start:id_end],
                    reply,
                    call,
                    deadline_ns,
                )
                return request
            reply.respond(call, self._methods[method](payload))
        except BatcherError as error:
            reply.fail(call, *self._status.status(error))
        except Exception as bug:
            log.exception("%s failed", method)
            reply.fail(call, *self._status.status(bug))
        return None

    def on_cancel(self, token: Any) -> None:
        token.plan.model.cancel(token)

    def _infer(
        self, reply: Reply, call: Any, payload: bytes, deadline_ns: int | None
    ) -> object:
        """A request with an unknown header: parsed and checked in full."""
        request = parse(payload)
        model = self._directory.get(request.model_name, request.model_version)
        try:
            parsed = validate(request, model.signature)
            header = locate(payload, request, parsed)
            if header is not None:
                plan = model.plan(parsed, header.spans)
                self._headers.learn(payload, header, plan)
                base = header.base
            else:
                # Contents that are typed, or written in another order: made raw.
                spans, base = _dense(parsed.data), 0
                payload = b"".join(parsed.data)
                plan = model.plan(parsed, spans)
        except BatcherError:
            model.refused()
            raise
        id_field = messages.ModelInferResponse(id=request.id).SerializeToString()
        return model.submit(plan, payload, base, id_field, reply, call, deadline_ns)

    # -- the other methods ------------------------------------------------------------

    def _server_live(self, payload: bytes) -> bytes:
        return messages.ServerLiveResponse(live=True).SerializeToString()

    def _server_ready(self, payload: bytes) -> bytes:
        ready = self._directory.ready
        return messages.ServerReadyResponse(ready=ready).SerializeToString()

    def _model_ready(self, payload: bytes) -> bytes:
        request = _parsed(messages.ModelReadyRequest, payload)
        try:
            ready = self._directory.get(request.name, request.version).ready
        except BatcherError:
            ready = False
        return messages.ModelReadyResponse(ready=ready).SerializeToString()

    def _server_metadata(self, payload: bytes) -> bytes:
        return messages.ServerMetadataResponse(
            name="batcher", version=self._server_version, extensions=EXTENSIONS
        ).SerializeToString()

    def _model_metadata(self, payload: bytes) -> bytes:
        request = _parsed(messages.ModelMetadataRequest, payload)
        signature = self._directory.get(request.name, request.version).signature
        response = messages.ModelMetadataResponse(
            name=signature.name,
            versions=self._directory.versions(signature.name),
            platform=signature.platform,
        )
        for tensors, target in (
            (signature.inputs, response.inputs),
            (signature.outputs, response.outputs),
        ):
            for t in tensors:
                target.add(name=t.name, datatype=t.datatype, shape=t.wire_shape)
        return response.SerializeToString()

    def _model_config(self, payload: bytes) -> bytes:
        request = _parsed(messages.ModelConfigRequest, payload)
        model = self._directory.get(request.name, request.version)
        return messages.ModelConfigResponse(
            config=model.config_message()
        ).SerializeToString()

    def _model_statistics(self, payload: bytes) -> bytes:
        request = _parsed(messages.ModelStatisticsRequest, payload)
        models: Iterable[ServedModel]
        if not request.name:
            models = self._directory.all()
        elif request.version:
            models = [self._directory.get(request.name, request.version)]
        else:
            models = [
                self._directory.get(request.name, version)
                for version in self._directory.versions(request.name)
            ]
        return messages.ModelStatisticsResponse(
            model_stats=[model.message() for model in models]
        ).SerializeToString()

    def _health_check(self, payload: bytes) -> bytes:
        request = _parsed(health_pb2.HealthCheckRequest, payload)
        kind = health_pb2.HealthCheckResponse
        if request.service in ("", messages.SERVICE_NAME):
            status = kind.SERVING if self._directory.ready else kind.NOT_SERVING
            return kind(status=status).SerializeToString()
        raise ModelNotFound(f"no service {request.service[:200]!r} here")


def _parsed(kind: Any, payload: bytes) -> Any:
    try:
        return kind.FromString(payload)
    except Exception as error:
        raise InvalidRequest(f"the message is no {kind.__name__}: {error}") from error


def _not_built(name: str) -> Callable[[bytes], bytes]:
    def refuse(payload: bytes) -> bytes:
        raise Unsupported(f"{name} is not built")

    return refuse


def _dense(data: list[bytes]) -> tuple[tuple[int, int], ...]:
    spans = []
    at = 0
    for content in data:
        spans.append((at, len(content)))
        at += len(content)
    return tuple(spans)
