"""Measures how much of an engine's rate reaches the callers, and what one caller waits.

The model takes 2 ms + 20 µs a row, at most 32 rows a batch, one instance; 1, 8, 64 and
256 callers. The bound is the engine's own back-to-back rate, timed in the same round;
one caller's latency is set against the model's time plus that of the bare transport.

    python -m benchmarks.batching [--pin 1core|2core] [--callers 1,64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks import procs, report, session
from benchmarks.load import CALLERS
from benchmarks.running import SERVER_CORE, Running, Sample
from benchmarks.servers import Work
from engines.fake import FakeEngine, FakeOptions
from engines.tensors import TensorSpec

_WORK: Final = Work(base_ms=2.0, per_row_us=20.0)
_MAX_BATCH: Final = 32
_BOUND_SECONDS: Final = 0.7

Bounds = dict[int, float]
"""Seconds that the engine itself needs for a batch, by rows."""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    session.add_arguments(parser, rounds=3, seconds=3.0)
    parser.add_argument(
        "--pin",
        choices=["1core", "2core"],
        default="1core",
        help="1core: server and load on a core each; 2core: neither is pinned",
    )
    parser.add_argument(
        "--callers",
        type=lambda text: [int(n) for n in text.split(",")],
        default=list(CALLERS),
        help=f"default: {','.join(map(str, CALLERS))}",
    )
    args = parser.parse_args()
    servers = session.chosen(args)
    run = session.Session(_WORK, pinned=args.pin == "1core")

    def measure(running: Running) -> Iterable[Sample]:
        # The echo is here for the latency of the bare transport alone.
        counts = [1] if running.server.answers == "echo" else args.callers
        for callers in counts:
            yield running.measure(callers, args.seconds, retries=args.retries)

    bounds: dict[int, Bounds] = {}
    rows = sorted({min(n, _MAX_BATCH) for n in args.callers} | {1})
    with run.until_interrupted():
        for number in range(1, args.rounds + 1):
            bounds[number] = {n: _batch_seconds(n, pinned=run.pinned) for n in rows}
            run.round(number, servers, measure)
    summary = {
        callers: _summary(run.samples, bounds, callers) for callers in args.callers
    }
    for callers, figures in summary.items():
        _print_summary(callers, figures, bounds)
    alone = _alone(run.samples, bounds)
    _print_alone(alone)
    print(report.machine_note(run.samples))
    if args.json:
        extra = {
            "failures": run.failures,
            "interrupted": run.interrupted,
            "batch_seconds": bounds,
            "summary": summary,
            "one_caller": alone,
        }
        report.write_json(args.json, "batching", vars(args), run.samples, extra)
    return run.exit_status()


def _batch_seconds(rows: int, *, pinned: bool) -> float:
    """Median time of a batch in the fake engine itself, run back to back."""
    axes = ("batch", 16)
    engine = FakeEngine(
        FakeOptions(
            inputs=(TensorSpec("INPUT0", "FP32", axes),),
            outputs=(TensorSpec("OUTPUT0", "FP32", axes),),
            base_ms=_WORK.base_ms,
            per_row_us=_WORK.per_row_us,
        )
    )
    context = engine.create_context()
    given, filled = np.ones((rows, 16), np.float32), np.empty((rows, 16), np.float32)
    taken = []
    with procs.pinned(SERVER_CORE if pinned else None):
        before = begun = time.perf_counter()
        while before - begun < _BOUND_SECONDS:
            context.execute([given], [filled])
            now = time.perf_counter()
            taken.append(now - before)
            before = now
    return median(taken)


def _bound_rps(callers: int, bounds: Bounds) -> float:
    """No scheduler does better: every batch as full as the callers can make it."""
    rows = min(callers, _MAX_BATCH)
    return rows / bounds[rows]


def _summary(
    samples: Sequence[tuple[int, Sample]], bounds: Mapping[int, Bounds], callers: int
) -> dict[str, dict[str, Any]]:
    return {
        name: {
            **report.figures(rounds),
            "of_bound": report.spread(
                sample.load.rps / _bound_rps(callers, bounds[number])
                for number, sample in rounds.items()
            ),
        }
        for name, rounds in report.by_server(samples, callers).items()
        if name != "echo"
    }


def _alone(
    samples: Sequence[tuple[int, Sample]], bounds: Mapping[int, Bounds]
) -> dict[str, dict[str, Any]]:
    """One caller's median latency, and what neither model nor transport explains."""
    grouped = report.by_server(samples, 1)
    echo = grouped.pop("echo", {})
    floors = {n: bounds[n][1] * 1e3 + s.load.p50_ms for n, s in echo.items()}
    return {
        name: {
            "p50_ms": report.spread(s.load.p50_ms for s in rounds.values()),
            "floor_ms": report.spread(floors.get(n) for n in rounds),
            "over_floor_ms": report.spread(
                s.load.p50_ms - floors[n] for n, s in rounds.items() if n in floors
            ),
        }
        for name, rounds in grouped.items()
    }


def _print_summary(
    callers: int, summary: dict[str, dict[str, Any]], bounds: Mapping[int, Bounds]
) -> None:
    rows = [
        (
            name,
            report.cell(figures["rps"], full=True),
            report.cell(figures["of_bound"], 3, full=True),
            report.cell(figures["p50_ms"], 2),
            report.cell(figures["p99_ms"], 2, full=True),
            report.cell(figures.get("cpu_us"), 1),
            report.cell(figures.get("mean_batch"), 1),
        )
        for name, figures in summary.items()
    ]
    bound = report.spread(_bound_rps(callers, b) for b in bounds.values())
    title = f"Callers: {callers}; bound: {report.cell(bound)}/s; median (min..max)"
    columns = ["server", "requests/s", "of the bound", "p50 ms", "p99 ms"]
    report.table(title, [*columns, "CPU µs/request", "batch"], rows)


def _print_alone(alone: dict[str, dict[str, Any]]) -> None:
    if not alone:
        return
    show: Callable[[Any], str] = lambda value: report.cell(value, 3, full=True)  # noqa: E731
    rows = [
        (name, show(f["p50_ms"]), show(f["floor_ms"]), show(f["over_floor_ms"]))
        for name, f in alone.items()
    ]
    title = (
        "One caller: median latency; floor: model's time + the bare transport's echo"
    )
    report.table(title, ["server", "p50 ms", "floor ms", "above the floor ms"], rows)


if __name__ == "__main__":
    sys.exit(main())
