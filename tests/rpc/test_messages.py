"""The message classes against tritonclient's, the type checker and reflection.

What the messages mean, and how arrays travel in them, is tested elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from batcher.rpc import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.descriptor import FileDescriptor

ROOT = Path(__file__).resolve().parents[2]

CONFIG_PBTXT = """
name: "resnet"
platform: "tensorrt_plan"
max_batch_size: 64
input [ { name: "image" data_type: TYPE_FP16 dims: [ 3, -1, 224 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: 1000 } ]
dynamic_batching {
  preferred_batch_size: [ 8, 16 ]
  max_queue_delay_microseconds: 500
  priority_levels: 2
  priority_queue_policy { key: 2 value { timeout_action: DELAY max_queue_size: 9 } }
}
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] profile: "1" } ]
optimization { cuda { graphs: true } }
parameters: { key: "mode" value: { string_value: "fast" } }
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python at the repository's root with the package of this process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def contract(files: Iterable[FileDescriptor]) -> set[tuple[object, ...]]:
    """Return all that is on the wire or in a client's code, as comparable facts."""
    facts: set[tuple[object, ...]] = set()
    for file in files:
        copy = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copy)
        for enum in copy.enum_type:
            facts |= {(f"{enum.name}.{v.name}", v.number) for v in enum.value}
        for message in copy.message_type:
            facts |= set(message_contract(message, ""))
        for service in copy.service:
            facts |= {
                (
                    f"{copy.package}.{service.name}/{method.name}",
                    method.input_type,
                    method.output_type,
                    method.client_streaming,
                    method.server_streaming,
                )
                for method in service.method
            }
    return facts


def message_contract(
    message: descriptor_pb2.DescriptorProto, outer: str
) -> Iterator[tuple[object, ...]]:
    """Yield a fact for the message and each field, enum value and nested message."""
    name = f"{outer}{message.name}"
    yield (name, "map entry" if message.options.map_entry else "message")
    for field in message.field:
        oneof = (
            message.oneof_decl[field.oneof_index].name
            if field.HasField("oneof_index")
            else None
        )
        yield (
            f"{name}.{field.name}",
            field.number,
            descriptor_pb2.FieldDescriptorProto.Type.Name(field.type),
            descriptor_pb2.FieldDescriptorProto.Label.Name(field.label),
            field.type_name,
            oneof,
            field.proto3_optional,
            field.options.SerializeToString(),
        )
    for enum in message.enum_type:
        for value in enum.value:
            yield (f"{name}.{enum.name}.{value.name}", value.number)
    for nested in message.nested_type:
        yield from message_contract(nested, f"{name}.")


def test_checked_in_files_are_what_the_sources_give() -> None:
    """The descriptor set and the stub in the tree are those that protos/ makes."""
    result = run("protos/generate.py", "--check")

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("first", ["batcher", "tritonclient"])
def test_one_process_holds_both_copies_of_the_package(first: str) -> None:
    """Ours and tritonclient's messages can be imported together, in either order."""
    pytest.importorskip("tritonclient.grpc")
    imports = [
        "from batcher.rpc import messages",
        "from tritonclient.grpc import service_pb2",
    ]
    if first == "tritonclient":
        imports.reverse()
    use = "print(messages.ModelInferRequest is service_pb2.ModelInferRequest)"

    result = run("-c", "; ".join([*imports, use]))

    assert (result.stdout, result.returncode) == ("False\n", 0), result.stderr


def test_the_pure_python_runtime_has_the_same_attributes() -> None:
    """Nested messages are attributes of their parents without protobuf's C code too."""
    code = (
        "from google.protobuf.internal import api_implementation as api\n"
        "from batcher.rpc.messages import ModelOptimizationPolicy as policy\n"
        "print(api.Type(), policy.Cuda.GraphSpec.LowerBound.__name__)"
    )
    switch = "import os; os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION']='python'"

    result = run("-c", f"{switch}\n{code}")

    assert result.stdout == "python LowerBound\n", result.stderr


def test_wire_contract_is_tritonclients_plus_the_oip_properties() -> None:
    """Every RPC, message, field and enum value equals tritonclient's; OIP adds one."""
    service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")
    model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")

    theirs = contract([service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR])
    ours = contract(
        messages.POOL.FindFileByName(name)
        for name in ("inference/grpc_service.proto", "inference/model_config.proto")
    )

    assert theirs - ours == set()
    assert sorted(str(name) for name, *_ in ours - theirs) == [
        "ModelMetadataResponse.PropertiesEntry",
        "ModelMetadataResponse.PropertiesEntry.key",
        "ModelMetadataResponse.PropertiesEntry.value",
        "ModelMetadataResponse.properties",
    ]


