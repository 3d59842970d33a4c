"""What loading a model shows: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from engines.report import Logged, Report


@contextlib.contextmanager
def loading(name: str, bar: bool) -> Iterator[Report]:
    """To be told how far the loading of a model is.

    Args:
        name: of the model.
        bar: whether a bar is shown where stderr is a terminal.
    """
    if not bar or not sys.stderr.isatty():
        yield Logged(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task(f"{name}: loading", total=None)

        def draw(phase: str, done: int, total: int) -> None:
            progress.update(
                line,
                description=f"{name}: {phase}",
                completed=done,
                total=total or None,
            )

        yield draw
