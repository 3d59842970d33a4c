"""One plain unary call to a server, by grpcio; for metadata and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from batcher.errors import BatcherError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    Answer = TypeVar("Answer", bound=Message)


def call(
    target: str,
    method: str,
    request: Message,
    answer: type[Answer],
    *,
    timeout_s: float,
) -> Answer:
    """Call a method of the inference service and return its answer.

    Raises:
        BatcherError: the call failed; the text begins with the gRPC code.
    """
    import grpc

    from batcher.rpc.messages import SERVICE_NAME

    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(target, options=options) as channel:
        stub = channel.unary_unary(
            f"/{SERVICE_NAME}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return stub(request, timeout=timeout_s)
        except grpc.RpcError as fault:
            code = fault.code().name
            raise BatcherError(
                f"{method} at {target}: {code}: {fault.details()}"
            ) from fault
