"""The ONNX Runtime back end: any ONNX model on the CPU, nothing else needed.

One session is shared by all contexts (a session may run in several threads). Inputs
and outputs are bound by address, so a run reads the caller's buffers and writes into
them without a copy of its own. Strings are the exception: ONNX Runtime's Python
interface takes and gives them as `str`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from engines.base import Array, Engine, ExecutionContext
from engines.cores import usable_cores
from engines.errors import EngineLoadError, EngineRunError
from engines.tensors import Axis, TensorSpec

# ONNX Runtime's type names, and TensorProto.DataType for binding by address.
_TYPES: Final[dict[str, tuple[str, int]]] = {
    "tensor(bool)": ("BOOL", 9),
    "tensor(uint8)": ("UINT8", 2),
    "tensor(uint16)": ("UINT16", 4),
    "tensor(uint32)": ("UINT32", 12),
    "tensor(uint64)": ("UINT64", 13),
    "tensor(int8)": ("INT8", 3),
    "tensor(int16)": ("INT16", 5),
    "tensor(int32)": ("INT32", 6),
    "tensor(int64)": ("INT64", 7),
    "tensor(float16)": ("FP16", 10),
    "tensor(float)": ("FP32", 1),
    "tensor(double)": ("FP64", 11),
    "tensor(bfloat16)": ("BF16", 16),
    "tensor(string)": ("BYTES", 8),
}
_NUMBER: Final = dict(_TYPES.values())


class OnnxRuntimeEngine(Engine):
    """An ONNX model on the CPU.

    Args:
        path: the `.onnx` file; external weight files lie beside it.
        contexts: how many runs will be made at the same time; each gets its share of
            the cores, so that they do not fight.
        spared: cores that are left to others.

    Raises:
        EngineLoadError: the file is missing or damaged, or has an input or output that
            cannot be handed over.
    """

    backend = "onnxruntime"

    def __init__(self, path: Path | str, *, contexts: int = 1, spared: int = 0) -> None:
        path = Path(path)
        if not path.is_file():
            raise EngineLoadError(f"{path}: no such file")
        options = ort.SessionOptions()
        cores = usable_cores() - spared
        options.intra_op_num_threads = max(1, cores // max(1, contexts))
        options.inter_op_num_threads = 1
        # Spinning threads would take the cores that the event loop needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # A failed run arrives as an exception; ONNX Runtime's own line about it would
        # stand in colour between the log's records, once per poisoned request.
        options.log_severity_level = 4
        self.session = _session(path, options)
        self.inputs = tuple(_spec(path, arg) for arg in self.session.get_inputs())
        self.outputs = tuple(_spec(path, arg) for arg in self.session.get_outputs())
        dtypes = {spec.dtype for spec in (*self.inputs, *self.outputs)}
        self.has_strings = "BYTES" in dtypes
        if self.has_strings and "BF16" in dtypes:
            raise EngineLoadError(
                f"{path}: BYTES and BF16 tensors in one model cannot be run: ONNX "
                "Runtime's Python interface has no way to hand over both"
            )

    def create_context(self) -> ExecutionContext:
        return _StringContext(self) if self.has_strings else _BoundContext(self)


def _session(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # ONNX Runtime's classes have no common base
        # Weight files lie beside a link (a Hugging Face cache) or beside its target.
        target = path.resolve()
        if path.is_symlink() and target != path:
            return _session(target, options)
        raise EngineLoadError(f"{path}: {_one_line(error)}") from error


class _BoundContext(ExecutionContext):
    """Runs with inputs and outputs bound by address."""

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._session = engine.session
        self._inputs = [(s.name, _NUMBER[s.dtype]) for s in engine.inputs]
        self._outputs = [(s, _NUMBER[s.dtype]) for s in engine.outputs]
        self._binding = engine.session.io_binding()

    def execute(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        binding = self._binding
        for (name, number), array in zip(self._inputs, inputs, strict=True):
            binding.bind_input(name, "cpu", 0, number, array.shape, array.ctypes.data)
        for (spec, number), output in zip(self._outputs, outputs, strict=True):
            if output is None:
                binding.bind_output(spec.name, "cpu")
            else:
                binding.bind_output(
                    spec.name, "cpu", 0, number, output.shape, output.ctypes.data
                )
        try:
            self._session.run_with_iobinding(binding)
            known = [output for output in outputs if output is not None]
            if len(known) == len(outputs):
                return known
            values = binding.get_outputs()
            return [
                _array(value, spec) if output is None else output
                for (spec, _), output, value in zip(
                    self._outputs, outputs, values, strict=True
                )
            ]
        except Exception as error:  # see OnnxRuntimeEngine.__init__
            raise EngineRunError(_one_line(error)) from error
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()


class _StringContext(ExecutionContext):
    """Runs a model with BYTES tensors, which cannot be bound by address."""

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._session = engine.session
        self._inputs = engine.inputs
        self._outputs = engine.outputs

    def execute(
        self, inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        feed = {
            spec.name: _decoded(array) if spec.dtype == "BYTES" else array
            for spec, array in zip(self._inputs, inputs, strict=True)
        }
        try:
            results = self._session.run(None, feed)
        except Exception as error:  # see OnnxRuntimeEngine.__init__
            raise EngineRunError(_one_line(error)) from error
        final = []
        for spec, result, output in zip(self._outputs, results, outputs, strict=True):
            array = _encoded(result) if spec.dtype == "BYTES" else result
            if output is not None:
                np.copyto(output, array)
            final.append(array if output is None else output)
        return final


def _decoded(array: Array) -> Array:
    try:
        flat = [item.decode() for item in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise EngineRunError(
            f"ONNX Runtime takes strings as UTF-8 only: {error}"
        ) from error
    decoded = np.empty(len(flat), dtype=object)
    decoded[:] = flat
    return decoded.reshape(array.shape)


def _encoded(array: Array) -> Array:
    encoded = np.empty(array.size, dtype=object)
    encoded[:] = [item.encode() for item in array.reshape(-1)]
    return encoded.reshape(array.shape)


def _array(value: Any, spec: TensorSpec) -> Array:
    """An OrtValue's elements; its memory is kept alive by the array's owner."""
    if spec.dtype == "BF16":  # numpy() does not know it
        shape = tuple(value.shape())
        count = int(np.prod(shape)) * 2
        raw = (ctypes.c_uint8 * count).from_address(value.data_ptr()) if count else b""
        return np.frombuffer(bytes(raw), spec.numpy).reshape(shape)
    array: Array = value.numpy()
    return array


def _spec(path: Path, arg: Any) -> TensorSpec:
    known = _TYPES.get(arg.type)
    if known is None:
        raise EngineLoadError(
            f"{path}: tensor {arg.name!r} has the type {arg.type}, which cannot travel "
            f"over the protocol (possible: {', '.join(sorted(_TYPES))})"
        )
    return TensorSpec(arg.name, known[0], tuple(_axis(a) for a in arg.shape))


def _axis(value: object) -> Axis:
    if isinstance(value, int):
        return value if value >= 0 else None
    # Some exporters write "-1" or "?" where they mean "any".
    text = str(value) if value is not None else ""
    return text if text and text.strip("-?0123456789") else None


def _one_line(error: BaseException) -> str:
    """The whole text: what was expected stands in its later lines."""
    return " ".join(str(error).split())[:1000] or type(error).__name__
