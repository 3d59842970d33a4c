"""What the demo prints: tables on a terminal, plain text elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from demo.load import LoadResult

_MARGIN = 1.05


@dataclass(slots=True)
class Comparison:
    """One model, measured with batching off and on."""

    off: LoadResult
    on: LoadResult

    @property
    def gain(self) -> float:
        """Requests per second with batching over without."""
        return rate(self.on) / rate(self.off) if rate(self.off) else math.nan

    @property
    def faster(self) -> bool:
        """Whether every turn with batching beat every turn without, by 5 %.

        Anything less is the noise of a machine that does other things too; a single
        turn proves nothing.
        """
        return min(self.on.turns) > max(self.off.turns) * _MARGIN

    @property
    def slower(self) -> bool:
        """The same the other way round."""
        return min(self.off.turns) > max(self.on.turns) * _MARGIN

    @property
    def wrong(self) -> bool:
        """Whether a request failed, or none was answered."""
        results = (self.off, self.on)
        return any(r.errors or not r.latencies_s for r in results)


def rate(result: LoadResult) -> float:
    """Answers per second."""
    return len(result.latencies_s) / result.seconds if result.seconds else 0.0


def percentile_ms(result: LoadResult, percent: float) -> float:
    """Latency (ms) that `percent` of the answers did not exceed."""
    latencies = sorted(result.latencies_s)
    if not latencies:
        return math.nan
    return latencies[max(0, math.ceil(len(latencies) * percent / 100) - 1)] * 1e3


def ms_per_row(result: LoadResult) -> float:
    """Milliseconds of running per row, over all batches."""
    rows = sum(size * count for size, count in result.runs.items())
    return sum(result.run_ns.values()) / rows / 1e6 if rows else math.nan


class Printer:
    """Prints to a terminal with frames and colours, elsewhere without."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._box = box.ROUNDED if self.console.is_terminal else None

    def say(self, text: str = "") -> None:
        """A line of text, as it is."""
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)

    def heading(self, text: str) -> None:
        """What comes now."""
        self.console.print(f"\n{text}", style="bold", markup=False)

    def status(self, text: str) -> None:
        """What is being done, where somebody watches."""
        if self.console.is_terminal:
            self.console.print(f"{text} ...", style="dim", markup=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; numbers flush right, the first column and bars flush left."""
        table = Table(box=self._box, pad_edge=False)
        for i, column in enumerate(columns):
            table.add_column(
                column, justify="right" if i and column else "left", no_wrap=True
            )
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def comparison(self, compared: Comparison) -> None:
        """Rates and latencies, batching off and on."""
        rows = []
        for name, result in (("off", compared.off), ("on", compared.on)):
            batches = sum(result.runs.values())
            total = sum(size * count for size, count in result.runs.items())
            rows.append(
                (
                    name,
                    f"{rate(result):,.1f}",
                    ", ".join(f"{turn:,.0f}" for turn in result.turns),
                    f"{percentile_ms(result, 50):,.1f}",
                    f"{percentile_ms(result, 99):,.1f}",
                    f"{total / batches if batches else 0:.1f}",
                    f"{ms_per_row(result):.2f}",
                )
            )
        self.table(
            (
                "batching",
                "answers/s",
                "by turns",
                "p50 ms",
                "p99 ms",
                "rows/batch",
                "ms/row",
            ),
            rows,
        )

    def histogram(self, result: LoadResult) -> None:
        """How large the batches were, and how long they ran (ModelStatistics)."""
        edges = [0, 1, 2, 4, 8, 16, 32, 64, 128]
        ranges = {
            (low, high): [size for size in result.runs if low < size <= high]
            for low, high in itertools.pairwise(edges)
        }
        counts = {
            key: sum(result.runs[size] for size in sizes)
            for key, sizes in ranges.items()
            if sizes
        }
        rows = []
        for (low, high), count in counts.items():
            sizes = ranges[low, high]
            run_ms = sum(result.run_ns[size] for size in sizes) / 1e6
            total = sum(size * result.runs[size] for size in sizes)
            bar = "#" * max(1, round(20 * count / max(counts.values())))
            rows.append(
                (
                    str(high) if high - low == 1 else f"{low + 1} to {high}",
                    f"{count:,}",
                    f"{run_ms / count:.1f}",
                    f"{run_ms / total:.2f}",
                    bar,
                )
            )
        self.table(("batch rows", "runs", "ms a run", "ms per row", ""), rows)
