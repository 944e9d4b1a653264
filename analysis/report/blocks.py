"""What a report is made of, apart from how it is written: HTML and Markdown render the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Text:
    """One paragraph; kind is "plain", "lead" (the verdict) or "note" (what a careful reader must know)."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Grid:
    """A table of words: `rows` have one cell per column; `numeric` columns are set flush right.

    A cell in `**` is set bold. `swatches` is the column that holds arms, shown with the look they have in figures.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    title: str = ""
    numeric: frozenset[int] = frozenset()
    swatches: int | None = None


@dataclass(frozen=True)
class Picture:
    """A figure for a wide and for a narrow page, each as SVG and hover data; `stem` is the path of the exported
    files, relative to the report and without ending."""

    name: str
    title: str
    caption: str
    wide: tuple[str, dict[str, Any]]
    narrow: tuple[str, dict[str, Any]]
    stem: str


@dataclass(frozen=True)
class Code:
    """Text to be shown as it is: a command, a diff."""

    text: str


@dataclass(frozen=True)
class Answer:
    """One recorded completion: what is said above it, the text, and how it was scored."""

    head: str
    text: str
    score: str
    good: bool


@dataclass(frozen=True)
class Compared:
    """Completions of several arms for one problem, to be read side by side; `gold` is the right answer, if known."""

    prompt: str
    answers: Sequence[Answer]
    gold: str = ""


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line one can open."""

    summary: str
    blocks: Sequence[Block]


Block = Text | Grid | Picture | Code | Compared | Fold


@dataclass(frozen=True)
class Section:
    """A titled part of the report; `anchor` is its place in the page's address."""

    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """The whole page: name, question, one line of state, and the sections."""

    name: str
    question: str
    state: str
    sections: Sequence[Section]
    arms: Sequence[str] = field(default_factory=tuple)
