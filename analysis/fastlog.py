"""Step lines that have the same keys in the same order -> Arrow columns, without a Python object per number.

In such lines only the numbers differ, so commas and newlines tell where each number begins and ends. What stands
between the numbers is compared with the first line in one piece, and all numbers are converted in one call.
Any line that is not exactly like this is left to the careful reader in eventlog.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

STEP_STARTS = (b'{"type":"step"', b'{"type": "step"')
_ENVELOPE = ["type", "time", "step", "metrics"]
_TAIL = b"}}\n"
_COMMA, _NEWLINE, _MINUS, _ZERO, _NINE = b",\n-09"
_SHAPES = 16  # a log has a few shapes (with and without a held-out evaluation); beyond this it is an odd one
_CHUNK = 20_000  # lines at a time: offsets are 32 bits wide


@dataclass(frozen=True)
class _Shape:
    """What is the same in every line: the text up to the first comma, the numbers' names, the text before each."""

    head: bytes
    names: tuple[str, ...]
    gaps: tuple[bytes, ...]


def read_fast(lines: list[bytes], reserved: tuple[str, ...]) -> tuple[pa.Table | None, list[int]]:
    """Columns time, step and the metrics of the step lines that could be read, and those lines' indices.

    `reserved` are metric names that must not be used as columns; lines with one of them are not read here.
    """
    waiting = [index for index, line in enumerate(lines) if line.startswith(STEP_STARTS)]
    tables: list[pa.Table] = []
    read: list[int] = []
    patience = _SHAPES
    while waiting and patience:
        chunk = waiting[:_CHUNK]
        table, fits = _read_alike([lines[index] for index in chunk], reserved)
        done = [index for index, fit in zip(chunk, fits, strict=True) if fit] if table is not None else []
        if table is not None:
            tables.append(table)
            read += done
        patience -= len(done) < len(chunk)
        gone = {*done, waiting[0]}  # an odd first line is left to the careful reader
        waiting = [index for index in waiting if index not in gone] if len(done) < len(waiting) else []
    if not tables:
        return None, []
    return pa.concat_tables(tables, promote_options="default"), read


def _read_alike(lines: list[bytes], reserved: tuple[str, ...]) -> tuple[pa.Table | None, np.ndarray]:
    """The lines shaped like the first one as a table, and which they are."""
    nothing = np.zeros(len(lines), bool)
    shape = _shape(lines[0], reserved) if lines else None
    if shape is None:
        return None, nothing
    data = b"\n".join(lines) + b"\n"
    text = np.frombuffer(data, np.uint8)
    flat = np.flatnonzero((text == _COMMA) | (text == _NEWLINE))
    fits = np.diff(np.flatnonzero(text[flat] == _NEWLINE), prepend=-1) == len(shape.gaps) + 1
    if not fits.all():
        return _again(lines, fits, reserved)
    marks = flat.reshape(len(lines), -1)
    line_starts = np.concatenate([[0], marks[:-1, -1] + 1])
    starts = marks[:, :-1] + np.array([len(gap) for gap in shape.gaps])
    ends = np.column_stack([marks[:, 1:-1], marks[:, -1] - len(_TAIL) + 1])
    first = text[np.minimum(starts, len(text) - 1)]
    fits = ((starts < ends) & ((first == _MINUS) | ((first >= _ZERO) & (first <= _NINE)))).all(axis=1)
    fits &= marks[:, 0] - line_starts == len(shape.head)
    if fits.all():
        gaps, values = _cut(data, starts, ends)
        wanted = np.frombuffer(shape.head + b"".join(shape.gaps) + _TAIL, np.uint8)
        fits = (gaps.reshape(len(lines), -1) == wanted).all(axis=1)
    if not fits.all():
        return _again(lines, fits, reserved)
    try:
        numbers = pc.cast(values, pa.float64(), memory_pool=pa.system_memory_pool()).to_numpy().reshape(starts.shape)
    except pa.ArrowInvalid:
        return None, nothing
    if not np.all(np.abs(numbers[:, 1]) < 2**53) or np.any(numbers[:, 1] % 1):
        return None, nothing
    step = pa.array(numbers[:, 1].astype(np.int64))
    columns = [pa.array(numbers[:, 0].copy()), step, *map(pa.array, numbers[:, 2:].T.copy())]
    return pa.table(columns, names=list(shape.names)), fits


def _again(lines: list[bytes], fits: np.ndarray, reserved: tuple[str, ...]) -> tuple[pa.Table | None, np.ndarray]:
    table, inner = _read_alike([line for line, fit in zip(lines, fits, strict=True) if fit], reserved)
    out = fits.copy()
    out[fits] = inner
    return table, out


def _cut(data: bytes, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, pa.Array]:
    """The bytes outside the numbers that begin and end at `starts` and `ends`, and the numbers as text."""
    bounds = np.empty(2 * starts.size + 2, np.int32)
    bounds[0], bounds[1:-1:2], bounds[2:-1:2], bounds[-1] = 0, starts.ravel(), ends.ravel(), len(data)
    pieces = pa.StringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(data))
    pool = pa.system_memory_pool()  # the default one gives memory back at once, and the next log asks for it again
    gaps = pc.take(pieces, pa.array(np.arange(0, len(pieces), 2)), memory_pool=pool)
    values = pc.take(pieces, pa.array(np.arange(1, len(pieces), 2)), memory_pool=pool)
    size = len(data) - int(np.sum(ends - starts))
    return np.frombuffer(gaps.buffers()[2], np.uint8, size), values


def _shape(line: bytes, reserved: tuple[str, ...]) -> _Shape | None:
    """The shape of a line, or None when it is not an ordinary step line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or list(event) != _ENVELOPE or not isinstance(event["metrics"], dict):
        return None
    names = ["time", "step", *event["metrics"]]
    head, *fields = line.split(b",")
    if len(fields) != len(names) or len(names) < 3 or any(name in reserved for name in event["metrics"]):
        return None
    gaps = []
    for field in fields:
        value = field[field.rfind(b":") + 1 :].lstrip()
        gaps.append(b"," + field[: len(field) - len(value)])
    return _Shape(head, tuple(names), tuple(gaps))
