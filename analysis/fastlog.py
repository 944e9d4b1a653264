"""Step lines that have the same keys in the same order -> Arrow columns, without a Python object per number.

In such lines only the numbers differ, so commas and newlines tell where each number begins and ends. What stands
between the numbers is compared with the first line in one piece, and all numbers are converted in one call.
Any line that is not exactly like this is left to the careful reader in eventlog.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_STEP_STARTS = tuple(np.frombuffer(start, np.uint8) for start in (b'{"type":"step"', b'{"type": "step"'))
_ENVELOPE = ["type", "time", "step", "metrics"]
_TAIL = b"}}\n"
_COMMA, _MINUS, _ZERO, _NINE = b",-09"
_SHAPES = 16  # a log has a few shapes (with and without a held-out evaluation); beyond this it is an odd one
_CHUNK = 20_000  # lines at a time: offsets are 32 bits wide


@dataclass(frozen=True)
class _Shape:
    """What is the same in every line: the text up to the first comma, the numbers' names, the text before each."""

    head: bytes
    names: tuple[str, ...]
    gaps: tuple[bytes, ...]


def line_bounds(data: bytes) -> np.ndarray:
    """(n, 2) offsets of the lines of `data` that end with a newline: the first byte, and the one after the newline."""
    bounds = [0]
    while end := data.find(b"\n", bounds[-1]) + 1:  # much faster than comparing byte by byte: lines are long
        bounds.append(end)
    places = np.array(bounds)
    return np.column_stack([places[:-1], places[1:]])


def read_fast(data: bytes, bounds: np.ndarray, reserved: tuple[str, ...]) -> tuple[pa.Table | None, np.ndarray]:
    """Columns time, step and the metrics of the step lines that could be read, and those lines' indices.

    `bounds` are the `line_bounds` of `data`. `reserved` are metric names that must not be used as columns; lines
    with one of them are not read here.
    """
    waiting = _step_lines(data, bounds)
    tables: list[pa.Table] = []
    read: list[np.ndarray] = []
    patience = _SHAPES
    while len(waiting) and patience:
        chunk = waiting[:_CHUNK]
        table, fits = _read_alike(data, bounds[chunk], reserved)
        if table is not None:
            tables.append(table)
            read.append(chunk[fits])
        patience -= not fits.all()
        left = ~fits
        left[0] = False  # an odd first line is left to the careful reader
        waiting = np.concatenate([chunk[left], waiting[_CHUNK:]])
    if not tables:
        return None, waiting[:0]
    return pa.concat_tables(tables, promote_options="default"), np.concatenate(read)


def _step_lines(data: bytes, bounds: np.ndarray) -> np.ndarray:
    """Indices of the lines that begin like a step event."""
    text = np.frombuffer(data, np.uint8)
    long_enough = np.flatnonzero(bounds[:, 1] - bounds[:, 0] > max(map(len, _STEP_STARTS)))
    found = np.zeros(len(long_enough), bool)
    for start in _STEP_STARTS:
        found |= (text[bounds[long_enough, :1] + np.arange(len(start))] == start).all(axis=1)
    return long_enough[found]


def _joined(data: bytes, bounds: np.ndarray) -> bytes:
    """The lines one after the other."""
    breaks = np.flatnonzero(bounds[1:, 0] != bounds[:-1, 1])
    starts = bounds[np.concatenate([[0], breaks + 1]), 0].tolist()
    ends = bounds[np.concatenate([breaks, [len(bounds) - 1]]), 1].tolist()
    view = memoryview(data)
    return b"".join([view[start:end] for start, end in zip(starts, ends, strict=True)])


def _read_alike(data: bytes, bounds: np.ndarray, reserved: tuple[str, ...]) -> tuple[pa.Table | None, np.ndarray]:
    """The lines shaped like the first one as a table, and which they are."""
    nothing = np.zeros(len(bounds), bool)
    shape = _shape(data[bounds[0, 0] : bounds[0, 1] - 1], reserved) if len(bounds) else None
    if shape is None:
        return None, nothing
    mine = _joined(data, bounds)
    text = np.frombuffer(mine, np.uint8)
    line_ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
    line_starts = np.concatenate([[0], line_ends[:-1]])
    found = np.flatnonzero(text == _COMMA)
    fits = np.diff(np.searchsorted(found, line_ends), prepend=0) == len(shape.gaps)
    if not fits.all():
        return _again(data, bounds, fits, reserved)
    commas = found.reshape(len(bounds), -1)
    starts = commas + np.array([len(gap) for gap in shape.gaps])
    ends = np.column_stack([commas[:, 1:], line_ends - len(_TAIL)])
    first = text[np.minimum(starts, len(text) - 1)]
    fits = ((starts < ends) & ((first == _MINUS) | ((first >= _ZERO) & (first <= _NINE)))).all(axis=1)
    fits &= commas[:, 0] - line_starts == len(shape.head)
    if fits.all():
        gaps, values = _cut(mine, starts, ends)
        wanted = np.frombuffer(shape.head + b"".join(shape.gaps) + _TAIL, np.uint8)
        fits = (gaps.reshape(len(bounds), -1) == wanted).all(axis=1)
    if not fits.all():
        return _again(data, bounds, fits, reserved)
    try:
        numbers = pc.cast(values, pa.float64(), memory_pool=pa.system_memory_pool()).to_numpy().reshape(starts.shape)
    except pa.ArrowInvalid:
        return None, nothing
    if not np.all(np.abs(numbers[:, 1]) < 2**53) or np.any(numbers[:, 1] % 1):
        return None, nothing
    return _table(numbers, shape.names), fits


def _table(numbers: np.ndarray, names: tuple[str, ...]) -> pa.Table:
    """Columns from a matrix (lines, names) whose second column holds the steps."""
    count = len(numbers)
    parts = pa.py_buffer(np.ascontiguousarray(numbers.T))
    columns = [
        pa.Array.from_buffers(pa.float64(), count, [None, parts.slice(8 * count * place, 8 * count)])
        for place in range(len(names))
    ]
    columns[1] = pa.array(numbers[:, 1].astype(np.int64))
    return pa.Table.from_arrays(columns, schema=_schema(names))


@lru_cache(maxsize=64)
def _schema(names: tuple[str, ...]) -> pa.Schema:
    return pa.schema([(name, pa.int64() if name == "step" else pa.float64()) for name in names])


def _again(
    data: bytes, bounds: np.ndarray, fits: np.ndarray, reserved: tuple[str, ...]
) -> tuple[pa.Table | None, np.ndarray]:
    table, inner = _read_alike(data, bounds[fits], reserved)
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
