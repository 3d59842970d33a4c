"""The model of the demo: magika's, which tells file types, out of its package.

Finds the model, makes its input from files, and gives the right answers to compare
with: onnxruntime's for every file alone, and magika's own labels. Knows nothing of the
daemon.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

_MODEL = "models/standard_v3_3"
_LEAST_BYTES = 64


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model gives without a daemon."""

    alone: list[Any]
    """For each row when nothing else runs with it."""
    spread: float
    """The largest difference that running rows together makes by itself: onnxruntime
    adds up the numbers of a batch in another order than those of a single row."""


@dataclass(frozen=True, slots=True)
class FileTypeModel:
    """Where the model is, and the layout of its input."""

    path: Path
    labels: tuple[str, ...]
    begin: int
    """Bytes from the beginning of a file, after its white space."""
    end: int
    """Bytes from its end, before its white space."""
    block: int
    """Bytes that are looked at, at either end."""
    padding: int
    """The value that fills up what a short file lacks."""

    @classmethod
    def find(cls) -> FileTypeModel:
        """The model in the installed magika package."""
        import magika

        folder = Path(magika.__file__).parent / _MODEL
        config = json.loads((folder / "config.min.json").read_text(encoding="utf-8"))
        if config["mid_size"] or config["use_inputs_at_offsets"]:
            raise RuntimeError(f"{folder}: the input's layout is not the known one")
        return cls(
            folder / "model.onnx",
            tuple(config["target_labels_space"]),
            config["beg_size"],
            config["end_size"],
            config["block_size"],
            config["padding_token"],
        )

    def features(self, path: Path) -> Any:
        """The input for one file: one row of numbers, its first and last bytes.

        Each end is read, stripped of white space, and filled up with the padding value
        on the side of the file's middle.
        """
        content = path.read_bytes()
        row = np.full(self.begin + self.end, self.padding, np.int32)
        head = content[: self.block].lstrip()[: self.begin]
        tail = content[-self.block :].rstrip()[-self.end :]
        row[: len(head)] = np.frombuffer(head, np.uint8)
        row[len(row) - len(tail) :] = np.frombuffer(tail, np.uint8)
        return row[np.newaxis]

    def answers(self, rows: Sequence[Any]) -> Answers:
        """What onnxruntime gives for these rows, without any daemon."""
        import onnxruntime

        session = onnxruntime.InferenceSession(
            str(self.path), providers=["CPUExecutionProvider"]
        )
        (name,) = (tensor.name for tensor in session.get_inputs())
        alone = [session.run(None, {name: row})[0] for row in rows]
        spread = 0.0
        for size in (5, len(rows)):
            for first in range(0, len(rows), size):
                batch = np.concatenate(rows[first : first + size])
                together = session.run(None, {name: batch})[0]
                expected = np.concatenate(alone[first : first + size])
                spread = max(spread, float(np.abs(together - expected).max()))
        return Answers(alone, spread)

    def label(self, scores: Any) -> tuple[str, float]:
        """The label with the best score, and that score."""
        best = int(np.argmax(scores))
        return self.labels[best], float(scores.reshape(-1)[best])


def magika_labels(paths: Sequence[Path]) -> list[str]:
    """The labels that magika's own model run gives these files."""
    from magika import Magika

    results = Magika().identify_paths(list(paths))
    return [str(result.prediction.dl.label) for result in results]


def repository_files(root: Path, most: int) -> list[Path]:
    """Files of the repository, of as many kinds as there are, in a fixed order."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        hidden = any(p.startswith((".", "__")) for p in parts[:-1])
        if hidden or parts[-1].startswith("."):
            continue
        if path.is_file() and len(path.read_bytes().strip()) >= _LEAST_BYTES:
            kinds.setdefault(path.suffix or path.name, []).append(path)
    rounds = zip_longest(*kinds.values())
    return [path for round_ in rounds for path in round_ if path is not None][:most]
