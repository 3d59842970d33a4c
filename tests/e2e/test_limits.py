"""Bounds on sizes: of one message, of all in flight, of what a message unfolds to."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import models
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from .client import Client, Raw, assert_refused, ones, request, trailing
from .conftest import Start
from .daemon import Daemon, eventually
from .repository import write, write_fake

OK = grpc.StatusCode.OK
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
MIB = 1 << 20
LIMIT_MIB = 5
IN_FLIGHT_MIB = 12


@pytest.fixture(scope="module")
def small(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with low limits."""
    root = tmp_path_factory.mktemp("limits")
    write(root, "id_fp32", models.identity("fp32"))
    write(root, "tile", models.tile(), "batching.max_request_rows = 10000")
    fake = write_fake(root, "nap", 300, max_batch=1) / "model.toml"
    fake.write_text(fake.read_text().replace("shape = [4]", "shape = [-1]"))
    limits = ("--max-message-mb", LIMIT_MIB, "--max-in-flight-mb", IN_FLIGHT_MIB)
    arguments = [root, *map(str, limits), "--transport", transport]
    with Daemon(*arguments, cwd=root) as running:
        yield running


@pytest.fixture
def caller(small: Daemon) -> Iterator[Client]:
    """A client of that daemon; afterwards nothing is in flight, and it serves."""
    with Client(small.grpc) as connected:
        yield connected
        eventually(lambda: small.in_flight_bytes() == 0)
        x = np.ones((1, 4), np.float32)
        assert connected.infer("id_fp32", x=x)["y"].tolist() == x.tolist()
    small.check_stderr()


def body(size: int, model: str = "id_fp32") -> pb.ModelInferRequest:
    """A request of exactly `size` bytes on the wire, all zeros."""
    elements = (size - 100) // 4
    message = request(model, x=Raw("FP32", [1, elements], bytes(elements * 4)))
    message.id = "x" * (size - message.ByteSize() - 2)
    return message


@pytest.mark.parametrize("size", [int(3.9 * MIB), int(4.1 * MIB), LIMIT_MIB * MIB - 9])
def test_up_to_the_limit(caller: Client, size: int) -> None:
    """Messages larger than gRPC's default of 4 MiB work, up to the limit (B080)."""
    message = body(size)
    answer = caller.stub.ModelInfer(message)

    assert message.ByteSize() == size
    assert answer.raw_output_contents[0] == message.raw_input_contents[0]
    assert answer.id == message.id


@pytest.mark.parametrize("more", [1, 12 * MIB])
def test_above_the_limit(caller: Client, more: int) -> None:
    """A larger message is refused, and the text holds the limit (B080)."""
    message = body(LIMIT_MIB * MIB + more)

    assert_refused(
        lambda: caller.stub.ModelInfer(message), EXHAUSTED, str(LIMIT_MIB * MIB)
    )


def test_above_the_limit_in_a_stream(caller: Client) -> None:
    """A message that is too large ends its stream with the limit in the text."""
    messages = [request("id_fp32", x=np.ones((1, 4), np.float32)), body(6 * MIB)]

    assert_refused(
        lambda: list(caller.stub.ModelStreamInfer(iter(messages))),
        EXHAUSTED,
        str(LIMIT_MIB * MIB),
    )


def test_answers_larger_than_their_request(caller: Client) -> None:
    """An answer may be a thousand times its request, up to the limit (B080)."""
    answer = caller.stub.ModelInfer(request("tile", x=ones(320, 3)))

    assert len(answer.raw_output_contents[0]) == 320 * 16_000
    assert set(answer.raw_output_contents[0][:8]) == set(struct.pack("<f", 3) * 2)


def test_answers_above_the_limit(caller: Client) -> None:
    """The limit holds for answers too: larger ones are refused, by name (B080)."""
    assert_refused(
        lambda: caller.stub.ModelInfer(request("tile", x=ones(340))),
        EXHAUSTED,
        str(LIMIT_MIB * MIB),
    )


