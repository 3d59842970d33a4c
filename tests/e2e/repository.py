"""Model repositories on disk, made of the tiny models of `models`."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import models
import onnx

FAKE = """
engine = "fake"
max_batch = {max_batch}
{top}
[fake]
base_ms = {base_ms}
inputs = [{{ name = "x", shape = [4] }}]
outputs = [{{ name = "y", shape = [4] }}]
"""


def write(root: Path, name: str, model: onnx.ModelProto, toml: str = "") -> Path:
    """A model's folder, with one version and its file."""
    models.save(model, root / name / "1" / "model.onnx")
    witnesses = {"n", "pos"} & {output.name for output in model.graph.output}
    axis = model.graph.input[0].type.tensor_type.shape.dim[0]
    if witnesses and axis.dim_param and "batch_axis" not in toml:
        toml = f'batch_axis = "first"  # rows tell of their batch\n{toml}'
    if toml:
        (root / name / "model.toml").write_text(toml)
    return root / name


def write_fake(
    root: Path, name: str, base_ms: float, *, max_batch: int = 8, toml: str = ""
) -> Path:
    """A model that echoes x FP32 [N, 4] as y after a sleep: known times, no load."""
    folder = root / name
    folder.mkdir(parents=True)
    tables = FAKE.format(max_batch=max_batch, base_ms=base_ms, top="")
    (folder / "model.toml").write_text(tables + toml)
    return folder


def window(max_batch: int, delay_ms: int = 2000, more: str = "") -> str:
    """A model's file: batches of up to `max_batch` rows that wait to become full."""
    return (
        f'max_batch = {max_batch}\n[batching]\npolicy = "window"\n'
        f"max_delay_us = {delay_ms * 1000}\n{more}\n"
    )


BUSY_S = 0.5
"""A run of the models `limited`, `fixed` and `unlimited`."""


def write_timed(root: Path) -> Path:
    """A repository of models whose run times are known, with queues of every kind."""
    two, few = "[slots]\ncount = 2\n", "[batching]\nmax_queue = 2\n"
    write_fake(root, "instant", 0)
    write_fake(root, "two_ms", 2, max_batch=16)
    write_fake(root, "fours", 50, max_batch=4)
    write_fake(root, "nap", 100, max_batch=1)
    write_fake(root, "two_slots", 100, max_batch=1, toml=two)
    write_fake(root, "small", 200, max_batch=1, toml=few)
    write(root, "delay10", models.probe(), window(64, 10))
    limit = "[batching]\ntimeout_ms = 300\n"
    fixed = limit + "allow_timeout_override = false\n"
    for name, knobs in (("limited", limit), ("fixed", fixed), ("unlimited", "")):
        write_fake(root, name, BUSY_S * 1000, max_batch=1, toml=knobs)
    return root


def axes(name: str, body: str) -> str:
    """The table of an axis."""
    return f"[axes.{name}]\n{body}\n"


SEQ_AXES = axes("S", "buckets = [8, 16, 32]\npad = { ids = 0, mask = 0 }")
CUT_AXES = axes(
    "D", "buckets = [4, 8]\npad = { x = 7 }\noutputs = { y = { axis = 1 } }"
)


def write_zoo(root: Path) -> Path:
    """The repository of the daemon that most tests share."""
    for name, build in models.BUILDERS.items():
        write(root, name, build())
    write(root, "probe_fixed", models.probe(1))
    # Pairs, eights and so on leave at once when complete, and wait for it otherwise.
    write(root, "probe2", models.probe(), window(2))
    write(root, "probe4", models.probe(), window(4, 200))
    write(root, "probe8", models.probe(), window(8))
    write(root, "probe128", models.probe(), window(128, 500))
    whole = window(8, more="max_request_rows = 8")
    write(root, "probe_whole", models.probe(), whole)
    rungs = 'batching.policy = "window"\nbatching.max_delay_us = 20000\n'
    write(root, "probe_rungs", models.probe(), rungs + "batching.rungs = [1, 4, 8]\n")
    race = "slots.count = 2\n" + window(4, 1)
    write(root, "probe_race", models.probe(), race)
    write(root, "emb8", models.emb(), window(8))
    write(root, "emb64", models.emb(), window(64))
    write(root, "seq2", models.seq(), window(2))
    write(root, "seq_pair", models.seq(), window(2) + SEQ_AXES)
    write(root, "seq_padded", models.seq(), window(16, 5) + SEQ_AXES)
    write(root, "seq_cut", models.seq(), SEQ_AXES + 'too_long = "truncate"')
    write(root, "seq_sizes", models.seq(), axes("S", "sizes = [4, 8]"))
    write(root, "id_cut", models.identity("fp32"), CUT_AXES)
    write(root, "id_pair", models.identity("fp32"), window(2) + CUT_AXES)
    write(root, "string2", models.identity("string"), window(2))
    write(root, "mixrow_alone", models.mixrow(), 'batch_axis = "none"')
    write(root, "nz_transposed", models.nz(transposed=True))
    write(root, "baked_n", models.baked("N"))
    write_fake(root, "nap", 100)
    magika = Path(find_spec("magika").origin).parent / "models" / "standard_v3_3"
    (root / "magika" / "1").mkdir(parents=True)
    shutil.copy(magika / "model.onnx", root / "magika" / "1")
    (root / "magika" / "model.toml").write_text(window(8))
    return root
