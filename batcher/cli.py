"""The commands. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

from batcher import __version__
from batcher.errors import BatcherError, ConfigError
from batcher.serving import logs, signals

_DAEMON: Final = sys.argv[1:2] == ["serve"]
if _DAEMON:
    signals.watch()  # now: what is imported from here on takes long

import typer  # noqa: E402

from batcher.cli_bench import bench  # noqa: E402
from batcher.cli_build import build  # noqa: E402
from batcher.cli_doctor import doctor  # noqa: E402

app = typer.Typer(
    name="batcher",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_KNOBS: Final = {
    "--engine": "engine",
    "--max-batch": "max_batch",
    "--batch-axis": "batch_axis",
    "--policy": "batching.policy",
    "--max-delay-us": "batching.max_delay_us",
    "--max-queue": "batching.max_queue",
    "--timeout-ms": "batching.timeout_ms",
    "--slots": "slots.count",
    "--isolation": "slots.isolation",
    "--precision": "tensorrt.precision",
}
"""Flags that win over every model's file, and the keys that they set there."""

# What wrong usage raises: click's class, which newer releases of Typer have inside.
_USAGE_ERROR: Final[Any] = typer.BadParameter.__mro__[1]

app.command()(bench)
app.command()(build)
app.command()(doctor)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    """Dynamic batching between gRPC clients and an inference engine."""
    if version:
        print(f"batcher {__version__}")
        raise typer.Exit


