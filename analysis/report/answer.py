"""The first section of a report: the verdict, what a careful reader must know, and the tables behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.compare import Comparison, ProblemComparison, compare, compare_problems
from analysis.export import SEED
from analysis.load import Results
from analysis.report.blocks import Block, Fold, Grid, Section, Text
from analysis.tables import arms_table, differences_table, problems_table
from analysis.typeset import Table
from analysis.verdict import verdict


@dataclass(frozen=True)
class Compared:
    """All comparisons of a sweep, over seeds and over held-out problems."""

    seeds: list[Comparison]
    problems: list[ProblemComparison]


def compare_all(results: Results) -> Compared:
    """The same comparisons as in the exported tables, random draws included."""
    rng = np.random.default_rng(SEED)
    return Compared(compare(results, rng), compare_problems(results, rng))


def verdict_section(results: Results, compared: Compared) -> Section:
    """The verdict, and behind a fold what was missing, damaged or left out."""
    blocks: list[Block] = [Text(sentence, "lead") for sentence in verdict(results, compared.seeds)]
    if results.notes:
        notes: list[Block] = [Text(note, "note") for note in results.notes]
        blocks.append(Fold(f"What was missing, damaged or left out ({len(notes)})", notes))
    return Section("verdict", "Verdict", blocks)


def tables_section(results: Results, compared: Compared) -> Section:
    """The tables behind the verdict; stopped runs have a section of their own."""
    tables = [
        arms_table(results, compared.seeds),
        differences_table(results, compared.seeds),
        problems_table(results, compared.problems),
    ]
    return Section("tables", "Tables", [table_block(table) for table in tables])


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
