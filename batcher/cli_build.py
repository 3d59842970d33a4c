"""`batcher build`: its options, how far it is, and what it prints.

What is built, compared and written is in `batcher.serving.building`.
"""

from __future__ import annotations

import dataclasses
import json as jsonlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from batcher.errors import BatcherError, ConfigError

if TYPE_CHECKING:
    from batcher.config import ModelConfig

_EVERY_S: Final = 5.0

_KNOBS: Final = {
    "--max-batch": "max_batch",
    "--rungs": "batching.rungs",
    "--precision": "tensorrt.precision",
    "--flavour": "tensorrt.flavour",
    "--optimization-level": "tensorrt.optimization_level",
    "--workspace-mb": "tensorrt.workspace_mb",
    "--hardware-compatibility": "tensorrt.hardware_compatibility",
}
"""Flags with a value, and the keys of a model's file that they win over."""


def build(
    model: Annotated[Path, typer.Argument(metavar="MODEL.ONNX", help="The model.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The plan to write, and FILE.json that describes it. [default: the "
            "model's name, ending in .plan]",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(metavar="ROWS", help="Rows of the largest batch. [default: 64]"),
    ] = None,
    rungs: Annotated[
        str | None,
        typer.Option(
            metavar="1,8,32",
            help="The batch sizes that will be run. [default: a ladder up to the "
            "largest]",
        ),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=16,32,64",
            help="The sizes that will be run of a dynamic axis that is not the batch; "
            "once for each such axis.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL.TOML",
            help="A model's file, for max_batch, rungs, axes and [tensorrt]; flags win "
            "over it. [default: the one of <model>/<version>/model.onnx]",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="keep|fp32|fp16|bf16",
            help="What an FP32 model is converted to; its inputs and outputs keep "
            "their types. [default: keep]",
        ),
    ] = None,
    input_u8: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[INPUT=]SCALE,MEAN",
            help="Take an image as bytes, and give the model (byte - MEAN) * SCALE; "
            "each is one number, or one per channel with colons between.",
        ),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Real inputs to compare on. [default: random values]",
        ),
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Compare the plan with ONNX Runtime, and write it only if they agree. "
            "[default: where there is a GPU]",
        ),
    ] = None,
    flavour: Annotated[
        str | None,
        typer.Option(
            metavar="auto|tensorrt|tensorrt_rtx",
            help="Which TensorRT builds. [default: auto, the data-centre one first]",
        ),
    ] = None,
    optimization_level: Annotated[
        int | None,
        typer.Option(
            metavar="0-5", help="0 is a quick build, 5 a quick plan. [default: 3]"
        ),
    ] = None,
    workspace_mb: Annotated[
        int | None,
        typer.Option(
            metavar="MIB",
            help="Scratch memory that a layer may use. [default: all of the GPU's]",
        ),
    ] = None,
    tf32: Annotated[
        bool | None,
        typer.Option(
            "--tf32/--no-tf32",
            help="Whether FP32 products may be rounded to TF32. [default: they may]",
        ),
    ] = None,
    version_compatible: Annotated[
        bool,
        typer.Option(
            "--version-compatible",
            help="Make a plan that later versions of TensorRT load too.",
        ),
    ] = False,
    hardware_compatibility: Annotated[
        str | None,
        typer.Option(
            metavar="none|ampere_plus|same_compute_capability",
            help="Make a plan that other GPUs load too. [default: none]",
        ),
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            metavar="8.9",
            help="Build for GPUs of this compute capability; may be given several "
            "times. [default: all that the flavour supports]",
        ),
    ] = None,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A plugin library to load (repeatable)."),
    ] = None,
    plugin_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Where plugin libraries may lie: they are code. (repeatable)",
        ),
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep timings of kernels there, for later builds."
        ),
    ] = None,
    device: Annotated[
        int | None,
        typer.Option(metavar="N", help="Index of the GPU. [default: the first]"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print what came of it as JSON on stdout.")
    ] = False,
) -> None:
    """Build a TensorRT plan of an ONNX model, and compare both.

    A plan is built for the batches that will be run, so say which: the largest batch,
    and sizes for every other dynamic axis. The daemon does the same by itself when a
    model's engine is tensorrt; build ahead where its start must be quick, or where a
    plan goes to other machines. Put it beside the model, and it is served in its place:

    \b
      batcher build model.onnx -o models/bert/1/model.plan --max-batch 32 \\
          --axis sequence=32,64,128 --precision fp16
      batcher serve models

    Where there is no GPU, TensorRT for RTX builds all the same; the plan is then not
    compared with its model. Ctrl-C or SIGTERM ends a build, and nothing is written.

    Exit code: 0; 1 if the plan does not compute what the model does (it is not
    written); 2 if none was built; 130 after Ctrl-C or SIGTERM.
    """
    from batcher.serving.building import build_plan, plan_wanted
    from batcher.serving.buildtarget import build_target
    from engines import EngineError

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _check(max_batch, workspace_mb, [*(plugin or ()), *filter(None, [samples])])
        file = config or _model_file(model)
        if file is not None and config is None:
            _say(f"configured by {file}")
        settings = _given(
            precision=precision,
            flavour=flavour,
            optimization_level=optimization_level,
            workspace_mb=workspace_mb,
            hardware_compatibility=hardware_compatibility,
            check=check,
            tf32=tf32,
            version_compatible=version_compatible or None,
            input_u8=_by_name("--input-u8", input_u8 or ()) or None,
        )
        axes = {
            name: _sizes(f"--axis {name}", sizes)
            for name, sizes in _by_name("--axis", axis or ()).items()
        }
        sizes = None if rungs is None else _sizes("--rungs", rungs)
        found = _config(file, max_batch, sizes, axes, settings)
        target = build_target(model, output)
        options = plan_wanted(model, found, plugin_folder or ())
        how = options.build
        options = dataclasses.replace(
            options,
            samples=samples or options.samples,
            build=dataclasses.replace(
                how,
                plugins=(*how.plugins, *(plugin or ())),
                compute_capabilities=tuple(compute_capability or ()),
                timing_cache=timing_cache,
            ),
        )
        with _progress() as report:
            result = build_plan(
                model,
                target,
                options,
                device=device,
                forced=check is True,
                report=report,
            )
    except KeyboardInterrupt:
        _say("stopped, and nothing was written")
        raise typer.Exit(130) from None
    except (BatcherError, EngineError, OSError) as error:
        _say("; ".join(str(error).splitlines()))
        raise typer.Exit(2) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    typer.echo(jsonlib.dumps(result.to_json(file), indent=2) if json else str(result))
    raise typer.Exit(0 if result.passed else 1)


