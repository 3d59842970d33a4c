"""Measures what a request costs with no model behind it: front end, queue and batcher.

Our daemon on each transport and the peers, with a model of 0 ms, FP32[16] (64 bytes),
64 callers (8 connections of 8 streams), the server on one core and the load on another,
in rounds. Says requests per second, CPU per request and ratios to Triton and mosec.

    python -m benchmarks.frontend [--peers triton,mosec] [--rounds 7] [--profile]
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from benchmarks import report, session, stages
from benchmarks.load import LoadError
from benchmarks.running import Running, Sample, ServerError, started
from benchmarks.servers import Server, Work

_WORK: Final = Work(base_ms=0.0, per_row_us=0.0)
_CALLERS: Final = 64
_BASES: Final = ("triton", "mosec")
"""Whom the others are compared with."""

_PROFILE_SECONDS: Final = 5.0
_SMALLEST_STAGE_US: Final = 0.05


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    session.add_arguments(parser, rounds=7, seconds=2.0)
    parser.add_argument(
        "--profile", action="store_true", help="CPU of our daemon by stage (py-spy)"
    )
    args = parser.parse_args()
    servers = session.chosen(args)
    run = session.Session(_WORK, pinned=True)

    def measure(running: Running) -> Iterable[Sample]:
        return [running.measure(_CALLERS, args.seconds, retries=args.retries)]

    with run.until_interrupted():
        for number in range(1, args.rounds + 1):
            run.round(number, servers, measure)
    summary = _summary(run.samples)
    _print_summary(summary)
    print(report.machine_note(run.samples))
    profiles: dict[str, Any] = {}
    if args.profile and not run.interrupted:
        with run.until_interrupted():
            _profile([s for s in servers if s.name.startswith("ours-")], run, profiles)
    if args.json:
        extra = {
            "failures": run.failures,
            "interrupted": run.interrupted,
            "summary": summary,
            "stages": profiles,
        }
        report.write_json(args.json, "frontend", vars(args), run.samples, extra)
    return run.exit_status()


def _summary(samples: Sequence[tuple[int, Sample]]) -> dict[str, dict[str, Any]]:
    grouped = report.by_server(samples, _CALLERS)
    return {
        name: {
            **report.figures(rounds),
            **{
                f"rps_over_{base}": report.ratios(
                    rounds, grouped[base], lambda sample: sample.load.rps
                )
                for base in _BASES
                if base in grouped
            },
        }
        for name, rounds in grouped.items()
    }


def _print_summary(summary: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, figures in summary.items():
        ratios = (
            report.cell(figures.get(f"rps_over_{b}"), 2, full=True) for b in _BASES
        )
        rows.append(
            (
                name,
                report.cell(figures["rps"], full=True),
                *ratios,
                report.cell(figures.get("cpu_us"), 1, full=True),
                report.cell(figures["p50_ms"], 2),
                report.cell(figures["p99_ms"], 2),
                report.cell(figures.get("mean_batch"), 1),
                report.cell(figures.get("pss_mb")),
                report.cell(figures["startup_s"], 1),
            )
        )
    columns = ["server", "requests/s", *(f"x {base}" for base in _BASES)]
    columns += ["CPU µs/request", "p50 ms", "p99 ms", "batch", "PSS MB", "start s"]
    title = f"Front end: 0 ms model, {_CALLERS} callers, one core; median (min..max)"
    report.table(title, columns, rows)


def _profile(
    servers: Sequence[Server], run: session.Session, found: dict[str, Any]
) -> None:
    for server in servers:
        if server.name in run.failures:
            continue
        try:
            with started(server, _WORK) as running:
                rows = stages.profile(running, _CALLERS, _PROFILE_SECONDS)
        except (ServerError, LoadError) as error:
            print(f"no stages of {server.name}: {error}", file=sys.stderr)
            continue
        _print_stages(server.name, rows)
        found[server.name] = [asdict(stage) for stage in rows]


def _print_stages(name: str, rows: Sequence[stages.Stage]) -> None:
    modules: dict[str, list[stages.Stage]] = defaultdict(list)
    for stage in rows:
        modules[stage.module].append(stage)
    total = sum(stage.us for stage in rows) or 1.0
    lines = []
    subtotals = {m: sum(s.us for s in members) for m, members in modules.items()}
    for module in sorted(subtotals, key=lambda m: -subtotals[m]):
        us = subtotals[module]
        lines.append((module, f"{us:.2f}", f"{us / total:.0%}", ""))
        lines += [
            (
                f"  {s.function or s.thread}",
                f"{s.us:.2f}",
                f"{s.us / total:.0%}",
                s.thread,
            )
            for s in modules[module]
            if s.us >= _SMALLEST_STAGE_US
        ]
    lines.append(("all", f"{total:.2f}", "100%", ""))
    title = f"{name}: CPU of a request by stage"
    report.table(title, ["module, function", "µs/request", "share", "thread"], lines)


if __name__ == "__main__":
    sys.exit(main())
