"""Step lines that have the same keys in the same order -> Arrow columns, without a Python object per number.

The lines are split at their commas by Arrow's CSV reader; what stands before each number must then be the
same in every line (the key), and is cut off. Anything else is left to the careful reader in eventlog.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

STEP_STARTS = (b'{"type":"step"', b'{"type": "step"')
_ENVELOPE = ["type", "time", "step", "metrics"]
_SHAPES = 16  # a log has a few shapes (steps with and without an evaluation); beyond this it is an odd one


@dataclass(frozen=True)
class _Shape:
    """The text before each number of a line, and the name of that number."""

    names: tuple[str, ...]
    prefixes: tuple[bytes, ...]


def read_fast(lines: list[bytes], reserved: tuple[str, ...]) -> tuple[pa.Table | None, list[int]]:
    """Columns time, step and the metrics of the step lines that could be read, and those lines' indices.

    `reserved` are metric names that must not be used as columns; lines with one of them are not read here.
    """
    groups: dict[int, list[int]] = {}
    for index, line in enumerate(lines):
        if line.startswith(STEP_STARTS):
            groups.setdefault(line.count(b","), []).append(index)
    tables: list[pa.Table] = []
    read: list[int] = []
    for _, group in sorted(groups.items())[:_SHAPES]:
        waiting = group
        for _ in range(_SHAPES):
            table, fits = _read_group([lines[i] for i in waiting], reserved)
            if table is None:
                break
            tables.append(table)
            read += [waiting[i] for i in np.flatnonzero(fits)]
            waiting = [waiting[i] for i in np.flatnonzero(~fits)]
            if not waiting:
                break
    if not tables:
        return None, []
    return pa.concat_tables(tables, promote_options="default"), read


def _read_group(lines: list[bytes], reserved: tuple[str, ...]) -> tuple[pa.Table | None, np.ndarray]:
    """The lines shaped like the first one as a table, and which they are; None if some are not numbers."""
    nothing = np.zeros(len(lines), bool)
    shape = _shape(lines[0], reserved)
    if shape is None:
        return None, nothing
    fields = [str(i) for i in range(len(shape.prefixes))]
    data = b"\n".join(lines) + b"\n"
    try:
        text = pa_csv.read_csv(
            pa.py_buffer(data),
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=fields),
            parse_options=pa_csv.ParseOptions(quote_char=False),
            convert_options=pa_csv.ConvertOptions(column_types=dict.fromkeys(fields, pa.string()), check_utf8=False),
        )
        if text.num_rows != len(lines):
            return None, nothing
        fits = pc.ends_with(text.column(len(fields) - 1), b"}}")
        for index, prefix in enumerate(shape.prefixes):
            fits = pc.and_(fits, pc.starts_with(text.column(index), prefix))
        mask = fits.to_numpy(zero_copy_only=False)
        if not mask.all():
            text = text.filter(fits)
        columns = [
            _number(
                text.column(index),
                prefix,
                index == len(fields) - 1,
                pa.int64() if index == 2 else pa.float64(),
            )
            for index, prefix in enumerate(shape.prefixes)
            if index
        ]
        return pa.table(columns, names=list(shape.names)), mask
    except pa.ArrowInvalid:
        return None, nothing


def _shape(line: bytes, reserved: tuple[str, ...]) -> _Shape | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or list(event) != _ENVELOPE or not isinstance(event["metrics"], dict):
        return None
    names = ["time", "step", *event["metrics"]]
    fields = line.rstrip().split(b",")
    if len(fields) != len(names) + 1 or len(names) < 3 or any(name in reserved for name in event["metrics"]):
        return None
    if any(b":" not in field for field in fields):
        return None
    prefixes = [fields[0]]
    for field in fields[1:]:
        value = field[field.rindex(b":") + 1 :].lstrip()
        prefixes.append(field[: len(field) - len(value)])
    return _Shape(tuple(names), tuple(prefixes))


def _number(column: Any, prefix: bytes, last: bool, kind: pa.DataType) -> Any:
    text = pc.binary_replace_slice(column, 0, len(prefix), b"")
    if last:
        text = pc.binary_replace_slice(text, -2, 2**31 - 1, b"")
    return text.cast(kind)
