"""Looking models up by name and version, in every state they can be in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batcher.errors import (
    BatcherError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    ShuttingDown,
)
from batcher.serving.directory import ModelDirectory
from batcher.serving.model import Model
from batcher.serving.repository import ModelSource

from .desk import made_model


@pytest.fixture
def model() -> Iterator[Model]:
    """A model called `m`, version 3."""
    made = made_model(name="m", version="3")
    yield made
    made.close()


@pytest.fixture
def directory(model: Model) -> ModelDirectory:
    """Three models: one ready, one loading, one that failed."""
    found = ModelDirectory()
    found.expect(ModelSource(n, "3", Path(n), None) for n in ("m", "slow", "bad"))
    found.add(model)
    found.failed("bad", "no such operator")
    found.loading = False
    return found


@pytest.mark.parametrize("version", ["", "3"])
def test_a_ready_model_is_found(
    directory: ModelDirectory, model: Model, version: str
) -> None:
    """The version may be left out, or be the one there is."""
    assert directory.get("m", version) is model


@pytest.mark.parametrize(
    ("name", "version", "error", "says"),
    [
        ("nope", "", ModelNotFound, "unknown model: 'nope' is not found"),
        ("nope", "abc", ModelNotFound, "unknown model: 'nope'"),
        ("", "", ModelNotFound, "unknown model: ''"),
        ("m", "99", ModelNotFound, "model 'm' has no version 99; there is 3"),
        ("m", "abc", InvalidRequest, "'abc' is no positive whole number"),
        ("m", "-1", InvalidRequest, "'-1'"),
        ("m", "03", InvalidRequest, "'03'"),
        ("m", "3 ", InvalidRequest, "'3 '"),
        ("m", "9" * 1000, InvalidRequest, "'" + "9" * 50 + "'"),
        (
            "slow",
            "",
            ModelNotReady,
            "model 'slow' is not at ready state: it is loading",
        ),
        ("bad", "", ModelNotReady, "model 'bad' failed to load (see the server's log)"),
        ("n\n" * 200, "", ModelNotFound, r"unknown model: 'n\nn\n"),
    ],
)
def test_what_is_not_there_is_told(
    directory: ModelDirectory,
    name: str,
    version: str,
    error: type[BatcherError],
    says: str,
) -> None:
    """Unknown, malformed, loading and failed each have their error, short and plain."""
    with pytest.raises(BatcherError) as caught:
        directory.get(name, version)

    assert type(caught.value) is error
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_only_what_will_be_ready_has_a_retry_hint(directory: ModelDirectory) -> None:
    """A model that is loading is worth another try; one that failed is not."""
    hints = {}
    for name in ("slow", "bad"):
        with pytest.raises(ModelNotReady) as caught:
            directory.get(name, "")
        hints[name] = caught.value.retry_after_ms

    assert hints == {"slow": 1000, "bad": None}


def test_versions_are_those_that_are_served(directory: ModelDirectory) -> None:
    """A model's versions are listed; of an unknown model there are none to list."""
    assert directory.versions("m") == ["3"]
    with pytest.raises(ModelNotFound):
        directory.versions("nope")


def test_readiness_needs_the_end_of_loading(model: Model) -> None:
    """Ready is when loading is over and there is a model, and not before."""
    found = ModelDirectory()
    states = [found.ready]
    found.expect([ModelSource("m", "3", Path("m"), None)])
    states.append(found.ready)
    found.add(model)
    states.append(found.ready)
    found.loading = False
    states.append(found.ready)

    assert states == [False, False, False, True]


def test_a_dead_model_ends_readiness(directory: ModelDirectory, model: Model) -> None:
    """An orchestrator must see that a model cannot serve any more."""
    before = directory.ready
    model.dead = RuntimeError("gone")

    assert (before, directory.ready) == (True, False)


def test_a_drain_refuses_everything_new(
    directory: ModelDirectory, model: Model
) -> None:
    """Draining ends readiness, and every lookup says that the server shuts down."""
    directory.drain()

    assert (directory.ready, model.ready) == (False, False)
    for name in ("m", "nope"):
        with pytest.raises(ShuttingDown, match="shutting down"):
            directory.get(name, "")
