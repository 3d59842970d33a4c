"""The parts of `benchmarks.gpu`: what is measured of a model, one function each.

A part gets the figures of its model so far, adds its own, and says them as they come.
Where a figure is a share of another, the other is of the same run, or it is None.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from batcher.tuning.bodies import body_from_arrays
from batcher.tuning.plan import Body
from benchmarks import models
from benchmarks.gpu_bench import (
    FULL,
    PLANS,
    SETTINGS,
    Bench,
    Figures,
    OutOfTime,
    PartError,
    Setting,
    Sizes,
)
from benchmarks.gpu_daemon import Daemon, Options, serving
from benchmarks.gpu_load import Served, best_of, highest_rate
from benchmarks.servers import REPOSITORY_DIR
from engines.tensorrt import onnxfile
from engines.tensors import Shape, TensorSpec

LIMIT_MS: Final = 15.0
"""Of p99, as MLPerf's Server scenario has it for ResNet-50."""

_BARE_TIMEOUT_S: Final = 240.0
_PROBES: Final = 5
_ECHO: Final = "echo"

# -- start ------------------------------------------------------------------------


def start(bench: Bench, model: Path, found: Figures) -> None:
    """From the start of the process to the ready line: with empty caches, then again.

    The plans that this makes are moved to the run's plan cache.
    """
    found["start"] = starts = {}
    cache = bench.options.plan_cache
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".cold-") as folder:
        options = replace(bench.options, plan_cache=Path(folder))
        for kind in ("cold", "warm"):
            bench.check_time()
            with serving(model, options, bench.work) as daemon:
                lines = [line for line in daemon.log if line[0] <= daemon.ready_s]
                starts[kind] = {"ready_s": daemon.ready_s, "log": lines}
            bench.say(f"{model.name} start {kind}: ready after {daemon.ready_s:.2f} s")
            for at, line in lines:
                bench.say(f"    {at:8.3f} {line}")
            bench.save()
        for file in Path(folder).iterdir():
            file.replace(cache / file.name)


# -- the engine without a server --------------------------------------------------


def bare(bench: Bench, model: Path, found: Figures) -> None:
    """Runs `benchmarks.bare` in a process of its own: a fault in it is not ours."""
    found["bare"] = lines = []
    command = [sys.executable, "-m", "benchmarks.bare", str(model)]
    command += ["--cells", PLANS[model.name].cells, "--engine", bench.options.engine]
    command += ["--plan-cache", str(bench.options.plan_cache)]
    with subprocess.Popen(
        command, cwd=REPOSITORY_DIR, stdout=subprocess.PIPE, text=True
    ) as process:
        limit = threading.Timer(_BARE_TIMEOUT_S, process.kill)
        limit.start()
        try:
            for line in process.stdout or ():
                if not line.startswith("{"):
                    bench.say(line.rstrip())
                    continue
                lines.append(json.loads(line))
                bench.say(f"{model.name} bare {_bare_text(lines[-1])}")
                bench.save()
        except BaseException:
            process.kill()
            raise
        finally:
            limit.cancel()
    if process.returncode:
        raise PartError(f"benchmarks.bare ended with status {process.returncode}")


def bare_rate(found: Mapping[str, Any], request: Sizes) -> float | None:
    """The most rows per second of the bare engine with this request's sizes."""
    return max(
        (
            line["rows_per_s"]
            for line in found.get("bare", ())
            if line["kind"] == "bare" and line["cell"][1:] == list(request)
        ),
        default=None,
    )


def graph_us(found: Mapping[str, Any], sizes: Sizes) -> float | None:
    """Microseconds of the bare engine's run of a cell."""
    for line in found.get("bare", ()):
        if line["kind"] == "bare" and line["cell"] == list(sizes):
            return float(line["graph_us"])
    return None


def _bare_text(line: Mapping[str, Any]) -> str:
    cell = "x".join(map(str, line.get("cell", ())))
    rest = {k: v for k, v in line.items() if k not in ("kind", "cell")}
    rest.update(rest.pop("gap", {}))
    texts = (
        f"{k} {v:,.0f}" if abs(v) >= 100 else f"{k} {v:.3g}" for k, v in rest.items()
    )
    return f"{cell} {line['kind']}: {', '.join(texts)}"


# -- one caller of nothing --------------------------------------------------------


def echo(bench: Bench, model: Path, found: Figures) -> None:
    """One caller of a model that takes no time: what the wire and the daemon take.

    Its request is that of the model, with a small input more, which is the answer.
    """
    found["echo"] = echoes = []
    specs = _inputs(model)
    folder = bench.work / f"{model.name}-{_ECHO}" / _ECHO
    for request in PLANS[model.name].requests[:1]:
        shapes = _shapes(specs, request)
        inputs = ['{ name = "echoed", dtype = "FP32", shape = [16] }']
        inputs += [
            f'{{ name = "{s.name}", dtype = "{s.dtype}", shape = '
            f"{list(shapes[s.name][1:])} }}"
            for s in specs
        ]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.toml").write_text(
            'engine = "fake"\n[fake]\n'
            f"inputs = [{', '.join(inputs)}]\n"
            'outputs = [{ name = "answer", dtype = "FP32", shape = [16] }]\n'
        )
        arrays = {"echoed": np.ones((1, 16), np.float32)}
        arrays.update(models.example(specs, shapes))
        body = body_from_arrays(_ECHO, arrays)
        options = replace(bench.options, engine="", slots=1)
        with serving(folder, options, bench.work) as daemon:
            served = bench.drive(
                daemon, body, options.slots, seconds=bench.seconds, callers=1
            )
        echoes.append({"request": list(request), **served.to_json()})
        bench.say(f"{model.name} echo {served.text}")
        bench.save()


