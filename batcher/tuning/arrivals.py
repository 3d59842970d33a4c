"""Open-loop arrivals: when each request is due and which body it carries.

An arrival process is a frozen value; `draw` turns it and a seed into one sequence that
does not depend on how many processes send it. The same seed gives the same unit-rate
gaps at every rate, so that rates and policies are compared on the same randomness.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from batcher.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_CHUNK: Final = 4096


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    rate_per_s: float
    """Mean requests per second."""

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Bursty (or smooth) arrivals: Gamma gaps of a given coefficient of variation."""

    rate_per_s: float
    """Mean requests per second."""

    cv: float
    """Standard deviation of the gaps over their mean; 1 is Poisson, 4 very bursty."""

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)
        if not self.cv > 0:
            raise ConfigError(f"cv is {self.cv}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Constant:
    """Equal gaps."""

    rate_per_s: float
    """Requests per second."""

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals that were recorded; see `read_trace` for the file."""

    offsets_ns: array[int]
    """Nanoseconds from the start of the run (warm-up included), not decreasing."""

    bodies: array[int] | None = None
    """Index of each arrival's body; None draws them by weight."""

    def __post_init__(self) -> None:
        if not self.offsets_ns:
            raise ConfigError("the trace has no arrivals")

    @property
    def length_ns(self) -> int:
        """Nanoseconds from the start of the run to the last arrival."""
        return self.offsets_ns[-1]


Arrivals = Poisson | Gamma | Constant | Trace


def _check_rate(rate_per_s: float) -> None:
    if not 0 < rate_per_s < float("inf"):
        raise ConfigError(f"rate_per_s is {rate_per_s}; it must be above 0")


def read_trace(path: Path) -> Trace:
    """Read a trace: a line per arrival, its offset in seconds and maybe a body index.

    The two are separated by a comma or spaces; what follows a `#` is a comment.

    Raises:
        ConfigError: the file cannot be read, or a line is not an arrival; it names
            the line.
    """
    offsets: array[int] = array("q")
    bodies: array[int] = array("q")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"trace {path}: {fault}") from fault
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].replace(",", " ").split()
        if not fields:
            continue
        try:
            offset_ns = round(float(fields[0]) * 1e9)
            last_ns = offsets[-1] if offsets else 0
            offsets.append(offset_ns)
            bodies.extend(int(field) for field in fields[1:])
        except (ValueError, OverflowError):
            raise ConfigError(f"trace {path}, line {number}: {line!r}") from None
        if offset_ns < last_ns or len(fields) > 2:
            raise ConfigError(
                f"trace {path}, line {number}: {line!r}; offsets are seconds that do "
                "not decrease, with at most one body index after them"
            )
    if bodies and len(bodies) != len(offsets):
        raise ConfigError(f"trace {path}: give every arrival a body index, or none")
    return Trace(offsets, bodies or None)


def draw(
    arrivals: Arrivals, weights: Sequence[float], seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield chunks of due times (nanoseconds from the start) and body indexes.

    Endless, but for a trace. `weights` are those of the bodies.
    """
    gaps_random = np.random.default_rng([seed, 0])
    bodies = draw_bodies(weights, seed)
    if isinstance(arrivals, Trace):
        offsets = np.frombuffer(arrivals.offsets_ns, dtype=np.int64)
        own = arrivals.bodies
        for start in range(0, len(offsets), _CHUNK):
            chunk = offsets[start : start + _CHUNK]
            if own is not None:
                yield chunk, np.array(own[start : start + _CHUNK], dtype=np.int64)
            else:
                yield chunk, next(bodies)[: len(chunk)]
        return
    mean_gap_ns = 1e9 / arrivals.rate_per_s
    # Equal gaps begin with the run, random ones with a gap.
    elapsed = -1.0 if isinstance(arrivals, Constant) else 0.0
    while True:
        match arrivals:
            case Constant():
                gaps = np.ones(_CHUNK)
            case Poisson():
                gaps = gaps_random.exponential(size=_CHUNK)
            case Gamma(cv=cv):
                # Mean 1 and this CV: shape 1/CV², scale CV².
                gaps = gaps_random.gamma(1 / cv**2, cv**2, size=_CHUNK)
        times = elapsed + np.cumsum(gaps)
        elapsed = float(times[-1])
        yield (times * mean_gap_ns).astype(np.int64), next(bodies)


def draw_bodies(
    weights: Sequence[float], seed: int, stream: int = 1
) -> Iterator[np.ndarray]:
    """Yield chunks of body indexes drawn by weight; endless."""
    random = np.random.default_rng([seed, stream])
    share = np.asarray(weights, dtype=float)
    share = share / share.sum()
    while True:
        if len(weights) == 1:
            yield np.zeros(_CHUNK, dtype=np.int64)
        else:
            yield random.choice(len(weights), size=_CHUNK, p=share)


def share(
    chunks: Iterator[tuple[np.ndarray, np.ndarray]], index: int, processes: int
) -> Iterator[tuple[int, int]]:
    """One process' share of the sequence: every `processes`-th arrival."""
    before = 0
    for times, bodies in chunks:
        first = (index - before) % processes
        before += len(times)
        yield from zip(
            times[first::processes].tolist(),
            bodies[first::processes].tolist(),
            strict=True,
        )
