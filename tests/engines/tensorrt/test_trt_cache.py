"""The cache of plans: keys, damage, kills, many at once, its size."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import networks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import EngineLoadError, Profile
from engines.tensorrt import onnxfile
from engines.tensorrt.build import BuildCancelled, build
from engines.tensorrt.cache import PlanCache, PlanKey, hash_model, plan_key
from engines.tensorrt.module import TensorRT
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.plans import Sidecar, read_sidecar, sidecar_path

X4 = Profile({"x": (1, 4)}, {"x": (2, 4)}, {"x": (4, 4)})
KEY = PlanKey(
    model_sha256="0" * 64,
    settings={"tf32": True},
    flavour="tensorrt_rtx",
    version="1.6.1.120",
    gpu="NVIDIA H200",
    compute_capability="9.0",
)
PLAN = bytes(range(256)) * 4


def never() -> bytes:
    """A build that must not happen."""
    raise AssertionError("built again")


# -- keys -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"model_sha256": "1" * 64},
        {"settings": {"tf32": False}},
        {"flavour": "tensorrt"},
        {"version": "1.6.1.121"},
        {"gpu": "NVIDIA L4"},
        {"compute_capability": "8.9"},
        {"precision": "fp16"},
        {"changes": {"input_u8": [0.1, 2]}},
    ],
)
def test_whatever_changes_a_plan_changes_its_key(change: dict[str, Any]) -> None:
    """Every part of a key counts, and equal parts make equal keys."""
    assert replace(KEY, **change).digest != KEY.digest
    assert replace(KEY).digest == KEY.digest


def test_equal_graph_names_never_meet(tmp_path: Path, rtx: TensorRT) -> None:
    """Models that differ in a weight only have plans of their own."""
    keys = set()
    for name in ("twin_a", "twin_b"):
        path = models.save(models.BUILDERS[name](), tmp_path / name / "model.onnx")
        keys.add(
            plan_key(onnxfile.read(path), BuildOptions(profiles=(X4,)), rtx).digest
        )

    assert len(keys) == 2


def test_external_weights_count_and_places_do_not(tmp_path: Path) -> None:
    """A changed weight changes the hash; moving, renaming and linking do not."""
    made = networks.conv()
    path = networks.save(made, tmp_path / "a" / "model.onnx", external=True)
    link = tmp_path / "link.onnx"
    link.symlink_to(path)
    before = hash_model(onnxfile.read(path))
    linked = hash_model(onnxfile.read(link))
    moved = path.rename(path.with_name("other.onnx"))
    (tmp_path / "a").rename(tmp_path / "b")
    after = hash_model(onnxfile.read(tmp_path / "b" / moved.name))
    weights = tmp_path / "b" / "model.weights"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    changed = hash_model(onnxfile.read(tmp_path / "b" / moved.name))

    assert before == linked == after
    assert changed != before


def test_hashing_tells_how_far_it_is(tmp_path: Path) -> None:
    """Bytes read and bytes in all, ending at all."""
    path = networks.save(networks.conv(), tmp_path / "model.onnx", external=True)
    size = path.stat().st_size + path.with_suffix(".weights").stat().st_size
    told: list[tuple[int, int]] = []

    hash_model(onnxfile.read(path), lambda done, total: told.append((done, total)))

    assert told[-1] == (size, size)


def test_plugin_libraries_count_by_content(tmp_path: Path, rtx: TensorRT) -> None:
    """A new build of a plugin makes a new plan."""
    file = onnxfile.read(models.save(models.twin_a(), tmp_path / "model.onnx"))
    library = tmp_path / "plugin.so"
    options = BuildOptions(plugins=(library,))
    digests = []
    for content in (b"one", b"two", b"one"):
        library.write_bytes(content)
        digests.append(plan_key(file, options, rtx).digest)

    assert digests[0] == digests[2] != digests[1]


# -- found and built ------------------------------------------------------------------


def test_a_real_plan_is_built_once(tmp_path: Path, rtx: TensorRT) -> None:
    """The second start finds the plan of the first, with its description."""
    path = models.save(models.twin_a(), tmp_path / "model.onnx")
    options = BuildOptions(profiles=(X4,), flavour="tensorrt_rtx")
    key = plan_key(onnxfile.read(path), options, rtx, gpu="A", compute_capability="9.0")
    first = PlanCache(tmp_path / "plans").get(
        key, lambda: build(path, options), model=str(path)
    )

    again = PlanCache(tmp_path / "plans").get(key, never)

    assert (first.built, again.built) == (True, False)
    assert first.plan == again.plan
    assert again.path is not None
    assert again.sidecar.model == str(path)
    assert again.sidecar.version == rtx.version
    assert again.sidecar.settings["profiles"][0]["max"] == {"x": [4, 4]}
    assert again.sidecar.plan_bytes == len(again.plan) == again.path.stat().st_size
    assert again.kernel_cache == tmp_path / "plans" / f"{key.digest}.kernels"


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(
    tmp_path: Path,
) -> None:
    """The error is the builder's, and the lock is free."""
    cache = PlanCache(tmp_path)

    def fail() -> bytes:
        raise EngineLoadError("no such operator")

    for _ in range(2):
        with pytest.raises(EngineLoadError, match="no such operator"):
            cache.get(KEY, fail)

    assert [p for p in os.listdir(tmp_path) if ".lock" not in p] == []
    assert cache.get(KEY, lambda: PLAN).built


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns, builds, and keeps nothing."""
    (tmp_path / "plans").write_text("a file, and no folder")

    with caplog.at_level(logging.WARNING):
        made = PlanCache(tmp_path / "plans").get(KEY, lambda: PLAN)

    assert (made.plan, made.path, made.kernel_cache) == (PLAN, None, None)
    assert "plans are not kept" in caplog.text


def test_a_full_disk_is_no_error(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The plan is used though it cannot be kept."""
    cache = PlanCache(tmp_path)
    cache.path(KEY).mkdir()  # stands where the plan must go

    made = cache.get(KEY, lambda: PLAN)

    assert (made.plan, made.path) == (PLAN, None)
    assert "cannot be kept" in caplog.text


