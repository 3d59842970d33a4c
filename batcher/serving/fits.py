"""Where the rows of requests go in a batch: axis rules, fits of groups and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batcher.errors import InvalidRequest
from batcher.rpc.request import Shape
from engines import Cell


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One `[axes.NAME]` table, resolved against the model.

    Attributes:
        name: of the table.
        places: (input index, axis) of every input axis it governs.
        buckets: sizes to pad to, or the allowed sizes, ascending.
        padded: whether padding is allowed.
        truncate: whether what is longer than the largest bucket is cut.
        pad: per input index, the pad value.
        outputs: per output index, (axis, ratio) to cut back.
    """

    name: str
    places: tuple[tuple[int, int], ...]
    buckets: tuple[int, ...]
    padded: bool
    truncate: bool
    pad: dict[int, float]
    outputs: dict[int, tuple[int, float]]

    def bucket(self, size: int) -> int:
        """The size that `size` is run at.

        Raises:
            InvalidRequest: no bucket holds it; the text names those there are.
        """
        if self.padded:
            for bucket in self.buckets:
                if bucket >= size:
                    return bucket
            if self.truncate:
                return self.buckets[-1]
        elif size in self.buckets:
            return size
        what = "at most" if self.padded else "one of"
        sizes = self.buckets[-1] if self.padded else list(self.buckets)
        raise InvalidRequest(
            f"axis {self.name!r} has {size} elements; it must have {what} {sizes}"
        )


class GroupFit:
    """How batches of one group lie in the buffers.

    Attributes:
        in_tails: per input, the shape of one row (of the whole, when not batched).
        in_row_bytes: per input, bytes of one row (0 for BYTES).
        out_tails: per output, the shape of one row, None where it is not known.
    """

    __slots__ = ("_batched", "_cells", "in_row_bytes", "in_tails", "out_tails")

    def __init__(
        self,
        batched: bool,
        in_tails: tuple[Shape, ...],
        in_row_bytes: tuple[int, ...],
        out_tails: tuple[Shape | None, ...],
    ) -> None:
        self._batched = batched
        self.in_tails = in_tails
        self.in_row_bytes = in_row_bytes
        self.out_tails = out_tails
        self._cells: dict[int, Cell] = {}

    def cell(self, rung: int) -> Cell:
        """The shapes of a batch of `rung` rows; always the same object."""
        cell = self._cells.get(rung)
        if cell is None:
            ins: Sequence[Shape] = self.in_tails
            outs: Sequence[Shape | None] = self.out_tails
            if self._batched:
                ins = [(rung, *tail) for tail in ins]
                outs = [None if tail is None else (rung, *tail) for tail in outs]
            cell = self._cells[rung] = Cell(ins, outs)
        return cell


class RequestFit:
    """How the rows of requests with one header fit their group's batches.

    Attributes:
        group: the group's fit.
        exact: whether the rows can be copied as they are (no axis is padded or cut).
        taken: per input, the shape of one row that is used (less than what was sent
            where it is truncated).
        cuts: per output, ((axis, size), …) to cut the answer back to.
    """

    __slots__ = ("cuts", "exact", "group", "taken")

    def __init__(
        self,
        group: GroupFit,
        exact: bool,
        taken: tuple[Shape, ...],
        cuts: tuple[tuple[tuple[int, int], ...], ...],
    ) -> None:
        self.group = group
        self.exact = exact
        self.taken = taken
        self.cuts = cuts
