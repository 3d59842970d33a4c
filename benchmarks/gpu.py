"""Measures the daemon on a GPU against the bare engine, per model in one run.

    python -m benchmarks.models MODELS
    python -m benchmarks.gpu --models MODELS --out gpu.json
    python -m benchmarks.gpu --models MODELS --out bert.json --which bert-base \\
        --only bare,served --settings eager/1

Parts, of which `--only` picks some:

- `start`: from the start of the process to the line that says it is ready, with nothing
  cached and then with everything; the log's lines with their times
- `bare`: the engine alone and through slots, with the gaps between runs (see
  `benchmarks.bare`)
- `echo`: one caller of a model that takes no time, with the same request
- `served`: requests of one row over gRPC, closed loop and Poisson at shares of the best
  rate, by policy and slots; batch sizes, time on the device, CPU of both sides
- `server`: the highest Poisson rate whose p99 is within 15 ms, by policy

Every result is printed as it comes, and the file is written anew after each, so that a
run that is killed loses nothing. A part that fails is told, and the others go on; what
has not begun when `--limit` is over is left out. Shares of the bare engine's rate need
`bare` in the same run. With `--engine onnxruntime` everything but the bare loop can be
tried without a GPU.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks import report
from benchmarks.gpu_bench import PLANS, SETTINGS, Bench, Figures, OutOfTime, PartError
from benchmarks.gpu_daemon import DaemonError, Options
from benchmarks.gpu_parts import PARTS, bare_rate, graph_us
from engines.tensorrt.facts import gpu_fact, module_facts

_WHICH: Final = ("bert-base", "resnet50-u8", "resnet50")


class Run:
    """The result file, and how far the run is.

    Args:
        args: of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._begun = time.monotonic()
        self.models: dict[str, Figures] = {}
        facts = gpu_fact()
        self._device = {
            "gpus": [gpu.name for gpu in facts.gpus],
            "cuda": facts.cuda_version,
            "detail": facts.detail,
            "tensorrt": {f.flavour: f.version for f in module_facts() if f.version},
        }
        self.say(f"{self._device}")

    def say(self, text: str) -> None:
        """Prints a line with the seconds since the start, at once."""
        print(f"[{time.monotonic() - self._begun:6.1f}] {text}", flush=True)

    def save(self) -> None:
        """Writes the result file anew; a reader never sees half of it."""
        path = self._args.out
        draft = path.with_name(f".{path.name}.partial")
        extra = {
            "device": self._device,
            "seconds": round(time.monotonic() - self._begun, 1),
            "models": self.models,
        }
        report.write_json(draft, "gpu", vars(self._args), [], extra)
        draft.replace(path)

    def left_s(self) -> float:
        """Seconds until the limit."""
        return float(self._args.limit) - (time.monotonic() - self._begun)

    def measure(self, work: Path) -> None:
        """All parts of all models; faults are kept in the result."""
        args = self._args
        bench = Bench(
            say=self.say,
            save=self.save,
            left_s=self.left_s,
            options=Options(
                engine=args.engine, plan_cache=args.plan_cache, unix=args.unix
            ),
            delay_us=args.delay_us,
            seconds=args.seconds,
            settings=tuple(args.settings),
            processes=args.processes,
            work=work,
        )
        for name in args.which:
            found = self.models[name] = {"faults": {}}
            for part in args.only:
                if part not in ("start", "bare") and not PLANS[name].requests:
                    continue
                begun = time.monotonic()
                try:
                    bench.check_time()
                    PARTS[part](bench, args.models / name, found)
                except OutOfTime as over:
                    found["faults"][part] = str(over)
                    self.say(f"{name} {part} left out: {over}")
                except Exception as error:
                    if not isinstance(error, DaemonError | PartError):
                        traceback.print_exc()
                    found["faults"][part] = f"{type(error).__name__}: {error}"
                    self.say(f"{name} {part} FAILED: {error}")
                taken = time.monotonic() - begun
                found.setdefault("part_seconds", {})[part] = round(taken, 1)
                self.save()

    def summary(self) -> Iterator[str]:
        """A line for each figure that matters, of what there is."""
        for name, found in self.models.items():
            yield from _summary(name, found)


