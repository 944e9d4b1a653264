"""A report as Markdown, with the exported figures linked by relative path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.report.blocks import Block, Code, Compared, Fold, Grid, Picture, Report, Text


def to_markdown(report: Report) -> str:
    """The report as one Markdown text (GitHub tables); figures are `figures/NAME.png` beside it."""
    parts = [f"# {report.name}"]
    if report.question:
        parts.append(f"*{report.question}*")
    parts.append(report.state)
    for section in report.sections:
        parts.append(f"## {section.title}")
        parts += _blocks(section.blocks)
    return "\n\n".join(parts) + "\n"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        match block:
            case Text(kind="lead"):
                yield f"**{_safe(block.text)}**"
            case Text(kind="note"):
                yield f"> {_safe(block.text)}"
            case Text():
                yield _safe(block.text)
            case Code():
                yield _fence(block.text)
            case Grid():
                yield _grid(block)
            case Picture():
                yield f"![{_safe(block.title)}]({block.stem}.png)\n\n**{_safe(block.title)}.** {_safe(block.caption)}"
            case Compared():
                yield "Problem:\n\n" + _fence(block.prompt + (f"\n\nright answer: {block.gold}" if block.gold else ""))
                for answer in block.answers:
                    yield f"{_safe(answer.head)}: {_safe(answer.score)}\n\n{_fence(answer.text)}"
            case Fold():
                yield f"**{_safe(block.summary)}**"
                yield from _blocks(block.blocks)


def _fence(text: str) -> str:
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}\n{text}\n{ticks}"


def _grid(grid: Grid) -> str:
    rule = ["---:" if index in grid.numeric else "---" for index in range(len(grid.columns))]
    lines = [grid.columns, rule, *([_safe(cell) for cell in row] for row in grid.rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    title = f"**{_safe(grid.title)}.** " if grid.title else ""
    caption = f"{title}{_safe(grid.caption)}"
    return f"{caption}\n\n{table}" if caption else table


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
