"""`batcher doctor`: what is installed, what will be used and why, and what is wrong.

Whatever is wrong is itself a fact here: nothing raises, and a library that does not
load is reported with its own words. No CUDA context is made and nothing is written.
"""

from __future__ import annotations

import importlib
import json as jsonlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from batcher import __version__
from batcher.serving.plancache import VARIABLE, PlanFolder, plan_folder

if TYPE_CHECKING:
    from engines.tensorrt.facts import GpuFact, ModuleFact

Blocks = Literal["serving", "onnxruntime", "tensorrt", ""]

_ENGINES: Final = ("auto", "onnxruntime", "tensorrt")
_GIB: Final = 1 << 30
_TITLES: Final = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT for RTX"}
_DRIVER_VERSION: Final = Path("/sys/module/nvidia/version")
_MEMORY_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")

# Module, and the distribution that brings it.
_PACKAGES: Final = {
    "cuda-python": ("cuda.bindings.driver", "cuda-bindings"),
    "ONNX Runtime": ("onnxruntime", "onnxruntime"),
    "grpcio": ("grpc", "grpcio"),
    "pygrpc-native": ("pygrpc_native", "pygrpc-native"),
    "uvloop": ("uvloop", "uvloop"),
    # With all that it needs: nothing else can tell so surely whether it starts.
    "the daemon": ("batcher.serving.server", "trt-batcher"),
}

# By the state of `GpuFact`: what is wrong, and the way out.
_NO_GPU: Final = {
    "no-bindings": (
        "GPUs cannot be asked for: cuda-python cannot be imported",
        "pip install --force-reinstall 'cuda-python>=12.8'",
    ),
    "no-driver": (
        "the NVIDIA driver's library (libcuda) is missing",
        "install the driver, or start the container with GPUs (docker run --gpus all)",
    ),
    "no-gpu": (
        "the driver finds no GPU",
        "look whether CUDA_VISIBLE_DEVICES is empty or wrong, and what nvidia-smi says",
    ),
}


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package: "found", "missing" (not installed) or "broken" (does not load).

    `version` is "" where it is not known; `detail` says more, or why it cannot be used.
    """

    name: str
    state: Literal["found", "missing", "broken"]
    version: str
    detail: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What will be used for something ("none" where nothing can be), and why."""

    what: str
    uses: str
    why: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, and the way out.

    `blocks` is what it makes impossible: "serving" at all, an engine ("onnxruntime",
    "tensorrt"), or nothing ("").
    """

    what: str
    remedy: str
    blocks: Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that `batcher doctor` knows; `asdict` of it is its JSON.

    Attributes:
        version: of batcher.
        engine: that was asked for: "auto", "onnxruntime" or "tensorrt".
        host: the machine as this process sees it: "python", "platform", "cores",
            "memory_bytes" (of the control group where one limits it; 0 if not known),
            "driver_version" (of NVIDIA's kernel driver; "" where none is to be seen).
        gpu, tensorrt, packages, plan_cache: what there is.
        choices: what will be used.
        problems: those that matter for the engine asked for.
        can_serve: whether that engine can serve; with "auto", whether any can.
    """

    version: str
    engine: str
    host: dict[str, Any]
    gpu: GpuFact
    tensorrt: tuple[ModuleFact, ...]
    packages: tuple[Package, ...]
    plan_cache: PlanFolder
    choices: tuple[Choice, ...]
    problems: tuple[Problem, ...]
    can_serve: bool


def doctor(
    engine: Annotated[
        str,
        typer.Option(
            metavar="|".join(_ENGINES),
            help="Ask for this engine: exit 1, with the reasons, if it cannot serve.",
        ),
    ] = "auto",
    json: Annotated[
        bool, typer.Option("--json", help="Print all of it as JSON on stdout.")
    ] = False,
) -> None:
    """Look at this machine: what is installed, what will be used, what is wrong.

    Looks only: nothing is written, and no GPU is set up. In a bug report, add what it
    prints.

    Exit code: 0 if models can be served (ONNX Runtime on the CPU is enough); 1 if not,
    or if the engine asked for cannot; 2 for wrong usage.
    """
    if engine not in _ENGINES:
        text = f"batcher doctor: --engine {engine!r} is none of {', '.join(_ENGINES)}"
        typer.echo(text, err=True)
        raise typer.Exit(2)
    try:
        found = diagnose(engine)
        text = jsonlib.dumps(asdict(found), indent=2) if json else _as_text(found)
    except Exception as error:  # numpy, without which not even `engines` loads
        remedy = "pip install --force-reinstall trt-batcher"
        typer.echo(f"batcher doctor: {_words(error)}; {remedy}", err=True)
        raise typer.Exit(1) from None
    # What a terminal cannot show must not end the command that looks for faults.
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    raise typer.Exit(0 if found.can_serve else 1)


