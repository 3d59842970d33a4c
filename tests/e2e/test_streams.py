"""ModelStreamInfer: many requests in flight, errors inside, callers that leave."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import repeat
from queue import SimpleQueue
from typing import Any, Self

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb

from .client import Client, assert_refused, decode, ones, request, result
from .daemon import Daemon, eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Answer = pb.ModelStreamInferResponse


class Stream:
    """A stream to send to and to receive from, in any order."""

    def __init__(self, client: Client, **options: Any) -> None:
        self._outgoing: SimpleQueue[pb.ModelInferRequest | None] = SimpleQueue()
        sent = iter(self._outgoing.get, None)
        self.call = client.stub.ModelStreamInfer(sent, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._outgoing.put(None)
        self.call.cancel()

    def send(self, model: str, **arguments: Any) -> None:
        """Sends one request, see `request`."""
        self._outgoing.put(request(model, **arguments))

    def receive(self) -> Answer:
        """The next answer."""
        return next(self.call)

    def half_close(self) -> list[Answer]:
        """Says that no more requests come; returns what is answered until the end."""
        self._outgoing.put(None)
        return list(self.call)


def first(answer: Answer) -> float:
    """The first element of an answer."""
    assert answer.error_message == ""
    return float(next(iter(decode(answer.infer_response).values()))[0, 0])


def test_many_in_flight(client: Client) -> None:
    """Hundreds of requests of one stream: each id comes back once, with its payload."""
    with Stream(client, timeout=20) as stream:
        for i in range(500):
            stream.send("probe_race", x=ones(1, i), id=str(i))
        answers = stream.half_close()

    assert sorted(int(a.infer_response.id) for a in answers) == list(range(500))
    for answer in answers:
        assert first(answer) == 2 * int(answer.infer_response.id)  # (B039)
        final = answer.infer_response.parameters["triton_final_response"]
        assert final.bool_param


@pytest.mark.parametrize("ids", ["", "é→漢字", "x" * 300, "a\nb"])
def test_ids_come_back(client: Client, ids: str) -> None:
    """A request's id comes back as it was sent, with an answer and with an error."""
    with Stream(client, timeout=20) as stream:
        stream.send("probe", x=ones(), id=ids)
        good = stream.receive()
        stream.send("nope", x=ones(), id=ids)
        bad = stream.receive()

    assert good.infer_response.id == bad.infer_response.id == ids
    assert not good.error_message
    assert bad.error_message


def test_half_close_is_answered_to_the_end(caller: Client) -> None:
    """What was sent before the half-close is answered, then the stream ends with OK."""
    with Stream(caller, timeout=20) as stream:
        for i in range(5):
            stream.send("nap", x=ones(1, i), id=str(i))
        answers = stream.half_close()

        assert [(a.infer_response.id, first(a)) for a in answers] == [
            (str(i), i) for i in range(5)
        ]
        assert stream.call.code() == grpc.StatusCode.OK


def test_an_empty_stream(client: Client) -> None:
    """A stream without requests ends with OK."""
    with Stream(client, timeout=5) as stream:
        assert stream.half_close() == []
        assert stream.call.code() == grpc.StatusCode.OK


def test_errors_come_inside(client: Client) -> None:
    """A bad request is answered with a text and its id; the stream goes on."""
    with Stream(client, timeout=20) as stream:
        stream.send("nope", x=ones(), id="a")
        unknown = stream.receive()
        stream.send("probe", x=ones(), outputs=["zzz"], id="b")
        wrong = stream.receive()
        stream.send("emb", ids=np.array([[99]]), id="c")
        failed = stream.receive()
        stream.send("probe", x=ones(1, 3), id="d")
        good = stream.receive()

    assert ["'nope'" in unknown.error_message, unknown.infer_response.id] == [True, "a"]
    assert ["'zzz'" in wrong.error_message, wrong.infer_response.id] == [True, "b"]
    assert ["99" in failed.error_message, failed.infer_response.id] == [True, "c"]
    assert (first(good), good.infer_response.id) == (6, "d")


def test_garbage_inside(client: Client) -> None:
    """Bytes that are no request get an error of their own."""
    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    good = request("probe", x=ones(), id="good").SerializeToString()
    call = client.channel.stream_stream(method)(iter([b"\xff\xff", good]), timeout=5)
    answers = [Answer.FromString(raw) for raw in call]

    assert "ModelInferRequest" in answers[0].error_message
    assert answers[1].infer_response.id == "good"


@pytest.mark.parametrize("value", ["true", "True"])
def test_errors_as_status(client: Client, value: str) -> None:
    """With triton_grpc_error the first error ends the stream with its status."""
    messages = [request("probe", x=ones(), outputs=["zzz"], id="b")]
    metadata = (("triton_grpc_error", value),)

    assert_refused(
        lambda: list(
            client.stub.ModelStreamInfer(iter(messages), metadata=metadata, timeout=5)
        ),
        INVALID,
        "'zzz'",
    )


def test_errors_as_status_only_when_asked(client: Client) -> None:
    """triton_grpc_error: false leaves errors inside the stream."""
    messages = iter([request("nope", x=ones(), id="a")])
    metadata = (("triton_grpc_error", "false"),)
    (answer,) = client.stub.ModelStreamInfer(messages, metadata=metadata, timeout=5)

    assert answer.infer_response.id == "a"
    assert answer.error_message