def test_memory_returns(caller: Client, small: Daemon) -> None:
    """Refused and served large messages leave the memory as it was (B073, B080)."""

    def burst() -> None:
        calls = [caller.send(body(size * MIB - 100)) for size in (6, 5, 6, 5)]
        assert {call.code() for call in calls} <= {OK, EXHAUSTED, UNAVAILABLE}

    for _ in range(2):
        burst()
    before = small.rss_kib()
    for _ in range(3):
        burst()

    # What was sent meanwhile is twice that, and more.
    assert small.rss_kib() < before + 6 * LIMIT_MIB * 1024


def test_strict_triton_codes(tmp_path: Path) -> None:
    """With --strict-triton-codes what is too large is INVALID_ARGUMENT."""
    model = write(tmp_path / "models", "tile", models.tile())
    flags = ("--strict-triton-codes", "--max-message-mb", "1")
    with Daemon(model, *flags, cwd=tmp_path) as daemon, Client(daemon.grpc) as client:
        assert_refused(
            lambda: client.infer("tile", x=ones(100)),
            grpc.StatusCode.INVALID_ARGUMENT,
            str(MIB),
        )
        assert len(client.infer("tile", x=ones(60))["y"]) == 60


# -- in flight --------------------------------------------------------------------


def test_bytes_in_flight_are_bounded(caller: Client, small: Daemon) -> None:
    """Requests above the in-flight budget are refused with when to try again (B080)."""
    message = body(LIMIT_MIB * MIB - 100, "nap")
    calls = [caller.send(message) for _ in range(8)]
    held = []
    while not all(call.done() for call in calls):
        held.append(small.in_flight_bytes())
    codes = Counter(call.code() for call in calls)
    refused = [call for call in calls if call.code() == UNAVAILABLE]

    assert 2 * (LIMIT_MIB * MIB - 100) == max(held) <= IN_FLIGHT_MIB * MIB
    assert codes[OK] >= 2
    assert codes[OK] + codes[UNAVAILABLE] == 8
    assert refused
    assert all(str(IN_FLIGHT_MIB * MIB) in call.details() for call in refused)
    assert all(trailing(call)["retry-after"] == "1" for call in refused)


def test_memory_of_parallel_bodies(small: Daemon) -> None:
    """Many large bodies at once take no more than twice what they are (B098)."""
    message = body(LIMIT_MIB * MIB - 100)
    clients = [Client(small.grpc) for _ in range(16)]
    before = small.rss_kib("VmHWM")
    calls = [client.send(message) for client in clients]
    codes = {call.code() for call in calls}
    peak = small.rss_kib("VmHWM") - before
    for client in clients:
        client.channel.close()

    assert codes <= {OK, UNAVAILABLE}
    assert peak < 2 * 16 * LIMIT_MIB * 1024


# -- compression (B081) -----------------------------------------------------------


def test_gzip(caller: Client) -> None:
    """A compressed request below the limit is served."""
    message = body(LIMIT_MIB * MIB * 9 // 10)
    answer = caller.stub.ModelInfer(message, compression=grpc.Compression.Gzip)

    assert answer.raw_output_contents[0] == message.raw_input_contents[0]


def test_gzip_bomb(caller: Client, small: Daemon, transport: str) -> None:
    """What unfolds above the limit is refused; by grpcio before it fills the memory."""
    before = small.rss_kib("VmHWM")
    payload = body(100).SerializeToString() + bytes(LIMIT_MIB * MIB * 20)
    gzip = grpc.Compression.Gzip  # a thousandth of it travels

    assert_refused(lambda: caller.raw(payload, compression=gzip), EXHAUSTED)
    if transport == "grpcio":  # native has no such limit, and says so
        assert small.rss_kib("VmHWM") - before < 3 * LIMIT_MIB * 1024


def test_what_can_never_fit(start: Start, tmp_path: Path) -> None:
    """A request with more bytes than all may have is told so, and the log warns."""
    model = write(tmp_path / "models", "id_fp32", models.identity("fp32"))
    daemon = start(model, "--max-message-mb", "5", "--max-in-flight-mb", "2")
    with Client(daemon.grpc) as client:
        error = assert_refused(
            lambda: client.stub.ModelInfer(body(3 * MIB)), EXHAUSTED, str(2 * MIB)
        )

    assert "retry-after" not in trailing(error)
    assert "requests above 2 MiB are refused though --max-message-mb is 5" in (
        daemon.stderr
    )
