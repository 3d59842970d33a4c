"""What to do about what TensorRT says.

TensorRT's texts are for those who know its inside. Here is, for those that users meet,
the cause in their words and the nearest way out. A text that is not known is passed on
as it is.
"""

from __future__ import annotations

import re
from typing import Final

_ELSEWHERE: Final = 'serve the model with engine = "onnxruntime"'

# Ordered: the first that is found in the text is taken.
_REMEDIES: Final[tuple[tuple[str, str], ...]] = (
    (
        r"plugin creator .* was not found|Plugin not found|No importer registered|"
        r"no runners that implement",
        "this TensorRT has no such operator: give the plugin library that has it, "
        f"export the model without the operator, or {_ELSEWHERE}",
    ),
    (
        r"Node input was not registered",
        "a value from outside is used in the body of a Loop, If or Scan, which "
        "TensorRT's parser does not follow: unroll the loop at export, or "
        + _ELSEWHERE,
    ),
    (
        r"convertDtype|[Uu]nsupported ONNX data type|data type .* not supported",
        "TensorRT does not have this type: cast it inside the model to FLOAT, FLOAT16, "
        f"BFLOAT16, INT8, INT32, INT64, UINT8 or BOOL, or {_ELSEWHERE}",
    ),
    (
        r"strongly typed|must have the same (?:data )?types?|type.*mismatch",
        "the types of this node's inputs differ, and nothing is cast in a strongly "
        "typed network: check the ONNX file with onnx.checker (full_check=True), and "
        "convert its precision with `batcher build --precision`",
    ),
    (
        r"Failed to open file|convertOnnxWeights|external data",
        "the model's external weights cannot be read: keep their file beside the ONNX "
        "file, under the name it had at export",
    ),
    (
        r"dtype == myelinType|MyelinCheckException.*dtype",
        "a layer has a type that TensorRT for RTX cannot run (int8 activations, for "
        "one): use fp16, bf16 or fp8",
    ),
    (
        r"libnvinfer_lean",
        "version-compatible plans need the lean runtime, which is not installed: "
        "switch version compatibility off",
    ),
    (
        r"cudaError (?:35|100|101|999)|driver version is insufficient|no CUDA-capable",
        "the GPU or its driver is missing or too old: see `batcher doctor`",
    ),
    (
        r"[Oo]ut ?[Oo]f ?[Mm]emory|cudaErrorMemoryAllocation|FAILED_ALLOCATION",
        "the GPU's memory is used up: free it, or build with a smaller workspace or "
        "smaller max shapes",
    ),
    (
        r"Could not find any implementation|insufficient workspace",
        "no kernel fits the limits: allow more workspace, or leave it to TensorRT",
    ),
    (
        r"kOPT|kMIN|kMAX|optimization profile",
        "the optimization profiles do not fit the model: see the shapes above",
    ),
    (
        r"does not support this compute capability|UNSUPPORTED_CC|compute capability",
        "the plan, or this TensorRT, is not for this GPU: build the plan on this GPU, "
        "or install the TensorRT whose support matrix lists it",
    ),
    (
        r"not compatible with this version|expecting library version|VERSION_MISMATCH|"
        r"[Vv]ersion tag does not match|stdVersionRead",
        "the plan was made by another TensorRT version: build it again from its ONNX",
    ),
    (
        r"magicTag|[Ss]erialization|MALFORMED_ENGINE|deserializ",
        "the file is damaged, or no plan of this TensorRT flavour: build it again from "
        "its ONNX",
    ),
)


def remedy(text: str) -> str:
    """The nearest way out of what TensorRT said, or "" if none is known."""
    for pattern, advice in _REMEDIES:
        if re.search(pattern, text):
            return advice
    return ""


def with_remedy(text: str) -> str:
    """The text, followed by the way out where one is known."""
    advice = remedy(text)
    return f"{text}; {advice}" if advice else text
