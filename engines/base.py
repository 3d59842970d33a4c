"""The seam between engines and whoever runs them.

An `Engine` is a loaded, immutable network; an `ExecutionContext` is what one run at a
time happens in. Back ends: `engines.onnxruntime`, `engines.fake` (and TensorRT, which
fills the same seam). Nothing here knows a back end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.tensors import Shape, TensorSpec

Array = np.ndarray  # of any dtype and shape


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimization profile: the shapes an engine accepts, by input name.

    `min`, `opt` and `max` hold one shape per input, the batch axis included; the
    engine is tuned for `opt` (TensorRT developer guide, "optimization profiles").
    """

    min: Mapping[str, Shape]
    opt: Mapping[str, Shape]
    max: Mapping[str, Shape]


class ExecutionContext(ABC):
    """The mutable state of one run at a time. Not thread-safe."""

    @abstractmethod
    def execute(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        """Runs the network once.

        Args:
            inputs: one C-contiguous array per engine input, in the engine's order.
            outputs: per engine output an array to fill, or None where its shape is not
                known beforehand.

        Returns:
            One array per output, in order: the given ones, or new ones for None.

        Raises:
            EngineRunError: this run failed; the context can be used again.
            EngineDeadError: no run will succeed any more.
        """

    def enter_thread(self) -> None:  # noqa: B027 - the CPU needs none
        """Prepares the calling thread for using this context; called once on each."""

    def warm(self, shapes: Sequence[Shape]) -> None:  # noqa: B027 - nothing to prepare
        """Prepares runs of these input shapes, so that the first is as quick as others.

        Must be called by the thread that launches, or before there is one.

        Raises:
            EngineRunError, EngineDeadError: these shapes cannot be run.
        """

    def output_shapes(self, shapes: Sequence[Shape]) -> list[Shape | None] | None:
        """The shape of every output for these input shapes.

        Returns:
            None for outputs whose shape the values decide; None for all where the back
            end does not know before it runs.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most contexts have nothing to give back
        """Releases what the context holds. Calling it twice is allowed."""


class Launch(ABC):
    """A run that is under way."""

    @abstractmethod
    def wait(self) -> tuple[list[Array], int]:
        """Waits for its end.

        Returns:
            One array per output, as from `execute`; and the time that the device took,
            in ns.

        Raises:
            EngineRunError, EngineDeadError: as `execute`.
        """


class PipelinedContext(ExecutionContext):
    """A context that takes the next run while one is under way.

    `launch` and `wait` may be called from two threads, in the same order.
    """

    @abstractmethod
    def launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch:
        """Begins a run, behind the one that is under way; at most one waits so.

        Arguments and errors are those of `execute`. The arrays belong to the run until
        it has been waited for.
        """

    def try_launch(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> Launch | None:
        """Begins a run if that takes the host some microseconds only, on any thread.

        Never at the same time as `launch`, and with the same lists each time.

        Returns:
            None where it would take longer: nothing has begun.
        """
        return None

    def expect(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> None:
        """Works out, after `warm`, runs of these very lists of arrays beforehand.

        Raises:
            EngineRunError, EngineDeadError: they cannot be run.
        """

    def execute(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        return self.launch(inputs, outputs).wait()[0]


class Engine(ABC):
    """A loaded network, shared by its contexts.

    Attributes:
        backend: name of the back end ("onnxruntime", "fake", …).
        inputs, outputs: what it takes and gives, in order.
        profiles: the shapes it accepts; empty when it accepts all that fit the specs.
        warmed_cells_only: whether a shape that was never run costs so much that only
            warmed ones may be run (TensorRT) or any shape is as good (False).
        costs_path: where measured run times of this very engine may be kept.
    """

    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...] = ()
    warmed_cells_only: bool = False
    costs_path: Path | None = None

    @property
    def lost(self) -> str | None:
        """Why its process has ended, for an engine that lives in one of its own."""
        return None

    @abstractmethod
    def create_context(self) -> ExecutionContext:
        """A new context; several can run at the same time."""

    def host_buffer(self, size: int) -> memoryview:
        """`size` bytes of memory that inputs and outputs are best kept in."""
        # Numpy's memory is 64-byte aligned on large sizes and not zeroed.
        return np.empty(size, np.uint8).data

    def adopt_buffer(self, view: memoryview) -> None:  # noqa: B027 - see save_warm
        """Takes memory of another process that inputs and outputs will lie in.

        It begins a page and is zeroed. Called on any thread, maybe while there are
        runs. The view must not be kept; its bytes stay until `release_buffer`.

        Raises:
            Exception: it is used as it is, and not released.
        """

    def release_buffer(self, view: memoryview) -> None:  # noqa: B027 - see save_warm
        """Gives back what `adopt_buffer` took: the same bytes, before they are gone.

        Called on any thread, after the last run that uses them, and before `close`.
        """

    def save_warm(self) -> None:  # noqa: B027 - most back ends have nothing to keep
        """Keeps on disk what warming has made, where that helps the next start."""

    def close(self) -> None:  # noqa: B027 - see ExecutionContext.close
        """Releases the network, after all contexts. Calling it twice is allowed."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Runs once, alone: for tests and for looking at a model by hand.

        Raises:
            KeyError: an input is missing.
            EngineRunError: the run failed.
        """
        context = self.create_context()
        try:
            arrays = [
                np.ascontiguousarray(inputs[spec.name], dtype=spec.numpy)
                for spec in self.inputs
            ]
            results = context.execute(arrays, [None] * len(self.outputs))
            names = [spec.name for spec in self.outputs]
            return {n: r.copy() for n, r in zip(names, results, strict=True)}
        finally:
            context.close()
