"""From a request's shapes to its place in a batch: groups, buckets, cuts.

`ModelShapes` holds the rules of one model (which axes may be padded, to what), made
once at load from the engine and the model's file. `GroupFit` is shared by all requests
of a group, `RequestFit` by all requests with the same header.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from batcher.config import AxisConfig
from batcher.errors import ConfigError, InvalidRequest
from batcher.rpc.request import Shape
from batcher.serving.fits import AxisRule, GroupFit, RequestFit
from engines import TensorSpec

_MAX_GROUPS: Final = 256  # whose fits are kept

MAX_OUTPUT_BYTES: Final = 2**31 - 1
"""What a gRPC message can hold at most."""


class ModelShapes:
    """The shape rules of one model.

    Args:
        inputs, outputs: of the engine.
        batched: whether axis 0 of all of them is the batch.
        axes: the `[axes.*]` tables.

    Raises:
        ConfigError: a table names an axis, input or output that is not there.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        batched: bool,
        axes: dict[str, AxisConfig],
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.batched = batched
        self.rules = tuple(self._rule(n, config) for n, config in axes.items())
        self._check_rules()
        self._predict_outputs = True
        self._learned: dict[tuple[Shape, ...], tuple[Shape | None, ...]] = {}
        self._groups: dict[tuple[Shape, ...], GroupFit] = {}

    @property
    def predict_outputs(self) -> bool:
        """Whether output shapes follow from the axis names (warm-up checks it)."""
        return self._predict_outputs

    @predict_outputs.setter
    def predict_outputs(self, value: bool) -> None:
        self._predict_outputs = value
        self._groups.clear()

    def learn(
        self, in_tails: tuple[Shape, ...], out_tails: tuple[Shape | None, ...]
    ) -> None:
        """Takes what the engine says of the outputs of a group, in place of names."""
        self._learned[in_tails] = out_tails
        self._groups.clear()

    def group(self, in_tails: tuple[Shape, ...]) -> GroupFit:
        """How batches of a group lie in the buffers; mostly the same object."""
        group = self._groups.get(in_tails)
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            group = self._groups[in_tails] = GroupFit(
                self.batched,
                in_tails,
                tuple(
                    spec.itemsize * math.prod(tail)
                    for spec, tail in zip(self.inputs, in_tails, strict=True)
                ),
                self._out_tails(in_tails),
            )
        return group

    @property
    def pad_values(self) -> list[float]:
        """Per input, the value that its padding holds."""
        values = [0.0] * len(self.inputs)
        for rule in self.rules:
            for index, value in rule.pad.items():
                values[index] = value
        return values

    def fit(self, shapes: tuple[Shape, ...]) -> RequestFit:
        """The fit of a request with these input shapes (batch axis included).

        Raises:
            InvalidRequest: an axis has a size that no bucket holds, or an output
                would be larger than a message can be.
        """
        first = 1 if self.batched else 0
        padded = [list(shape) for shape in shapes]
        taken = [list(shape) for shape in shapes]
        cuts: list[list[tuple[int, int]]] = [[] for _ in self.outputs]
        exact = True
        for rule in self.rules:
            size = self._size(rule, shapes)
            bucket = rule.bucket(size)
            if bucket == size:
                continue
            exact = False
            used = min(size, bucket)
            for index, axis in rule.places:
                padded[index][axis] = bucket
                taken[index][axis] = used
            for index, (axis, ratio) in rule.outputs.items():
                cuts[index].append((axis, cut_size(used, ratio)))
        group = self.group(tuple(tuple(shape[first:]) for shape in padded))
        rows = shapes[0][0] if self.batched else 1
        self._check_answer(rows, group.out_tails)
        return RequestFit(
            group,
            exact,
            tuple(tuple(shape[first:]) for shape in taken),
            tuple(tuple(c) for c in cuts),
        )

    def _size(self, rule: AxisRule, shapes: tuple[Shape, ...]) -> int:
        sizes = {shapes[index][axis] for index, axis in rule.places}
        if len(sizes) > 1:
            names = ", ".join(
                f"{self.inputs[i].name!r}: {shapes[i][axis]}" for i, axis in rule.places
            )
            raise InvalidRequest(f"the inputs disagree on axis {rule.name!r}: {names}")
        return sizes.pop()

    def _out_tails(self, in_tails: tuple[Shape, ...]) -> tuple[Shape | None, ...]:
        learned = self._learned.get(in_tails)
        if learned is not None:
            return learned
        if not self._predict_outputs:
            return (None,) * len(self.outputs)
        first = 1 if self.batched else 0
        known = {
            axis: size
            for spec, tail in zip(self.inputs, in_tails, strict=True)
            for axis, size in zip(spec.shape[first:], tail, strict=True)
            if isinstance(axis, str)
        }
        tails: list[Shape | None] = []
        for spec in self.outputs:
            axes = spec.shape[first:]
            tail = [a if isinstance(a, int) else known.get(a or "") for a in axes]
            sizes = [size for size in tail if size is not None]
            tails.append(tuple(sizes) if len(sizes) == len(tail) else None)
        return tuple(tails)

    def _check_answer(self, rows: int, tails: tuple[Shape | None, ...]) -> None:
        """Refuses what asks for more than a message can hold, before it is run."""
        for spec, tail in zip(self.outputs, tails, strict=True):
            if tail is not None:
                size = rows * math.prod(tail) * spec.itemsize
                if size > MAX_OUTPUT_BYTES:
                    raise InvalidRequest(
                        f"output {spec.name!r} would be of {size} bytes for inputs of "
                        f"these shapes; a message holds {MAX_OUTPUT_BYTES}"
                    )

    def _rule(self, name: str, config: AxisConfig) -> AxisRule:
        inputs = {spec.name: i for i, spec in enumerate(self.inputs)}
        outputs = {spec.name: i for i, spec in enumerate(self.outputs)}
        first = 1 if self.batched else 0
        if config.inputs:
            places = []
            for tensor, axis in config.inputs.items():
                index = _known(f"axes.{name}.inputs", tensor, inputs)
                shape = self.inputs[index].shape
                if not first <= axis < len(shape) or isinstance(shape[axis], int):
                    raise ConfigError(
                        f"axes.{name}.inputs.{tensor} = {axis}: that axis of "
                        f"{list(shape)} is not there, not dynamic, or the batch"
                    )
                places.append((index, axis))
        else:
            places = [
                (i, axis)
                for i, spec in enumerate(self.inputs)
                for axis, label in enumerate(spec.shape)
                if label == name and axis >= first
            ]
        if not places:
            raise ConfigError(
                f"axes.{name}: no input has an axis of that name "
                f"({self._dynamic_axes()}); name the table after one, or say where it "
                f"is with axes.{name}.inputs"
            )
        pad = {
            _known(f"axes.{name}.pad", tensor, inputs): value
            for tensor, value in config.pad.items()
        }
        if config.buckets:
            for index, _ in places:
                if index not in pad:
                    raise ConfigError(
                        f"axes.{name}.pad: a value for input "
                        f"{self.inputs[index].name!r} is needed, it has this axis"
                    )
                if self.inputs[index].dtype == "BYTES":
                    raise ConfigError(
                        f"axes.{name}: input {self.inputs[index].name!r} is BYTES, "
                        "which cannot be padded"
                    )
        for index, value in pad.items():
            _check_pad(f"axes.{name}.pad", self.inputs[index], value)
        cuts: dict[int, tuple[int, float]] = {}
        for tensor, output in config.outputs.items():
            index = _known(f"axes.{name}.outputs", tensor, outputs)
            if output.axis >= len(self.outputs[index].shape):
                raise ConfigError(
                    f"axes.{name}.outputs.{tensor}.axis = {output.axis}: the output "
                    f"has only {len(self.outputs[index].shape)} axes"
                )
            if output.follows not in ("", name):
                raise ConfigError(
                    f"axes.{name}.outputs.{tensor}.follows = {output.follows!r}: in "
                    f"this table it can only be {name!r}"
                )
            cuts[index] = (output.axis, output.ratio)
        return AxisRule(
            name,
            tuple(places),
            config.buckets or config.sizes,
            bool(config.buckets),
            config.too_long == "truncate",
            pad,
            cuts,
        )

    def _check_rules(self) -> None:
        """What two tables must not both say."""
        places: dict[tuple[int, int], str] = {}
        values: dict[int, tuple[str, float]] = {}
        for rule in self.rules:
            for index, axis in rule.places:
                other = places.setdefault((index, axis), rule.name)
                if other != rule.name:
                    raise ConfigError(
                        f"axes.{other} and axes.{rule.name} are both about axis {axis} "
                        f"of input {self.inputs[index].name!r}"
                    )
            for index, value in rule.pad.items():
                other, known = values.setdefault(index, (rule.name, value))
                if repr(known) != repr(value):  # nan is nan
                    raise ConfigError(
                        f"axes.{other}.pad and axes.{rule.name}.pad give input "
                        f"{self.inputs[index].name!r} different values: {known:g} and "
                        f"{value:g}"
                    )

    def _dynamic_axes(self) -> str:
        first = 1 if self.batched else 0
        names = [
            f"{spec.name!r} axis {i}: {axis or 'unnamed'}"
            for spec in self.inputs
            for i, axis in enumerate(spec.shape)
            if not isinstance(axis, int) and i >= first
        ]
        return "dynamic are " + ", ".join(names) if names else "none is dynamic"