@app.command()
def serve(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="An .onnx file or a TensorRT .plan, a model's folder, or a repository "
            "of such folders (<model>/<version>/model.onnx or model.plan, "
            "<model>/model.toml).",
        ),
    ],
    grpc_address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT|unix:PATH",
            envvar="BATCHER_GRPC_ADDRESS",
            help="Where to listen for gRPC; may be given several times. "
            "[default: 127.0.0.1:8001]",
        ),
    ] = None,
    http_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|none",
            envvar="BATCHER_HTTP_ADDRESS",
            help="Where /metrics, /livez and /readyz are. [default: 127.0.0.1:8002]",
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="auto|native|grpcio",
            envvar="BATCHER_TRANSPORT",
            help="Who speaks gRPC: native is fast and for trusted networks, grpcio "
            "does the rest; auto picks by address. [default: auto]",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="auto|onnxruntime|tensorrt|fake",
            envvar="BATCHER_ENGINE",
            help="The back end that runs the models; auto goes by the kind of file: "
            "TensorRT for a plan, ONNX Runtime on the CPU for ONNX. [default: auto]",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="keep|fp32|fp16|bf16",
            envvar="BATCHER_PRECISION",
            help="What TensorRT makes of FP32 models; inputs and outputs keep their "
            "types. [default: keep]",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="eager|window",
            envvar="BATCHER_POLICY",
            help="When a batch closes: eager runs when a slot is free, window waits "
            "out the delay like Triton. [default: eager]",
        ),
    ] = None,
    max_delay_us: Annotated[
        int | None,
        typer.Option(
            metavar="US",
            envvar="BATCHER_MAX_DELAY_US",
            help="The most a free slot waits for a fuller batch. [default: 0]",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            envvar="BATCHER_MAX_BATCH",
            help="Rows of the largest batch. [default: 64]",
        ),
    ] = None,
    batch_axis: Annotated[
        str | None,
        typer.Option(
            metavar="auto|first|none",
            envvar="BATCHER_BATCH_AXIS",
            help="Where rows are joined: axis 0 by your word (first), nowhere (none), "
            "or axis 0 where a check finds rows independent. [default: auto]",
        ),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="BATCHER_MAX_QUEUE",
            help="Requests that may wait; one more is refused. [default: 4096]",
        ),
    ] = None,
    timeout_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            envvar="BATCHER_TIMEOUT_MS",
            help="The longest wait in the queue, 0 for none. [default: 0]",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="BATCHER_SLOTS",
            help="Batches that run at the same time, per device. [default: 1, on a GPU "
            "2]",
        ),
    ] = None,
    isolation: Annotated[
        str | None,
        typer.Option(
            metavar="auto|thread|process",
            envvar="BATCHER_ISOLATION",
            help="Where engines live: in the daemon, or in a process of their own per "
            "device, which is started again when it ends. [default: auto]",
        ),
    ] = None,
    socket_mode: Annotated[
        str | None,
        typer.Option(
            metavar="OCTAL",
            envvar="BATCHER_SOCKET_MODE",
            help="Permission bits of Unix sockets. [default: 0660]",
        ),
    ] = None,
    max_message_mb: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            envvar="BATCHER_MAX_MESSAGE_MB",
            help="Largest message. [default: 64]",
        ),
    ] = None,
    max_in_flight_mb: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            envvar="BATCHER_MAX_IN_FLIGHT_MB",
            help="Most bytes of requests in the daemon. [default: a quarter of memory]",
        ),
    ] = None,
    io_threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            envvar="BATCHER_IO_THREADS",
            help="Threads of the native transport, per address. [default: one per "
            "four cores, at most 4]",
        ),
    ] = None,
    plan_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            envvar="BATCHER_PLAN_CACHE",
            help="Where TensorRT plans are kept that were built here; daemons may "
            "share it. [default: batcher/plans in the user's cache folder]",
        ),
    ] = None,
    plan_cache_mb: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            envvar="BATCHER_PLAN_CACHE_MB",
            help="How large the plan cache may grow, 0 for no limit. [default: 0]",
        ),
    ] = None,
    plugin_folder: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            envvar="BATCHER_PLUGIN_FOLDER",
            help="Where TensorRT plugin libraries may lie that models name; may be "
            "given several times. None are loaded otherwise.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            envvar="BATCHER_DRAIN_TIMEOUT",
            help="How long SIGTERM waits for what was accepted. [default: 30]",
        ),
    ] = None,
    strict_triton_codes: Annotated[
        bool,
        typer.Option(
            "--strict-triton-codes",
            envvar="BATCHER_STRICT_TRITON_CODES",
            help="Answer Triton's status codes where they differ from ours.",
        ),
    ] = False,
    log_format: Annotated[
        str | None,
        typer.Option(
            metavar="text|json",
            envvar="BATCHER_LOG_FORMAT",
            help="[default: text]",
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="debug|info|warning|error",
            envvar="BATCHER_LOG_LEVEL",
            help="[default: info]",
        ),
    ] = None,
) -> None:
    """Serve models over the KServe v2 / Triton gRPC protocol.

    Batching knobs given here win over the models' own model.toml. SIGTERM drains: it
    answers everything accepted, then exits with 0; a second signal exits at once.
    """
    logs.setup("json" if log_format == "json" else "text", "info")
    server = _given(
        grpc_address=tuple(grpc_address) if grpc_address else None,
        http_address=http_address,
        transport=transport,
        max_message_mb=max_message_mb,
        max_in_flight_mb=max_in_flight_mb,
        io_threads=io_threads,
        plan_cache=plan_cache,
        plan_cache_mb=plan_cache_mb,
        plugin_folder=tuple(plugin_folder) if plugin_folder else None,
        drain_timeout_s=drain_timeout,
        strict_triton_codes=strict_triton_codes or None,
        log_format=log_format,
        log_level=log_level,
    )
    batching = _given(
        policy=policy,
        max_delay_us=max_delay_us,
        max_queue=max_queue,
        timeout_ms=timeout_ms,
    )
    overrides = _given(
        engine=engine,
        max_batch=max_batch,
        batch_axis=batch_axis,
        batching=batching or None,
        slots=_given(count=slots, isolation=isolation) or None,
        tensorrt=None if precision is None else {"precision": precision},
    )
    # What gRPC's core would print on stderr is said by our own errors, in one line.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from batcher.config import ServerConfig, check_overrides, from_mapping

    try:
        if socket_mode is not None:
            server["socket_mode"] = _octal(socket_mode)
        config = from_mapping(ServerConfig, server, "options")
        for flag, value in (("--max-batch", max_batch), ("--slots", slots)):
            if value == 0:  # in a model's file it stands for the default
                raise ConfigError(f"{flag} must be at least 1, got 0")
        check_overrides(overrides, _KNOBS)
        logs.setup(config.log_format, config.log_level)
        from batcher.serving.server import serve as run

        code = run(config, paths, overrides)
    except BatcherError as error:
        for line in str(error).splitlines():
            logs.announce(line, logging.ERROR)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def main() -> None:
    """The console script."""
    if _DAEMON:
        sys.exit(_daemon())
    app()


def _daemon() -> int:
    """`batcher serve`, all of whose lines on stderr have the format asked for."""
    style = logs.asked_for(sys.argv[1:], os.environ)
    logs.setup(style, "info")
    logs.catch_uncaught()
    command = typer.main.get_command(app)
    try:
        return command.main(standalone_mode=False) or 0
    except _USAGE_ERROR as error:
        if style == "json":
            logs.announce(error.format_message(), logging.ERROR)
        else:
            error.show()
        return int(error.exit_code)
    except Exception:
        logging.getLogger("batcher").exception("the daemon failed")
        return 1


def _given(**values: Any) -> dict[str, Any]:
    """The values that were given."""
    return {key: value for key, value in values.items() if value is not None}


def _octal(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise ConfigError(f"--socket-mode {text!r} is not octal") from None
