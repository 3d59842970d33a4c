"""`batcher bench`: the load generator's options, and what it prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batcher.errors import BatcherError, ConfigError

if TYPE_CHECKING:
    from batcher.tuning.arrivals import Arrivals
    from batcher.tuning.bodies import Body


def bench(
    target: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT|unix:PATH",
            help="Any KServe v2 / Triton gRPC server.",
        ),
    ],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")],
    callers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Closed loop: N callers, each of which sends a request when its last "
            "is answered. [default: 16]",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND",
            help="Open loop: requests are sent at this mean rate, whatever the server "
            "does; latency counts from the instant a request was due.",
        ),
    ] = None,
    cv: Annotated[
        float,
        typer.Option(
            metavar="CV",
            help="Open loop: how bursty. 0 is a constant rate, 1 is Poisson, more is "
            "Gamma with this coefficient of variation.",
        ),
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Open loop: arrivals from a file, one per line: seconds from the "
            "start, then optionally the number of the body.",
        ),
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="Rows of a request; several make a mix. [default: 1]",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:1,128",
            help="Shape of an input with dynamic axes; of one input several times "
            "makes a mix.",
        ),
    ] = None,
    npz: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Real input: each array of the .npz file is the input of its name; "
            "several files make a mix.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Length of the measured window.")
    ] = 5.0,
    warmup: Annotated[
        float, typer.Option(metavar="S", help="Load before it, not measured.")
    ] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(metavar="N", help="Measure this many requests, then stop."),
    ] = None,
    connections: Annotated[
        int | None, typer.Option(metavar="N", help="[default: by the load]")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Load-generating processes. [default: by the load, but a core is "
            "left to the server]",
        ),
    ] = None,
    deadline_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="gRPC deadline of every request."),
    ] = None,
    verify: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Compare this fraction of the answers with the answer that each body "
            "got before the run.",
        ),
    ] = 0.0,
    allow_errors: Annotated[
        bool,
        typer.Option(
            "--allow-errors", help="Run even when a body is refused before the run."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N")] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on stdout.")
    ] = False,
) -> None:
    """Measure a server: throughput, latency percentiles, errors, batch sizes.

    Inputs are made up from the server's ModelMetadata unless files are given. Ctrl-C
    ends early with what was measured so far.
    """
    from rich.console import Console

    from batcher.tuning.bench import BenchConfig, run
    from batcher.tuning.progress import progress_bar

    try:
        if callers is not None and (rate is not None or trace is not None):
            raise ConfigError("--callers is a closed loop, --rate and --trace are open")
        arrivals = _arrivals(rate, cv, trace)
        config = BenchConfig(
            target=target,
            bodies=_bodies(target, model, rows, shape, npz, deadline_ms, seed),
            callers=(callers or 16) if arrivals is None else None,
            arrivals=arrivals,
            connections=connections,
            processes=processes,
            warmup_s=warmup,
            measure_s=seconds,
            requests=requests,
            verify_fraction=verify,
            allow_errors=allow_errors,
            seed=seed,
        )
        with progress_bar() as progress:
            report = run(config, progress=progress)
    except BatcherError as error:
        print(f"batcher bench: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if json:
        print(report.to_json())
    else:
        report.render(Console())
    # Failed requests are a result of a load test, wrong answers are not.
    raise typer.Exit(1 if report.mismatches else 0)


def _arrivals(rate: float | None, cv: float, trace: Path | None) -> Arrivals | None:
    from batcher.tuning.arrivals import Constant, Gamma, Poisson, read_trace

    if trace is not None:
        if rate is not None:
            raise ConfigError("give either --rate or --trace")
        return read_trace(trace)
    if rate is None:
        return None
    if cv == 0:
        return Constant(rate)
    return Poisson(rate) if cv == 1 else Gamma(rate, cv)


def _bodies(
    target: str,
    model: str,
    rows: list[int] | None,
    shapes: list[str] | None,
    npz: list[Path] | None,
    deadline_ms: float | None,
    seed: int,
) -> tuple[Body, ...]:
    """One body per file, or per combination of rows and of the shapes given."""
    import dataclasses
    import itertools

    from batcher.tuning.bodies import body_from_metadata, body_from_npz, parse_shape

    if npz:
        if rows or shapes:
            raise ConfigError("--npz brings its shapes; leave out --rows and --shape")
        bodies = [body_from_npz(model, path) for path in npz]
    else:
        choices: dict[str, list[tuple[int, ...]]] = {}
        for text in shapes or ():
            name, dims = parse_shape(text)
            choices.setdefault(name, []).append(dims)
        # Inputs with as many shapes as each other change together (ids and mask).
        count = max(map(len, choices.values()), default=1)
        for name, given in choices.items():
            if len(given) not in (1, count):
                raise ConfigError(
                    f"--shape {name}: {len(given)} shapes, but another input has "
                    f"{count}; give one, or as many"
                )
        bodies = [
            body_from_metadata(
                target,
                model,
                shapes={n: g[i % len(g)] for n, g in choices.items()},
                rows=count_rows,
                seed=seed + i,
            )
            for count_rows, i in itertools.product(rows or [1], range(count))
        ]
    if deadline_ms is not None:
        deadline_us = int(deadline_ms * 1000)
        bodies = [dataclasses.replace(b, deadline_us=deadline_us) for b in bodies]
    return tuple(bodies)
