"""A thin client on the raw stub: builds requests, also wrong ones, and reads answers.

tritonclient refuses many malformed requests by itself, so only tests of its own
methods use it; all others speak to the daemon through this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

INFER = "/inference.GRPCInferenceService/ModelInfer"
NO_LIMIT = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

_NUMPY = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
_DATATYPES = {np.dtype(kind): name for name, kind in _NUMPY.items()}

Call = Any  # a grpc.Future that is a grpc.Call


@dataclass(frozen=True)
class Raw:
    """A tensor as it goes on the wire, right or wrong."""

    datatype: str
    shape: Sequence[int]
    data: bytes | None


def pack(elements: Iterable[bytes]) -> bytes:
    """The raw form of BYTES elements."""
    return b"".join(len(e).to_bytes(4, "little") + e for e in elements)


def unpack(data: bytes) -> list[bytes]:
    """The elements of a raw BYTES tensor."""
    found = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(data)
    return found


def request(
    model: str,
    /,
    *,
    id: str = "",
    version: str = "",
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    **inputs: Any,
) -> pb.ModelInferRequest:
    """A request; inputs are arrays, or `Raw`, by name ("x:0" goes in by `**{...}`)."""
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for name, value in inputs.items():
        if not isinstance(value, Raw):
            array = np.ascontiguousarray(value)
            shape = np.shape(value)  # the line above makes [1] of a scalar
            value = Raw(_DATATYPES[array.dtype], shape, array.tobytes())
        message.inputs.add(name=name, datatype=value.datatype, shape=value.shape)
        if value.data is not None:
            message.raw_input_contents.append(value.data)
    for output in outputs:
        message.outputs.add(name=output)
    for key, value in (parameters or {}).items():
        set_parameter(message.parameters[key], value)
    return message


def set_parameter(target: pb.InferParameter, value: Any) -> None:
    """Sets a parameter by the type of its value; None sets none."""
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, str):
        target.string_param = value
    elif isinstance(value, float):
        target.double_param = value


def decode(answer: pb.ModelInferResponse) -> dict[str, np.ndarray]:
    """The outputs of an answer as arrays; BYTES as object arrays."""
    assert len(answer.outputs) == len(answer.raw_output_contents)
    arrays = {}
    for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True):
        shape = tuple(output.shape)
        if output.datatype == "BYTES":
            array = np.empty(int(np.prod(shape)), object)
            array[:] = unpack(data)
        else:
            array = np.frombuffer(data, _NUMPY[output.datatype])
        arrays[output.name] = array.reshape(shape)
    return arrays


def ones(rows: int = 1, value: float = 1.0) -> np.ndarray:
    """An input of the models that take x FP32 [N, 4]."""
    return np.full((rows, 4), value, np.float32)


class Client:
    """A channel to a daemon, of its own connection.

    Args:
        target: as gRPC takes it.
        options: of the channel.
    """

    def __init__(self, target: str, *options: tuple[str, Any]) -> None:
        own = ("grpc.use_local_subchannel_pool", 1)
        self.target = target
        self.channel = grpc.insecure_channel(target, (own, *NO_LIMIT, *options))
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.raw = self.channel.unary_unary(INFER)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.channel.close()

    def infer(
        self, model: str, /, timeout: float = 20, **arguments: Any
    ) -> dict[str, np.ndarray]:
        """One request, see `request`; returns the outputs."""
        message = request(model, **arguments)
        return decode(self.stub.ModelInfer(message, timeout=timeout))

    def send(self, message: pb.ModelInferRequest, timeout: float | None = 20) -> Call:
        """Starts a call."""
        return self.stub.ModelInfer.future(message, timeout=timeout)

    def start(
        self, model: str, /, timeout: float | None = 20, **arguments: Any
    ) -> Call:
        """Starts a call of one request, see `request`."""
        return self.send(request(model, **arguments), timeout)

    def statistics(self, model: str) -> pb.ModelStatistics:
        """The books of one model."""
        answer = self.stub.ModelStatistics(pb.ModelStatisticsRequest(name=model))
        (found,) = answer.model_stats
        return found

    def books(self, model: str) -> Books:
        """The books of one model as plain numbers."""
        found = self.statistics(model)
        return Books(
            requests=found.inference_stats.success.count,
            failures=found.inference_stats.fail.count,
            rows=found.inference_count,
            runs=found.execution_count,
            batches={b.batch_size: b.compute_infer.count for b in found.batch_stats},
        )


@dataclass(frozen=True)
class Books:
    """Counts of a model: what is compared before and after."""

    requests: int
    failures: int
    rows: int
    runs: int
    batches: Mapping[int, int]

    def __sub__(self, before: Books) -> Books:
        sizes = {
            size: count - before.batches.get(size, 0)
            for size, count in self.batches.items()
        }
        return Books(
            self.requests - before.requests,
            self.failures - before.failures,
            self.rows - before.rows,
            self.runs - before.runs,
            {size: count for size, count in sizes.items() if count},
        )


def result(call: Call) -> dict[str, np.ndarray]:
    """The outputs that a call ended with."""
    return decode(call.result())


def ending(call: Call) -> grpc.StatusCode:
    """The status that a call ended with, OK included."""
    return call.code()


def refusal(do: Callable[[], Any]) -> grpc.RpcError:
    """The error that `do` ends with; it must end with one."""
    with pytest.raises(grpc.RpcError) as caught:
        do()
    return caught.value


def trailing(error: Any) -> dict[str, str | bytes]:
    """The trailing metadata of a failed call."""
    return {item.key: item.value for item in error.trailing_metadata() or ()}


def assert_refused(
    do: Callable[[], Any], code: grpc.StatusCode, *texts: str
) -> grpc.RpcError:
    """`do` must end with this code and a text that holds all of `texts`."""
    error: Any = refusal(do)

    assert error.code() == code, error.details()
    for text in texts:
        assert text.lower() in error.details().lower()
    return error