def _summary(name: str, found: Figures) -> Iterator[str]:
    for kind, start in found.get("start", {}).items():
        yield f"{name}: ready after {start['ready_s']:.1f} s ({kind})"
    for line in found.get("bare", ()):
        if line["kind"] == "slot" and "gap" in line:
            gap = line["gap"]
            yield (
                f"{name} {line['cell']}: {line['slots']} slots, rows in place: "
                f"{line['rows_per_s']:,.0f} rows/s = {line['of_bare']:.3f} of bare, "
                f"gap p50 {gap['p50_us']:.0f} p99 {gap['p99_us']:.0f} µs; CPU "
                f"{line['cpu_us_per_batch']:.0f} µs/batch"
            )
    for request in PLANS[name].requests:
        mine = [e for e in found.get("served", ()) if e["request"] == list(request)]
        closed = [line for line in mine if line["callers"]]
        if closed:
            best = max(closed, key=lambda line: line["requests_per_s"])
            yield (
                f"{name} {list(request)}: served {best['requests_per_s']:,.0f}/s of "
                f"bare {_text(bare_rate(found, request), ',.0f')} = "
                f"{_text(best['of_bare'], '.3f')} ({best['setting']}, "
                f"{best['callers']} callers, p99 {best['p99_ms']:.1f} ms)"
            )
        echo = next(
            (e for e in found.get("echo", ()) if e["request"] == list(request)), None
        )
        for line in mine:
            if line["callers"] == 1:
                yield (
                    f"{name} {list(request)}: one caller {line['p50_ms']:.3f} ms "
                    f"({line['setting']}); {_alone(found, line, echo)}"
                )
    for line in found.get("server", ()):
        yield (
            f"{name} {line['request']}: {line['setting']} Server "
            f"{line['rate_per_s']:,.0f}/s = {_text(line['of_bare'], '.3f')} of bare"
        )
    for part, fault in found["faults"].items():
        yield f"{name}: {part} FAILED: {fault.splitlines()[0]}"


def _alone(found: Figures, line: Figures, echo: Figures | None) -> str:
    """What neither the engine nor the wire explains of one caller's wait."""
    graph = graph_us(found, (1, *line["request"]))
    if graph is None or echo is None:
        return "no bare time or no echo to compare with"
    over_us = line["p50_ms"] * 1e3 - graph
    echo_us = echo["p50_ms"] * 1e3
    return (
        f"over the graph's {graph:.0f} µs: {over_us:.0f} µs = echo ({echo_us:.0f}) "
        f"{over_us - echo_us:+.0f} µs"
    )


def _text(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--only",
        type=_names,
        default=list(PARTS),
        metavar="PARTS",
        help=f"default: {','.join(PARTS)}",
    )
    parser.add_argument(
        "--which",
        type=_names,
        default=list(_WHICH),
        metavar="MODELS",
        help=f"of {','.join(PLANS)} (default: {','.join(_WHICH)})",
    )
    parser.add_argument(
        "--settings",
        type=_names,
        default=[],
        help=f"of `served` (default: {','.join(s.name for s in SETTINGS)})",
    )
    parser.add_argument("--engine", default="tensorrt")
    parser.add_argument(
        "--plan-cache", type=Path, help="default: the folder `plans` beside --out"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of a window (default: 3)"
    )
    parser.add_argument(
        "--limit", type=float, default=420.0, help="of the run, in s (default: 420)"
    )
    parser.add_argument(
        "--delay-us", type=int, default=2000, help="of `window` (default: 2000)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="of the generator, at most (default: all cores but four)",
    )
    parser.add_argument(
        "--unix", action="store_true", help="a Unix socket in place of loopback"
    )
    args = parser.parse_args()
    known: dict[str, list[str]] = {
        "only": list(PARTS),
        "which": list(PLANS),
        "settings": [setting.name for setting in SETTINGS],
    }
    for option, names in known.items():
        for name in getattr(args, option):
            if name not in names:
                parser.error(f"--{option}: no {name!r}; there are {', '.join(names)}")
    args.out = args.out.resolve()
    args.models = args.models.resolve()
    args.plan_cache = (args.plan_cache or args.out.parent / "plans").resolve()
    return args


def main() -> int:
    """The command."""
    args = _arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    # Whoever ends this run gets its daemons ended too, and what there is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        try:
            run.measure(Path(work))
        except KeyboardInterrupt:
            interrupted = True
            run.say("interrupted")
    run.save()
    for line in run.summary():
        print(line, flush=True)
    return int(interrupted or any(f["faults"] for f in run.models.values()))


if __name__ == "__main__":
    sys.exit(main())
