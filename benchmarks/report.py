"""What a benchmark says at the end: medians and spreads as tables, everything as JSON.

Ratios between two servers are taken within a round and then summed up, because the two
runs lie seconds apart: a slow minute of the machine falls out of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.running import Sample


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    min: float
    max: float

    def text(self, digits: int = 0) -> str:
        """For a table: the median, and from where to where it went."""
        low, middle, high = (
            f"{v:,.{digits}f}" for v in (self.min, self.median, self.max)
        )
        return f"{middle} ({low}..{high})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """None where nothing was measured."""
    known = [v for v in values if v is not None]
    return Spread(median(known), min(known), max(known)) if known else None


Rounds = Mapping[int, Sample]
"""The samples of one server under one load, by round."""


def ratios(
    ours: Rounds, theirs: Rounds, figure: Callable[[Sample], float | None]
) -> Spread | None:
    """Of `figure`, round by round."""
    pairs = ((figure(ours[r]), figure(theirs[r])) for r in ours if r in theirs)
    return spread(a / b for a, b in pairs if a is not None and b)


def by_server(samples: Iterable[tuple[int, Sample]], callers: int) -> dict[str, Rounds]:
    """Those under one load, grouped, in the order of the first round."""
    grouped: dict[str, dict[int, Sample]] = {}
    for number, sample in samples:
        if sample.load.callers == callers:
            grouped.setdefault(sample.server, {})[number] = sample
    return dict(grouped)


def figures(rounds: Rounds) -> dict[str, Spread]:
    """Every figure that the server has, over its rounds."""
    samples = list(rounds.values())
    found = {
        name: spread(getattr(s.load, name) for s in samples)
        for name in (
            *("rps", "p50_ms", "p90_ms", "p99_ms", "cpu_us", "server_cores"),
            *("client_cores", "other_cores", "core_speed", "rss_mb", "pss_mb"),
        )
    }
    found["mean_batch"] = spread(s.mean_batch for s in samples)
    found["startup_s"] = spread(s.startup_s for s in samples)
    return {name: value for name, value in found.items() if value is not None}


def cell(value: Spread | None, digits: int = 0, *, full: bool = False) -> str:
    """A table cell: the median alone, or with its spread."""
    if value is None:
        return "-"
    return value.text(digits) if full else f"{value.median:,.{digits}f}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; the first column is a name, the others are figures."""
    printed = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        printed.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        printed.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(printed)


def machine_note(samples: Sequence[tuple[int, Sample]]) -> str:
    """How even the machine was: one line to judge the tables by."""
    speeds = [s.load.core_speed for _, s in samples]
    others = [s.load.other_cores or 0.0 for _, s in samples]
    if not speeds:
        return "nothing was measured"
    disturbed = sum(s.disturbed for _, s in samples)
    return (
        f"machine: other processes took {median(others):.2f} cores (median), "
        f"{max(others):.2f} at most; {disturbed} of {len(samples)} runs stayed "
        "disturbed by them. A fixed loop around the runs went at "
        f"{min(speeds) / max(speeds):.0%} of its best speed or more"
    )


def write_json(
    path: Path,
    benchmark: str,
    arguments: Mapping[str, Any],
    samples: Sequence[tuple[int, Sample]],
    extra: Mapping[str, Any],
) -> None:
    """Everything measured, and the summary, for other programs."""
    document = {
        "benchmark": benchmark,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": {k: v for k, v in arguments.items() if not isinstance(v, Path)},
        "machine": _machine(),
        **extra,
        "samples": [{"round": number, **asdict(s)} for number, s in samples],
    }
    path.write_text(json.dumps(document, indent=1, default=_plain) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def _machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    packages = {}
    for name in ("grpcio", "protobuf", "pygrpc-native", "uvloop", "numpy"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "packages": packages,
    }
