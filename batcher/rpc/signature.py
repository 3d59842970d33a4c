"""What a model looks like on the wire: names, datatypes, shapes, limits.

Made once per loaded model by the serving layer; everything that a request is checked
against. Immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batcher.rpc.datatypes import DATATYPES, Datatype

Axis = int | str | None
"""A fixed size, a named dynamic axis, or None for a dynamic axis without a name."""


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """One input or output.

    Attributes:
        name, datatype: as on the wire.
        axes: every axis of the tensor, the batch axis included.
    """

    name: str
    datatype: str
    axes: tuple[Axis, ...]

    @property
    def type(self) -> Datatype:
        """The datatype's row of the table."""
        return DATATYPES[self.datatype]

    @property
    def wire_shape(self) -> list[int]:
        """The shape with -1 for dynamic axes."""
        return [a if isinstance(a, int) else -1 for a in self.axes]


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """A model version as its callers see it.

    Attributes:
        name, version: as callers address it.
        platform: for ModelMetadata, such as "onnxruntime_onnx".
        inputs, outputs: in the engine's order.
        batched: whether axis 0 of every tensor is the batch.
        max_batch: rows of the largest batch (1 when not batched).
        max_rows: the most rows of one request; more than `max_batch` are split.
        utf8_strings: whether BYTES elements must be UTF-8 (the engine takes no others).
    """

    name: str
    version: str
    platform: str
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    batched: bool
    max_batch: int
    max_rows: int
    utf8_strings: bool = False
    input_index: dict[str, int] = field(init=False, repr=False, compare=False)
    output_index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {t.name: i for i, t in enumerate(self.inputs)}
        object.__setattr__(self, "input_index", index)
        index = {t.name: i for i, t in enumerate(self.outputs)}
        object.__setattr__(self, "output_index", index)
