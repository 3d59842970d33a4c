"""Reads the documents: links, fenced blocks, tables, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@dataclass(frozen=True)
class Table:
    """A table and the heading above it."""

    heading: str
    columns: list[str]
    rows: list[list[str]]

    def column(self, name: str) -> list[str]:
        """The cells below `name`."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


def name(document: Path) -> str:
    """What a test of this document is called."""
    return str(document.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks in a language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, document.read_text(), re.DOTALL | re.MULTILINE)


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    pattern = r"^```.*?^```$"
    return re.sub(pattern, "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """What a link may name behind its `#`, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def tables(document: Path) -> Iterator[Table]:
    """Every table."""
    heading = ""
    lines: list[list[str]] = []
    for line in [*prose(document).splitlines(), ""]:
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            lines.append([cell.strip() for cell in cells])
            continue
        if lines:
            yield Table(heading, lines[0], lines[2:])
            lines = []
        if line.startswith("#"):
            heading = line.lstrip("#").strip()


def commands(document: Path) -> Iterator[str]:
    """Every line of the shell blocks."""
    for block in blocks(document, "sh"):
        for line in block.splitlines():
            yield line.partition("  #")[0].strip()
