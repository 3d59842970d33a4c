"""How far a run is, and a bar on the terminal that shows it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a run, as given to a progress callback a few times a second."""

    phase: str
    """`warm-up`, `measure` or `drain`."""

    fraction: float
    """How much of warm-up and window together has elapsed (0 to 1)."""

    answered_per_s: float
    """OK answers per second since the last report."""

    answered: int
    """OK answers since the start, warm-up included."""

    errors: int
    """Requests that ended otherwise, warm-up included."""

    in_flight: int
    """Requests without an answer."""


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr, to be given to `run`; draws nothing when that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("connect", total=1.0, figures="")

        def draw(progress: Progress) -> None:
            figures = f"{progress.answered_per_s:,.0f}/s"
            if progress.errors:
                figures += f", [red]{progress.errors:,} errors[/red]"
            bar.update(
                line,
                completed=progress.fraction,
                description=progress.phase,
                figures=figures,
            )

        yield draw
