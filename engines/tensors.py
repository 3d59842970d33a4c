"""Tensors as an engine sees them: names, dtypes and shapes with dynamic axes.

The dtype names are those of the KServe v2 protocol (FP32, INT64, BYTES, …), because
they are exact and short. Nothing of requests here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

Axis = int | str | None
"""A fixed size, the name of a dynamic axis, or None for a dynamic axis without one."""

Shape = tuple[int, ...]

DTYPES: Final[dict[str, np.dtype]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(object),
}
"""Protocol name to numpy dtype; BYTES elements are Python `bytes` objects."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of an engine.

    Attributes:
        name: as in the model file.
        dtype: a key of `DTYPES`.
        shape: every axis, the batch axis included.
    """

    name: str
    dtype: str
    shape: tuple[Axis, ...]

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype of the elements."""
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element (0 for BYTES, whose elements have no fixed size)."""
        return 0 if self.dtype == "BYTES" else self.numpy.itemsize

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """The shape with -1 for every dynamic axis."""
        return tuple(a if isinstance(a, int) else -1 for a in self.shape)


def element_count(shape: Shape) -> int:
    """The product of the axes, as a Python int that cannot overflow."""
    count = 1
    for axis in shape:
        count *= axis
    return count
