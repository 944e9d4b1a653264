"""The first section of a report: the verdict, what a careful reader must know, and the tables behind it."""

from __future__ import annotations

import numpy as np

from analysis.compare import compare, compare_problems
from analysis.load import Results
from analysis.report.blocks import Block, Fold, Grid, Section, Text
from analysis.tables import arms_table, differences_table, problems_table
from analysis.typeset import Table
from analysis.verdict import verdict


def answer_sections(results: Results) -> tuple[Section, Section]:
    """The verdict with its caveats, and the tables; the same numbers as the exported tables."""
    rng = np.random.default_rng(0)
    comparisons = compare(results, rng)
    problems = compare_problems(results, rng)
    blocks: list[Block] = [Text(sentence, "lead") for sentence in verdict(results, comparisons)]
    if results.notes:
        notes: list[Block] = [Text(note, "note") for note in results.notes]
        blocks.append(Fold(f"What was missing, damaged or left out ({len(notes)})", notes))
    tables = [arms_table(results, comparisons), differences_table(results, comparisons)]
    tables.append(problems_table(results, problems))
    return Section("verdict", "Verdict", blocks), Section("tables", "Tables", [table_block(t) for t in tables])


def table_block(table: Table) -> Block:
    """A table of the analysis as a block; bold cells are marked as in Markdown."""
    if table.shown.empty:
        return Text(f"{table.title}: {table.missing}", "note")
    columns = list(map(str, table.shown.columns))
    rows = []
    for index, row in enumerate(table.shown.itertuples(index=False)):
        cells = zip(columns, map(str, row), strict=True)
        rows.append([f"**{cell}**" if (index, head) in table.bold else cell for head, cell in cells])
    return Grid(columns, rows, table.caption, table.title)
