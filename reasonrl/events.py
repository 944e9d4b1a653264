"""The append-only event log of one run: one JSON object per line, the truth from which all else is rebuilt."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrl.errors import EngineError

Event = dict[str, Any]


def _encode(value: Any) -> Any:
    """Spell non-finite floats as strings, since JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode_metrics(event: Event) -> Event:
    metrics = event.get("metrics")
    if isinstance(metrics, dict):
        event["metrics"] = {key: float(value) if isinstance(value, str) else value for key, value in metrics.items()}
    return event


def encode_line(event: Mapping[str, Any]) -> str:
    """Return `event` as one line of JSON, ending in a newline."""
    return json.dumps(_encode(event), allow_nan=False, separators=(",", ":"), default=str) + "\n"


def make_folder(folder: Path) -> None:
    """Make a results folder that can be written to; EngineError says why it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EngineError(
            f"results folder {folder}: {error.strerror or error}. Choose another with results=FOLDER."
        ) from error


class EventLog:
    """Append events to `path`; each line is handed to the system before `append` returns.

    A torn last line left by a killed process is cut when the log is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)

    def append(self, event: Mapping[str, Any], sync: bool = False) -> None:
        """Write one event; `sync=True` also waits for the disk (used for ends and checkpoints)."""
        data = encode_line(event).encode()
        while data:
            data = data[self._file.write(data) :]
        if sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; further appends raise."""
        self._file.close()


def _cut_torn_tail(path: Path) -> None:
    """Drop the bytes behind the last newline: a line is either whole or absent."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end != len(data):
            file.truncate(end)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the readable events of a log in order; a torn or damaged line is left out.

    Use `count_damaged` to learn how many lines were left out.
    """
    for event in _parse_lines(path):
        if event is not None:
            yield event


def count_damaged(path: Path) -> int:
    """Return how many lines of the log cannot be read as events (a torn last line included)."""
    return sum(event is None for event in _parse_lines(path))


def read_from(path: Path, offset: int) -> tuple[list[Event], int]:
    """(the readable events behind byte `offset`, where to go on from); a line that is still being written waits."""
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read()
    lines = lines[: lines.rfind(b"\n") + 1]
    found = [_parse(line) for line in lines.splitlines(keepends=True) if line.strip()]
    return [event for event in found if event is not None], offset + len(lines)


def _parse_lines(path: Path) -> Iterator[Event | None]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield _parse(line)


def _parse(line: bytes) -> Event | None:
    """The event in one line, None for a torn or damaged one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(event, dict) and "type" in event
    return _decode_metrics(event) if whole else None
