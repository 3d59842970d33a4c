"""Which names of TensorRT the back end uses, and what an installed module says of them.

Names are found in the source: `trt.X`, `trt.X.Y`, what is asked of objects that hold
TensorRT's (by the name of the variable, below), and callbacks that TensorRT calls.

    python tests/engines/tensorrt/trt_names.py

prints, as JSON for `manifest.json`, those that it does not have yet.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
BACK_END: Final = ROOT / "engines" / "tensorrt"
MANIFEST: Final = BACK_END / "manifest.json"

OBJECTS: Final[dict[str, dict[str, str]]] = {
    "build.py": {
        "builder": "Builder",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "error": "ParserError",
        "config": "IBuilderConfig",
        "shapes": "IOptimizationProfile",
        "timings": "ITimingCache",
        "registry": "IPluginRegistry",
        "tensor": "ITensor",
    },
    "engine.py": {
        "engine": "ICudaEngine",
        "_engine": "ICudaEngine",
        "_runtime": "Runtime",
        "config": "IRuntimeConfig",
        "cache": "IRuntimeCache",
        "context": "IExecutionContext",
    },
    "lane.py": {"context": "IExecutionContext"},
}
"""Per file, which variable (or attribute) holds an object of which class."""

DYNAMIC: Final = (
    "HardwareCompatibilityLevel.AMPERE_PLUS",
    "HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY",
    "ComputeCapability.CURRENT",
    "IBuilderConfig.num_compute_capabilities",
    "IExecutionContext.is_stream_capturable",
)
"""Names that the code makes from strings."""

_GETTERS: Final = ("getattr", "hasattr", "_members")


def used_names() -> dict[str, str]:
    """Dotted names that the back end uses, each with the file that does."""
    found = dict.fromkeys(DYNAMIC, "(made from strings)")
    for path in sorted(BACK_END.glob("*.py")):
        for name in _names(ast.parse(path.read_text()), OBJECTS.get(path.name, {})):
            found.setdefault(name, path.name)
    return found


def describe(trt: Any, name: str) -> dict[str, Any] | None:
    """The kind, and for methods the signature, of a name; None if it has none such."""
    value: Any = trt
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    if isinstance(value, str):
        return {"kind": "constant"}
    if isinstance(value, type):
        return {"kind": "enum" if hasattr(value, "__members__") else "class"}
    if isinstance(value, property):
        return {"kind": "property"}
    if callable(value):
        return {"kind": "method", "signatures": _signatures(value)}
    return {"kind": "value"}


def _signatures(method: Any) -> list[str]:
    """As pybind11 writes them, without `self` and module names."""
    lines = (method.__doc__ or "").splitlines()
    found = [re.fullmatch(r"(?:\d+\. )?\w+(\(self.*\) -> .*)", line) for line in lines]
    texts = [match[1] for match in found if match]
    texts = [re.sub(r"\b(?:\w+\.)+(?=\w)", "", text) for text in texts]
    return [re.sub(r"^\(self: \w+(?:, )?", "(", text) for text in texts]


def _names(tree: ast.Module, objects: dict[str, str]) -> set[str]:
    aliases = dict(objects)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_module_member(node.value):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    aliases[target.id] = node.value.attr  # type: ignore[attr-defined]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= _callbacks(node)
        elif isinstance(node, ast.Call):
            names |= _asked(node)
        elif isinstance(node, ast.Attribute):
            if _is_module_member(node):
                names.add(node.attr)
            elif _is_module_member(node.value):
                names.add(f"{node.value.attr}.{node.attr}")  # type: ignore[attr-defined]
            elif (holder := _terminal(node.value)) in aliases:
                names.add(f"{aliases[holder]}.{node.attr}")
    return {name for name in names if not name.rpartition(".")[2].startswith("_")}


def _is_module_member(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _terminal(node.value) == "trt"


def _terminal(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _callbacks(node: ast.ClassDef) -> set[str]:
    bases = [b.attr for b in node.bases if _is_module_member(b)]  # type: ignore[attr-defined]
    methods = [
        n.name
        for n in node.body
        if isinstance(n, ast.FunctionDef) and not n.decorator_list
    ]
    # `log` cannot be seen on the class: TensorRT only asks instances for it.
    return {f"{base}.{m}" for base in bases for m in methods if m != "log"}


def _asked(node: ast.Call) -> set[str]:
    if _terminal(node.func) not in _GETTERS or len(node.args) < 2:
        return set()
    holder, name = node.args[:2]
    if _terminal(holder) == "trt" and isinstance(name, ast.Constant):
        return {str(name.value)}
    return set()


def main() -> None:
    """Prints the entries that the manifest lacks."""
    sys.path.insert(0, str(ROOT))
    from engines.tensorrt.module import find

    found = find()
    known = json.loads(MANIFEST.read_text())["names"] if MANIFEST.exists() else {}
    lacking = {
        name: {**(describe(found.trt, name) or {}), found.flavour: [found.version] * 2}
        for name in sorted(set(used_names()) - set(known))
    }
    json.dump(lacking, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
