"""The demo, top to bottom: `python -m demo` (or `make demo`).

Starts the installed daemon twice, once with batching off, on a model that comes in a
package; drives both by turns with tritonclient; compares every answer with the one the
model gives alone; prints what was measured; stops everything.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

from demo.daemon import Daemon, DaemonError
from demo.filetypes import FileTypeModel, magika_labels, repository_files
from demo.load import Callers, CallersError, Load, LoadResult
from demo.report import Comparison, Printer, ms_per_row

ROOT = Path(__file__).resolve().parent.parent

TOLERANCE = 1e-5
"""The most that an answer (probabilities) may differ from the model's answer to the
same row alone, beyond what onnxruntime itself differs by when it runs a batch."""

STAND_IN = """\
# Not a model: it sleeps 10 ms a run and 0.1 ms a row, and echoes. That is how a GPU
# behaves that one row does not fill.
engine = "fake"

[fake]
base_ms = 10
per_row_us = 100
inputs = [{ name = "x", shape = [16] }]
outputs = [{ name = "y", shape = [16] }]
"""


def main() -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds in all")
    parser.add_argument("--callers", type=int, default=32, help="concurrent callers")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of each of the measurements"
    )
    options = parser.parse_args()
    if options.callers < 1 or not options.seconds > 0:
        parser.error("--callers and --seconds must be positive")
    if options.quick:
        options.callers, options.seconds = 8, 0.5
    missing = _missing("batcher", "magika", "tritonclient", "grpc")
    if missing:
        print(
            f"{missing}\nRun `make demo`: it installs what is needed", file=sys.stderr
        )
        return 2
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return Demo(options.callers, options.seconds, options.quick).run()
    except (DaemonError, CallersError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the daemons are down", file=sys.stderr)
        return 130


class Demo:
    """One run.

    Args:
        callers: how many requests are under way at any time.
        seconds: of each measurement.
        quick: whether to measure once what is otherwise measured three times.
    """

    def __init__(self, callers: int, seconds: float, quick: bool) -> None:
        self._callers = callers
        self._seconds = seconds
        self._rounds = 1 if quick else 3
        self._printer = Printer()

    def run(self) -> int:
        """Everything; returns the exit code."""
        started = time.monotonic()
        say = self._printer.say
        self._printer.status("looking for the model, and asking it without the daemon")
        self._model = FileTypeModel.find()
        files = repository_files(ROOT, most=48)
        self._rows = [self._model.features(path) for path in files]
        self._answers = self._model.answers(self._rows)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._make_repository(folder)
            off = stack.enter_context(Daemon([folder], ["--max-batch", "1"]))
            on = stack.enter_context(Daemon([folder]))
            callers = stack.enter_context(Callers())  # the last: it ends first
            self._printer.status("starting two daemons")
            for daemon in (off, on):
                daemon.await_ready()
            self._tell_load()
            say("Two daemons serve the same folder, one of them with batching off:")
            say(f"  on   {on.address}  batcher serve FOLDER")
            say(f"  off  {off.address}  batcher serve FOLDER --max-batch 1")
            labels_ok = self._classify(callers, on.address, files)
            filetypes = self._measure(callers, off.address, on.address, "filetype")
            self._tell_filetypes(filetypes)
            stand_in = self._measure(callers, off.address, on.address, "stand-in")
            self._tell_stand_in(stand_in)
            codes = [daemon.stop() for daemon in (on, off)]
        right = labels_ok and self._tell_answers(filetypes, stand_in)
        seconds = time.monotonic() - started
        say(f"The daemons drained and ended with exit codes {codes}.")
        say(f"All of it took {seconds:.0f} s.")
        self._tell_next()
        return 0 if right and codes == [0, 0] else 1

    def _make_repository(self, folder: Path) -> None:
        version = folder / "filetype" / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").symlink_to(self._model.path)
        (folder / "stand-in").mkdir()
        (folder / "stand-in" / "model.toml").write_text(STAND_IN, encoding="utf-8")

    def _classify(self, callers: Callers, address: str, files: list[Path]) -> bool:
        """Every file once, through the daemon; whether all is as it should be."""
        self._printer.heading(
            f"What are the files of this repository? ({len(files)} of them, asked "
            "through tritonclient)"
        )
        result = callers.run(self._load(address, "filetype", seconds=0))
        if result.errors:
            self._tell_errors(result)
            return False
        found = [self._model.label(answer) for answer in result.answers]
        shown: dict[str, tuple[str, str, str]] = {}
        for path, (label, score) in zip(files, found, strict=True):
            name = str(path.relative_to(ROOT))
            shown.setdefault(label, (name, label, f"{score:.3f}"))
        self._printer.table(("file", "label", "score"), list(shown.values())[:12])
        own = magika_labels(files)
        same = sum(a == b for (a, _), b in zip(found, own, strict=True))
        self._printer.say(
            f"{same} of {len(files)} labels are what magika's own identify_path finds "
            "(prediction.dl)."
        )
        return same == len(files)

    def _measure(self, callers: Callers, off: str, on: str, model: str) -> Comparison:
        """Both daemons by turns, so that what the machine does besides hits both."""
        compared = Comparison(LoadResult(), LoadResult())
        pair = [(compared.off, off, "off"), (compared.on, on, "on")]
        for number in range(self._rounds):
            for total, address, name in pair if number % 2 == 0 else pair[::-1]:
                self._printer.status(f"{model}: {self._seconds:g} s, batching {name}")
                total.add(callers.run(self._load(address, model, self._seconds)))
        return compared

    def _load(self, address: str, model: str, seconds: float) -> Load:
        rows, expected = self._rows, self._answers.alone
        if model == "stand-in":
            rows = [np.full((1, 16), i, np.float32) for i in range(16)]
            expected = rows
        return Load(
            address=address,
            model=model,
            rows=rows,
            expected=expected,
            callers=self._callers,
            seconds=seconds,
        )

    # -- words ----------------------------------------------------------------------

    def _tell_load(self) -> None:
        """Whoever reads the figures should know that the machine does other things."""
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores:
            self._printer.say(
                f"This machine is busy (load {load:.1f} on {cores} cores): the figures "
                "below are of what is left of it, and vary."
            )

    def _tell_filetypes(self, compared: Comparison) -> None:
        self._printer.heading(
            f"The file-type model on this CPU, {self._callers} callers, "
            "off and on by turns"
        )
        self._printer.comparison(compared)
        self._printer.say("The batches with batching on, as ModelStatistics has them:")
        self._printer.histogram(compared.on)
        alone, together = ms_per_row(compared.off), ms_per_row(compared.on)
        cost = f"a row runs for {alone:.1f} ms alone and {together:.1f} ms in a batch"
        rates = f"{compared.gain:.2f} times the rate"
        if self._rounds == 1:
            text = (
                f"{rates}; {cost}. So short a measurement proves nothing about rates: "
                "leave out --quick for that."
            )
        elif compared.faster:
            text = f"Batching pays here: {rates}; {cost}."
        elif compared.slower:
            text = (
                f"Batching costs here: {rates}; {cost}. Cap the batches of such a "
                "model (--max-batch 4, say), or switch them off (--max-batch 1)."
            )
        else:
            text = (
                f"No difference beyond the noise of this machine ({rates}; {cost}). "
                "That is usual where a single row keeps the cores busy: a batch finds "
                "nothing idle to use. Batching is for engines that one row does not "
                "fill; the next table has one."
            )
        self._printer.say(text)

    def _tell_stand_in(self, compared: Comparison) -> None:
        self._printer.heading(
            "A stand-in for a GPU: 10 ms a run + 0.1 ms a row, slept, not computed"
        )
        self._printer.comparison(compared)
        self._printer.histogram(compared.on)
        self._printer.say(
            "Where a run costs about the same for one row as for many, the same daemon "
            f"answers {compared.gain:.1f} times as much. Nothing was held back for "
            "that: batches form while the slot is busy (policy eager, max_delay_us 0)."
        )
        busy = compared.on.cpu_s / compared.on.seconds
        if busy > 0.8:
            self._printer.say(
                f"(The callers used {busy:.0%} of a core: they may be the limit.)"
            )

    def _tell_answers(self, filetypes: Comparison, stand_in: Comparison) -> bool:
        self._printer.heading("Are the answers right?")
        spread = self._answers.spread
        self._printer.say(
            f"onnxruntime alone, without a daemon, gives numbers that differ by up to "
            f"{spread:.1e} between a row by itself and the same row in a batch."
        )
        right = True
        for name, compared, limit in (
            ("filetype", filetypes, spread + TOLERANCE),
            ("stand-in", stand_in, 0.0),
        ):
            difference = max(compared.off.max_difference, compared.on.max_difference)
            count = len(compared.off.latencies_s) + len(compared.on.latencies_s)
            ok = difference <= limit and not compared.wrong
            source = "its input" if limit == 0 else "the model's, run alone"
            self._printer.say(
                f"{name}: {count:,} answers compared with {source}: the largest "
                f"difference is {difference:.1e} (allowed {limit:.1e}): "
                + ("ok" if ok else "WRONG")
            )
            for result in (compared.off, compared.on):
                self._tell_errors(result)
            right = right and ok
        return right

    def _tell_errors(self, result: LoadResult) -> None:
        for text, count in result.errors.most_common(3):
            self._printer.say(f"  failed {count} times: {text}")

    def _tell_next(self) -> None:
        program = os.path.relpath(Path(sysconfig.get_path("scripts")) / "batcher")
        model = os.path.relpath(self._model.path)
        self._printer.heading("What to try next")
        self._printer.say(f"  {program} serve {model}")
        self._printer.say("  curl http://127.0.0.1:8002/metrics")
        self._printer.say("  README.md      your own model, and every knob")
        self._printer.say("  docs/batching.md  how requests become batches, and tuning")
        self._printer.say("  make test      linters, types and the test suite")


def _missing(*names: str) -> str:
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"the demo needs {name}, which is not installed"
    return ""


if __name__ == "__main__":
    sys.exit(main())
