"""Whether a new plan computes what its model does: outputs compared in numbers.

Takes arrays and callables only: no GPU, no TensorRT. What counts as equal depends on
the precision, since 16 bits cannot give what 32 do; a plan that fails is not served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np

from engines.base import Array

Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
Outputs = Mapping[str, Array]
Run = Callable[[Mapping[str, Array]], Outputs]
"""Runs a network once: arrays by input name to arrays by output name."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What an output may differ by at most. Errors are relative to its scale.

    Attributes:
        max_error: largest difference, in shares of the largest reference value.
        mean_error: mean difference, in shares of the mean reference magnitude.
        cosine: the least cosine between the two.
        agreement: the least share of equal values of integers and booleans, and of
            rows whose largest score is at the same place.
    """

    max_error: float
    mean_error: float
    cosine: float
    agreement: float


THRESHOLDS: Final[dict[Precision, Thresholds]] = {
    # fp32 stands for TF32, which TensorRT uses unless told not to: 10 bits of mantissa,
    # as fp16 has, but accumulated and stored in 32.
    "fp32": Thresholds(0.01, 0.003, 0.9999, 0.99),
    "fp16": Thresholds(0.03, 0.01, 0.999, 0.98),
    "bf16": Thresholds(0.15, 0.05, 0.99, 0.95),
    "fp8": Thresholds(0.3, 0.15, 0.97, 0.9),
    "int8": Thresholds(0.3, 0.15, 0.97, 0.9),
}
"""By the lowest precision in the network. ResNet-50 and BERT-base in fp16 on an H200
have a cosine of 0.999995 and more to fp32; these leave room for other networks."""


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output over all samples.

    Attributes:
        name: of the output.
        values: elements compared.
        max_abs, mean_abs: of the difference.
        max_error, mean_error: the same, relative: see `Thresholds`.
        cosine: the least of all samples (1 for outputs that are no floats).
        agreement: of integers and booleans the share of equal values; of floats with
            rows the share of rows whose largest value is at the same place, where the
            reference's lead is larger than the error that is allowed; 1 without any.
        top1: the same for all rows, however close the race (None if there are none).
        nonfinite: values that are NaN or infinite in one and not in the other.
        problems: what is wrong, in words; empty if it passes.
    """

    name: str
    values: int
    max_abs: float
    mean_abs: float
    max_error: float
    mean_error: float
    cosine: float
    agreement: float
    top1: float | None
    nonfinite: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison gave.

    Attributes:
        precision: whose thresholds were applied.
        samples: runs compared.
        outputs: one each, in the reference's order.
    """

    precision: Precision
    samples: int
    outputs: tuple[OutputComparison, ...]

    @property
    def passed(self) -> bool:
        """Whether every output is within its thresholds."""
        return self.samples > 0 and not any(output.problems for output in self.outputs)

    @property
    def problems(self) -> list[str]:
        """All that is wrong, each with its output."""
        found = [f"output {o.name!r}: {p}" for o in self.outputs for p in o.problems]
        return found if self.samples else ["nothing was compared"]

    def table(self) -> str:
        """The numbers, one output a line, in columns."""
        limits = THRESHOLDS[self.precision]
        rows = [
            ("output", "max abs", "mean abs", "max rel", "mean rel", "cosine", "top-1"),
            *(_row(output) for output in self.outputs),
            (
                f"({self.precision} limit)",
                "",
                "",
                f"{limits.max_error:.1e}",
                f"{limits.mean_error:.1e}",
                f"{limits.cosine:.6f}",
                f"{limits.agreement:.3f}",
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if position == 0 else cell.rjust(width)
                for position, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        verdict = "passed" if self.passed else "FAILED: " + "; ".join(self.problems)
        return "\n".join([*lines, f"{self.samples} samples, {verdict}"])

    def to_json(self) -> dict[str, Any]:
        """The numbers for a sidecar; JSON has no NaN, so it stands as text."""

        def plain(value: Any) -> Any:
            finite = not isinstance(value, float) or math.isfinite(value)
            return value if finite else str(value)

        outputs = [
            {k: plain(v) for k, v in asdict(output).items()} for output in self.outputs
        ]
        for output in outputs:
            output["problems"] = list(output["problems"])
        return {
            "precision": self.precision,
            "samples": self.samples,
            "passed": self.passed,
            "outputs": outputs,
        }


def compare(
    reference: Outputs | Sequence[Outputs],
    candidate: Outputs | Sequence[Outputs],
    precision: Precision,
    *,
    thresholds: Thresholds | None = None,
) -> Comparison:
    """Compares outputs by name.

    Args:
        reference, candidate: the outputs of one run, or of several in the same order.
        precision: chooses the thresholds.
        thresholds: in place of those.
    """
    expected = [reference] if isinstance(reference, Mapping) else list(reference)
    actual = [candidate] if isinstance(candidate, Mapping) else list(candidate)
    made = _Comparer(precision, thresholds)
    for one, other in zip(expected, actual, strict=True):
        made.add(one, other)
    return made.result()


def check(
    reference: Run,
    candidate: Run,
    samples: Iterable[Mapping[str, Array]],
    precision: Precision,
    *,
    thresholds: Thresholds | None = None,
    progress: Callable[[int], object] | None = None,
) -> Comparison:
    """Runs both on every sample and compares, holding one sample's outputs at a time.

    Args:
        reference, candidate: for example ONNX Runtime and the new plan.
        samples: inputs by name.
        precision, thresholds: as for `compare`.
        progress: told how many samples are done.
    """
    made = _Comparer(precision, thresholds)
    for done, sample in enumerate(samples, start=1):
        made.add(reference(sample), candidate(sample))
        if progress is not None:
            progress(done)
    return made.result()


class _Comparer:
    def __init__(self, precision: Precision, thresholds: Thresholds | None) -> None:
        self._precision: Precision = precision
        self._limits = thresholds or THRESHOLDS[precision]
        self._sums: dict[str, _Sums] = {}
        self._samples = 0

    def add(self, reference: Outputs, candidate: Outputs) -> None:
        self._samples += 1
        for name in [*reference, *(n for n in candidate if n not in reference)]:
            sums = self._sums.setdefault(name, _Sums(self._limits))
            if name not in candidate or name not in reference:
                which = "the candidate" if name in reference else "the reference"
                sums.faults.setdefault(f"{which} has no such output")
            else:
                sums.add(np.asarray(reference[name]), np.asarray(candidate[name]))

    def result(self) -> Comparison:
        outputs = tuple(s.result(name) for name, s in self._sums.items())
        return Comparison(self._precision, self._samples, outputs)


@dataclass(slots=True)
class _Sums:
    """One output, added up over the samples in float64."""

    limits: Thresholds
    faults: dict[str, None] = field(default_factory=dict)
    values: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    max_reference: float = 0.0
    sum_reference: float = 0.0
    cosine: float = 1.0
    nonfinite: int = 0
    compared: int = 0  # equal or not: integers, and rows with a clear winner
    agreed: int = 0
    rows: int = 0
    rows_agreed: int = 0

    def add(self, expected: Array, actual: Array) -> None:
        if expected.shape != actual.shape:
            self.faults.setdefault(
                f"has shape {list(actual.shape)}, and the reference "
                f"{list(expected.shape)}"
            )
            return
        if expected.dtype != actual.dtype:
            self.faults.setdefault(
                f"is {actual.dtype}, and the reference {expected.dtype}"
            )
            return
        self.values += expected.size
        if expected.size == 0:
            return
        if expected.dtype.kind in "biuOSU":
            self._add_exact(expected, actual)
        else:
            self._add_floats(expected.astype(np.float64), actual.astype(np.float64))

    def _add_exact(self, expected: Array, actual: Array) -> None:
        equal = expected == actual
        self.compared += expected.size
        self.agreed += int(np.count_nonzero(equal))
        if expected.dtype.kind in "iu" and not equal.all():
            # In float64: a difference of two unsigned numbers may not exist in them.
            difference = np.abs(expected.astype(np.float64) - actual.astype(np.float64))
            self.max_abs = max(self.max_abs, float(difference.max()))
            self.sum_abs += float(difference.sum())

    def _add_floats(self, expected: Array, actual: Array) -> None:
        finite = np.isfinite(expected) & np.isfinite(actual)
        same = np.isnan(expected) & np.isnan(actual)
        same |= expected == actual  # infinities of one sign
        self.nonfinite += int(np.count_nonzero(~finite & ~same))
        a, b = expected[finite], actual[finite]
        if a.size == 0:
            return
        difference = np.abs(a - b)
        self.max_abs = max(self.max_abs, float(difference.max()))
        self.sum_abs += float(difference.sum())
        scale = float(np.abs(a).max())
        self.max_reference = max(self.max_reference, scale)
        self.sum_reference += float(np.abs(a).sum())
        self.cosine = min(self.cosine, _cosine(a, b))
        if expected.ndim >= 2 and expected.shape[-1] > 1:
            self._add_rows(expected, actual, scale)

    def _add_rows(self, expected: Array, actual: Array, scale: float) -> None:
        width = expected.shape[-1]
        a, b = expected.reshape(-1, width), actual.reshape(-1, width)
        whole = np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1)
        a, b = a[whole], b[whole]
        if not len(a):
            return
        first, second = a.argmax(axis=1), b.argmax(axis=1)
        equal = first == second
        highest = np.partition(a, -2, axis=1)[:, -2:]
        lead = highest[:, 1] - highest[:, 0]
        clear = lead > 2 * self.limits.max_error * scale
        self.rows += len(a)
        self.rows_agreed += int(np.count_nonzero(equal))
        self.compared += int(np.count_nonzero(clear))
        self.agreed += int(np.count_nonzero(equal & clear))

    def result(self, name: str) -> OutputComparison:
        limits = self.limits
        max_error = _ratio(self.max_abs, self.max_reference)
        mean_error = _ratio(self.sum_abs, self.sum_reference)
        agreement = self.agreed / self.compared if self.compared else 1.0
        problems = list(self.faults)
        if self.nonfinite:
            problems.append(f"{self.nonfinite} values are NaN or infinite in one only")
        if self.sum_reference or self.cosine < 1:  # floats; integers have `agreement`
            for what, value, limit in (
                ("max error", max_error, limits.max_error),
                ("mean error", mean_error, limits.mean_error),
            ):
                if value > limit:
                    problems.append(f"{what} {value:.3g} is above {limit:g}")
            if self.cosine < limits.cosine:
                problems.append(f"cosine {self.cosine:.6f} is below {limits.cosine:g}")
        if agreement < limits.agreement:
            problems.append(f"agreement {agreement:.4f} is below {limits.agreement:g}")
        return OutputComparison(
            name=name,
            values=self.values,
            max_abs=self.max_abs,
            mean_abs=self.sum_abs / self.values if self.values else 0.0,
            max_error=max_error,
            mean_error=mean_error,
            cosine=self.cosine,
            agreement=agreement,
            top1=self.rows_agreed / self.rows if self.rows else None,
            nonfinite=self.nonfinite,
            problems=tuple(problems),
        )


def _cosine(a: Array, b: Array) -> float:
    # Scaled first: squares of large values would not fit.
    a = a / (np.abs(a).max() or 1.0)
    b = b / (np.abs(b).max() or 1.0)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    if norms == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return min(1.0, float(np.dot(a.ravel(), b.ravel())) / norms)


def _ratio(error: float, reference: float) -> float:
    return error / reference if reference else (0.0 if not error else math.inf)


def _row(output: OutputComparison) -> tuple[str, ...]:
    shown = output.top1 if output.top1 is not None else output.agreement
    return (
        output.name,
        f"{output.max_abs:.2e}",
        f"{output.mean_abs:.2e}",
        f"{output.max_error:.1e}",
        f"{output.mean_error:.1e}",
        f"{output.cosine:.6f}",
        f"{shown:.3f}",
    )
