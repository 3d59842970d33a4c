"""What the daemon gives to all of its models, and where their engines live."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batcher.config import ModelConfig, ServerConfig
from batcher.serving.plancache import default_plan_cache
from engines import Engine

if TYPE_CHECKING:
    from engines.tensorrt.modelfile import OnnxFile

Recipe = Callable[[], Engine]
"""Makes an engine; it can be sent to another process."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the daemon gives to all of its models.

    Attributes:
        plan_cache: the folder of TensorRT plans; None for the default one.
        plan_cache_mb: how large it may grow, 0 for no limit.
        plugin_folders: where plugin libraries may lie.
        bar: whether progress is shown as a bar on a terminal.
        on_lost: told, on any thread, of a model whose engine's process has ended: its
            name, and how.
    """

    plan_cache: Path | None = None
    plan_cache_mb: int = 0
    plugin_folders: tuple[Path, ...] = ()
    on_lost: Callable[[str, str], None] | None = None
    bar: bool = False

    @classmethod
    def of(cls, config: ServerConfig, on_lost: Callable[[str, str], None]) -> Host:
        """What a daemon with these knobs gives."""
        return cls(
            Path(config.plan_cache).expanduser() if config.plan_cache else None,
            config.plan_cache_mb,
            tuple(Path(folder).expanduser() for folder in config.plugin_folder),
            on_lost,
            bar=config.log_format == "text",
        )

    def onnx_file(self, path: Path) -> OnnxFile:
        """A model's inputs and outputs; read anew only where it has changed.

        Raises:
            EngineLoadError: it cannot be read.
        """
        from engines.tensorrt.modelfile import recall

        known = recall(path, self.plans)
        if known is None:
            from engines.tensorrt import onnxfile

            known = onnxfile.read(path)
        return known

    @property
    def plans(self) -> Path:
        """The folder of TensorRT plans."""
        return self.plan_cache or default_plan_cache()

    def engine(
        self, recipe: Recipe, name: str, config: ModelConfig, *, gpu: bool = False
    ) -> Engine:
        """Makes an engine where the configuration wants it.

        Args:
            recipe: makes it.
            name: of the model.
            config: of the model.
            gpu: whether it runs on one.

        Raises:
            EngineLoadError: it cannot be made.
        """
        if not isolated(config, gpu=gpu):
            return recipe()
        from engines.process import open_in_process

        lost = self.on_lost
        return open_in_process(
            recipe,
            name=name,
            on_lost=None if lost is None else partial(lost, name),
        )


def isolated(config: ModelConfig, *, gpu: bool) -> bool:
    """Whether a model's engines live in processes of their own.

    On a GPU that is the default: the event loop and the launches then do not share an
    interpreter lock (1.2 times the requests/s of BERT-base with 16 tokens and two slots
    on an H200), and what crashes there does not end the daemon.
    """
    wanted = config.slots.isolation
    if wanted == "auto":
        return gpu and sys.platform == "linux"
    return wanted == "process"