def test_request_survives_the_way_through_both_copies() -> None:
    """A request built by tritonclient's class, and parsed by ours, is unchanged."""
    service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

    request = service_pb2.ModelInferRequest(
        model_name="m", model_version="3", id="é", raw_input_contents=[b"\0\1", b""]
    )
    request.parameters["bool"].bool_param = False
    request.parameters["int64"].int64_param = -(2**63)
    request.parameters["string"].string_param = "s"
    request.parameters["double"].double_param = 0.1
    request.parameters["uint64"].uint64_param = 2**64 - 1
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, -1, 2**40])
    tensor.parameters["shared_memory_offset"].int64_param = 7
    tensor.contents.fp32_contents.extend([1.5, -2.0])
    tensor.contents.bytes_contents.append(b"\xff")
    request.outputs.add(name="y").parameters["classification"].int64_param = 2

    ours = messages.ModelInferRequest.FromString(request.SerializeToString())
    back = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())

    assert ours.parameters["double"].WhichOneof("parameter_choice") == "double_param"
    assert list(ours.raw_input_contents) == [b"\0\1", b""]
    assert back == request


def test_triton_configuration_text_is_read() -> None:
    """A config.pbtxt parses into ModelConfig, the enum names and maps included."""
    config = text_format.Parse(CONFIG_PBTXT, messages.ModelConfig())

    batching = config.dynamic_batching
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert config.input[0].data_type == messages.DataType.TYPE_FP16
    assert list(config.input[0].dims) == [3, -1, 224]
    assert list(batching.preferred_batch_size) == [8, 16]
    assert batching.priority_queue_policy[2] == messages.ModelQueuePolicy(
        timeout_action=messages.ModelQueuePolicy.DELAY, max_queue_size=9
    )
    assert config.instance_group[0].kind == messages.ModelInstanceGroup.KIND_GPU
    assert config.parameters["mode"].string_value == "fast"


def test_unknown_key_in_configuration_text_is_named() -> None:
    """A misspelt key in a config.pbtxt is refused with its name and line."""
    with pytest.raises(
        text_format.ParseError, match=r'^2:1 : .* named "max_bach_size"'
    ):
        text_format.Parse('name: "m"\nmax_bach_size: 8', messages.ModelConfig())


def test_reflection_answers_from_our_pool() -> None:
    """A client that knows no .proto gets the service, and the health service, by name.

    Health's file is added to the pool here as the server adds it.
    """
    health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    messages.POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    names = (messages.SERVICE_NAME, health, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=messages.POOL)
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        with grpc.insecure_channel(f"localhost:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            listed = set(database.get_services())
            seen = descriptor_pool.DescriptorPool(database)
            service = seen.FindServiceByName(messages.SERVICE_NAME)
            check = seen.FindServiceByName(health).methods_by_name["Check"]
    finally:
        server.stop(grace=None).wait()

    assert listed == set(names)
    assert list(service.methods_by_name) == list(messages.SERVICE.methods_by_name)
    assert check.input_type.full_name == "grpc.health.v1.HealthCheckRequest"


def test_misspelt_field_is_a_type_error(tmp_path: Path) -> None:
    """Under mypy --strict a wrong name, type or oneof of a message is an error."""
    pytest.importorskip("mypy")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        "from batcher.rpc import messages as m\n"
        "request = m.ModelInferRequest(model_name='m', id='1')\n"
        "tensor: m.ModelInferRequest.InferInputTensor = request.inputs.add(name='x')\n"
        "methods: int = len(m.SERVICE.methods)\n"
        "m.ModelInferRequest(model_nam='m')\n"
        "request.modle_name = 'm'\n"
        "request.id = 1\n"
        "m.InferParameter().WhichOneof('parameter')\n"
        "m.ModelInput(data_type=m.DataType.TYPE_FP33)\n"
    )

    result = run(
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        f"--cache-dir={tmp_path}",
        str(snippet),
    )

    errors = [line for line in result.stdout.splitlines() if ": error:" in line]
    assert [line.rpartition("[")[2] for line in errors] == [
        "call-arg]",
        "attr-defined]",
        "assignment]",
        "arg-type]",
        "attr-defined]",
    ], result.stdout
