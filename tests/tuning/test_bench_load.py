"""Arrivals, latencies and bodies: the parts of a load that need no run."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from batcher.errors import BatcherError, ConfigError
from batcher.rpc.messages import ModelInferRequest
from batcher.tuning.arrivals import (
    Constant,
    Gamma,
    Poisson,
    draw,
    read_trace,
    share,
)
from batcher.tuning.bodies import (
    body_from_arrays,
    body_from_metadata,
    body_from_npz,
    parse_shape,
)
from batcher.tuning.latency import LatencyRecorder
from batcher.tuning.percentiles import LatencySummary
from batcher.tuning.progress import Progress, progress_bar

if TYPE_CHECKING:
    from pathlib import Path

    from batcher.tuning.arrivals import Arrivals
    from batcher.tuning.bodies import Body


def offsets_of(arrivals: Arrivals, count: int, seed: int = 0) -> np.ndarray:
    """The first `count` due times."""
    chunks = islice(draw(arrivals, [1.0], seed), -(-count // 4096))
    return np.concatenate([times for times, _ in chunks])[:count]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Poisson(500), 1.0),
        (Gamma(500, 4.0), 4.0),
        (Gamma(500, 0.5), 0.5),
        (Constant(500), 0.0),
    ],
)
def test_gaps_have_the_rate_and_the_variation_they_should(
    arrivals: Arrivals, cv: float
) -> None:
    """Mean and coefficient of variation of 100,000 gaps are those asked for."""
    gaps = np.diff(offsets_of(arrivals, 100_000))

    assert gaps.mean() == pytest.approx(2_000_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_the_seed_makes_the_sequence_and_the_rate_only_scales_it() -> None:
    """Rates are compared on the same randomness; another seed is another one."""
    slow = offsets_of(Poisson(100), 5000, seed=3)
    fast = offsets_of(Poisson(200), 5000, seed=3)

    assert np.abs(slow - 2 * fast).max() <= 2
    assert not np.array_equal(slow, offsets_of(Poisson(100), 5000, seed=4))


def test_processes_share_one_sequence() -> None:
    """The shares of 3 processes are the whole sequence, bodies included."""
    whole = list(islice(share(draw(Poisson(100), [3, 1], 5), 0, 1), 9000))

    shares = [
        list(islice(share(draw(Poisson(100), [3, 1], 5), i, 3), 3000)) for i in range(3)
    ]

    assert [shares[k % 3][k // 3] for k in range(9000)] == whole
    assert np.mean([body for _, body in whole]) == pytest.approx(0.25, abs=0.02)


def test_a_trace_file_is_read(tmp_path: Path) -> None:
    """Offsets in seconds, with or without a body index; comments are left out."""
    path = tmp_path / "trace"
    path.write_text("# recorded\n0.0 1\n\n0.5,0  # late\n0.5 1\n")

    trace = read_trace(path)

    assert trace.offsets_ns.tolist() == [0, 500_000_000, 500_000_000]
    assert trace.bodies is not None
    assert trace.bodies.tolist() == [1, 0, 1]
    assert trace.length_ns == 500_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1\nx\n", "line 2"),
        ("0.2\n0.1\n", "line 2"),
        ("0.1 0 7\n", "line 1"),
        ("0.1 0\n0.2\n", "every arrival a body index"),
        ("", "no arrivals"),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    """What is not an arrival is a configuration error that says where."""
    path = tmp_path / "trace"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_percentiles_are_exact_and_then_within_half_a_percent() -> None:
    """Nearest rank over all samples; past the limit of a recorder, by fine buckets."""
    values = np.random.default_rng(0).lognormal(14, 1, 50_000).astype(int)
    exact, bounded = LatencyRecorder(), LatencyRecorder(exact_limit=1000)
    for i, value in enumerate(values.tolist()):
        exact.record(value)
        bounded.record(value)
        if i % 500 == 0:
            exact.fold()
            bounded.fold()

    first = LatencySummary([exact.take()])
    second = LatencySummary([bounded.take()])

    assert first.exact
    assert not second.exact
    assert first.count == second.count == 50_000
    assert first.mean_ns == pytest.approx(values.mean())
    assert first.max_ns == values.max()
    for percent in (50, 90, 99, 99.9):
        wanted = np.sort(values)[int(np.ceil(500 * percent)) - 1]
        assert first.percentile_ns(percent) == wanted
        assert second.percentile_ns(percent) == pytest.approx(wanted, rel=0.005)
    assert second.share_within(first.percentile_ns(90)) == pytest.approx(0.9, abs=0.01)


def parsed(body: Body) -> ModelInferRequest:
    """The request that a body carries."""
    return ModelInferRequest.FromString(body.message)


def test_a_body_is_made_from_the_model_that_the_server_describes(front: str) -> None:
    """Dynamic dimensions are given, or 1; values are random and seeded."""
    body = body_from_metadata(front, "echo", shapes={"ids": (2, 128)}, rows=2, seed=1)

    request = parsed(body)
    shapes = {t.name: (t.datatype, list(t.shape)) for t in request.inputs}
    assert shapes == {
        "ids": ("INT64", [2, 128]),
        "x": ("FP32", [2, 4]),
        "text": ("BYTES", [2]),
    }
    sizes = [len(raw) for raw in request.raw_input_contents]
    assert sizes == [2 * 128 * 8, 2 * 4 * 4, 2 * (4 + 8)]
    same = body_from_metadata(front, "echo", shapes={"ids": (2, 128)}, rows=2, seed=1)
    assert same.message == body.message
    other = body_from_metadata(front, "echo", shapes={"ids": (2, 128)}, rows=2, seed=2)
    assert other.message != body.message


@pytest.mark.parametrize(
    ("shapes", "message"),
    [({"x": (1, 5)}, "not \\[1, 5\\]"), ({"y": (1,)}, "shape for y")],
)
def test_a_shape_that_does_not_fit_the_model_is_named(
    front: str, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    """A fixed dimension stays as it is, and an unknown input is none."""
    with pytest.raises(ConfigError, match=message):
        body_from_metadata(front, "echo", shapes=shapes)


def test_a_server_that_describes_nothing_is_named(front: str) -> None:
    """Where metadata cannot be had, the gRPC code says why."""
    with pytest.raises(BatcherError, match="ModelMetadata at unix:/none: UNAVAILABLE"):
        body_from_metadata("unix:/none", "echo")


def test_bodies_of_numpy_files(tmp_path: Path) -> None:
    """An .npz file carries names, shapes, datatypes and bytes."""
    ids = np.array([[1, 2, 3]], dtype=np.int64)
    words = np.array(["a", "bcd"])
    np.savez(tmp_path / "b.npz", ids=ids.astype(">i8"), words=words)

    both = parsed(body_from_npz("m", tmp_path / "b.npz", version="3"))

    assert (both.model_name, both.model_version) == ("m", "3")
    assert [(t.name, t.datatype) for t in both.inputs] == [
        ("ids", "INT64"),
        ("words", "BYTES"),
    ]
    assert both.raw_input_contents[0] == ids.tobytes()
    assert both.raw_input_contents[1] == b"\1\0\0\0a\3\0\0\0bcd"


def test_pickles_in_numpy_files_are_refused(tmp_path: Path) -> None:
    """A file that would run code when it is loaded is not loaded."""
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object))

    with pytest.raises(ConfigError, match="allow_pickle"):
        body_from_npz("m", tmp_path / "a.npz")


def test_dtypes_that_the_protocol_has_not_are_refused() -> None:
    """A complex array is no tensor."""
    with pytest.raises(ConfigError, match="complex64"):
        body_from_arrays("m", {"x": np.zeros(2, dtype=np.complex64)})


def test_shape_options_are_read() -> None:
    """`name:1,128` is a shape, `name:` a scalar."""
    assert parse_shape("ids:1,128") == ("ids", (1, 128))
    assert parse_shape("a:b:2") == ("a:b", (2,))
    assert parse_shape("x:") == ("x", ())
    for text in ("ids", ":1", "ids:1,x", "ids:-1"):
        with pytest.raises(ConfigError, match="give it as name:1,128"):
            parse_shape(text)


def test_no_progress_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is a file nothing is drawn."""
    with progress_bar() as draw_progress:
        draw_progress(
            Progress(
                phase="measure",
                fraction=0.5,
                answered_per_s=10.0,
                answered=5,
                errors=0,
                in_flight=1,
            )
        )

    assert capsys.readouterr() == ("", "")