def diagnose(engine: str = "auto") -> Diagnosis:
    """Looks at everything; raises nothing, unless numpy does not load.

    Args:
        engine: whose problems count: "auto" (any engine will do), "onnxruntime" or
            "tensorrt".
    """
    from engines.tensorrt.facts import gpu_fact, module_facts

    gpu, flavours = gpu_fact(), [_with_abilities(fact) for fact in module_facts()]
    packages = {name: _package(name) for name in _PACKAGES}
    folder = plan_folder()
    daemon = _package_problems(packages["the daemon"], "serving")
    runtime = _package_problems(packages["ONNX Runtime"], "onnxruntime")
    no_flavour, no_gpu = _flavour_problems(flavours), _gpu_problems(gpu)

    problems = [*daemon, *runtime]
    wanted = engine == "tensorrt" or any(fact.state != "missing" for fact in flavours)
    if wanted or gpu.gpus:  # else nobody misses it
        problems += [*no_flavour, *no_gpu]
    if wanted and not folder.writable:
        what = f"TensorRT plans are built anew at every start: {folder.detail}"
        remedy = f"set {VARIABLE} to a folder that this user can write"
        problems.append(Problem(what, remedy, ""))
    impossible = {p.blocks for p in (*daemon, *runtime, *no_flavour, *no_gpu)}
    needed = {"onnxruntime", "tensorrt"} if engine == "auto" else {engine}

    tensorrt, why_tensorrt = _chosen_flavour(flavours)
    gpus = ", ".join(str(each.index) for each in gpu.gpus)
    why_cpu = "an .onnx file runs there unless TensorRT is asked for"
    why_gpus = "all that are visible; slots.devices of a model's file may name some"
    why_far = "bounds what it receives; native there needs --transport native"
    why_near = "the faster one, for trusted networks"
    asked = "model.onnx --engine tensorrt, model.plan"
    return Diagnosis(
        version=__version__,
        engine=engine,
        host=_host(),
        gpu=gpu,
        tensorrt=tuple(flavours),
        packages=tuple(packages.values()),
        plan_cache=folder,
        choices=(
            _choice("model.onnx", "onnxruntime (CPU)", why_cpu, daemon, runtime),
            _choice(
                asked, "tensorrt", "TensorRT is asked for", daemon, no_flavour, no_gpu
            ),
            _choice("TensorRT", tensorrt, why_tensorrt, no_flavour),
            _choice("GPUs", gpus, why_gpus, no_gpu),
            _choice("gRPC on loopback, Unix sockets", "native", why_near, daemon),
            _choice("gRPC on other addresses", "grpcio", why_far, daemon),
        ),
        problems=tuple(problems),
        can_serve="serving" not in impossible and not needed <= impossible,
    )


def _chosen_flavour(flavours: Sequence[ModuleFact]) -> tuple[str, str]:
    """The flavour that "auto" takes, and why."""
    usable = [f"{_TITLES[f.flavour]} {f.version}" for f in flavours if f.version]
    if len(usable) > 1:
        return usable[0], "the data-centre flavour goes first where both load"
    return (usable or ["none"])[0], "the only flavour that loads"


def _choice(what: str, uses: str, why: str, *obstacles: Iterable[Problem]) -> Choice:
    """What is used where nothing is in the way; else "none", and what is."""
    reasons = [p.what for problems in obstacles for p in problems if p.blocks]
    return Choice(what, "none" if reasons else uses, "; ".join(reasons) or why)


# -- what there is ----------------------------------------------------------------


def _package(name: str) -> Package:
    module_name, distribution = _PACKAGES[name]
    version = detail = ""
    try:
        version = metadata.version(distribution)
    except Exception:  # damaged metadata raises as it likes
        pass
    try:
        module = importlib.import_module(module_name)
        if name == "ONNX Runtime":
            detail = f"providers: {', '.join(module.get_available_providers())}"
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and not version
        return Package(name, "missing" if absent else "broken", version, _words(error))
    version = version or str(getattr(module, "__version__", "found"))
    return Package(name, "found", version, detail)


def _with_abilities(fact: ModuleFact) -> ModuleFact:
    """The fact, with what this TensorRT can do beyond building and running."""
    from engines.tensorrt.module import load

    try:
        trt = load(fact.flavour)
    except Exception:  # the fact says it already
        return fact
    abilities = {
        "timing cache": trt.timing_cache,
        "version-compatible plans": trt.version_compatible,
        f"plans for {', '.join(trt.hardware_levels[1:])}": trt.hardware_levels[1:],
        "int8 activations": trt.int8_activations,
        f"can aim at {', '.join(trt.compute_capabilities)}": trt.compute_capabilities,
    }
    able = [ability for ability, present in abilities.items() if present]
    return replace(fact, detail="; ".join([fact.detail, *able]))


