"""The protocol's message classes, made at import from a checked-in descriptor set.

What a peer sends and receives lives here, as protobuf declares it; how a message
becomes a request or a tensor never does. `protos/generate.py` writes the two files
this one goes with: `inference.binpb`, its input, and `messages.pyi`, its types.

The classes are in a pool of their own, not in protobuf's process-wide one, because
that one takes a name only once: tritonclient declares package `inference` too, and
whichever was imported second would fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

if TYPE_CHECKING:
    from google.protobuf import descriptor
    from google.protobuf.message import Message

#: Every descriptor of the protocol. Server reflection takes it as `pool=`; what
#: else a server offers, such as its health service, is added to it by the server.
POOL: Final = descriptor_pool.DescriptorPool()

#: The service's full name, and so the first part of every method's path.
SERVICE_NAME: Final = "inference.GRPCInferenceService"


def _load() -> dict[str, object]:
    """Fill `POOL`; return what protoc's generated modules would have defined."""
    names: dict[str, object] = {}
    files = descriptor_pb2.FileDescriptorSet.FromString(
        Path(__file__).with_name("inference.binpb").read_bytes()
    )
    for file in files.file:  # in order: a file comes after those that it imports
        POOL.Add(file)
        declared = POOL.FindFileByName(file.name)
        for name, message in declared.message_types_by_name.items():
            names[name] = _message_class(message)
        for name, enum in declared.enum_types_by_name.items():
            names[name] = enum_type_wrapper.EnumTypeWrapper(enum)
            names.update({value.name: value.number for value in enum.values})
    return names


def _message_class(message: descriptor.Descriptor) -> type[Message]:
    """Return the class of `message`, with those nested in it as its attributes."""
    made = message_factory.GetMessageClass(message)
    # Not left to protobuf, whose pure-Python runtime doesn't do it.
    for nested in message.nested_types:
        setattr(made, nested.name, _message_class(nested))
    return made


globals().update(_load())

#: The service's descriptor: its methods, with their request and response types.
SERVICE: Final = POOL.FindServiceByName(SERVICE_NAME)
