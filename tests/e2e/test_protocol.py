"""Every method of the protocol, by the real tritonclient and by the raw stub."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tritonclient.grpc import service_pb2 as pb

from batcher import __version__

from .client import Client, assert_refused, ones, refusal, request
from .daemon import Daemon

SERVICE = "inference.GRPCInferenceService"
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def triton_client(daemon: Daemon) -> Iterator[triton.InferenceServerClient]:
    """The client that users have."""
    with triton.InferenceServerClient(daemon.grpc) as connected:
        yield connected


def triton_input(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    """An input as tritonclient wants it."""
    tensor = triton.InferInput(name, array.shape, datatype)
    tensor.set_data_from_numpy(array)
    return tensor


# -- tritonclient -----------------------------------------------------------------


def test_live_and_ready(triton_client: triton.InferenceServerClient) -> None:
    """The server is live and ready, and says which models are."""
    ready = triton_client.is_model_ready

    assert triton_client.is_server_live()
    assert triton_client.is_server_ready()
    assert [ready("probe"), ready("probe", "1"), ready("probe", "2")] == [1, 1, 0]
    assert not ready("nope")
    assert not ready("probe", "abc")


def test_server_metadata(triton_client: triton.InferenceServerClient) -> None:
    """Name, version and extensions are those of this package."""
    metadata = triton_client.get_server_metadata()

    assert (metadata.name, metadata.version) == ("batcher", __version__)
    assert "statistics" in metadata.extensions
    assert "system_shared_memory" not in metadata.extensions  # it is not built


def test_model_metadata(triton_client: triton.InferenceServerClient) -> None:
    """Names, datatypes and shapes of inputs and outputs are the model's."""
    metadata = triton_client.get_model_metadata("seq", as_json=True)

    assert metadata["name"] == "seq"
    assert metadata["versions"] == ["1"]
    assert metadata["platform"] == "onnxruntime_onnx"
    assert [(t["name"], t["datatype"], t["shape"]) for t in metadata["inputs"]] == [
        ("ids", "INT64", ["-1", "-1"]),
        ("mask", "INT64", ["-1", "-1"]),
    ]
    assert [(t["name"], t["datatype"], t["shape"]) for t in metadata["outputs"]] == [
        ("y", "FP32", ["-1", "8"]),
        ("rawsum", "FP32", ["-1", "1"]),
        ("len", "INT64", ["-1", "1"]),
        ("n", "INT64", ["-1", "1"]),
        ("pos", "INT64", ["-1", "1"]),
    ]


def test_metadata_of_unknown_model(triton_client: triton.InferenceServerClient) -> None:
    """Metadata, configuration and statistics of an unknown model are NOT_FOUND."""
    for ask in (
        triton_client.get_model_metadata,
        triton_client.get_model_config,
        triton_client.get_inference_statistics,
    ):
        with pytest.raises(triton.InferenceServerException, match="nope") as caught:
            ask("nope")

        assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_model_config(triton_client: triton.InferenceServerClient) -> None:
    """The configuration in force is answered in Triton's terms."""
    config = triton_client.get_model_config("probe4").config

    assert config.max_batch_size == 4
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [
        ("x", 11, [4])
    ]
    assert [o.name for o in config.output] == ["y", "n", "pos"]
    assert config.dynamic_batching.max_queue_delay_microseconds == 200_000
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 4096
    assert config.parameters["policy"].string_value == "window"


def test_model_config_of_unbatched(triton_client: triton.InferenceServerClient) -> None:
    """A model that cannot batch has max_batch_size 0 and complete dims."""
    config = triton_client.get_model_config("probe_fixed").config

    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [1, 4]
    assert not config.HasField("dynamic_batching")


