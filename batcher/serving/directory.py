"""Which models there are, and in what state: what the services look models up in."""

from __future__ import annotations

from collections.abc import Iterable

from batcher.errors import (
    BatcherError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    ShuttingDown,
)
from batcher.serving.model import Model
from batcher.serving.repository import ModelSource, is_version


class ModelDirectory:
    """All models by name; one version each.

    A model is loading from `expect` on, then ready (`add`) or failed (`failed`).
    """

    def __init__(self) -> None:
        self._sources: dict[str, ModelSource] = {}
        self._models: dict[str, Model] = {}
        self._faults: dict[str, str] = {}
        self.loading = True
        self.draining = False

    @property
    def ready(self) -> bool:
        """Whether requests are taken: loading is over, models are there, no drain."""
        return (
            not self.loading
            and not self.draining
            and bool(self._models)
            and all(model.dead is None for model in self._models.values())
        )

    def expect(self, sources: Iterable[ModelSource]) -> None:
        """The models that are going to be loaded."""
        self._sources = {source.name: source for source in sources}

    def add(self, model: Model) -> None:
        """A model is ready."""
        self._models[model.signature.name] = model

    def failed(self, name: str, fault: str) -> None:
        """A model cannot be loaded."""
        self._faults[name] = fault

    def source(self, name: str) -> ModelSource:
        """Where a model comes from."""
        return self._sources[name]

    def drain(self) -> None:
        """Nothing new is taken from now on."""
        self.draining = True
        for model in self._models.values():
            model.drain(_shutting_down())

    def get(self, name: str, version: str) -> Model:
        """See `batcher.rpc.service.Directory.get`."""
        if self.draining:
            raise _shutting_down()
        shown = repr(name[:200])
        source = self._sources.get(name)
        if source is None:
            raise ModelNotFound(f"unknown model: {shown} is not found")
        if version:
            if not is_version(version):
                raise InvalidRequest(
                    f"model version {version[:50]!r} is no positive whole number"
                )
            if version != source.version:
                raise ModelNotFound(
                    f"model {shown} has no version {version}; there is {source.version}"
                )
        model = self._models.get(name)
        if model is not None:
            return model
        if name in self._faults:
            error: BatcherError = ModelNotReady(
                f"model {shown} failed to load (see the server's log)"
            )
            error.retry_after_ms = None  # trying again will not help
            raise error
        raise ModelNotReady(f"model {shown} is not at ready state: it is loading")

    def versions(self, name: str) -> list[str]:
        """The versions of a model that exists.

        Raises:
            ModelNotFound, ModelNotReady: see `get`.
        """
        return [self.get(name, "").signature.version]

    def all(self) -> list[Model]:
        """Every model that is ready."""
        return list(self._models.values())

    @property
    def faults(self) -> dict[str, str]:
        """Why models failed to load, by name."""
        return self._faults


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is shutting down")