# -- what is wanted -------------------------------------------------------------------


def _given(**values: Any) -> dict[str, Any]:
    """The values that were given."""
    return {key: value for key, value in values.items() if value is not None}


def _sizes(flag: str, text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{flag} {text!r} must be numbers with commas between, as in 16,32,64"
        ) from None


def _by_name(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """What was given as NAME=VALUE, by name; "" where there is none."""
    named = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if name in named:
            raise ConfigError(f"{flag} {name or value} is given twice")
        named[name] = value
    return named


def _check(max_batch: int | None, workspace_mb: int | None, files: list[Path]) -> None:
    """Refuses what a model's file would take for a default, and files not there."""
    for flag, value in (("--max-batch", max_batch), ("--workspace-mb", workspace_mb)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: no such file")


def _model_file(model: Path) -> Path | None:
    """The `model.toml` of a model that lies in its version's folder, if it has one."""
    from batcher.serving.repository import CONFIG_NAME, is_version

    version = model.absolute().parent
    file = version.parent / CONFIG_NAME
    found = model.name == "model.onnx" and is_version(version.name) and file.is_file()
    return file if found else None


def _config(
    file: Path | None,
    max_batch: int | None,
    rungs: list[int] | None,
    axes: Mapping[str, list[int]],
    settings: Mapping[str, Any],
) -> ModelConfig:
    """The model's file with the flags that win over it.

    Raises:
        ConfigError: it cannot be read, or a value is wrong; names the flag.
    """
    from batcher.config import check_overrides, load_model_config

    known = load_model_config(file).axes
    overrides = _given(max_batch=max_batch, tensorrt=settings or None)
    if rungs is not None:
        overrides["batching"] = {"rungs": rungs}
    flags = dict(_KNOBS)
    for name, sizes in axes.items():
        if not name:
            raise ConfigError("--axis must be NAME=SIZES, as in sequence=16,32,64")
        # To TensorRT they are one, but a model's file may have only one of them.
        kind = "sizes" if name in known and known[name].sizes else "buckets"
        overrides.setdefault("axes", {})[name] = {kind: sizes}
        flags[f"--axis {name}"] = f"axes.{name}"
    check_overrides(overrides, flags)
    return load_model_config(file, overrides)


# -- how far it is --------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], object]]:
    """Tells how far things are on stderr: by a bar on a terminal, else in lines."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=Console(stderr=True), transient=True
        ) as progress:
            bar = progress.add_task("reading", total=None)
            yield lambda phase, done, total: progress.update(
                bar, description=phase, completed=done, total=total or None
            )
        return
    started = time.monotonic()
    ended = threading.Event()
    state = ["reading"]

    def tell() -> None:
        while not ended.wait(_EVERY_S):
            _say(f"{state[0]} ({time.monotonic() - started:.0f} s)")

    def report(phase: str, done: int, total: int) -> None:
        state[0] = f"{phase}, step {done} of {total}" if total else phase

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        ended.set()
        thread.join()


def _interrupt(*_: object) -> None:
    """Ends a build as Ctrl-C does, so that nothing is left in temporary folders."""
    raise KeyboardInterrupt


def _say(text: str) -> None:
    typer.echo(f"batcher build: {text}", err=True)
