"""A folder of plans, found by what they were made from.

A key covers everything that changes a plan: the bytes of the model and its weights, how
it is built, by what, and for which GPU. Names play no part, so models whose graphs have
equal names never meet. What is read is checked by its SHA-256 first; what is damaged or
half there counts as absent, and is built again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from engines.errors import EngineLoadError
from engines.tensorrt.build import BuildCancelled
from engines.tensorrt.locks import STALE_S, Locking, WaitCancelled, exclusive, is_held
from engines.tensorrt.modelfile import OnnxFile
from engines.tensorrt.module import TensorRT
from engines.tensorrt.options import BuildOptions
from engines.tensorrt.plans import (
    Sidecar,
    misfit,
    read_sidecar,
    sha256,
    sidecar_path,
    write_plan,
    write_whole,
)

_log = logging.getLogger(__name__)
_CHUNK: Final = 1 << 22
_REVISION: Final = 1  # of what we do to a model before it is built; part of every key


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """Everything that a plan depends on; equal keys, equal plans.

    Attributes:
        model_sha256: see `hash_model`.
        settings: see `BuildOptions.settings`.
        flavour, version: of the TensorRT that builds.
        gpu, compute_capability: of the GPU; "" where a plan is built without one.
        precision: that the model is converted to before the build, or "".
        changes: what else is done to the model before the build, as JSON (such as
            the numbers of `--input-u8`).
    """

    model_sha256: str
    settings: dict[str, Any]
    flavour: str
    version: str
    gpu: str
    compute_capability: str
    precision: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        parts["revision"] = _REVISION
        return sha256(json.dumps(parts, sort_keys=True).encode())


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan to run.

    Attributes:
        plan: the serialized engine.
        path: where it lies; None if the folder could not be written.
        sidecar: what is known of it.
        built: whether it was built now, rather than found.
    """

    plan: bytes
    path: Path | None
    sidecar: Sidecar
    built: bool

    @property
    def kernel_cache(self) -> Path | None:
        """Where TensorRT for RTX's specialised kernels for it may be kept."""
        return None if self.path is None else self.path.with_suffix(".kernels")