# -- served -----------------------------------------------------------------------


def served(bench: Bench, model: Path, found: Figures) -> None:
    """Closed loops and Poisson arrivals, by policy and slots."""
    found["served"] = []
    failed = []
    for setting in SETTINGS:
        if bench.settings and setting.name not in bench.settings:
            continue
        try:
            _served_by(bench, model, found, setting)
        except OutOfTime:
            raise
        except Exception as error:  # the other settings go on
            failed.append(f"{setting.name}: {_first_line(error)}")
            bench.say(f"{model.name} served {setting.name} FAILED: {error}")
    if failed:
        raise PartError("; ".join(failed))


def _served_by(bench: Bench, model: Path, found: Figures, setting: Setting) -> None:
    options = bench.with_setting(setting.policy, setting.slots)
    with serving(model, options, bench.work) as daemon:
        for number, request in enumerate(PLANS[model.name].requests):
            body = _body(model, request)
            offline = bare_rate(found, request)
            best = 0.0
            loads: list[Figures] = [
                {"callers": callers, "seconds": bench.seconds * 2 / 3}
                for callers in (setting.others if number else setting.callers)
            ]
            shares = () if number else setting.shares
            for share in (None, *shares):
                if share is not None:
                    rate = share * best
                    loads = [{"rate_per_s": rate, "seconds": bench.seconds}]
                for load in loads:
                    measured = bench.drive(daemon, body, setting.slots, **load)
                    best = max(best, measured.requests_per_s if share is None else 0)
                    of_bare = offline and measured.requests_per_s / offline
                    found["served"].append(
                        {
                            "request": list(request),
                            "setting": options.text,
                            "callers": load.get("callers"),
                            "share": share,
                            "of_bare": of_bare,
                            **measured.to_json(),
                        }
                    )
                    ratio = f" = {of_bare:.3f} of bare" if of_bare else ""
                    where = f"{model.name} {list(request)} {options.text}"
                    bench.say(f"{where} {measured.text}{ratio}")
                    for warning in measured.warnings:
                        bench.say(f"    {warning}")
                    bench.save()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


# -- the Server scenario ----------------------------------------------------------


def server(bench: Bench, model: Path, found: Figures) -> None:
    """The highest Poisson rate within the limit, for `eager` and `window`.

    Slots are those that were better when `served` was measured in this run, else 1.
    """
    found["server"] = scenarios = []
    request = PLANS[model.name].requests[0]
    for policy in ("eager", "window"):
        options = bench.with_setting(policy, _better_slots(found, request))
        with serving(model, options, bench.work) as daemon:
            scenario = _scenario(bench, daemon, options, _body(model, request))
        offline = bare_rate(found, request)
        of_bare = offline and scenario["rate_per_s"] / offline
        compared = {"bare_per_s": offline, "of_bare": of_bare}
        scenarios.append({"request": list(request), **scenario, **compared})
        ratio = f" = {of_bare:.3f} of bare" if of_bare else ""
        bench.say(
            f"{model.name} server {options.text}: {scenario['rate_per_s']:,.0f}/s with "
            f"p99 within {LIMIT_MS:g} ms{ratio}"
        )
        bench.save()


def _scenario(bench: Bench, daemon: Daemon, options: Options, body: Body) -> Figures:
    def at(rate_per_s: float) -> Served:
        load = bench.drive(
            daemon,
            body,
            options.slots,
            seconds=bench.seconds,
            rate_per_s=rate_per_s,
        )
        bench.say(f"{daemon.model} server {options.text} {load.text}")
        return load

    # What it can do at all, so that few rates have to be tried.
    full = bench.drive(
        daemon, body, options.slots, seconds=bench.seconds / 2, callers=FULL
    )
    probes = highest_rate(at, LIMIT_MS, 1.05 * full.requests_per_s, _PROBES)
    return {
        "setting": options.text,
        "limit_ms": LIMIT_MS,
        "rate_per_s": best_of(probes),
        "closed_loop_per_s": full.requests_per_s,
        "probes": [
            {"rate_per_s": p.rate_per_s, "within": p.within, **p.served.to_json()}
            for p in probes
        ],
    }


def _better_slots(found: Mapping[str, Any], request: Sizes) -> int:
    """The number of slots that gave the highest rate to most callers."""
    rates: dict[int, float] = {}
    for line in found.get("served", ()):
        if line["request"] == list(request) and line["callers"] == FULL:
            slots = int(line["setting"].rsplit("/", 1)[1])
            rates[slots] = max(rates.get(slots, 0.0), line["requests_per_s"])
    return max(rates, key=lambda slots: rates[slots], default=1)


# -- requests ---------------------------------------------------------------------


def _inputs(model: Path) -> tuple[TensorSpec, ...]:
    return onnxfile.read(model / "1" / "model.onnx").inputs


def _shapes(specs: tuple[TensorSpec, ...], request: Sizes) -> dict[str, Shape]:
    """Of one row; the dynamic axes beside the batch get the request's sizes."""
    shapes = {}
    for spec in specs:
        sizes = iter(request)
        rest = (a if isinstance(a, int) else next(sizes) for a in spec.shape[1:])
        shapes[spec.name] = (1, *rest)
    return shapes


def _body(model: Path, request: Sizes) -> Body:
    specs = _inputs(model)
    arrays = models.example(specs, _shapes(specs, request))
    return body_from_arrays(model.name, arrays)


PARTS: Final[dict[str, Callable[[Bench, Path, Figures], None]]] = {
    "start": start,
    "bare": bare,
    "echo": echo,
    "served": served,
    "server": server,
}
"""In the order in which they are measured."""
