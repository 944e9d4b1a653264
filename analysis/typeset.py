"""A table as CSV (raw numbers), Markdown and LaTeX booktabs (cells as printed); always the same text."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_WORDS = re.compile(r"(?!\b(?:n|a|to|of|p|seeds?|all|equal|more)\b)\b[A-Za-z]+")  # a cell with more is text
_NUMERIC = re.compile(r"(?<![\w.-])-(?=\d)")  # a hyphen before a digit is a minus sign


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
        """A floating table with booktabs rules; needs only \\usepackage{booktabs}."""
        if self.shown.empty:
            return f"% {self.title}: {self.missing}\n"
        heads = list(self.shown.columns)
        align = "".join("l" if self._is_text(head) else "r" for head in heads)
        wide = "table*" if len(heads) > 6 else "table"  # across both columns of a page
        lines = [f"\\begin{{{wide}}}[t]", r"\centering", r"\footnotesize", r"\setlength{\tabcolsep}{3pt}"]
        lines += [f"\\caption{{{latex(self.caption)}}}", f"\\label{{tab:{self.name}}}"]
        lines += [f"\\begin{{tabular}}{{{align}}}", r"\toprule", _ampersands(map(latex, heads)), r"\midrule"]
        for index, row in enumerate(self.shown.itertuples(index=False)):
            cells = [latex(_cell(value)) for value in row]
            bold = [(index, head) in self.bold for head in heads]
            lines.append(_ampersands(f"\\textbf{{{c}}}" if b else c for c, b in zip(cells, bold, strict=True)))
        lines += [r"\bottomrule", r"\end{tabular}", f"\\end{{{wide}}}"]
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


def _cell(value: object) -> str:
    return " ".join(str(value).split())


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ampersands(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
