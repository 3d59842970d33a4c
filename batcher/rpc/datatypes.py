"""The datatypes of the protocol: sizes, numpy types, typed fields.

The table is the contract of KServe v2 and Triton (protocol notes §1.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype.

    Attributes:
        name: on the wire.
        itemsize: bytes of an element; 0 for BYTES, which has no fixed size.
        field: of `InferTensorContents` that carries it typed, None for raw only.
        numpy: the numpy dtype of the typed values; FP16 and BF16 travel raw only.
        number: in Triton's `ModelConfig.DataType`.
    """

    name: str
    itemsize: int
    field: str | None
    numpy: np.dtype | None
    number: int


_TABLE: Final = (
    ("BOOL", 1, "bool_contents", np.bool_, 1),
    ("UINT8", 1, "uint_contents", np.uint8, 2),
    ("UINT16", 2, "uint_contents", np.uint16, 3),
    ("UINT32", 4, "uint_contents", np.uint32, 4),
    ("UINT64", 8, "uint64_contents", np.uint64, 5),
    ("INT8", 1, "int_contents", np.int8, 6),
    ("INT16", 2, "int_contents", np.int16, 7),
    ("INT32", 4, "int_contents", np.int32, 8),
    ("INT64", 8, "int64_contents", np.int64, 9),
    ("FP16", 2, None, None, 10),
    ("FP32", 4, "fp32_contents", np.float32, 11),
    ("FP64", 8, "fp64_contents", np.float64, 12),
    ("BYTES", 0, "bytes_contents", None, 13),
    ("BF16", 2, None, None, 14),
)

DATATYPES: Final = {
    name: Datatype(name, size, field, None if kind is None else np.dtype(kind), number)
    for name, size, field, kind, number in _TABLE
}
"""Every datatype by its name."""

CONTENTS_FIELDS: Final = tuple(
    dict.fromkeys(d.field for d in DATATYPES.values() if d.field is not None)
)
"""The fields of `InferTensorContents`."""
