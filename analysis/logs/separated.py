"""Tables of text: CSV, TSV, semicolons, Markdown, columns set apart by blanks, and what stands around them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from analysis.logs.table import Log, build
from reasonrl.alerts.names import counts_steps, normalise, translate

LOOK = 200  # lines in which the header may stand
NAMES, VALUES = ("metric", "name", "tag", "key"), ("value", "scalar")
CHART = re.compile(r"(.+) - (?=\S)")  # a chart exported from W&B: "run name - metric", with __MIN and __MAX beside it


def read_separated(path: Path, text: str) -> Log | None:
    """Read a table with a header line; None without one."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").split("\n")
    start, separator = _header(lines)
    if not separator:
        return None
    rows: Iterable[list[str]] = (
        (line.split() for line in lines[start:]) if separator == " " else csv.reader(lines[start:], delimiter=separator)
    )
    rows = iter(rows)
    names = [name.strip() for name in next(rows)]
    records, odd = [], 0
    for row in rows:
        if not any(cell.strip() for cell in row) or all(set(cell.strip()) <= set("-: ") for cell in row if cell):
            continue
        odd += len(row) != len(names)
        cells = [_point(cell) for cell in row] if separator == ";" else row
        pairs = [(name, cell) for name, cell in zip(names, cells, strict=False) if name]
        filled = {name for name, cell in pairs if cell.strip()}  # a second column of a name may be empty
        records.append({name: cell for name, cell in pairs if cell.strip() or name not in filled})
    if 2 * odd > len(records) and 2 * sum(map(_is_known, names)) <= len(names):
        return None  # prose with a comma or a table somewhere in it
    notes = [f"{odd} rows have more or fewer cells than the header (a cut last line?)"] if odd else []
    return build(path, "CSV", _one_run(_wide(records)), notes)


def _header(lines: list[str]) -> tuple[int, str]:
    """The line that names the columns and what separates them: the first that names two known ones, else the first."""
    first = (0, "")
    for number, line in enumerate(lines[:LOOK]):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        separator = max((",", "\t", ";", "|"), key=line.count)
        separator = separator if line.count(separator) else ""
        if not first[1]:
            first = (number, separator) if separator else first
        cells = [cell.strip(" \"'") for cell in (line.split(separator) if separator else line.split())]
        if sum(_is_known(cell) for cell in cells) >= 2:
            return number, separator or " "
    return first


def _is_known(cell: str) -> bool:
    return counts_steps(cell) or translate(cell) is not None


def _point(cell: str) -> str:
    """Where semicolons separate, a comma is a decimal point."""
    return cell.replace(",", ".") if re.fullmatch(r"\s*[-+]?\d+,\d+(?:[eE][-+]?\d+)?\s*", cell) else cell


def _wide(records: list[dict[str, str]]) -> list[dict[str, str]]:
    """A table with one number a row (step, metric, value) as one with one step a row."""
    if not records:
        return records
    plain = {normalise(name): name for name in records[0]}
    name = next((plain[known] for known in NAMES if known in plain), None)
    value = next((plain[known] for known in VALUES if known in plain), None)
    if name is None or value is None:
        return records
    return [
        {key: cell for key, cell in record.items() if counts_steps(key)} | {record[name]: record.get(value, "")}
        for record in records
        if record.get(name)
    ]


def _one_run(records: list[dict[str, str]]) -> list[dict[str, str]]:
    """The columns of an exported chart under their own names, when they are of one run."""
    names = list(dict.fromkeys(name for record in records for name in record))
    runs = {found[1] for name in names if (found := CHART.match(name))}
    if len(runs) != 1:
        return records
    return [
        {CHART.sub("", name): cell for name, cell in record.items() if not name.endswith(("__MIN", "__MAX"))}
        for record in records
    ]
