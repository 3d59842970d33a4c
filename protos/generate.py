"""Write what `batcher/rpc/messages.py` needs of the `.proto` files here.

Run by `make protos`; with `--check`, by `make test`. Written, and checked in, so that
neither a user nor the daemon ever needs protoc:

- `batcher/rpc/inference.binpb`: the descriptor set that is loaded at run time;
- `batcher/rpc/messages.pyi`: the types of the message classes, for the type checker.

No `*_pb2.py` ever: those register in protobuf's process-wide pool, where they clash
with tritonclient's. Nothing here is imported by the packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
PROTOS: Final = ROOT / "protos"
DESCRIPTORS: Final = ROOT / "batcher" / "rpc" / "inference.binpb"
STUB: Final = ROOT / "batcher" / "rpc" / "messages.pyi"

# A file after those that it imports: the stub is made of them in this order.
SOURCES: Final = ("inference/model_config.proto", "inference/grpc_service.proto")
PACKAGE: Final = "package inference;\n"

TOOLS: Final = ("grpcio-tools", "mypy-protobuf")

# mypy-protobuf's style is not ours: long lines, protobuf's own method names, imports.
STUB_HEAD: Final = """\
# ruff: noqa: E402, E501, I001, N802, UP035, UP036
# fmt: off
"""
STUB_TITLE: Final = """\
// Types of what `messages.py` makes at import, written by `make protos` from `protos/`.
// Nothing is ever added here by hand.
syntax = "proto3";

"""
STUB_TAIL: Final = """
from google.protobuf import descriptor_pool as _descriptor_pool

POOL: _typing.Final[_descriptor_pool.DescriptorPool]
SERVICE: _typing.Final[_descriptor.ServiceDescriptor]
SERVICE_NAME: _typing.Final = "inference.GRPCInferenceService"
"""
# In the generated text, but not for us: a single module's descriptor, where we have
# two files; the code of a linter that we don't use, which ruff would complain of.
STUB_MODULE: Final = "\nDESCRIPTOR: _descriptor.FileDescriptor\n"
STUB_NOQA: Final = "  # noqa: Y015"


class GenerationError(Exception):
    """A tool is missing, refused the sources, or wrote what we do not expect."""


def build_descriptors(folder: Path) -> bytes:
    """Return the serialized `FileDescriptorSet` of `SOURCES` and their imports.

    Args:
        folder: An empty place for protoc to write in.
    """
    path = folder / DESCRIPTORS.name
    _protoc(PROTOS, f"--descriptor_set_out={path}", "--include_imports", *SOURCES)
    return path.read_bytes()


def build_stub(folder: Path) -> bytes:
    """Return the text of `messages.pyi`.

    The sources are put together into one first, so that a single stub comes of them:
    one for each would stand for modules that do not exist at run time.

    Args:
        folder: An empty place for protoc to write in.
    """
    bodies = [_body(PROTOS / source) for source in SOURCES]
    (folder / "messages.proto").write_text(
        STUB_TITLE + PACKAGE + "".join(bodies), encoding="utf-8"
    )
    plugin = f"--plugin=protoc-gen-mypy={_mypy_plugin()}"
    _protoc(folder, plugin, f"--mypy_out={folder}", "messages.proto")
    text = (folder / "messages_pb2.pyi").read_text(encoding="utf-8")
    text = text.replace(STUB_MODULE, "").replace(STUB_NOQA, "")
    return (STUB_HEAD + text + STUB_TAIL).encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with `--check` compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if a checked-in file is not what would be written",
    )
    check: bool = parser.parse_args(arguments).check
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = {
                DESCRIPTORS: build_descriptors(Path(folder)),
                STUB: build_stub(Path(folder)),
            }
    except GenerationError as error:
        sys.stderr.write(f"protos/generate.py: {error}\n")
        return 2
    if check:
        return _compare(built)
    for path, content in built.items():
        path.write_bytes(content)
    return 0


def _compare(built: dict[Path, bytes]) -> int:
    """Report the checked-in files that differ from `built`; return the exit code."""
    stale = [
        str(path.relative_to(ROOT))
        for path, content in built.items()
        if not path.is_file() or path.read_bytes() != content
    ]
    if not stale:
        return 0
    # The versions: another release of a tool may write the same thing otherwise.
    versions = ", ".join(f"{tool} {metadata.version(tool)}" for tool in TOOLS)
    sys.stderr.write(
        f"stale: {' and '.join(stale)} (not what protos/ gives with {versions}); "
        "run `make protos`\n"
    )
    return 1


def _body(path: Path) -> str:
    """Return the declarations of a `.proto` file, without head and imports."""
    _, package, body = path.read_text(encoding="utf-8").partition(PACKAGE)
    if not package:
        raise GenerationError(f"{path.name} does not say `{PACKAGE.strip()}`")
    lines = body.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("import "))


def _protoc(include: Path, *arguments: str) -> None:
    """Run protoc on files below `include`."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{include}", *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise GenerationError(f"protoc (of grpcio-tools): {result.stderr.strip()}")


def _mypy_plugin() -> str:
    """Return the path of mypy-protobuf's plugin, also where no venv is activated."""
    places = os.pathsep.join(
        (sysconfig.get_path("scripts"), os.environ.get("PATH", ""))
    )
    plugin = shutil.which("protoc-gen-mypy", path=places)
    if plugin is None:
        raise GenerationError("protoc-gen-mypy not found; install mypy-protobuf")
    return plugin


if __name__ == "__main__":
    sys.exit(main())
