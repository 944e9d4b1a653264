"""Commands from `python -m sweeps` to a running coordinator: lines in `control.jsonl`, read about once a second."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from reasonrl.events import EventLog, read_events

VERBS = ("stop", "pause", "resume", "retry")


class Control:
    """The commands that came after this coordinator started; older ones were meant for another."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "control.jsonl"
        self._seen = 0
        self._size = 0
        if self._path.exists():
            self._size = self._path.stat().st_size
            self._seen = sum(1 for _ in read_events(self._path))

    def fresh(self) -> list[dict[str, Any]]:
        """Commands not seen yet, oldest first."""
        if not self._path.exists() or self._path.stat().st_size == self._size:
            return []
        self._size = self._path.stat().st_size
        commands = list(read_events(self._path))
        fresh, self._seen = commands[self._seen :], len(commands)
        return [command for command in fresh if command.get("verb") in VERBS]


def send(directory: Path, verb: str, key: str | None = None) -> None:
    """Leave a command for the coordinator of this folder."""
    log = EventLog(directory / "control.jsonl")
    log.append({"type": "command", "time": time.time(), "verb": verb, "key": key}, sync=True)
    log.close()