def plan_key(
    file: OnnxFile,
    options: BuildOptions,
    tensorrt: TensorRT,
    *,
    gpu: str = "",
    compute_capability: str = "",
    precision: str = "",
    changes: dict[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> PlanKey:
    """The key of the plan that a build would make.

    Args:
        file: the model.
        options: of the build; plugin libraries count by content.
        tensorrt: what builds.
        gpu, compute_capability: where it will run ("NVIDIA H200", "9.0").
        precision, changes: see `PlanKey`.
        progress: told of (bytes read, bytes in all) while the model is hashed.

    Raises:
        EngineLoadError: a file cannot be read.
    """
    settings = options.settings()
    try:
        settings["plugins"] = sorted(_hash_file(path) for path in options.plugins)
        model = hash_model(file, progress)
    except OSError as error:
        raise EngineLoadError(f"{file.path}: {error}") from error
    return PlanKey(
        model_sha256=model,
        settings=settings,
        flavour=tensorrt.flavour,
        version=tensorrt.version,
        gpu=gpu,
        compute_capability=compute_capability,
        precision=precision,
        changes=changes or {},
    )


def hash_model(
    file: OnnxFile, progress: Callable[[int, int], object] | None = None
) -> str:
    """SHA-256 over the ONNX file and its weight files, their names and sizes too.

    Raises:
        OSError: one cannot be read.
    """
    if file.sha256:
        return file.sha256
    folder = file.folder_of.parent
    paths = [file.folder_of, *file.weight_files]
    sizes = [path.stat().st_size for path in paths]
    total, done = sum(sizes), 0
    digest = hashlib.sha256()
    for position, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        # The name of the ONNX file itself does not matter; the graph names the others.
        name = path.relative_to(folder).as_posix() if position else ""
        digest.update(f"{len(name)}:{name}{size}:".encode())
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    return digest.hexdigest()


class PlanCache:
    """A folder of plans that processes and hosts may share.

    Args:
        folder: made when it is needed.
        max_bytes: how large it may grow (plans, sidecars, kernels); the plans that
            were not used for longest go first. None: without limit.
        locking: see `locks.exclusive`.
        stale_s: see `locks.STALE_S`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        locking: Locking = "auto",
        stale_s: float = STALE_S,
    ) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._locking: Locking = locking
        self._stale_s = stale_s

    def path(self, key: PlanKey) -> Path:
        """Where the plan of a key lies, whether it does or not."""
        return self.folder / f"{key.digest}.plan"

    def find(self, key: PlanKey) -> CachedPlan | None:
        """The plan of a key, if it is there and whole."""
        path = self.path(key)
        sidecar = read_sidecar(path)
        if sidecar is None or sidecar.key != key.digest:
            return None
        try:
            plan = path.read_bytes()
        except OSError:
            return None
        if len(plan) != sidecar.plan_bytes or sha256(plan) != sidecar.plan_sha256:
            _log.warning("%s is damaged; it will be built again", path)
            return None
        try:
            os.utime(sidecar_path(path))  # the time of its last use
        except OSError:
            pass
        return CachedPlan(plan, path, sidecar, built=False)

    def get(
        self,
        key: PlanKey,
        build: Callable[[], bytes],
        *,
        model: str = "",
        on_wait: Callable[[], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> CachedPlan:
        """The plan of a key: found, or built once, however many ask at a time.

        A folder that cannot be written is no error: the plan is built and not kept.

        Args:
            key: which plan.
            build: makes it; called with the key's lock held.
            model: path of the ONNX file, for the sidecar.
            on_wait: called once when another process is building it.
            cancelled: asked while waiting.

        Raises:
            EngineLoadError: from `build`.
            BuildCancelled: `cancelled` said so.
        """
        found = self.find(key)
        if found is not None:
            return found
        lock = self.folder / f"{key.digest}.lock"
        entered = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with exclusive(
                lock,
                locking=self._locking,
                on_wait=on_wait,
                cancelled=cancelled,
                stale_s=self._stale_s,
            ):
                entered = True
                found = self.find(key)  # another may have built it meanwhile
                if found is None:
                    self._clear(key)
                    found = self._keep(key, self._made(key, build, model))
        except WaitCancelled:
            raise BuildCancelled("given up while another process builds it") from None
        except OSError as error:
            if entered:
                raise
            _log.warning("the plan cache cannot be used, plans are not kept: %s", error)
            return self._made(key, build, model)
        if self._max_bytes is not None and found.built:
            self.prune(self._max_bytes, keep=key)
        return found

    def annotate(self, key: PlanKey, notes: dict[str, Any]) -> None:
        """Adds to the notes of a plan (the numbers of its comparison, for one)."""
        found = self.find(key)
        if found is not None and found.path is not None:
            sidecar = replace(found.sidecar, notes={**found.sidecar.notes, **notes})
            try:
                write_whole(sidecar_path(found.path), sidecar.to_bytes())
            except OSError as error:
                _log.warning("the plan cache cannot be written: %s", error)

    def forget(self, key: PlanKey) -> None:
        """Removes a plan (one that failed its comparison, or that nothing loads)."""
        self._remove(self.path(key).stem)

    def prune(self, max_bytes: int, *, keep: PlanKey | None = None) -> None:
        """Removes the plans that were not used for longest, down to a size.

        Neither `keep` nor what is being built now is removed.
        """
        kept = keep.digest if keep is not None else ""
        sizes: dict[str, int] = {}
        used: dict[str, float] = {}
        for path in self._files():
            try:
                status = path.stat()
            except OSError:  # removed by another meanwhile
                continue
            stem = path.name.split(".", 1)[0]
            sizes[stem] = sizes.get(stem, 0) + status.st_size
            if path.name.endswith(".plan.json") or stem not in used:
                used[stem] = status.st_mtime
        total = sum(sizes.values())
        for stem in sorted(sizes, key=lambda stem: used[stem]):
            if total <= max_bytes:
                return
            if stem != kept and not is_held(self.folder / f"{stem}.lock"):
                self._remove(stem)
                total -= sizes[stem]

    def _made(self, key: PlanKey, build: Callable[[], bytes], model: str) -> CachedPlan:
        started = time.monotonic()
        plan = build()
        sidecar = Sidecar(
            model=model,
            model_sha256=key.model_sha256,
            flavour=key.flavour,
            version=key.version,
            gpu=key.gpu,
            compute_capability=key.compute_capability,
            settings=key.settings,
            precision=key.precision,
            plan_sha256=sha256(plan),
            plan_bytes=len(plan),
            built_at=time.time(),
            build_seconds=time.monotonic() - started,
            key=key.digest,
        )
        return CachedPlan(plan, None, sidecar, built=True)

    def _keep(self, key: PlanKey, made: CachedPlan) -> CachedPlan:
        path = self.path(key)
        try:
            write_plan(path, made.plan, made.sidecar)
        except OSError as error:  # a full disk: the plan itself is good
            _log.warning("the plan %s cannot be kept: %s", path, error)
            return made
        return replace(made, path=path)

    def _clear(self, key: PlanKey) -> None:
        """Removes what killed builders of this key left (its lock is held)."""
        for path in self._files():
            if path.name.startswith(key.digest) and path.name.endswith(".tmp"):
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if ".lock" not in path.name]
        except OSError:
            return []

    def _remove(self, stem: str) -> None:
        # The sidecar first: a plan without one counts as absent.
        names = [f"{stem}.plan.json", f"{stem}.plan"]
        names += [p.name for p in self._files() if p.name.startswith(f"{stem}.")]
        for name in dict.fromkeys(names):
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", self.folder / name, error)


def _hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_user_plan(
    path: Path, tensorrt: TensorRT, *, gpu: str = "", compute_capability: str = ""
) -> bytes:
    """Reads a plan that the user gave, and refuses one that cannot run here.

    Raises:
        EngineLoadError: why, and what to do.
    """
    try:
        plan = path.read_bytes()
    except OSError as error:
        raise EngineLoadError(f"{path}: {error.strerror}") from error
    reason = misfit(
        path, plan, tensorrt, gpu=gpu, compute_capability=compute_capability
    )
    if reason:
        raise EngineLoadError(reason)
    return plan