def test_infer(triton_client: triton.InferenceServerClient) -> None:
    """Triton's client gets its rows, by all outputs and by those it names."""
    inputs = [triton_input("x", X, "FP32")]
    every = triton_client.infer("probe", inputs, request_id="7")
    wanted = [triton.InferRequestedOutput(n) for n in ("pos", "y")]
    some = triton_client.infer("probe", inputs, outputs=wanted)

    assert every.as_numpy("y").tolist() == (2 * X).tolist()
    assert every.as_numpy("n").tolist() == [[2], [2]]
    assert every.get_response().id == "7"
    assert every.get_response().model_name == "probe"
    assert every.get_response().model_version == "1"
    assert [o.name for o in every.get_response().outputs] == ["y", "n", "pos"]
    assert [o.name for o in some.get_response().outputs] == ["pos", "y"]
    assert some.as_numpy("y").tolist() == (2 * X).tolist()


def test_async_infer(triton_client: triton.InferenceServerClient) -> None:
    """async_infer calls back with the answer."""
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    triton_client.async_infer(
        "probe",
        [triton_input("x", X, "FP32")],
        callback=lambda result, error: answers.put((result, error)),
    )
    answer, error = answers.get(timeout=10)

    assert error is None
    assert answer.as_numpy("y").tolist() == (2 * X).tolist()


def test_strings(triton_client: triton.InferenceServerClient) -> None:
    """BYTES arrays of Triton's client go there and back."""
    words = np.array([["hello", "wörld"], ["", "x" * 300]], dtype=object)
    answer = triton_client.infer("id_string", [triton_input("x", words, "BYTES")])

    assert [[w.decode() for w in row] for row in answer.as_numpy("y")] == words.tolist()


def test_odd_tensor_names(triton_client: triton.InferenceServerClient) -> None:
    """Names with ':', '/' and '::' work everywhere (B092)."""
    metadata = triton_client.get_model_metadata("names")
    answer = triton_client.infer("names", [triton_input("x:0", X, "FP32")])
    wanted = [triton.InferRequestedOutput("a/b")]
    one = triton_client.infer("names", [triton_input("x:0", X, "FP32")], outputs=wanted)

    assert [t.name for t in metadata.inputs] == ["x:0"]
    assert [t.name for t in metadata.outputs] == ["onnx::Shape_422", "a/b"]
    assert answer.as_numpy("onnx::Shape_422").tolist() == (2 * X).tolist()
    assert one.as_numpy("a/b").tolist() == (-X).tolist()


# -- statistics -------------------------------------------------------------------


def test_statistics_are_exact(client: Client) -> None:
    """Requests, rows, runs, batch sizes and durations add up (B105)."""
    before = client.books("twin_a")
    earlier = client.statistics("twin_a")
    for rows in (1, 3, 3):
        client.infer("twin_a", x=ones(rows))
    assert_refused(
        lambda: client.infer("twin_a", x=ones(), outputs=["z"]),
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    books = client.books("twin_a") - before
    now = client.statistics("twin_a")
    ns = {
        name: getattr(now.inference_stats, name).ns
        - getattr(earlier.inference_stats, name).ns
        for name in ("success", "queue", "compute_infer", "compute_output")
    }

    assert (books.requests, books.rows, books.runs) == (3, 7, 3)
    assert books.batches == {1: 1, 3: 2}
    assert books.failures == 1
    assert now.last_inference > earlier.last_inference
    assert 0 < ns["compute_infer"] <= ns["success"]
    assert ns["queue"] + ns["compute_infer"] + ns["compute_output"] <= ns["success"]


def test_statistics_of_all_models(client: Client) -> None:
    """Without a name the books of every model are answered."""
    answer = client.stub.ModelStatistics(pb.ModelStatisticsRequest())
    names = [s.name for s in answer.model_stats]

    assert len(names) == len(set(names))
    assert {"probe", "emb", "id_fp32"} <= set(names)


# -- ids --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids", ["", "7", "é→漢字", "x" * 127, "x" * 128, "y" * 300, "a\nb\0c", "z" * 65_536]
)
def test_ids_come_back(client: Client, ids: str) -> None:
    """A request's id comes back as it was sent, also the second time (B075)."""
    message = request("probe", x=ones(), id=ids)
    answers = [client.stub.ModelInfer(message).id for _ in range(3)]

    assert answers == [ids] * 3


