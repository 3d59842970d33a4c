"""`batcher bench`: the load generator's options, and what it prints."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from batcher.errors import BatcherError, ConfigError

if TYPE_CHECKING:
    from batcher.tuning.arrivals import Arrivals
    from batcher.tuning.bodies import Body

_DEFAULT_CALLERS: Final = 16

# gRPC sends a deadline in microseconds, or in at most eight digits of seconds.
_DEADLINE_MS: Final = (0.001, 99_999_999_000.0)


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
        float | None,
        typer.Option(
            metavar="CV",
            help="With --rate: how bursty. 0 is a constant rate, 1 is Poisson, any "
            "other is Gamma with this coefficient of variation. [default: 1]",
        ),
    ] = None,
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
            help="Rows of a request: the first size of inputs that leave it open; "
            "several make a mix. [default: 1]",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:1,128",
            help="Shape of an input with dynamic axes, which else have the size 1; of "
            "one input several times makes a mix.",
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
        typer.Option(
            metavar="N",
            help="Measure this many requests, then stop, or when --seconds are over.",
        ),
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

    Inputs are made up from the server's ModelMetadata unless files are given; the
    report says their shapes. Ctrl-C ends early with what was measured so far.

    Exit code: 0; 1 when an answer is wrong (--verify), when no request was answered,
    or when more than half of them failed; 2 when there was no run.
    """
    from rich.console import Console

    from batcher.tuning.bench import BenchConfig, run
    from batcher.tuning.link import Address
    from batcher.tuning.progress import progress_bar

    try:
        Address(target)  # before gRPC's resolver is asked, which takes long
        if not model.isprintable():  # a name that is no UTF-8 cannot be sent
            raise ConfigError(f"{model!r} cannot be a model's name")
        _at_least(
            1,
            callers=callers,
            requests=requests,
            connections=connections,
            processes=processes,
        )
        for count in rows or ():
            _at_least(1, rows=count)
        _at_least(0, cv=cv, warmup=warmup, seed=seed)
        _at_least(0.001, seconds=seconds)
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"--rate is {rate:g}; it must be above 0")
        _within(0, 1, verify=verify)
        _within(*_DEADLINE_MS, deadline_ms=deadline_ms)
        if callers is not None and (rate is not None or trace is not None):
            raise ConfigError("--callers is a closed loop, --rate and --trace are open")
        arrivals = _arrivals(rate, cv, trace)
        config = BenchConfig(
            target=target,
            bodies=_bodies(target, model, rows, shape, npz, deadline_ms, seed),
            callers=(callers or _DEFAULT_CALLERS) if arrivals is None else None,
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
    raise typer.Exit(0 if report.passed else 1)


def _at_least(least: float, **options: float | None) -> None:
    _within(least, math.inf, **options)


def _within(least: float, most: float, **options: float | None) -> None:
    """Sees to it that the values of options are numbers between two.

    Raises:
        ConfigError: one is not; it names the flag.
    """
    for name, value in options.items():
        if value is None or (least <= value <= most and value < math.inf):
            continue
        limits = f"at least {least:g}"
        if most < math.inf:
            limits = f"from {least:g} to {most:,.15g}"
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {value:.15g}; it must be {limits}")


def _arrivals(
    rate: float | None, cv: float | None, trace: Path | None
) -> Arrivals | None:
    from batcher.tuning.arrivals import Constant, Gamma, Poisson, read_trace

    if cv is not None and rate is None:
        what = "a closed loop" if trace is None else "a --trace"
        raise ConfigError(f"--cv is of --rate; {what} takes none")
    if trace is not None:
        if rate is not None:
            raise ConfigError("give either --rate or --trace")
        return read_trace(trace)
    if rate is None:
        return None
    if cv is None or cv == 1:
        return Poisson(rate)
    return Constant(rate) if cv == 0 else Gamma(rate, cv)


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
        mix: list[int] | list[None] = rows or [None]
        bodies = [
            body_from_metadata(
                target,
                model,
                shapes={n: g[i % len(g)] for n, g in choices.items()},
                rows=count_rows,
                seed=seed + i,
            )
            for count_rows, i in itertools.product(mix, range(count))
        ]
    if deadline_ms is not None:
        deadline_us = int(deadline_ms * 1000)
        bodies = [dataclasses.replace(b, deadline_us=deadline_us) for b in bodies]
    return tuple(bodies)
