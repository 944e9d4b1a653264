"""A report as one HTML page that needs nothing else: no network, no fonts, no other files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import count

from analysis.report.blocks import Answer, Block, Code, Compared, Fold, Grid, Picture, Report, Section, Text
from analysis.report.svg import variable
from analysis.style import ON_DARK, ArmStyle, arm_styles

# The page may not load anything: a report opened years later, or by a reviewer, must not phone anyone.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_DARK_PAGE = {
    "paper": "#1b1b1e",
    "ink": "#e8e6e3",
    "soft": "#a5a29c",
    "line": "#3a3a3d",
    "wash": "#26262a",
    "accent": "#6ea8fe",
    "good": "#63c774",
    "bad": "#ff8a80",
}


def to_html(report: Report) -> str:
    """The page as text; every recorded word is escaped."""
    body = [
        f"<h1>{escape(report.name)}</h1>",
        f'<p class="question">{escape(report.question)}</p>' if report.question else "",
        f'<p class="state">{escape(report.state)} <button id="theme" hidden>Dark page</button></p>',
        _contents(report.sections),
    ]
    writer = _Writer(arm_styles(report.arms))
    body += [writer.section(section) for section in report.sections]
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(report.name)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_style()}</style></head>\n<body>\n" + "\n".join(part for part in body if part) + "\n"
        f"<script>\n{_asset('report.js')}</script>\n</body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("analysis.report") / name).read_text(encoding="utf-8")


def _style() -> str:
    page = [f"--{name}: {value};" for name, value in _DARK_PAGE.items()]
    figures = [f"{variable(light)}: {dark};" for light, dark in ON_DARK.items()]
    rules = "color-scheme: dark; " + " ".join(page + figures)
    dark = (
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {rules} }} }}\n"
        f"@media screen {{ :root[data-theme=dark] {{ {rules} }} }}"
    )
    return _asset("report.css").replace("/*DARK*/", dark)


def _contents(sections: Sequence[Section]) -> str:
    links = [f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in sections]
    return f"<nav>{''.join(links)}</nav>"


class _Writer:
    """Blocks to HTML; numbers the figures."""

    def __init__(self, styles: dict[str, ArmStyle]) -> None:
        self._styles = styles
        self._figures = count(1)

    def section(self, section: Section) -> str:
        body = "\n".join(self.blocks(section.blocks))
        return f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>\n{body}</section>'

    def blocks(self, blocks: Sequence[Block]) -> Iterator[str]:
        for block in blocks:
            match block:
                case Text():
                    name = "" if block.kind == "plain" else f' class="{block.kind}"'
                    yield f"<p{name}>{escape(block.text)}</p>"
                case Code():
                    yield f"<pre>{escape(block.text)}</pre>"
                case Grid():
                    yield self.grid(block)
                case Picture():
                    yield self.picture(block)
                case Compared():
                    answers = "".join(map(_answer, block.answers))
                    gold = f", right answer <code>{escape(block.gold)}</code>" if block.gold else ""
                    yield (
                        f'<div class="compared"><p>Problem <code>{escape(block.prompt)}</code>{gold}</p>'
                        f'<div class="answers">{answers}</div></div>'
                    )
                case Fold():
                    inner = "\n".join(self.blocks(block.blocks))
                    yield f"<details><summary>{escape(block.summary)}</summary>\n{inner}</details>"

    def grid(self, grid: Grid) -> str:
        head = "".join(f"<th{_kind(grid, i)}>{escape(name)}</th>" for i, name in enumerate(grid.columns))
        rows = []
        for row in grid.rows:
            cells = []
            for index, text in enumerate(row):
                swatch = self.swatch(text) if index == grid.swatches else ""
                cells.append(f"<td{_kind(grid, index, text)}>{swatch}{_cell(text)}</td>")
            rows.append(f"<tr>{''.join(cells)}</tr>")
        title = f"<b>{escape(grid.title)}.</b> " if grid.title else ""
        caption = f'<p class="caption">{title}{escape(grid.caption)}</p>' if title or grid.caption else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        return f'{caption}<div class="scroll" tabindex="0">{table}</div>'

    def swatch(self, arm: str) -> str:
        """A short piece of the arm's line, as it is drawn in the figures."""
        style = self._styles.get(arm)
        if style is None:
            return ""
        dash = "" if style.dash == "solid" else f' stroke-dasharray="{" ".join(f"{d * 1.6:g}" for d in style.dash[1])}"'
        colour = f"var({variable(style.colour)},{style.colour})"
        return (
            '<svg class="swatch" width="26" height="8" aria-hidden="true">'
            f'<line x1="0" x2="26" y1="4" y2="4" stroke="{colour}" stroke-width="2.4"{dash}/></svg>'
        )

    def picture(self, picture: Picture) -> str:
        number = next(self._figures)
        parts = []
        for width, (svg, hover) in (("wide", picture.wide), ("narrow", picture.narrow)):
            ident = f"{picture.name}-{width}"
            parts.append(svg.replace("<svg ", f'<svg id="{ident}" class="{width}" ', 1))
            if hover:
                # "</script>" inside an arm's name must not end the element.
                data = json.dumps(hover, separators=(",", ":")).replace("<", "\\u003c")
                parts.append(f'<script type="application/json" data-figure="{ident}">{data}</script>')
        caption = f"<b>Figure {number}. {escape(picture.title)}.</b> {escape(picture.caption)}"
        return f"<figure>{''.join(parts)}<figcaption>{caption}</figcaption></figure>"


def _kind(grid: Grid, index: int, text: str = "") -> str:
    """Class of a cell: numbers to the right, sentences with room, short words on one line."""
    if index in grid.numeric:
        return ' class="num"'
    whole = len(text) < (26 if text[:2].strip("-−")[:1].isdigit() else 16)  # an interval is not broken, words are
    return ' class="wide"' if len(text) > 60 else ' class="short"' if text and whole else ""


def _cell(text: str) -> str:
    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    return f"<b>{escape(text[2:-2])}</b>" if bold else escape(text)


def _answer(answer: Answer) -> str:
    tone = "good" if answer.good else "bad"
    return (
        f'<div class="answer"><b>{escape(answer.head)}</b><pre>{escape(answer.text)}</pre>'
        f'<div class="score {tone}">{escape(answer.score)}</div></div>'
    )