def test_equal_ids_do_not_clash(client: Client) -> None:
    """Two requests in flight with one id are two requests (B075)."""
    calls = [client.start("probe2", x=ones(1, v), id="same") for v in (1, 2)]
    answers = [call.result() for call in calls]

    assert [a.id for a in answers] == ["same", "same"]
    assert [np.frombuffer(a.raw_output_contents[0], "f4")[0] for a in answers] == [2, 4]


# -- health, reflection -----------------------------------------------------------


def test_health_check(client: Client) -> None:
    """Check says SERVING for the server and its service, NOT_FOUND for others."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == serving

    assert_refused(
        lambda: stub.Check(health_pb2.HealthCheckRequest(service="nope")),
        grpc.StatusCode.NOT_FOUND,
    )


def test_health_watch(client: Client) -> None:
    """Watch says SERVING at once, and SERVICE_UNKNOWN for an unknown service."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    kind = health_pb2.HealthCheckResponse
    for service, expected in (
        ("", kind.SERVING),
        (SERVICE, kind.SERVING),
        ("nope", kind.SERVICE_UNKNOWN),
    ):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert next(watch).status == expected
        watch.cancel()


def test_reflection(client: Client) -> None:
    """Reflection lists the services and resolves their methods and messages."""
    database = ProtoReflectionDescriptorDatabase(client.channel)
    pool = DescriptorPool(database)
    services = set(database.get_services())
    service = pool.FindServiceByName(SERVICE)
    methods = {method.name for method in service.methods}
    infer = pool.FindMessageTypeByName("inference.ModelInferRequest")

    assert {SERVICE, "grpc.health.v1.Health"} <= services
    assert {"ModelInfer", "ModelStreamInfer", "ModelStatistics"} <= methods
    assert infer.fields_by_name["raw_input_contents"].number == 7
    assert pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]


# -- what is not built ------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="probe")),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="probe")),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r")),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
        ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="r")),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
        ("TraceSetting", pb.TraceSettingRequest()),
        ("LogSettings", pb.LogSettingsRequest()),
    ],
)
def test_not_built(client: Client, method: str, message: Any) -> None:
    """What the protocol has and we have not yet answers UNIMPLEMENTED, by name."""
    call = getattr(client.stub, method)

    assert_refused(lambda: call(message), grpc.StatusCode.UNIMPLEMENTED, method)


@pytest.mark.parametrize("method", ["/inference.GRPCInferenceService/Nope", "/a.B/C"])
def test_unknown_method(client: Client, method: str) -> None:
    """A method that nobody knows is UNIMPLEMENTED."""
    error = refusal(lambda: client.channel.unary_unary(method)(b""))

    assert error.code() == grpc.StatusCode.UNIMPLEMENTED


def test_every_method_is_answered(client: Client) -> None:
    """No method of the contract is forgotten: each gives an answer or a reason."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    unary = [m.name for m in service.methods if not m.client_streaming]
    for name in unary:
        call = client.channel.unary_unary(f"/{SERVICE}/{name}").future(b"", timeout=5)

        assert call.code() in (
            grpc.StatusCode.OK,
            grpc.StatusCode.NOT_FOUND,  # of the model called ""
            grpc.StatusCode.UNIMPLEMENTED,
        ), name


def test_garbage_instead_of_messages(client: Client) -> None:
    """Bytes that are no message are refused by every method that reads one."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        if method.client_streaming or not method.input_type.fields:
            continue
        call = client.channel.unary_unary(f"/{SERVICE}/{method.name}")
        code = call.future(b"\xff\xff\xff garbage", timeout=5).code()

        assert code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.UNIMPLEMENTED,
        ), method.name
