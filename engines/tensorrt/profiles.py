"""Which optimization profiles an engine gets, from the batches that will be run.

Only the sizes of a warmed grid are run: batches go up to a rung, other dynamic axes to
a bucket. A profile is a box of that grid; an engine is tuned for one shape in it, its
`opt`, so a box that holds both very small and very large shapes is split. Pure: no
TensorRT, no files.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engines.base import Profile
from engines.errors import EngineLoadError
from engines.tensors import Axis, Shape, TensorSpec

MAX_PROFILES: Final = 4
"""Profiles made by default: each costs build time, and a context in every lane."""

SPREAD: Final = 16
"""A box whose largest shape has more than this many times the elements of its smallest
is split: kernels chosen for one are then some 5-10 % slow on the other (BERT-base,
32 x 128 tuned at 8 x 64 against tuned at 32 x 128, on an H200), and more on small ones.
"""


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """A dynamic axis and the sizes that are run of it.

    Attributes:
        name: the axis's name, or any name if `inputs` says where it is.
        sizes: its buckets, in any order.
        inputs: per input, which of its axes this is; empty: where the model names it.
    """

    name: str
    sizes: tuple[int, ...]
    inputs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grid:
    """All shapes that will be run: every combination of a size per dynamic axis.

    Attributes:
        inputs: of the engine.
        axes: per dynamic axis its sizes, ascending; the batch is the first, if any.
        places: per axis, the (input, axis) pairs it governs.
        batched: whether the first axis is the batch.
    """

    inputs: tuple[TensorSpec, ...]
    axes: tuple[tuple[int, ...], ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    batched: bool

    def shapes(self, sizes: Sequence[int]) -> dict[str, Shape]:
        """The shape of every input when the axes have these sizes."""
        made = [list(spec.wire_shape) for spec in self.inputs]
        for size, places in zip(sizes, self.places, strict=True):
            for position, axis in places:
                made[position][axis] = size
        names = [spec.name for spec in self.inputs]
        return {n: tuple(shape) for n, shape in zip(names, made, strict=True)}

    def cells(self) -> list[dict[str, Shape]]:
        """The shapes of every cell."""
        return [self.shapes(sizes) for sizes in itertools.product(*self.axes)]

    def corners(self) -> list[dict[str, Shape]]:
        """The shapes of every rung with the other axes all smallest, and all largest.

        What a new plan is compared on: every batch size, at the ends of the buckets.
        """
        rungs = self.axes[0] if self.batched else (0,)
        rest = self.axes[1:] if self.batched else self.axes
        ends = {tuple(a[0] for a in rest), tuple(a[-1] for a in rest)}
        first = [(rung,) if self.batched else () for rung in rungs]
        return [self.shapes((*r, *end)) for r in first for end in sorted(ends)]


def grid(
    inputs: Sequence[TensorSpec],
    *,
    rungs: Sequence[int] = (),
    axes: Sequence[AxisSizes] = (),
) -> Grid:
    """The shapes an engine will run.

    Args:
        inputs: of the engine.
        rungs: the batch sizes; empty for a model without a batch axis. The batch is
            axis 0, and every axis that has the name of the first input's axis 0.
        axes: the sizes of all other dynamic axes.

    Raises:
        EngineLoadError: a dynamic axis has no sizes, or sizes belong to no axis.
    """
    taken: dict[tuple[int, int], str] = {}
    all_sizes: list[tuple[int, ...]] = []
    all_places: list[tuple[tuple[int, int], ...]] = []
    if rungs:
        places = _batch_places(inputs)
        if places:
            taken.update(dict.fromkeys(places, "the batch"))
            all_sizes.append(_ascending("batch sizes", rungs))
            all_places.append(tuple(places))
    batched = bool(all_places)
    for axis in axes:
        places = _places(inputs, axis)
        for place in places:
            if place in taken:
                raise EngineLoadError(
                    f"axis {place[1]} of input {inputs[place[0]].name!r} cannot be "
                    f"both {taken[place]} and {axis.name!r}"
                )
            taken[place] = f"axis {axis.name!r}"
        all_sizes.append(_ascending(f"sizes of axis {axis.name!r}", axis.sizes))
        all_places.append(tuple(places))
    for position, spec in enumerate(inputs):
        for number, size in enumerate(spec.shape):
            if not isinstance(size, int) and (position, number) not in taken:
                raise EngineLoadError(_unbounded(spec, number, size, bool(rungs)))
    return Grid(tuple(inputs), tuple(all_sizes), tuple(all_places), batched)


def make_profiles(
    grid: Grid, *, limit: int = MAX_PROFILES, spread: float = SPREAD
) -> tuple[Profile, ...]:
    """The profiles of a grid: boxes that together hold all its cells without a gap.

    Sizes between two rungs are in a profile too, so that rungs can be changed later up
    to the largest. A static model gets one profile.

    `opt` is the geometric middle of a box (rounded up to a size of the grid), but the
    largest rung where the box holds it: that is what runs when the daemon is full.

    Args:
        grid: what will be run.
        limit: the most profiles to make; 1 never splits.
        spread: see `SPREAD`.
    """
    boxes: list[_Box] = [tuple(tuple(sizes) for sizes in grid.axes)]
    while len(boxes) < limit:
        widest = max(boxes, key=_spread)
        if _spread(widest) <= spread:
            break
        position = boxes.index(widest)
        boxes[position : position + 1] = _split(widest)
    boxes.sort(key=lambda box: [sizes[-1] for sizes in box])
    return tuple(_profile(grid, box) for box in boxes)


def check_profiles(inputs: Sequence[TensorSpec], profiles: Sequence[Profile]) -> None:
    """Refuses profiles that do not fit an engine's inputs.

    TensorRT itself takes some of these mistakes, and the first batch then fails.

    Raises:
        EngineLoadError: names the profile, the input and what its shape must be.
    """
    known = {spec.name: spec for spec in inputs}
    have = "; ".join(f"{s.name} {_text(s.shape)}" for s in inputs)
    for number, profile in enumerate(profiles):
        where = f"profile {number}"
        for kind in ("min", "opt", "max"):
            shapes: Mapping[str, Shape] = getattr(profile, kind)
            for name in shapes:
                if name not in known:
                    raise EngineLoadError(
                        f"{where}: the model has no input {name!r} (it has {have})"
                    )
            for name, spec in known.items():
                if name not in shapes and None in _sizes(spec):
                    raise EngineLoadError(
                        f"{where}: no {kind} shape for input {name!r} "
                        f"{_text(spec.shape)}"
                    )
        for name in profile.max:
            _check_shapes(f"{where}, input {name!r}", known[name], profile)


# -- the grid ---------------------------------------------------------------------


def _batch_places(inputs: Sequence[TensorSpec]) -> list[tuple[int, int]]:
    name = inputs[0].shape[0] if inputs and inputs[0].shape else None
    places = []
    for position, spec in enumerate(inputs):
        for number, size in enumerate(spec.shape):
            if isinstance(size, int):
                continue
            if number == 0 or (isinstance(name, str) and size == name):
                places.append((position, number))
    return places


def _places(inputs: Sequence[TensorSpec], axis: AxisSizes) -> list[tuple[int, int]]:
    names = [spec.name for spec in inputs]
    if not axis.inputs:
        places = [
            (position, number)
            for position, spec in enumerate(inputs)
            for number, size in enumerate(spec.shape)
            if size == axis.name
        ]
        if not places:
            dynamic = sorted(
                {s for spec in inputs for s in spec.shape if type(s) is str}
            )
            raise EngineLoadError(
                f"no input has an axis named {axis.name!r} (named axes: "
                f"{', '.join(dynamic) or 'none'}); say which it is with "
                f"`inputs = {{ {names[0] if names else 'NAME'} = 1 }}`"
            )
        return places
    places = []
    for name, number in axis.inputs.items():
        if name not in names:
            raise EngineLoadError(
                f"axis {axis.name!r}: the model has no input {name!r} (it has "
                f"{', '.join(names)})"
            )
        position = names.index(name)
        shape = inputs[position].shape
        if not 0 <= number < len(shape) or isinstance(shape[number], int):
            raise EngineLoadError(
                f"axis {axis.name!r}: axis {number} of input {name!r} {_text(shape)} "
                "is not dynamic"
            )
        places.append((position, number))
    return places


def _ascending(what: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if not sizes or min(sizes) < 1:
        raise EngineLoadError(f"{what}: at least one is needed, and none below 1")
    return tuple(sorted(set(sizes)))


def _unbounded(spec: TensorSpec, number: int, size: Axis, batched: bool) -> str:
    what = f"axis {number} ({size!r})" if size else f"axis {number} (without a name)"
    text = (
        f"input {spec.name!r} {_text(spec.shape)}: {what} has no limits, and TensorRT "
        "needs to know which sizes will be run"
    )
    if number == 0 and not batched:
        return f"{text}; if it is the batch, add to model.toml: max_batch = 32"
    key = size if isinstance(size, str) and size.isidentifier() else None
    table = key or (f'"{size}"' if isinstance(size, str) else "sequence")
    lines = f"[axes.{table}] / buckets = [32, 64, 128, 256]"
    if not isinstance(size, str):
        lines += f" / inputs = {{ {spec.name} = {number} }}"
    return (
        f"{text}; add to model.toml: {lines} (`sizes` in place of `buckets` where "
        "padding is not allowed)"
    )


# -- boxes ------------------------------------------------------------------------

_Box = tuple[tuple[int, ...], ...]  # per axis, the sizes of the grid that it holds


def _spread(box: _Box) -> float:
    spread = 1.0
    for sizes in box:
        spread *= sizes[-1] / sizes[0]
    return spread


def _split(box: _Box) -> list[_Box]:
    """Cuts the axis that spreads most, between the sizes next to its middle."""
    axis = max(range(len(box)), key=lambda i: box[i][-1] / box[i][0])
    sizes = box[axis]
    middle = (sizes[0] * sizes[-1]) ** 0.5
    cut = next(i for i, size in enumerate(sizes) if size > middle)
    return [
        (*box[:axis], part, *box[axis + 1 :]) for part in (sizes[:cut], sizes[cut:])
    ]


def _profile(grid: Grid, box: _Box) -> Profile:
    low, opt, high = [], [], []
    for position, (sizes, every) in enumerate(zip(box, grid.axes, strict=True)):
        first = every.index(sizes[0])
        # From just above the size below: no gap between neighbouring boxes.
        low.append(every[first - 1] + 1 if first else sizes[0])
        high.append(sizes[-1])
        if grid.batched and position == 0 and sizes[-1] == every[-1]:
            opt.append(sizes[-1])
        else:
            middle = (sizes[0] * sizes[-1]) ** 0.5
            opt.append(next(size for size in sizes if size >= middle))
    return Profile(grid.shapes(low), grid.shapes(opt), grid.shapes(high))


# -- checks -----------------------------------------------------------------------


def _check_shapes(where: str, spec: TensorSpec, profile: Profile) -> None:
    name = spec.name
    if name not in profile.min or name not in profile.opt:
        raise EngineLoadError(f"{where}: min, opt and max must name the same inputs")
    low, opt, high = profile.min[name], profile.opt[name], profile.max[name]
    for kind, shape in (("min", low), ("opt", opt), ("max", high)):
        if len(shape) != len(spec.shape):
            raise EngineLoadError(
                f"{where}: {kind} {_text(shape)} has {len(shape)} axes, but the input "
                f"has {len(spec.shape)}: {_text(spec.shape)}"
            )
        for number, (size, fixed) in enumerate(zip(shape, _sizes(spec), strict=True)):
            if fixed is not None and size != fixed:
                raise EngineLoadError(
                    f"{where}: axis {number} of {kind} {_text(shape)} must be {fixed}, "
                    f"as in the model: {_text(spec.shape)}"
                )
            if size < 1 and fixed is None:
                raise EngineLoadError(
                    f"{where}: axis {number} of {kind} {_text(shape)} is below 1"
                )
    for number, (a, b, c) in enumerate(zip(low, opt, high, strict=True)):
        if not a <= b <= c:
            raise EngineLoadError(
                f"{where}: axis {number} has min {a}, opt {b}, max {c}; it must be "
                "min <= opt <= max"
            )


def _sizes(spec: TensorSpec) -> list[int | None]:
    return [size if isinstance(size, int) else None for size in spec.shape]


def _text(shape: Sequence[Axis]) -> str:
    sizes = ("?" if size is None else str(size) for size in shape)
    return f"[{', '.join(sizes)}]"
