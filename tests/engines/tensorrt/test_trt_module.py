"""Finding TensorRT, its messages, and the facts for the doctor."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType

import pytest

from engines import EngineLoadError
from engines.tensorrt import facts, messages
from engines.tensorrt.messages import collected_errors, logger
from engines.tensorrt.module import (
    EXTRAS,
    FlavourChoice,
    ModuleBroken,
    ModuleMissing,
    TensorRT,
    find,
    is_installed,
    load,
)

WHOLE = """
__version__ = "{version}"
class Builder: pass
class OnnxParser: pass
class IBuilderConfig: pass
class BuilderFlag:
    __members__ = {{"TF32": 1, "VERSION_COMPATIBLE": 2 {flags}}}
class HardwareCompatibilityLevel:
    __members__ = {{"NONE": 0, "AMPERE_PLUS": 1}}
"""


BACK_ENDS = ("tensorrt", "cuda")


def take_out() -> dict[str, ModuleType]:
    """Takes TensorRT and CUDA out of the loaded modules, or what stands in for them."""
    names = [n for n in sys.modules if n.split("_")[0].split(".")[0] in BACK_ENDS]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An import path with nothing on it but what a test writes (and the library)."""
    loaded = take_out()
    library = [p for p in sys.path if "site-packages" not in p]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *library])
    yield tmp_path
    take_out()  # what the test has made
    sys.modules.update(loaded)


def install(folder: Path, name: str, source: str) -> None:
    """Writes a package."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)


def test_nothing_installed_says_what_to_install(installed: Path) -> None:
    """Both extras are named, and for which GPU each is."""
    with pytest.raises(ModuleMissing) as caught:
        find()

    assert "pip install 'trt-batcher[tensorrt]'" in str(caught.value)
    assert "pip install 'trt-batcher[tensorrt-rtx]'" in str(caught.value)


@pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt_rtx"])
def test_a_flavour_that_is_asked_for_and_missing_is_named(
    flavour: FlavourChoice, installed: Path
) -> None:
    """With its own extra; the other flavour is not taken for it."""
    other = "tensorrt_rtx" if flavour == "tensorrt" else "tensorrt"
    install(installed, other, WHOLE.format(version="10.9.0", flags=""))

    with pytest.raises(ModuleMissing, match=f"no Python module '{flavour}'"):
        find(flavour)


def test_a_folder_of_that_name_is_no_module(installed: Path) -> None:
    """Python finds any folder as a package; such a one does not count."""
    (installed / "tensorrt").mkdir()

    assert not is_installed("tensorrt")


def test_a_module_that_does_not_load_is_broken(installed: Path) -> None:
    """Its error is passed on, and so is the way out."""
    install(installed, "tensorrt", "raise OSError('libnvinfer.so.10: cannot open')")

    with pytest.raises(
        ModuleBroken, match=r"does not load: OSError: libnvinfer\.so\.10.*\[tensorrt\]"
    ):
        find()


def test_a_broken_flavour_does_not_hide_a_whole_one(
    installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` takes the other one, and warns of the broken."""
    install(installed, "tensorrt", "raise ImportError('undefined symbol')")
    install(installed, "tensorrt_rtx", WHOLE.format(version="1.6.1", flags=""))

    found = find()

    assert str(found) == "TensorRT for RTX 1.6.1"
    assert "undefined symbol" in caplog.text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", r"is no TensorRT \(it has no Builder"),
        (WHOLE.format(version="8.6.1", flags=""), "TensorRT 8.6.1 is too old: 10"),
    ],
)
def test_other_modules_of_that_name_are_refused(
    source: str, expected: str, installed: Path
) -> None:
    """A stub, another project's module, and old versions."""
    install(installed, "tensorrt", source)

    with pytest.raises(ModuleBroken, match=expected):
        load("tensorrt")


@pytest.mark.parametrize(
    ("version", "flags", "strong"),
    [("10.9.0.34", ', "FP16": 3', False), ("11.1.0", "", True)],
)
def test_the_data_centre_flavour_is_described(
    version: str, flags: str, strong: bool, installed: Path
) -> None:
    """What version 10 has and 11 has not; it is taken before TensorRT for RTX."""
    install(installed, "tensorrt", WHOLE.format(version=version, flags=flags))
    install(installed, "tensorrt_rtx", WHOLE.format(version="1.6.1", flags=""))

    found = find()

    assert (found.flavour, found.version) == ("tensorrt", version)
    assert found.strongly_typed_only is strong
    assert found.timing_cache
    assert found.version_compatible
    assert found.hardware_levels == ("none", "ampere_plus")
    assert found.int8_activations
    assert found.compute_capabilities == ()


def test_tensorrt_for_rtx_is_described(rtx: TensorRT) -> None:
    """What it has in name only is not counted."""
    assert rtx.strongly_typed_only
    assert not any((rtx.timing_cache, rtx.version_compatible, rtx.int8_activations))
    assert rtx.hardware_levels == ("none",)
    assert {"CURRENT", "SM89", "SM120"} <= set(rtx.compute_capabilities)
    assert "FP16" not in rtx.builder_flags


def test_an_unknown_flavour_is_refused() -> None:
    """With those there are."""
    with pytest.raises(EngineLoadError, match="possible: auto, tensorrt, tensorrt_rtx"):
        find("trt")  # type: ignore[arg-type]


def test_importing_the_back_end_imports_no_tensorrt() -> None:
    """Nor CUDA: the cache and the build options work without either."""
    code = (
        "import sys, engines.tensorrt.cache, engines.tensorrt.facts, "
        "engines.tensorrt.uint8, engines.tensorrt.precision\n"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('tensorrt', 'tensorrt_rtx', 'cuda')])"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert said.stdout == "[]\n", said.stderr


