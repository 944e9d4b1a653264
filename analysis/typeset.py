"""A table as CSV (raw numbers), Markdown and LaTeX booktabs (cells as printed); always the same text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

TABLE_FORMATS = ("csv", "md", "tex")
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\u00a0": "~",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_WORDS = re.compile(r"(?!\b(?:n|a|to|of|p|seeds?|all|equal|more)\b)\b[A-Za-z]+")  # a cell with more is text
_NUMERIC = re.compile(r"(?<![\w.-])-(?=\d)")  # a hyphen before a digit is a minus sign

_BRACKETS = re.compile(r"\([^()]{,24}\)")
_LETTER, _GAP = 4.1, 6.0  # points at \\footnotesize: a letter on average, the space between two columns
_COLUMN, _PAGE = 229.0, 397.0  # points: a column of two, the text width of common one-column styles


@dataclass
class Table:
    """`frame` holds raw numbers for the CSV, `shown` the cells as printed, `bold` their (row, column) places.

    `missing` says why a table is empty.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    shown: pd.DataFrame
    bold: set[tuple[int, str]] = field(default_factory=set)
    missing: str = ""

    def to_csv(self) -> str:
        """Raw numbers, 10 significant digits; an empty table is one comment line with the reason."""
        if self.frame.empty:
            return f"# {self.missing}\n"
        return self.frame.to_csv(index=False, float_format="%.10g", lineterminator="\n")

    def to_markdown(self) -> str:
        """A pipe table under its title, the caption below."""
        if self.shown.empty:
            return f"### {self.title}\n\n{self.missing}\n"
        heads = list(self.shown.columns)
        lines = [_pipes(heads), _pipes("---" if self._is_text(head) else "--:" for head in heads)]
        for index, row in enumerate(self.shown.itertuples(index=False)):
            cells = [_cell(value).replace("|", "\\|") for value in row]
            bold = [(index, head) in self.bold for head in heads]
            lines.append(_pipes(f"**{c}**" if b else c for c, b in zip(cells, bold, strict=True)))
        return f"### {self.title}\n\n" + "\n".join(lines) + f"\n\n{self.caption}\n"

    def to_latex(self) -> str:
        """A floating table with booktabs rules, wrapped to the width of a page; needs only \\usepackage{booktabs}."""
        if self.shown.empty:
            return f"% {self.title}: {self.missing}\n"
        heads = list(self.shown.columns)
        rows = [[_tied(text) for text in row] for row in [heads, *self.shown.itertuples(index=False)]]
        narrow, size, widths = _widths(rows)
        texts = [self._is_text(head) for head in heads]
        sides = [r"\raggedright" if text else r"\raggedleft" for text in texts]
        columns = [f"p{{{w:.0f}pt}}" if w else "l" if text else "r" for w, text in zip(widths, texts, strict=True)]
        kind = "table" if narrow else "table*"  # across both columns of a page
        lines = [f"\\begin{{{kind}}}[t]", r"\centering", f"\\{size}", r"\setlength{\tabcolsep}{3pt}"]
        lines += [r"\setlength{\belowcaptionskip}{4pt}"]
        lines += [f"\\caption{{{latex(self.caption)}}}", f"\\label{{tab:{self.name}}}"]
        lines += [f"\\begin{{tabular}}{{@{{}}{''.join(columns)}@{{}}}}", r"\toprule"]
        for index, row in enumerate(rows):
            cells = [latex(cell) for cell in row]
            bold = [bool(index) and (index - 1, head) in self.bold for head in heads]
            cells = [f"\\textbf{{{c}}}" if b else c for c, b in zip(cells, bold, strict=True)]
            cells = [f"{s} {c}" if w else c for c, w, s in zip(cells, widths, sides, strict=True)]
            lines += [] if index < 2 or not any(widths) else [r"\addlinespace[2pt]"]
            lines += [_ampersands(cells)] + ([] if index else [r"\midrule"])
        lines += [r"\bottomrule", r"\end{tabular}", f"\\end{{{kind}}}"]
        return "\n".join(lines) + "\n"

    def render(self, format: str) -> str:
        """The table as text of one of TABLE_FORMATS; ValueError for another."""
        writers = {"csv": self.to_csv, "md": self.to_markdown, "tex": self.to_latex}
        if format not in writers:
            raise ValueError(f"format={format!r}: choose {', '.join(writers)}")
        return writers[format]()

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.csv, NAME.md and NAME.tex and return the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for format in TABLE_FORMATS:
            path = folder / f"{self.name}.{format}"
            path.write_text(self.render(format), encoding="utf-8")
            paths.append(path)
        return paths

    def _is_text(self, head: str) -> bool:
        return any(_WORDS.search(_cell(value)) for value in self.shown[head])


def latex(text: str) -> str:
    """Text with LaTeX's special characters escaped and minus signs typeset."""
    marked = _NUMERIC.sub("\0", text)
    return "".join(_LATEX.get(char, char) for char in marked).replace("\0", "$-$")


def _widths(rows: Sequence[Sequence[str]]) -> tuple[bool, str, list[float]]:
    """Whether a table fits in one of two columns; else LaTeX's size of letters and the points per column (0: as wide
    as it is) with which it fits on a page.

    The widest columns are cut to one common width, none below its longest word.
    """
    natural = [max(map(len, column)) * _LETTER + 3 for column in zip(*rows, strict=True)]
    least = [
        max(len(word) for text in column for word in text.split(" ")) * _LETTER + 3
        for column in zip(*rows, strict=True)
    ]
    if sum(natural) + _GAP * len(natural) <= _COLUMN:
        return True, "footnotesize", [0.0] * len(natural)
    small = sum(least) + _GAP * len(least) > _PAGE
    scale = 7 / 8 if small else 1.0
    room, cap = (_PAGE - _GAP * len(natural)) / scale, max(natural)
    while cap > _LETTER and sum(min(n, max(cap, w)) for n, w in zip(natural, least, strict=True)) > room:
        cap -= 1.0
    widths = [0.0 if n <= max(cap, w) else scale * max(cap, w) for n, w in zip(natural, least, strict=True)]
    return False, "scriptsize" if small else "footnotesize", widths


def _tied(value: object) -> str:
    """A cell whose brackets and per cents are not broken over two lines."""
    text = _cell(value).replace(" %", "\u00a0%")
    return _BRACKETS.sub(lambda found: found[0].replace(" ", "\u00a0"), text)


def _cell(value: object) -> str:
    return " ".join(str(value).split())


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ampersands(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \tabularnewline"
