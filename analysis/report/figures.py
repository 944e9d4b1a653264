"""The figures of a report: drawn for a wide and a narrow page, with what the pointer shows."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.figures import FIGURES, FigureSpec
from analysis.figures.curves import shown_arms
from analysis.load import Results
from analysis.report.blocks import Block, Picture, Section, Text
from analysis.report.svg import hover_data, themed_svg


def figures_section(results: Results, names: Sequence[str] | None = None) -> Section:
    """The default figures of this sweep, or those asked for by name."""
    chosen = [spec for spec in FIGURES.values() if (spec.name in names if names else spec.default_for(results))]
    if results.runs.empty:
        return Section("figures", "Figures", [Text("There is nothing to draw yet.", "note")])
    blocks: list[Block] = []
    for spec in chosen:
        try:
            blocks.append(picture(results, spec))
        except Exception as error:  # one figure that breaks must not cost the page
            blocks.append(Text(f"{spec.title}: not drawn ({type(error).__name__}: {error}).", "note"))
    return Section("figures", "Figures", blocks)


def picture(results: Results, spec: FigureSpec) -> Picture:
    """One figure as a block: both widths as inline SVG with their hover data."""
    parts = []
    for size in ("double", "single"):
        figure, numbers = spec.draw(results, size)
        svg = themed_svg(figure, f"{spec.name}-{size}", spec.title)
        parts.append((svg, hover_data(figure, numbers, shown_arms(results))))
    return Picture(spec.name, spec.title, spec.caption, parts[0], parts[1], f"figures/{spec.name}")