# -- messages -------------------------------------------------------------------------


def test_errors_go_to_the_call_that_failed(
    rtx: TensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorRT's own text of a failed call, which is not logged as an error too."""
    caplog.set_level(logging.DEBUG)
    trt = rtx.trt
    builder = trt.Builder(logger(rtx))
    network = builder.create_network(1 << int(_flags(trt).STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger(rtx))

    with collected_errors() as said:
        parsed = parser.parse_from_file("/no/such/model.onnx")

    assert not parsed
    assert "/no/such/model.onnx" in str(said)
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert "/no/such/model.onnx" in caplog.text
    assert logger(rtx) is logger(rtx)


def _flags(trt: ModuleType) -> object:
    return trt.NetworkDefinitionCreationFlag


def test_messages_have_the_levels_of_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors and warnings are seen; what TensorRT calls INFO is for debugging."""
    caplog.set_level(logging.DEBUG)
    for severity in range(5):
        messages.write(severity, f"text\n  {severity}")
    messages.write(2, "Make sure input x has Int64 binding.")

    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("ERROR", "text 0"),
        ("ERROR", "text 1"),
        ("WARNING", "text 2"),
        ("DEBUG", "text 3"),
        ("DEBUG", "text 4"),
        ("DEBUG", "Make sure input x has Int64 binding."),
    ]


def test_each_thread_collects_its_own_errors() -> None:
    """And what comes from a thread that collects nothing goes to all who do."""
    with collected_errors() as mine:
        collected: list[str] = []

        def other() -> None:
            with collected_errors() as said:
                messages.write(1, "theirs")
            collected.extend(said.errors)

        for work in (other, lambda: messages.write(1, "from within TensorRT")):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        messages.write(1, "mine")
        messages.write(1, "mine")

    assert mine.errors == ["from within TensorRT", "mine"]
    assert collected == ["theirs"]


def test_errors_are_bounded() -> None:
    """A network of thousands of bad nodes does not make a text of megabytes."""
    with collected_errors() as said:
        for number in range(1000):
            messages.write(1, f"error {number}")

    assert len(said.errors) == 20


# -- facts ----------------------------------------------------------------------------


def test_facts_of_modules_never_raise(installed: Path) -> None:
    """Missing and broken ones are facts with a way out."""
    install(installed, "tensorrt", "raise SystemError('no')")

    broken, missing = facts.module_facts()

    assert (broken.flavour, broken.state) == ("tensorrt", "broken")
    assert "SystemError: no" in broken.detail
    assert (missing.flavour, missing.state) == ("tensorrt_rtx", "missing")
    assert "trt-batcher[tensorrt-rtx]" in missing.detail


def test_facts_of_a_module_that_is_there(rtx: TensorRT) -> None:
    """Its version, and where its precision comes from."""
    (fact,) = [f for f in facts.module_facts() if f.flavour == "tensorrt_rtx"]

    assert (fact.state, fact.version) == ("found", rtx.version)


def test_facts_of_gpus_never_raise() -> None:
    """Whatever this machine has: a state, and a sentence."""
    fact = facts.gpu_fact()

    assert fact.detail
    assert (fact.state == "found") == bool(fact.gpus)


CUDA = """
class Status(int):
    @property
    def name(self): return NAMES[self]
NAMES = {{0: "CUDA_SUCCESS", 100: "CUDA_ERROR_NO_DEVICE", 803: "CUDA_ERROR_MISMATCH"}}
class CUdevice_attribute:
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = "major"
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = "minor"
def cuInit(flags): {init}
def cuDriverGetVersion(): return Status(0), 13000
def cuDeviceGetCount(): return Status(0), 2
def cuDeviceGet(index): return Status(0), index
def cuDeviceGetAttribute(kind, device): return Status(0), 9 * (kind == "major")
def cuDeviceGetName(size, device): return Status(0), b"NVIDIA H200" + bytes(5)
def cuDeviceTotalMem(device): return Status(0), 1 << 37
"""


@pytest.mark.parametrize(
    ("init", "state", "detail"),
    [
        ("return (Status(0),)", "found", "2 found"),
        ("return (Status(100),)", "no-gpu", "CUDA_VISIBLE_DEVICES"),
        ("return (Status(803),)", "error", "CUDA_ERROR_MISMATCH"),
        ("raise RuntimeError('no libcuda')", "no-driver", "docker run --gpus all"),
        (None, "no-bindings", "cuda-python cannot be imported"),
    ],
)
def test_the_driver_is_asked(
    init: str | None,
    state: str,
    detail: str,
    installed: Path,
) -> None:
    """Bindings, driver and GPU missing are told apart (with a stand-in for CUDA)."""
    if init is not None:
        (installed / "cuda").mkdir()
        install(installed, "cuda/bindings", "")
        source = CUDA.format(init=init)
        (installed / "cuda" / "bindings" / "driver.py").write_text(source)

    fact = facts.gpu_fact()

    assert (fact.state, detail in fact.detail) == (state, True)
    if state == "found":
        gpu = facts.Gpu(0, "NVIDIA H200", "9.0", 1 << 37)
        assert fact.gpus == (gpu, replace(gpu, index=1))
        assert fact.cuda_version == "13.0"


def test_what_installs_a_flavour_exists() -> None:
    """Every extra that a text tells people to install is one of the package's."""
    extras = {text.split("[")[1].split("]")[0] for text in EXTRAS.values()}

    assert extras <= set(metadata("trt-batcher").get_all("Provides-Extra") or [])