def test_notes_are_added_to_a_plan(tmp_path: Path) -> None:
    """The numbers of its comparison stay with the plan."""
    cache = PlanCache(tmp_path)
    cache.get(KEY, lambda: PLAN)

    cache.annotate(KEY, {"cosine": 0.999})
    cache.annotate(KEY, {"rows": 8})

    found = cache.get(KEY, never)
    assert found.sidecar.notes == {"cosine": 0.999, "rows": 8}


def test_a_plan_can_be_forgotten(tmp_path: Path) -> None:
    """With all that lies beside it."""
    cache = PlanCache(tmp_path)
    made = cache.get(KEY, lambda: PLAN)
    assert made.kernel_cache is not None
    made.kernel_cache.write_bytes(b"kernels")

    cache.forget(KEY)

    assert [p for p in os.listdir(tmp_path) if ".lock" not in p] == []


# -- damage ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlanCache, Path]:
    """A cache with one plan, and the plan's path."""
    cache = PlanCache(tmp_path_factory.mktemp("plans"))
    path = cache.get(KEY, lambda: PLAN).path
    assert path is not None
    return cache, path


@pytest.mark.parametrize("which", ["plan", "sidecar"])
def test_damage_in_any_byte_is_noticed(
    which: str, whole: tuple[PlanCache, Path]
) -> None:
    """Each byte of plan and sidecar in turn, one bit of it flipped."""
    cache, plan = whole
    path = plan if which == "plan" else sidecar_path(plan)
    content = path.read_bytes()

    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert cache.find(KEY) is None, position

    path.write_bytes(content)
    assert cache.find(KEY) is not None