def cut_size(size: int, ratio: float) -> int:
    """Output elements for `size` input elements, rounded up."""
    # 70 * 0.1 is 7.000000000000001: what is less than a millionth is not an element.
    return math.ceil(round(size * ratio, 6))


def _check_pad(where: str, spec: TensorSpec, value: float) -> None:
    """Whether an element of this datatype can hold the value."""
    if spec.dtype == "BYTES":
        return
    if spec.numpy.kind in "biu":
        least, most = (0, 1) if spec.dtype == "BOOL" else _limits(spec)
        fits = value.is_integer() and least <= value <= most
    else:
        with np.errstate(over="ignore"):
            kept = float(np.array(value).astype(spec.numpy))
        fits = math.isfinite(kept) or not math.isfinite(value)
    if not fits:
        raise ConfigError(
            f"{where}.{spec.name} = {value:g}: input {spec.name!r} is {spec.dtype}, "
            "which cannot hold that"
        )


def _limits(spec: TensorSpec) -> tuple[int, int]:
    limits = np.iinfo(spec.numpy)
    return int(limits.min), int(limits.max)


def _known(where: str, name: str, names: dict[str, int]) -> int:
    if name not in names:
        raise ConfigError(f"{where}: no {name!r}; there are {sorted(names)}")
    return names[name]
