"""TensorBoard event files and W&B offline runs, read from their bytes: no tensorboard, no running wandb needed.

Both are records of protobuf messages; only the few fields that carry scalars are decoded.
TensorBoard: tensorflow/core/util/event.proto in TFRecord framing. W&B: wandb_internal.proto in LevelDB log framing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.logs.table import Log, Table, step_name, to_number

BLOCK = 32768  # LevelDB log block, bytes


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a protobuf message: int for varints, bytes for the rest; stops at damage."""
    at = 0
    value: Any
    while at < len(data):
        try:
            key, at = _varint(data, at)
            kind = key & 7
            if kind == 0:
                value, at = _varint(data, at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                value, at = data[at : at + size], at + size
            elif kind == 2:
                size, at = _varint(data, at)
                value, at = data[at : at + size], at + size
            else:
                return
        except IndexError:
            return
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


# ---- TensorBoard
def read_tensorboard(path: Path) -> Log:
    """Read a tfevents file, or all of a folder's."""
    files = [path] if path.is_file() else sorted(path.glob("*tfevents*"))
    table, notes = Table(), []
    for file in files:
        data, at, whole = file.read_bytes(), 0, True
        while at + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            if at + 16 + size > len(data):
                break
            step, values = _tensorboard_event(data[at + 12 : at + 12 + size])
            if values:
                table.add(float(step), values)
            at += 16 + size
        whole = at == len(data)
        if not whole:
            notes.append(f"{file.name}: the last record is cut off")
    rows, more = table.finish()
    return Log(path, "TensorBoard", rows, notes + more)


def _tensorboard_event(data: bytes) -> tuple[int, dict[str, float]]:
    step, values = 0, {}
    for number, value in fields(data):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for inner, item in fields(value):
                if inner == 1 and isinstance(item, bytes):
                    name, scalar = _tensorboard_value(item)
                    if scalar is not None:
                        values[name] = scalar
    return step, values


def _tensorboard_value(data: bytes) -> tuple[str, float | None]:
    name, scalar = "", None
    for number, value in fields(data):
        if number == 1:
            name = value.decode("utf-8", "replace")
        elif number == 2:
            scalar = struct.unpack("<f", value)[0]
        elif number == 8:
            scalar = _tensor_scalar(value)
    return name, scalar


def _tensor_scalar(data: bytes) -> float | None:
    """The number of a scalar TensorProto (float or double); None for anything larger or other."""
    kind, content, found = 0, b"", None
    for number, value in fields(data):
        if number == 1:
            kind = value
        elif number == 4:
            content = value
        elif number == 5 and len(value) == 4:
            found = struct.unpack("<f", value)[0]
        elif number == 6 and len(value) == 8:
            found = struct.unpack("<d", value)[0]
    if found is None and kind == 1 and len(content) == 4:
        found = struct.unpack("<f", content)[0]
    if found is None and kind == 2 and len(content) == 8:
        found = struct.unpack("<d", content)[0]
    return found


# ---- W&B
def read_wandb(path: Path) -> Log:
    """Read a run-*.wandb file, or the one in an offline run's folder."""
    file = path if path.is_file() else next(iter(sorted(path.glob("*.wandb"))))
    records: list[dict[str, Any]] = []
    notes: list[str] = []
    for message in _leveldb_records(file.read_bytes(), notes):
        for number, value in fields(message):
            if number == 2 and isinstance(value, bytes):  # Record.history
                records.append(_wandb_history(value))
    names = dict.fromkeys(name for record in records for name in record)
    column = step_name(names) or "_step"
    table = Table()
    for record in records:
        step = to_number(record.get(column))
        if step is None:  # a row logged beside the trainer's own counter belongs to the step before it
            step = table.last if table.last is not None else 0.0
        table.add(step, {n: value for n, value in record.items() if n != column and not n.startswith("_")})
    rows, more = table.finish()
    return Log(path, "W&B offline run", rows, notes + more)


def _leveldb_records(data: bytes, notes: list[str]) -> Iterator[bytes]:
    """Whole records of W&B's log: a 7-byte file header, then blocks of (crc, length, type) chunks."""
    at, partial = 7 if data[:4] == b":W&B" else 0, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        chunk = data[at + 7 : at + 7 + size]
        if kind == 0 and size == 0:
            at += left
            continue
        if len(chunk) < size:
            notes.append("the last record is cut off")
            return
        at += 7 + size
        partial = chunk if kind in (1, 2) else partial + chunk
        if kind in (1, 4):
            yield partial
            partial = b""


def _wandb_history(data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            item = dict(fields(value))
            nested = [v.decode("utf-8", "replace") for n, v in fields(value) if n == 2]
            name = item[1].decode("utf-8", "replace") if item.get(1) else ".".join(nested)
            try:
                row[name] = json.loads(item.get(16, b"null"))
            except ValueError:
                continue
        elif number == 2 and isinstance(value, bytes):
            row.setdefault("_step", dict(fields(value)).get(1, 0))
    return row
