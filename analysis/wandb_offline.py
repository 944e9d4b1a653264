"""Read W&B's own offline files (offline-run-*/run-ID.wandb) without sending them anywhere.

The file is a LevelDB log (7 bytes of header, then records split over blocks of 32 KiB, each piece with a checksum)
of protocol buffers. A process that was killed leaves a torn end: everything before it is read.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrl.errors import AnalysisError

_BLOCK = 32768
_HEADER = 7  # of the file, and of every piece: 4 bytes checksum, 2 length, 1 kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class PulledRun:
    """One W&B run, from the server or from an offline file.

    `history`: logged rows in order, with W&B's `_step` and `_timestamp` (unix seconds). `state`: finished,
    failed, crashed, killed or running. `damaged`: pieces of the file that could not be read.
    """

    id: str
    name: str = ""
    group: str = ""
    job_type: str = ""
    state: str = "running"
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0


def find_files(folder: Path) -> list[Path]:
    """The .wandb files in and under a folder, oldest first (their folders' names begin with the time)."""
    if folder.is_file():
        return [folder]
    return sorted(folder.rglob("run-*.wandb"), key=lambda path: (path.parent.name, path.name))


def read_offline(folder: Path) -> list[PulledRun]:
    """Every run under `folder` (a .wandb file, a run folder, a wandb folder, or a results folder).

    Several files of one run (it was resumed) become one. AnalysisError when there are no files.
    """
    files = find_files(folder)
    if not files:
        raise AnalysisError(f"{folder}: no W&B files (run-*.wandb) here or below.")
    runs: dict[str, PulledRun] = {}
    for file in files:
        run = _read_file(file)
        if run.id in runs:
            earlier = runs[run.id]
            run.history = earlier.history + run.history
            run.summary = earlier.summary | run.summary
            run.damaged += earlier.damaged
        runs[run.id] = run
    return list(runs.values())


def _read_file(path: Path) -> PulledRun:
    from wandb.proto import wandb_internal_pb2

    new_record: Any = getattr(wandb_internal_pb2, "Record")  # noqa: B009  (made when the module is loaded)
    run = PulledRun(id=path.stem.removeprefix("run-"))
    data = path.read_bytes()
    if data[:4] != b":W&B":
        run.damaged += 1
        return run
    for piece in read_records(data):
        if piece is None:
            run.damaged += 1
            continue
        record = new_record()
        try:
            record.ParseFromString(piece)
        except Exception:  # protobuf's DecodeError lives in another place in each of its versions
            run.damaged += 1
            continue
        _apply(run, record)
    return run


def read_records(data: bytes) -> Iterator[bytes | None]:
    """The records of a W&B file; None for each that is damaged, and for a torn end."""
    offset, parts = _HEADER, b""
    while offset + _HEADER <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER:  # the rest of a block too short for a piece is padding
            offset += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, offset)
        start, end = offset + _HEADER, offset + _HEADER + length
        if kind == 0 and length == 0:
            offset += left
            continue
        offset = end
        if end > len(data) or not _FULL <= kind <= _LAST or zlib.crc32(data[start - 1 : end]) != checksum:
            parts = b""
            yield None
            if end > len(data) or length > left:
                return
            continue
        parts = data[start:end] if kind in (_FULL, _FIRST) else parts + data[start:end]
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
    if offset < len(data) or parts:
        yield None


def _apply(run: PulledRun, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.id = record.run.run_id or run.id
        run.name, run.group = record.run.display_name or run.name, record.run.run_group or run.group
        run.job_type = record.run.job_type or run.job_type
        run.config |= _items(record.run.config.update)
        run.summary |= _items(record.run.summary.update)
    elif kind == "config":
        run.config |= _items(record.config.update)
    elif kind == "summary":
        run.summary |= _items(record.summary.update)
    elif kind == "history":
        run.history.append(_items(record.history.item))
    elif kind == "exit":
        run.state = "finished" if record.exit.exit_code == 0 else "failed"


def _items(items: Any) -> dict[str, Any]:
    out = {}
    for item in items:
        key = item.key or "/".join(item.nested_key)
        with contextlib.suppress(ValueError):
            out[key] = json.loads(item.value_json)
    out.pop("_wandb", None)
    media = tuple(key.removesuffix("_type") for key in out if key.endswith("/_type"))  # a table, an image: no metrics
    return {key: value for key, value in out.items() if not key.startswith(media)} if media else out