def test_streams_and_unary_calls_share_runs(client: Client) -> None:
    """A request of a stream and a unary one are of one queue, on every transport."""
    with Stream(client, timeout=20) as stream:
        stream.send("probe2", x=ones(1, 1), id="s")
        unary = client.start("probe2", x=ones(1, 2))
        streamed = decode(stream.receive().infer_response)

    assert streamed["n"].tolist() == result(unary)["n"].tolist() == [[2]]
    assert (streamed["y"][0, 0], result(unary)["y"][0, 0]) == (2, 4)


def test_queue_full(caller: Client) -> None:
    """Refusals of a full queue come inside, with their ids; the stream lives (B028)."""
    with Stream(caller, timeout=20) as stream:
        for i in range(8):
            stream.send("small", x=ones(1, i), id=str(i))
        answers = [stream.receive() for _ in range(8)]
        stream.send("small", x=ones(1, 9), id="9")
        last = stream.receive()
    refused = [a for a in answers if a.error_message]

    assert sorted(int(a.infer_response.id) for a in answers) == list(range(8))
    assert len(refused) >= 4
    assert all("queue is full" in a.error_message for a in refused)
    assert all(
        first(a) == int(a.infer_response.id) for a in answers if a not in refused
    )
    assert (last.infer_response.id, first(last)) == ("9", 9)


def test_tritonclient_stream(daemon: Daemon) -> None:
    """Triton's own streaming client gets answers and errors, each with its id."""
    found: SimpleQueue[Any] = SimpleQueue()
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(ones(1, 4))
    with triton.InferenceServerClient(daemon.grpc) as client:
        client.start_stream(callback=lambda result, error: found.put((result, error)))
        client.async_stream_infer("probe", [tensor], request_id="one")
        client.async_stream_infer("nope", [tensor], request_id="two")
        answers = [found.get(timeout=5) for _ in range(2)]
        client.stop_stream()
    good = next(a for a, error in answers if error is None)
    bad = next(error for _, error in answers if error is not None)

    assert good.get_response().id == "one"
    assert good.as_numpy("y").tolist() == [[8, 8, 8, 8]]
    assert "nope" in bad.message()


def test_cancelled_streams_leave_nothing(caller: Client, timed: Daemon) -> None:
    """A cancelled stream takes its queued requests with it, others go on (B037)."""
    with Stream(caller, timeout=20) as other:
        other.send("instant", x=ones(1, 7))
        assert first(other.receive()) == 7
        files = timed.open_files()
        for _ in range(5):
            before = caller.books("nap")
            with Client(timed.grpc) as leaving, Stream(leaving) as stream:
                for i in range(20):
                    stream.send("nap", x=ones(1, i))
                stream.receive()
            eventually(lambda: timed.waiting("nap") == 0, 1)
            assert (caller.books("nap") - before).failures >= 15
            other.send("instant", x=ones(1, 7), id="other")
            assert first(other.receive()) == 7
        eventually(lambda: timed.open_files() <= files, what="files are closed")


KILLED = """
import sys, time
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc
import grpc
stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
message = pb.ModelInferRequest(model_name="nap", raw_input_contents=[bytes(16)])
message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
def requests():
    for _ in range(20):
        yield message
    time.sleep(60)
for answer in stub.ModelStreamInfer(requests()):
    print("answered", flush=True)
"""


def test_killed_clients(caller: Client, timed: Daemon) -> None:
    """A client that dies in the middle of its stream does no harm (B037)."""
    assert caller.infer("instant", x=ones(1, 1))["y"][0, 0] == 1
    files = timed.open_files()
    command = [sys.executable, "-c", KILLED, timed.grpc]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "answered\n"
            process.send_signal(signal.SIGKILL)
        eventually(lambda: timed.waiting("nap") == 0, 1)

    assert caller.infer("instant", x=ones(1, 2))["y"][0, 0] == 2
    eventually(lambda: timed.open_files() <= files, what="files are closed")


def test_a_flooding_sender_is_held_back(caller: Client, timed: Daemon) -> None:
    """However many requests one stream sends, a bounded number is in the daemon."""
    message = request("nap", x=ones())
    with Client(timed.grpc) as flooding:
        call = flooding.stub.ModelStreamInfer(repeat(message, 5000), timeout=20)
        assert next(call).error_message == ""
        eventually(lambda: timed.waiting("nap") > 900)
        assert next(call).error_message == ""  # time for more to come in
        waiting = timed.waiting("nap")
        call.cancel()

    assert waiting <= 1024
    eventually(lambda: timed.waiting("nap") == 0, 1)


def test_deadline_of_a_stream(caller: Client, timed: Daemon) -> None:
    """A stream's deadline ends it, and what it left in the queue goes with it."""
    with Stream(caller, timeout=0.3) as stream:
        for i in range(20):
            stream.send("nap", x=ones(1, i))
        assert_refused(lambda: list(stream.call), grpc.StatusCode.DEADLINE_EXCEEDED)
    eventually(lambda: timed.waiting("nap") == 0, 1)