def _host() -> dict[str, Any]:
    cores, memory = os.cpu_count() or 1, 0
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError, ValueError):  # not everywhere
        pass
    limit = _read(_MEMORY_LIMIT)
    if limit.isdigit():
        memory = min(memory, int(limit))
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cores": cores,
        "memory_bytes": memory,
        "driver_version": _read(_DRIVER_VERSION),
    }


# -- what is wrong ----------------------------------------------------------------


def _package_problems(package: Package, blocks: Blocks) -> list[Problem]:
    what = f"{package.name} does not load: {package.detail}"
    remedy = f"pip install --force-reinstall {_PACKAGES[package.name][1]}"
    return [] if package.state == "found" else [Problem(what, remedy, blocks)]


def _gpu_problems(gpu: GpuFact) -> list[Problem]:
    what, remedy = _NO_GPU.get(gpu.state, (gpu.detail, "see what nvidia-smi says"))
    return [] if gpu.gpus else [Problem(what, remedy, "tensorrt")]


def _flavour_problems(flavours: Sequence[ModuleFact]) -> list[Problem]:
    from engines.tensorrt.module import EXTRAS

    states = {fact.state for fact in flavours}
    if states == {"missing"}:
        remedy = (
            f"for a data-centre GPU: {EXTRAS['tensorrt']} (from NVIDIA's index); for a "
            f"GeForce or RTX card: {EXTRAS['tensorrt_rtx']}"
        )
        return [Problem("no TensorRT is installed", remedy, "tensorrt")]
    problems = []
    for fact in flavours:
        if fact.state == "broken":
            # Its text ends with the remedy; a plain `pip install` would do nothing.
            what = re.sub(r"[:;] (install it .*)?pip install.*", "", fact.detail)
            again = EXTRAS[fact.flavour].replace("install", "install --force-reinstall")
            blocks: Blocks = "" if "found" in states else "tensorrt"
            problems.append(Problem(what, again, blocks))
    return problems


# -- as text ----------------------------------------------------------------------


def _as_text(found: Diagnosis) -> str:
    """For people: in columns, with no more than ASCII of our own."""
    able = "can" if found.can_serve else "CANNOT"
    which = "models" if found.engine == "auto" else f"models with {found.engine}"
    choices = [(c.what, c.uses, c.why) for c in found.choices]
    problems = []
    for number, p in enumerate(found.problems, start=1):
        kind = f"stops {p.blocks}" if p.blocks else "warning"
        problems += [(f"{number}.", kind, p.what), ("", "remedy", p.remedy)]
    return _drawn(
        (f"batcher {found.version}: {able} serve {which}", list(_rows(found))),
        ("What will be used, and why", choices),
        ("Problems" if problems else "No problems.", problems),
    )


def _rows(found: Diagnosis) -> Iterator[tuple[str, str, str]]:
    """What was found: name, version or state, detail."""
    host, gpu, folder = found.host, found.gpu, found.plan_cache
    yield "Python", host["python"], host["platform"]
    memory = f"{host['memory_bytes'] / _GIB:.1f} GiB of memory"
    yield "this process", f"{host['cores']} cores", memory
    for each in gpu.gpus:
        memory = f"{each.memory_bytes / _GIB:.1f} GiB"
        what = f"compute capability {each.compute_capability}, {memory}"
        yield f"GPU {each.index}", each.name, what
    if not gpu.gpus:
        yield "GPU", gpu.state, gpu.detail
    cuda = f"takes CUDA up to {gpu.cuda_version}" if gpu.cuda_version else ""
    yield "NVIDIA driver", host["driver_version"] or gpu.state, cuda
    for fact in found.tensorrt:
        yield _TITLES[fact.flavour], fact.version or fact.state, fact.detail
    for package in found.packages:
        state = package.version if package.state == "found" else package.state
        yield package.name, state, package.detail
    used, free = folder.size_bytes / _GIB, folder.free_bytes / _GIB
    what = f"{folder.plans} plans, {used:.3f} GiB; {free:.1f} GiB free"
    yield "plan cache", "writable" if folder.writable else "unusable", folder.path
    yield "", "", folder.detail or what


def _drawn(*sections: tuple[str, list[tuple[str, str, str]]]) -> str:
    """Titles, and tables below them; only a terminal's width makes lines wrap."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as shown:
        for title, rows in sections:
            table = Table(box=None, show_header=False, pad_edge=False)
            for row in rows:
                table.add_row(*map(Text, row))  # plain: their brackets are no markup
            head = f"{title}\n" if rows else title
            console.print(Text(head, style="bold"), table, "")
    return "\n".join(line.rstrip() for line in shown.get().splitlines()).rstrip()


def _words(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
