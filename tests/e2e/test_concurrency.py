"""Many callers at once, of all shapes: every answer is its caller's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import numpy as np
import onnxruntime as ort
import pytest

from .client import Client, Raw, ones, pack, request, result, unpack
from .daemon import Daemon, eventually

THREADS = 64


@pytest.fixture(scope="module")
def seq_alone() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """`seq` run alone, without a daemon."""
    session = ort.InferenceSession(
        models.seq().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return lambda ids, mask: session.run(["y"], {"ids": ids, "mask": mask})[0]


def in_threads(work: Callable[[int], int]) -> int:
    """Runs `work` in 64 threads at once; returns the sum of what they say."""
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(work, range(THREADS)))


def test_mixed_shapes(
    client: Client,
    daemon: Daemon,
    seq_alone: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    """64 callers, five models, all shapes: each gets what it would get alone."""

    def probe(chance: random.Random, tag: str) -> None:
        x = ones(chance.randint(1, 8), chance.random())
        answer = client.infer("probe", x=x, id=tag)
        assert answer["y"].tobytes() == (2 * x).tobytes()
        assert (answer["pos"] < answer["n"]).all()

    def padded(chance: random.Random, tag: str) -> None:
        shape = (chance.randint(1, 3), chance.randint(1, 32))
        ids = np.array([chance.randrange(100) for _ in range(shape[0] * shape[1])])
        ids = ids.reshape(shape)
        mask = (ids % 5 != 0).astype(np.int64)
        answer = client.infer("seq_padded", ids=ids, mask=mask, id=tag)
        np.testing.assert_allclose(answer["y"], seq_alone(ids, mask), rtol=0, atol=1e-5)

    def cut(chance: random.Random, tag: str) -> None:
        x = np.full((chance.randint(1, 4), chance.randint(1, 8)), chance.random(), "f4")
        assert client.infer("id_cut", x=x, id=tag)["y"].tobytes() == x.tobytes()

    def plain(chance: random.Random, tag: str) -> None:
        x = np.full((chance.randint(1, 4), chance.randint(0, 50)), chance.random())
        assert client.infer("id_fp64", x=x, id=tag)["y"].tobytes() == x.tobytes()

    def text(chance: random.Random, tag: str) -> None:
        words = [tag.encode() * chance.randint(0, 9) for _ in range(3)]
        message = request("id_string", x=Raw("BYTES", [1, 3], pack(words)), id=tag)
        answer = client.stub.ModelInfer(message, timeout=20)
        assert answer.id == tag
        assert unpack(answer.raw_output_contents[0]) == words

    def work(thread: int) -> int:
        chance = random.Random(thread)
        for i in range(12):
            kind = chance.choice((probe, padded, padded, cut, plain, text))
            kind(chance, f"{thread}/{i}")
        return 12

    before = client.books("seq_padded")
    answered = in_threads(work)
    books = client.books("seq_padded") - before

    assert answered == THREADS * 12
    assert books.failures == 0
    assert books.runs < books.requests  # lengths did share runs
    assert sum(size * count for size, count in books.batches.items()) == books.rows
    eventually(lambda: daemon.in_flight_bytes() == 0)


def test_a_real_model(client: Client, zoo: Path) -> None:
    """A real network gives in a batch what it gives alone, but for rounding (B068)."""
    rng = np.random.default_rng(8)
    rows = [rng.integers(0, 257, (1, 2048), np.int32) for _ in range(8)]
    session = ort.InferenceSession(
        zoo / "magika" / "1" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    alone = [session.run(["target_label"], {"bytes": row})[0] for row in rows]
    before = client.books("magika")
    calls = [client.start("magika", bytes=row) for row in rows]
    together = [result(call)["target_label"] for call in calls]

    assert (client.books("magika") - before).batches == {8: 1}
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
        assert other.argmax() == one.argmax()


def test_no_request_in_a_run_that_has_left(client: Client) -> None:
    """At full speed with two slots no row is lost, doubled or another's (B115)."""
    before = client.books("probe_race")

    def work(thread: int) -> int:
        values = [float(thread * 1000 + i) for i in range(40)]
        calls: Iterable = [client.start("probe_race", x=ones(1, v)) for v in values]
        for value, call in zip(values, calls, strict=True):
            answer = call.result()
            y, n, pos = answer.raw_output_contents
            assert np.frombuffer(y, "f4").tolist() == [2 * value] * 4
            assert np.frombuffer(pos, "i8")[0] < np.frombuffer(n, "i8")[0] <= 4
        return 40

    answered = in_threads(work)
    books = client.books("probe_race") - before

    assert answered == books.requests == books.rows == THREADS * 40
    assert sum(size * count for size, count in books.batches.items()) == books.rows
    assert sum(books.batches.values()) == books.runs


def test_many_connections(daemon: Daemon, client: Client) -> None:
    """Hundreds of connections, idle or not, do not keep others from being served."""
    files = daemon.open_files()
    clients = [Client(daemon.grpc) for _ in range(100)]
    calls = [c.start("probe", x=ones(1, i)) for i, c in enumerate(clients)]
    found = [np.frombuffer(c.result().raw_output_contents[0], "f4")[0] for c in calls]
    for one in clients:
        one.channel.close()

    assert found == [2 * i for i in range(100)]
    eventually(lambda: daemon.open_files() <= files + 2, what="connections are closed")