@pytest.mark.parametrize("which", ["plan", "sidecar"])
def test_a_cut_file_is_noticed(which: str, whole: tuple[PlanCache, Path]) -> None:
    """Whatever the length to which a file was cut, or by which it has grown."""
    cache, plan = whole
    path = plan if which == "plan" else sidecar_path(plan)
    content = path.read_bytes()

    for length in [*range(0, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        assert cache.find(KEY) is None, length
    path.write_bytes(content + b"\0")
    assert cache.find(KEY) is None

    path.write_bytes(content)
    assert cache.find(KEY) is not None


@settings(max_examples=200, deadline=None)
@given(junk=st.one_of(st.binary(max_size=300), st.text(max_size=100).map(str.encode)))
def test_junk_is_no_sidecar(junk: bytes) -> None:
    """Reading never fails in another way than by ValueError."""
    try:
        Sidecar.from_bytes(junk)
    except ValueError:
        return
    raise AssertionError(junk)


@pytest.mark.parametrize("junk", [b"[" * 100_000, b"null", b"{}", b'{"format": 1}'])
def test_a_strange_sidecar_counts_as_none(junk: bytes, tmp_path: Path) -> None:
    """Deeply nested, of another kind, or with fields missing."""
    plan = tmp_path / "x.plan"
    sidecar_path(plan).write_bytes(junk)

    assert read_sidecar(plan) is None


def test_a_damaged_plan_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the new one replaces it."""
    cache = PlanCache(tmp_path)
    path = cache.get(KEY, lambda: PLAN).path
    assert path is not None
    path.write_bytes(PLAN[:-1])

    made = cache.get(KEY, lambda: PLAN)

    assert made.built
    assert "damaged" in caplog.text
    assert not cache.get(KEY, never).built


def test_a_plan_under_another_key_does_not_count(tmp_path: Path) -> None:
    """Files that were renamed or copied by hand do not become another's plan."""
    cache = PlanCache(tmp_path)
    other = replace(KEY, gpu="NVIDIA L4")
    made = cache.get(KEY, lambda: PLAN).path
    assert made is not None
    made.rename(cache.path(other))
    sidecar_path(made).rename(sidecar_path(cache.path(other)))

    assert cache.find(other) is None


# -- many at once, and killed ---------------------------------------------------------

BUILDER = """
import sys, time
from pathlib import Path
from test_trt_cache import KEY
from engines.tensorrt.cache import PlanCache
folder, locking, log, size = Path(sys.argv[1]), *sys.argv[2:]
def build():
    with open(log, "a") as file:
        file.write("built\\n")
    print("building", flush=True)
    time.sleep(0.3)
    return b"p" * int(size)
made = PlanCache(folder, locking=locking).get(KEY, build)
print("whole" if made.plan == b"p" * int(size) else "BROKEN", flush=True)
"""


def builder(
    folder: Path, locking: str, log: Path, size: int = 1000
) -> subprocess.Popen[str]:
    """A process that asks a cache for the plan of `KEY`."""
    arguments = [str(folder), locking, str(log), str(size)]
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("locking", ["flock", "file"])
def test_processes_build_once_between_them(locking: str, tmp_path: Path) -> None:
    """Three daemons that start on an empty cache: one builds, all get the whole."""
    log = tmp_path / "log"
    processes = [builder(tmp_path / "plans", locking, log) for _ in range(3)]

    said = [process.communicate(timeout=60)[0].split()[-1] for process in processes]

    assert said == ["whole"] * 3
    assert log.read_text() == "built\n"


@pytest.mark.parametrize("locking", ["flock", "file"])
def test_a_builder_killed_while_building_is_replaced(
    locking: str, tmp_path: Path
) -> None:
    """SIGKILL in the middle: the one that waited builds, and nobody hangs."""
    log = tmp_path / "log"
    first = builder(tmp_path / "plans", locking, log)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    second = builder(tmp_path / "plans", locking, log)
    first.kill()
    first.communicate()

    said = second.communicate(timeout=60)[0].split()

    assert first.returncode == -signal.SIGKILL
    assert said == ["building", "whole"]
    assert log.read_text() == "built\nbuilt\n"


def test_a_builder_killed_while_writing_leaves_nothing_half(tmp_path: Path) -> None:
    """SIGKILL in the middle of 256 MB: no plan is there, and the next build tidies."""
    cache = PlanCache(tmp_path / "plans")
    process = builder(cache.folder, "auto", tmp_path / "log", 256 << 20)
    assert process.stdout is not None
    process.stdout.readline()
    while not (partial := list(cache.folder.glob("*.tmp"))):
        time.sleep(0.001)
    process.kill()
    process.communicate()

    left = [p.name for p in cache.folder.iterdir() if p.suffix != ".lock"]
    found = cache.find(KEY)
    made = cache.get(KEY, lambda: PLAN)

    assert left == [partial[0].name]
    assert found is None
    assert made.built
    assert list(cache.folder.glob("*.tmp")) == []


def test_a_plan_without_its_sidecar_counts_as_absent(tmp_path: Path) -> None:
    """As it is left by a kill between the two."""
    cache = PlanCache(tmp_path)
    cache.get(KEY, lambda: PLAN)
    sidecar_path(cache.path(KEY)).unlink()

    assert cache.find(KEY) is None
    assert cache.get(KEY, lambda: PLAN).built


def test_threads_build_once_between_them(tmp_path: Path) -> None:
    """Models that load at the same time in one daemon share a build."""
    cache = PlanCache(tmp_path)
    builds: list[int] = []
    got: list[bool] = []

    def slow_build() -> bytes:
        builds.append(1)
        time.sleep(0.2)
        return PLAN

    threads = [
        threading.Thread(target=lambda: got.append(cache.get(KEY, slow_build).built))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(builds) == 1
    assert sorted(got) == [False, False, False, True]


def test_waiting_can_be_given_up(tmp_path: Path) -> None:
    """A daemon that is stopped does not wait for another's build."""
    waits: list[int] = []
    process = builder(tmp_path / "plans", "auto", tmp_path / "log")
    assert process.stdout is not None
    process.stdout.readline()

    with pytest.raises(BuildCancelled):
        PlanCache(tmp_path / "plans").get(
            KEY,
            never,
            on_wait=lambda: waits.append(1),
            cancelled=lambda: len(waits) > 0,
        )
    process.communicate()

    assert waits == [1]


# -- size -----------------------------------------------------------------------------


def keys(count: int) -> list[PlanKey]:
    """Different keys."""
    return [replace(KEY, gpu=f"GPU {i}") for i in range(count)]


def age(cache: PlanCache, key: PlanKey, seconds: float) -> None:
    """Lets the last use of a plan be `seconds` ago."""
    at = time.time() - seconds
    os.utime(sidecar_path(cache.path(key)), (at, at))


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    """A use makes a plan young again; kernels go with their plan."""
    cache = PlanCache(tmp_path)
    a, b, c = keys(3)
    for key in (a, b, c):
        made = cache.get(key, lambda: PLAN)
        assert made.kernel_cache is not None
        made.kernel_cache.write_bytes(b"k" * 100)
    for position, key in enumerate((a, b, c)):
        age(cache, key, 300 - 100 * position)
    cache.get(a, never)

    cache.prune(5000)

    assert [cache.find(key) is not None for key in (a, b, c)] == [True, False, True]
    assert not cache.path(b).with_suffix(".kernels").exists()


def test_the_newest_plan_is_kept_whatever_its_size(tmp_path: Path) -> None:
    """A bound that is too small for one plan keeps the one in use."""
    cache = PlanCache(tmp_path, max_bytes=10)
    a, b = keys(2)

    cache.get(a, lambda: PLAN)
    cache.get(b, lambda: PLAN)

    assert [cache.find(key) is not None for key in (a, b)] == [False, True]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    bound=st.integers(0, 20_000),
)
def test_a_bound_is_kept(
    sizes: list[int], bound: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After pruning, the folder is no larger than the bound, or holds one plan."""
    cache = PlanCache(tmp_path_factory.mktemp("plans"), max_bytes=bound)
    for key, size in zip(keys(len(sizes)), sizes, strict=True):
        cache.get(key, lambda size=size: b"p" * size)

    left = [p for p in cache.folder.iterdir() if ".lock" not in p.name]

    assert sum(p.stat().st_size for p in left) <= bound or len(left) == 2
    assert cache.find(keys(len(sizes))[-1]) is not None
